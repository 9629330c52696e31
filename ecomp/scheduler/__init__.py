"""eschedule's use cases: request, find, destroy, wait. No libvirt, no psutil: it runs on a laptop."""
