"""The etcd border: the only room that speaks with etcd."""
