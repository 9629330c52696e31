"""Answers a guest's cloud-init or Cirros at 169.254.169.254, independently of ecomp."""

__version__ = '1.2.0.dev0'
