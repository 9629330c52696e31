"""What instances and computes share in etcd, above the store: used by agent and scheduler."""
