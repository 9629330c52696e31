"""ecomp: VMs on your own Linux machines, by placement, etcd and libvirt."""

__version__ = '1.1.0'
