"""The levels of what the doctor, the audit and `ecompute --check` find: errors and warnings. Pure.

An operator must act on an error. A warning is about what the packages of the system bring and no newer package of the
system repairs, or about a host that others stand in for; it does not change the exit code, and `ignore_warnings:`
silences it.
"""

from __future__ import annotations

from collections.abc import Collection

ERROR = 'error'
WARNING = 'warning'
# The exit code of a command that finds an error.
EXIT_FINDINGS = 8

# Warnings by code, as eschedule (doctor, audit) and ecompute (--check, log) print them. Debian 12 and 13 have an etcd
# with known vulnerabilities, older systems an untested libvirt, and libvirt's package defines a network with open DHCP.
SCHEDULE_WARNINGS = ('dhcp-open', 'etcd-version', 'host-trouble')
COMPUTE_WARNINGS = ('etcd-version', 'libvirt-version')


def get_level(code: str) -> str:
    """Return WARNING or ERROR for the code of an audit's finding or the name of a check."""
    return WARNING if code in (*SCHEDULE_WARNINGS, *COMPUTE_WARNINGS) else ERROR


def mark_warning(code: str, sentence: str) -> str:
    """Return a finding's sentence for people: that of a warning begins with `warning: `."""
    return f'{WARNING}: {sentence}' if get_level(code) == WARNING else sentence


def get_exit_code(codes: Collection[str]) -> int:
    """Return EXIT_FINDINGS if an operator must act on one of the findings, else 0."""
    return EXIT_FINDINGS if any(get_level(code) == ERROR for code in codes) else 0


def count_findings(codes: Collection[str]) -> str:
    """Return 'no findings', '1 finding' or '2 findings, 1 warning': the warnings are counted separately."""
    warnings = sum(get_level(code) == WARNING for code in codes)
    errors = len(codes) - warnings
    text = f'{errors or "no"} finding{"" if errors == 1 else "s"}'
    return f'{text}, {warnings} warning{"" if warnings == 1 else "s"}' if warnings else text
