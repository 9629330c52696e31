"""A whole cluster on one machine: the control plane and hypervisor hosts, each in network and mount namespaces."""
