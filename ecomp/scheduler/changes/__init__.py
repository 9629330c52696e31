"""Change existing instances, and wait for the result."""
