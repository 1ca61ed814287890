"""What compiled blocks run on a GPU where the compiler's own code is slow: `graphs` puts it into their graphs."""
