"""Find instances and computes in etcd and placement."""
