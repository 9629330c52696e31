"""This compute's provider in placement: its inventory, traits and aggregates.

<state>/provider.json  {"version", "compute", "traits": […], "aggregates": […]}: those that this ecompute added.
Others were added outside this ecompute, and stay.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ecomp.agent.host.claims import LastGoodCheck
from ecomp.errors import EcompError, UsageError
from ecomp.failpoints import failpoint
from ecomp.files import write_durably
from ecomp.model import allocation as model
from ecomp.model import status
from ecomp.model.allocation import GIB, MIB, REQUIRED_CLASSES, Provider
from ecomp.model.json_object import load_object
from ecomp.model.query import QueryNames
from ecomp.placement import providers
from ecomp.placement.client import Placement
from ecomp.placement.providers import AGGREGATES, TRAITS

# In placement's form: {class: {'total', 'reserved', 'allocation_ratio'}}.
PlacementInventory = dict[str, dict[str, float]]

# A smaller change of what others use, as a share of the whole, is not written to placement.
RESERVED_TOLERANCE = 0.05


@dataclass(frozen=True)
class MachineUsage:
    """A machine's CPUs and bytes, where the used amounts include guests and cached images."""

    cores: int
    memory: int
    memory_used: int
    memory_guests: int
    disk: int
    disk_used: int
    disk_guests: int
    disk_cached: int


def measure_machine(directory: Path, instances: Collection[str], disks: Iterable[str] = ()) -> MachineUsage:
    """Measure this machine, the file system of `directory`, and what `instances` use of both."""
    memory = psutil.virtual_memory()
    overlays = [path for path in (directory / 'images').glob('*.qcow2') if path.stem in instances]
    device = directory.stat().st_dev
    disk = psutil.disk_usage(str(directory))
    return MachineUsage(
        cores=psutil.cpu_count() or 1,
        memory=memory.total,
        memory_used=memory.total - memory.available,
        memory_guests=_measure_guest_memory(set(instances)) if instances else 0,
        disk=disk.total,
        # Without the blocks that file systems reserve for root.
        disk_used=disk.total - disk.free,
        # `disks` are those of adopted instances, which may be on other file systems.
        disk_guests=sum(_read_allocated_bytes(path, device) for path in {*overlays, *map(Path, disks)}),
        disk_cached=sum(_read_allocated_bytes(path, device) for path in (directory / 'images').glob('base-*')),
    )


def measure_usage(directory: Path) -> dict[str, float]:
    """Measure the CPUs and memory of this machine, and the file system that has `directory`."""
    times, memory, disk = psutil.cpu_times(), psutil.virtual_memory(), psutil.disk_usage(str(directory))
    cpus = {'cpus': psutil.cpu_count() or 1, 'load': round(psutil.getloadavg()[0], 2)}
    cpus['cpu_seconds_total'] = times.user + times.nice + times.system + times.irq + times.softirq
    sizes = {'memory_used_bytes': memory.total - memory.available, 'memory_bytes': memory.total}
    return {**cpus, **sizes, 'disk_used_bytes': disk.total - disk.free, 'disk_bytes': disk.total}


