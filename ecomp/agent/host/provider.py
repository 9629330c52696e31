"""This compute's provider in placement: its inventory, traits and aggregates.

<state>/provider.json  {"version", "compute", "traits": […], "aggregates": […]}: those that this ecompute added.
Others were added outside this ecompute, and stay. The file is written before placement, so that after a kill in between
the next start removes what is no longer configured.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ecomp.agent.host.claims import Settled
from ecomp.errors import EcompError, UsageError
from ecomp.failpoints import failpoint
from ecomp.files import write_durably
from ecomp.model import allocation as model
from ecomp.model import status
from ecomp.model.allocation import GIB, MIB, NEEDED, capacity
from ecomp.model.json_object import load_object
from ecomp.model.query import Named
from ecomp.placement import providers
from ecomp.placement.client import Placement
from ecomp.placement.providers import AGGREGATES, TRAITS

# In placement's form: {class: {'total', 'reserved', 'allocation_ratio'}}.
Inventory = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Machine:
    """Totals and used amounts in bytes, the latter including guests and cached images."""

    cores: int
    memory: int
    memory_used: int
    memory_ours: int
    disk: int
    disk_used: int
    disk_ours: int
    disk_cached: int


def look(directory: Path, instances: Collection[str]) -> Machine:
    """Measure this machine, the disk of the state `directory`, and the guests' share."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage(str(directory))
    return Machine(
        cores=psutil.cpu_count() or 1,
        memory=memory.total,
        memory_used=memory.total - memory.available,
        memory_ours=_guest_memory(instances) if instances else 0,
        disk=disk.total,
        # Without the blocks that file systems reserve for root.
        disk_used=disk.total - disk.free,
        disk_ours=sum(_blocks(path) for path in (directory / 'images').glob('*.qcow2') if path.stem in instances),
        disk_cached=sum(_blocks(path) for path in (directory / 'images').glob('base-*')),
    )


