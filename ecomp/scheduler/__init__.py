"""eschedule's use cases (create, find, change, wait), which need neither libvirt nor psutil."""