def choose_cache_gib(directory: Path) -> int:
    """Return the default limit of cached images: a tenth of the disk, in 1..20 GiB."""
    return min(max(psutil.disk_usage(str(directory)).total // (10 * GIB), 1), 20)


def make_inventory(machine: MachineUsage, image_cache_gib: int, foreign_vcpus: int = 0) -> dict[str, dict[str, int]]:
    """Return the inventory of a machine, {class: {'total', 'reserved'}}.

    MEMORY_MB is in MiB, DISK_GB in GiB. Reserved is what others use and, of DISK_GB, also `image_cache_gib`, or what
    images use if that is more. What our guests use is not reserved, because placement counts it as allocated.
    """
    foreign = machine.disk_used - machine.disk_guests - machine.disk_cached
    return {
        # Not all of it: that means that the ecompute was stopped.
        'VCPU': {'total': machine.cores, 'reserved': min(foreign_vcpus, machine.cores - 1)},
        'MEMORY_MB': _make_inventory_class(machine.memory, machine.memory_used - machine.memory_guests, MIB),
        'DISK_GB': _make_inventory_class(machine.disk, foreign + max(image_cache_gib * GIB, machine.disk_cached), GIB),
    }


def make_fixed_inventory(totals: Mapping[str, int]) -> dict[str, dict[str, int]]:
    return {name: {'total': total, 'reserved': 0} for name, total in totals.items()}


def add_ratios(totals: Mapping[str, Mapping[str, int]], ratios: Mapping[str, float]) -> PlacementInventory:
    """Return `totals` with allocation ratios, or raise UsageError for a ratio without a class."""
    unknown = sorted(ratios.keys() - totals.keys())
    if unknown:
        raise UsageError(f'allocation_ratios: the inventory has no {", ".join(unknown)}, only {", ".join(totals)}')
    return {name: {**amounts, 'allocation_ratio': ratios.get(name, 1.0)} for name, amounts in totals.items()}


def reserve_all_vcpus(current: Mapping[str, Mapping[str, float]]) -> PlacementInventory:
    closed_inventory = {name: dict(amounts) for name, amounts in current.items()}
    if 'VCPU' in closed_inventory:
        closed_inventory['VCPU']['reserved'] = closed_inventory['VCPU']['total']
    return closed_inventory


def _make_inventory_class(total: int, foreign_use: int, unit: int) -> dict[str, int]:
    whole = max(total // unit, 1)
    # Rounded up, because a partly used unit cannot be allocated.
    return {'total': whole, 'reserved': min(max(-(-foreign_use // unit), 0), whole)}


def _measure_guest_memory(instances: Set[str]) -> int:
    used = 0
    for process in psutil.process_iter(['name']):
        with suppress(psutil.Error):
            # libvirt gives QEMU `-uuid <instance>`.
            if (process.info['name'] or '').startswith('qemu') and not instances.isdisjoint(process.cmdline()):
                # The resident set lacks huge pages (proc(5)).
                used += process.memory_info().rss + _read_huge_page_bytes(process.pid)
    return used


def _read_huge_page_bytes(pid: int) -> int:
    try:
        status = Path(f'/proc/{pid}/status').read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith('HugetlbPages')), 0)


def _read_allocated_bytes(path: Path, device: int) -> int:
    try:
        status = path.stat()
    except OSError:
        return 0  # it was just destroyed
    return status.st_blocks * 512 if status.st_dev == device else 0


def settle_reserved(current: PlacementInventory, new: PlacementInventory, is_exact: bool) -> PlacementInventory:
    """Return `new`, but keep reserved amounts that hardly differ, unless `is_exact`."""
    settled = {name: dict(parts) for name, parts in new.items()}
    for name, parts in settled.items():
        before = current.get(name, parts)['reserved']
        if not is_exact and abs(parts['reserved'] - before) <= parts['total'] * RESERVED_TOLERANCE:
            parts['reserved'] = min(before, parts['total'])
    return settled


def parse_inventory(inventory: PlacementInventory) -> dict[str, model.Inventory]:
    return {
        name: model.Inventory(int(parts['total']), int(parts.get('reserved', 0)), parts.get('allocation_ratio', 1.0))
        for name, parts in inventory.items()
    }


log = logging.getLogger(__name__)

VERSION = 1

Names = frozenset[str]


@dataclass(eq=False)
class Registration:
    """Keeps this compute's provider in placement as configured."""

    placement: Placement
    compute: str
    inventory: PlacementInventory
    detected_traits: Collection[str]
    configured_traits: Collection[str]
    aggregates: Collection[str]
    state_directory: Path

    def __post_init__(self) -> None:
        traits = frozenset([*self.configured_traits, *self.detected_traits])
        self._configured_names = {TRAITS: traits, AGGREGATES: frozenset(self.aggregates)}
        self._path = self.state_directory / 'provider.json'
        self._own_names = _read_own_names(self._path, self.compute)
        self._last_good_check = LastGoodCheck()
        # The generation at which register() made the provider, with no claims on it; None: it existed before.
        self.created_generation: int | None = None
        # The provider as it was last read, without its usage.
        self.provider: Provider | None = None

    def register(self, is_closing: Callable[[], bool] = lambda: False) -> None:
        """Make and correct the provider, and enable it unless an operator disabled it."""
        is_right = self._reread_provider()
        is_new = self.provider is None and providers.ensure_provider(self.placement, self.compute)
        if is_new:
            log.info('created resource provider %s', self.compute)
        else:
            used = providers.read_usages(self.placement, self.compute)
            log.info('resource provider %s exists, with usages %s', self.compute, used or 'none')
        failpoint('registered')
        # Once is_closing() is true, traits, aggregates and inventory are left as they are.
        # A new provider has no traits, and is at generation 0.
        has_names = bool(self.aggregates or self._configured_names[TRAITS])
        has_changed_names = (has_names or not is_new) and self._update_names(is_closing)
        failpoint('described')
        if not is_right:
            before = 0 if is_new and not has_changed_names else None
            # Written last: a right inventory means that an earlier run was complete.
            generation = providers.set_inventory(self.placement, self.compute, self.inventory, before, is_closing)
            self._last_good_check.record(generation)
            self.created_generation = generation if is_new else None
        if has_changed_names or not is_right:
            self._reread_provider()

    def ensure_registered(self, is_closing: Callable[[], bool], generation: int | None = None) -> None:
        """Register again if the provider was changed or removed outside ecomp."""
        if self.provider is not None and self._last_good_check.use_skip(generation):
            return
        # is_closing() is called after the check: if close() has changed the provider, it returns True by then.
        if self._compare_provider():
            self._last_good_check.record(generation)
        elif not is_closing():
            log.warning('the resource provider was changed outside ecomp, or placement was restored: writing it again')
            self.register(is_closing)

    def update_inventory(self, inventory: PlacementInventory, is_closing: Callable[[], bool]) -> None:
        """Write the inventory if it differs, unless is_closing(), and read the provider again."""
        if inventory == self.inventory:
            return
        if providers.set_inventory(self.placement, self.compute, inventory, None, is_closing) is not None:
            self.inventory = inventory
            self._reread_provider()
            amounts = (f'{name} {parts["reserved"]:g}' for name, parts in sorted(inventory.items()))
            log.info('reserved in placement for what ecomp did not create: %s', ', '.join(amounts))

    def close(self) -> None:
        """Reserve all VCPU and disable the provider, so that nothing is scheduled here."""
        providers.set_inventory(self.placement, self.compute, reserve_all_vcpus(self.inventory))
        failpoint('closed')
        providers.change_names(self.placement, self.compute, TRAITS, status.apply_stop)

    def _reread_provider(self) -> bool:
        """Read the provider, and return whether its inventory is right."""
        self.provider = providers.read_provider(self.placement, self.compute, traits=True, aggregates=True, used={})
        return self.provider is not None and providers.has_inventory(self.provider.inventories, self.inventory)

    def _compare_provider(self) -> bool:
        """Read the provider, and return whether all of it is right."""
        if not self._reread_provider() or self.provider is None:
            return False
        current = {TRAITS: frozenset(self.provider.traits), AGGREGATES: frozenset(self.provider.aggregates)}
        return all(names == self._derive_names(kind, names) for kind, names in current.items())

    def _derive_names(self, kind: str, current: Names) -> Names:
        names = status.merge_names(current, self._configured_names[kind], self._own_names[kind])
        return status.apply_start(names) if kind == TRAITS else names

    def _update_names(self, is_closing: Callable[[], bool]) -> bool:
        """Write traits and aggregates to placement, and return whether that changed any."""
        self._create_traits()
        changed = False
        # AGGREGATES only if configured or ours, which saves most computes a call.
        has_aggregates = self._configured_names[AGGREGATES] or self._own_names[AGGREGATES]
        for kind in (TRAITS, AGGREGATES) if has_aggregates else (TRAITS,):

            def update(current: Names, kind: str = kind) -> Names:
                if is_closing():
                    return current
                own_names = status.find_managed_names(current, self._configured_names[kind], self._own_names[kind])
                # Before placement is changed: after a kill in between the next start removes what is not configured.
                self._save_own_names(kind, self._own_names[kind] | own_names)
                return self._derive_names(kind, current)

            changed = providers.change_names(self.placement, self.compute, kind, update) or changed
            if not is_closing():
                self._save_own_names(kind, self._own_names[kind] & self._configured_names[kind])
        return changed

    def _create_traits(self) -> None:
        """Create unknown CUSTOM_ traits, leave out other detected ones, refuse configured ones."""
        if not self._configured_names[TRAITS]:
            return
        missing = self._configured_names[TRAITS] - providers.read_names(self.placement, self.compute, TRAITS)
        unknown = providers.create_missing_traits(self.placement, missing)
        _refuse_unknown_traits(self.placement, unknown.intersection(self.configured_traits))
        self._configured_names[TRAITS] -= unknown

    def _save_own_names(self, kind: str, kind_names: Names) -> None:
        if kind_names == self._own_names[kind]:
            return
        own_names = {**self._own_names, kind: kind_names}
        names = {name_kind: sorted(values) for name_kind, values in own_names.items()}
        try:
            write_durably(self._path, json.dumps({'version': VERSION, 'compute': self.compute, **names}))
        except OSError as error:
            raise EcompError(f'{self._path}: {error.strerror}: the provider keeps its traits and aggregates') from error
        self._own_names = own_names
        failpoint('described-here')


def require_names(placement: Placement, traits: Collection[str], classes: Collection[str]) -> None:
    """Raise UsageError for a configured class or standard trait that placement lacks."""
    # Placement's own refusal of an inventory would not name the wrong key of compute.yaml.
    if unusual := frozenset(classes).difference(REQUIRED_CLASSES):
        sentences = providers.find_unknown_names(placement, QueryNames(unusual, frozenset()))
        if any(sentences):
            raise UsageError(f'inventory: {"; ".join(filter(None, sentences))}')
    # CUSTOM_ traits are accepted, because register() creates them.
    unknown = providers.find_unknown_traits(placement, [*traits, status.DISABLED])
    _refuse_unknown_traits(placement, unknown.intersection(traits))


def _refuse_unknown_traits(placement: Placement, unknown: Names) -> None:
    if names := ', '.join(sorted(unknown)):
        raise UsageError(f'traits: {placement.name} does not know {names}, because its os-traits package is too old')


def _read_own_names(path: Path, compute: str) -> dict[str, Names]:
    try:
        data: Mapping[str, object] = load_object(path.read_bytes())
        if data.get('version') != VERSION:
            raise ValueError(f'version {data.get("version")!r} is not supported')
    except FileNotFoundError:
        data = {}
    except ValueError as error:
        cure = 'remove the file; the provider then keeps the traits and aggregates that the file lists'
        raise UsageError(f'{path}: is malformed: {error}. Fix: {cure}') from error
    if data.get('compute') != compute:
        data = {}  # `uuid:` was changed: these are another provider's
    listed = {kind: data.get(kind) for kind in (TRAITS, AGGREGATES)}
    return {kind: frozenset(map(str, names if isinstance(names, list) else ())) for kind, names in listed.items()}
