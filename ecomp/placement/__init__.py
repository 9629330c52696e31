"""The placement client: HTTP to OpenStack's placement, one microversion, errors by code."""
