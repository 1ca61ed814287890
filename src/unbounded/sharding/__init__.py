"""The front door: `placing` shards a model, `running` knows those that are, `block_policies` says what blocks keep."""
