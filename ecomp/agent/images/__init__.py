"""The image cache: sources, checked connections, downloads, inspection and base volumes."""
