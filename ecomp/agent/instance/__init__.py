"""Building one instance, its power, its records, and the workers."""
