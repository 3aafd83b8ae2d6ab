"""Quantised weights: which formats exist, how they are recognised, and how they are made."""
