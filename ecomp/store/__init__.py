"""The etcd client: the only package that talks to etcd."""
