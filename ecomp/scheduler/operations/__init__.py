"""Operators' commands: hosts, flavors, quotas and the audit."""
