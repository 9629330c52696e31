"""The codes of warnings, which the configuration needs before any check is loaded."""

from __future__ import annotations

# As eschedule (check) and ecompute (--check, log) print them. Debian 12 and 13 have an etcd with known vulnerabilities,
# older systems an untested libvirt, and libvirt's package defines a network with open DHCP.
SCHEDULE_WARNINGS = ('dhcp-open', 'etcd-version', 'host-trouble')
COMPUTE_WARNINGS = ('etcd-version', 'libvirt-version')
