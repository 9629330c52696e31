"""mdserver: answers a guest's cloud-init or Cirros at 169.254.169.254. Knows nothing of ecomp."""

__version__ = '1.0.0'
