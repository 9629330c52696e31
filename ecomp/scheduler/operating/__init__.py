"""What operators do: hosts, flavors, groups, quotas, the audit."""
