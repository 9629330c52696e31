"""ecompute's use cases: what it has, what it is asked for, and the difference carried out."""
