"""A whole cluster on one machine: control plane and hosts, each in its own namespaces."""
