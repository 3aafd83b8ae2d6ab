"""Clients to copy from: each complete in itself, and ending with an error when one occurs."""
