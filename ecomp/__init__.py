"""ecomp: VMs on your own Linux machines, by placement, etcd and libvirt."""

__version__ = '1.2.0.dev0'
