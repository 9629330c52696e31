"""Turn an order into a request on a compute or in a queue."""
