"""Checkpoints of other systems, read into ours: DeepSpeed ZeRO-3 folders and torch's distributed checkpoints."""
