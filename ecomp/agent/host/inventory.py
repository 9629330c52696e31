"""What this machine has, by psutil, and how much of it is not ours to give.

`reserved` tells the truth about a machine that does other things too; what our own guests use is not in it,
for placement counts that as allocated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ecomp.errors import UsageError
from ecomp.model import inventory as model
from ecomp.model.allocation import GIB, MIB

Inventory = dict[str, dict[str, float]]
"""As placement has it: {class: {'total', 'reserved', 'allocation_ratio'}}."""


@dataclass(frozen=True)
class Machine:
    """Totals and use, in bytes (cores: a number). `*_ours` is what our own guests take of what is used.

    `disk_cached` is what cached images take of it.
    """

    cores: int
    memory: int
    memory_used: int
    memory_ours: int
    disk: int
    disk_used: int
    disk_ours: int
    disk_cached: int


def look(directory: Path, instances: Collection[str]) -> Machine:
    """This machine now. `directory` is where disks are kept; `instances` are our guests, by uuid."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage(str(directory))
    return Machine(
        cores=psutil.cpu_count() or 1,
        memory=memory.total,
        memory_used=memory.total - memory.available,
        memory_ours=_guest_memory(instances) if instances else 0,
        disk=disk.total,
        # What is free to us, not what is free: file systems keep some back for root, and root's is not ours.
        disk_used=disk.total - disk.free,
        disk_ours=sum(_blocks(path) for path in (directory / 'images').glob('*.qcow2') if path.stem in instances),
        disk_cached=sum(_blocks(path) for path in (directory / 'images').glob('base-*')),
    )


def default_cache(directory: Path) -> int:
    """How many GiB cached images may take where nobody says it: a tenth of the disk, at least 1 and at most 20."""
    return min(max(psutil.disk_usage(str(directory)).total // (10 * GIB), 1), 20)


def inventory(machine: Machine, image_cache: int) -> dict[str, dict[str, int]]:
    """Placement's inventory of a machine: {class: {'total', 'reserved'}}; MEMORY_MB in MiB, DISK_GB in GiB.

    `image_cache` GiB are reserved for cached images, whether or not there are so many yet.
    """
    foreign = machine.disk_used - machine.disk_ours - machine.disk_cached
    return {
        'VCPU': {'total': machine.cores, 'reserved': 0},
        'MEMORY_MB': _class(machine.memory, machine.memory_used - machine.memory_ours, MIB),
        'DISK_GB': _class(machine.disk, foreign + max(image_cache * GIB, machine.disk_cached), GIB),
    }


def given(totals: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The inventory for totals a person gave (`inventory:`, --fake): they know what is theirs to give."""
    return {name: {'total': total, 'reserved': 0} for name, total in totals.items()}


def with_ratios(totals: Mapping[str, Mapping[str, int]], ratios: Mapping[str, float]) -> Inventory:
    """The inventory with `allocation_ratios:`, 1 for every other class. UsageError for a class it does not have."""
    unknown = sorted(ratios.keys() - totals.keys())
    if unknown:
        raise UsageError(f'allocation_ratios: there is no {", ".join(unknown)} here, only {", ".join(totals)}')
    return {name: {**each, 'allocation_ratio': ratios.get(name, 1.0)} for name, each in totals.items()}


def closed(current: Mapping[str, Mapping[str, float]]) -> Inventory:
    """The same inventory with all VCPU reserved: nothing is scheduled there, what runs goes on."""
    shut = {name: dict(each) for name, each in current.items()}
    if 'VCPU' in shut:
        shut['VCPU']['reserved'] = shut['VCPU']['total']
    return shut


def _class(total: int, foreign: int, unit: int) -> dict[str, int]:
    whole = max(total // unit, 1)
    # Rounded up: the part of a unit somebody uses cannot be given away.
    return {'total': whole, 'reserved': min(max(-(-foreign // unit), 0), whole)}


def _guest_memory(instances: Collection[str]) -> int:
    used = 0
    for process in psutil.process_iter(['name', 'cmdline', 'memory_info']):
        info = process.info
        is_qemu = (info['name'] or '').startswith('qemu') and info['memory_info'] and info['cmdline']
        # libvirt gives QEMU `-uuid <instance>`.
        if is_qemu and any(word in instances for word in info['cmdline']):
            used += info['memory_info'].rss
    return used


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0  # destroyed this moment


def registered(inventory: Inventory) -> dict[str, model.Inventory]:
    """The inventory as it is reckoned with, of which nothing is used."""
    return {
        name: model.Inventory(int(each['total']), int(each.get('reserved', 0)), each.get('allocation_ratio', 1.0))
        for name, each in inventory.items()
    }
