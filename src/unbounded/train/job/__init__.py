"""A run from preparation to summary: data and placement, folder, interrupts, export, summary."""
