"""mdserver answers a guest's cloud-init or Cirros at 169.254.169.254. It does not depend on ecomp."""

__version__ = '1.2.0.dev0'
