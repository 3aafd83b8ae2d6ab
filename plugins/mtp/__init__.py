"""The input of a draft layer (multi-token prediction) as one operation."""
