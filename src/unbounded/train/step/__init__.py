"""One step after another: the loss, the update, the schedule, what is measured, and a sample."""
