"""What looks after the host: inventory, provider, claims, memory, what the metadata server serves."""
