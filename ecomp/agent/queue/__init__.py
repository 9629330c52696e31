"""What takes from the queues."""
