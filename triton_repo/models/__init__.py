"""What the `model.py` files of the repository call; each takes Triton's module as an argument."""
