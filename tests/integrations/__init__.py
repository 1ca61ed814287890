"""Frameworks and other systems, each against its own plain run."""
