"""eschedule's use cases: create, find, change, wait. No libvirt, no psutil: it runs on a laptop."""
