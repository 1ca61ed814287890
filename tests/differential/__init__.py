"""Random models, plans and loops against plain PyTorch: `python -m tests.differential 0 300` runs 300 of them."""
