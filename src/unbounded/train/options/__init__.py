"""What the user asked for: every setting, how it is read from flags and files, checked, and closed for a machine."""
