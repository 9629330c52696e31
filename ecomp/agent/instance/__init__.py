"""Build and control one instance, keep its record, and run the worker processes."""