def default_cache(directory: Path) -> int:
    """Return the default limit of cached images: a tenth of the disk, in 1..20 GiB."""
    return min(max(psutil.disk_usage(str(directory)).total // (10 * GIB), 1), 20)


def inventory(machine: Machine, image_cache: int) -> dict[str, dict[str, int]]:
    """Return the inventory {class: {'total', 'reserved'}}; MEMORY_MB in MiB, DISK_GB in GiB.

    Reserved are the amounts that others use, and `image_cache_gib` even if images use less. Our own guests are not
    included, because placement counts them as allocated.
    """
    foreign = machine.disk_used - machine.disk_ours - machine.disk_cached
    return {
        'VCPU': {'total': machine.cores, 'reserved': 0},
        'MEMORY_MB': _class(machine.memory, machine.memory_used - machine.memory_ours, MIB),
        'DISK_GB': _class(machine.disk, foreign + max(image_cache * GIB, machine.disk_cached), GIB),
    }


def given(totals: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the inventory of configured totals (`inventory:`, --fake), with nothing reserved."""
    return {name: {'total': total, 'reserved': 0} for name, total in totals.items()}


def with_ratios(totals: Mapping[str, Mapping[str, int]], ratios: Mapping[str, float]) -> Inventory:
    """Add ratios, 1 if not configured; UsageError for a class that the inventory lacks."""
    unknown = sorted(ratios.keys() - totals.keys())
    if unknown:
        raise UsageError(f'allocation_ratios: there is no {", ".join(unknown)} here, only {", ".join(totals)}')
    return {name: {**amounts, 'allocation_ratio': ratios.get(name, 1.0)} for name, amounts in totals.items()}


def closed(current: Mapping[str, Mapping[str, float]]) -> Inventory:
    """Return the inventory with all VCPU reserved: nothing new is scheduled there."""
    closed_inventory = {name: dict(amounts) for name, amounts in current.items()}
    if 'VCPU' in closed_inventory:
        closed_inventory['VCPU']['reserved'] = closed_inventory['VCPU']['total']
    return closed_inventory


def _class(total: int, foreign: int, unit: int) -> dict[str, int]:
    whole = max(total // unit, 1)
    # Rounded up, because a partly used unit cannot be allocated.
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
        return 0  # it was just destroyed


def registered(inventory: Inventory) -> dict[str, model.Inventory]:
    """Convert an inventory in placement's form to the model's, with nothing used."""
    return {
        name: model.Inventory(int(parts['total']), int(parts.get('reserved', 0)), parts.get('allocation_ratio', 1.0))
        for name, parts in inventory.items()
    }


log = logging.getLogger(__name__)

VERSION = 1

Names = frozenset[str]


@dataclass(eq=False)
class Registration:
    """Keeps this compute's provider in placement as configured; errors of placement pass.

    A `detected_traits` name that placement does not know is left out; of `configured_traits` it is a UsageError.
    """

    placement: Placement
    compute: str
    inventory: Inventory
    found: Collection[str]
    configured: Collection[str]
    aggregates: Collection[str]
    state: Path

    def __post_init__(self) -> None:
        self._wanted = {TRAITS: frozenset([*self.configured, *self.found]), AGGREGATES: frozenset(self.aggregates)}
        self._path = self.state / 'provider.json'
        self._ours = _load(self._path, self.compute)
        self._settled = Settled()
        # The generation at which register() made the provider, with no claims on it; None: it existed before.
        self.new_at: int | None = None
        # Whether the provider had the trait of a disabled compute when its traits were last read.
        self.is_disabled = False

    def register(self, is_closing: Callable[[], bool] = lambda: False) -> None:
        """Make, correct and enable the provider, unless is_closing() or an operator disabled it.

        The inventory is written last, so a right inventory means that an earlier run was complete. Raises EcompError if
        provider.json cannot be written, UsageError if placement does not know a configured trait.
        """
        is_right = providers.is_as(self.placement, self.compute, self.inventory)
        is_new = is_right is None and providers.ensure(self.placement, self.compute)
        if is_new:
            log.info('made resource provider %s', self.compute)
        else:
            self._report()
        failpoint('registered')
        # A new provider has no traits, and is at generation 0.
        has_changed_names = (bool(self.aggregates or self._wanted[TRAITS]) or not is_new) and self._describe(is_closing)
        failpoint('described')
        if not is_right:
            before = 0 if is_new and not has_changed_names else None
            generation = providers.set_inventory(self.placement, self.compute, self.inventory, before, is_closing)
            self._settled.note(generation)
            self.new_at = generation if is_new else None

    def keep(self, is_closing: Callable[[], bool], generation: int | None = None) -> None:
        """Register again if the provider was changed outside ecomp, as by a restored database.

        The check is skipped if `generation`, read before (None: not known), has not changed since the last good one.
        """
        if self._settled.at(generation):
            return
        # is_closing() is called after the check: if close() has changed the provider, it returns True by then.
        if self._is_as_it_should():
            self._settled.note(generation)
        elif not is_closing():
            log.warning('placement does not know this compute as it is (restored from a copy?): registering again')
            self.register(is_closing)

    def close(self) -> None:
        """Reserve all VCPU and disable the provider, against scheduling until the next start."""
        providers.set_inventory(self.placement, self.compute, closed(self.inventory))
        failpoint('closed')
        providers.change_names(self.placement, self.compute, TRAITS, status.stopped)

    def _report(self) -> None:
        used = providers.usages(self.placement, self.compute)
        log.info('resource provider %s is there, with usages %s', self.compute, used or 'none')
        for name, amount in used.items():
            amounts = self.inventory.get(name, {'total': 0})
            total = capacity(amounts['total'], amounts.get('allocation_ratio', 1))
            if amount > total:
                log.warning('%s of %s is used, and there is only %s of it now', amount, name, total)

    def _is_as_it_should(self) -> bool:
        if not providers.is_as(self.placement, self.compute, self.inventory):
            return False
        current = {kind: providers.names_of(self.placement, self.compute, kind) for kind in self._kinds()}
        return all(names == self._right(kind, names) for kind, names in current.items())

    def _kinds(self) -> list[str]:
        # Most computes have no aggregates, so a call to placement is saved.
        return [kind for kind in (TRAITS, AGGREGATES) if kind == TRAITS or self._wanted[kind] or self._ours[kind]]

    def _right(self, kind: str, there: Names) -> Names:
        if kind == TRAITS:
            self.is_disabled = status.DISABLED in there
        names = status.changed(there, self._wanted[kind], self._ours[kind])
        return status.opened(names) if kind == TRAITS else names

    def _describe(self, is_closing: Callable[[], bool]) -> bool:
        """Write the traits and aggregates; return whether that changed the provider."""
        self._make_known()
        changed = False
        for kind in self._kinds():

            def to(there: Names, kind: str = kind) -> Names:
                if is_closing():
                    return there
                own_names = status.ours_then(there, self._wanted[kind], self._ours[kind])
                self._remember(kind, self._ours[kind] | own_names)
                return self._right(kind, there)

            changed = providers.change_names(self.placement, self.compute, kind, to) or changed
            if not is_closing():
                self._remember(kind, self._ours[kind] & self._wanted[kind])
        return changed

    def _make_known(self) -> None:
        """Create custom traits; of the unknown others drop the detected, and refuse the configured."""
        if not self._wanted[TRAITS]:
            return
        missing = self._wanted[TRAITS] - providers.names_of(self.placement, self.compute, TRAITS)
        unknown = providers.make_known(self.placement, missing)
        _refuse(self.placement, unknown.intersection(self.configured))
        self._wanted[TRAITS] -= unknown

    def _remember(self, kind: str, ours: Names) -> None:
        if ours == self._ours[kind]:
            return
        own_names = {**self._ours, kind: ours}
        names = {name_kind: sorted(values) for name_kind, values in own_names.items()}
        try:
            write_durably(self._path, json.dumps({'version': VERSION, 'compute': self.compute, **names}))
        except OSError as error:
            raise EcompError(f'{self._path}: {error.strerror}: traits and aggregates stay as they are') from error
        self._ours = own_names
        failpoint('described-here')


def check_names(placement: Placement, configured: Collection[str], classes: Collection[str]) -> None:
    """Raise UsageError for a configured trait or resource class that placement does not know.

    Placement's own refusal of an inventory would not name the wrong key of compute.yaml.
    """
    if unusual := frozenset(classes).difference(NEEDED):
        never, yet = providers.unknown_names(placement, Named(unusual, frozenset()))
        if never or yet:
            raise UsageError(f'inventory: {"; ".join(filter(None, (never, yet)))}')
    unknown = providers.unknown(placement, [*configured, status.DISABLED])
    _refuse(placement, unknown.intersection(configured))


def _refuse(placement: Placement, unknown: Names) -> None:
    if names := ', '.join(sorted(unknown)):
        raise UsageError(f'traits: {names}: {placement.name} does not know it, its os-traits are older')


def _load(path: Path, compute: str) -> dict[str, Names]:
    try:
        data: Mapping[str, object] = load_object(path.read_bytes())
        if data.get('version') != VERSION:
            raise ValueError(f'version {data.get("version")!r} is not known here')
    except FileNotFoundError:
        data = {}
    except ValueError as error:
        raise UsageError(f'{path}: cannot be understood ({error}): remove it, and the traits it named stay') from error
    if data.get('compute') != compute:
        data = {}  # `uuid:` was changed: these are another provider's
    listed = {kind: data.get(kind) for kind in (TRAITS, AGGREGATES)}
    return {kind: frozenset(map(str, names if isinstance(names, list) else ())) for kind, names in listed.items()}
