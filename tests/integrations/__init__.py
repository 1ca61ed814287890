"""Frameworks and other systems, each compared with its own plain run."""
