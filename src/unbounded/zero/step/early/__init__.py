"""Updates inside the backward: drafts that can be taken back, and those that are final."""
