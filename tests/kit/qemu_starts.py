"""The starts of QEMU by this process, found in the domains' logs, which end with their host."""

from __future__ import annotations

from pathlib import Path

# Written by libvirt before each start of QEMU for a domain.
START_LINE = 'starting up libvirt version'
# The name of the log for each start.
STARTED_GUESTS: list[str] = []


def note_qemu_starts(directory: Path) -> None:
    for log in directory.glob('**/log/qemu/*.log*'):
        STARTED_GUESTS.extend([log.name] * log.read_text(errors='replace').count(START_LINE))
