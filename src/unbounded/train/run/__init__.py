"""A run from its first preparations to its last line: data and placement, folder, interrupts, export, summary."""
