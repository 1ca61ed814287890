"""What "auto" would choose: `choosing` closes a plan, `running_step` predicts a step of a sharded model."""
