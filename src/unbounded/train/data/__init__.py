"""From files to batches: documents, tokens, packed sequences, in one order that ranks share and a state can resume."""
