"""The front door: `placing` shards models, `running` keeps track of them, `block_policies` decides what blocks keep."""
