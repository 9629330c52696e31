"""The image cache of a hypervisor: where images come from, how they are fetched once, and what is kept of them."""
