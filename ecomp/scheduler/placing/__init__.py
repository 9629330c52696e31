"""From an order to its request on a compute, or in a queue."""
