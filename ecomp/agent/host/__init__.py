"""The host: its inventory, provider, claims, memory, audits, and the metadata of guests."""
