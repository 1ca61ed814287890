"""From files to batches: documents, tokens and packed sequences, in one order for all ranks that can be resumed."""
