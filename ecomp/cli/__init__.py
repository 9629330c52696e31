"""The command line of eschedule: what may be typed, what is printed, and which use case does it."""
