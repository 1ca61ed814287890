"""Inputs of blocks on the host: where they lie, and how they get there and back."""
