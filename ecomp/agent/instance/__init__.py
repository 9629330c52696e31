"""What carries out one instance: its build, its power, its record, the workers."""
