"""What this compute is in placement: its inventory, traits and aggregates, and whether it is open.

`reserved` is what the machine uses for other things; placement counts our own guests as allocated, so they are not in
it.

<state>/provider.json  {"version", "compute", "traits": […], "aggregates": […]}: those that this ecompute added.
Whatever else the provider has was added by others, and stays. The file is written before placement: after a kill in
between, the next start removes what is no longer configured.
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


log = logging.getLogger(__name__)

VERSION = 1

Names = frozenset[str]


@dataclass(eq=False)
class Registration:
    """The provider, as it is to be. `configured` traits are a person's word, those `found` out are this host's.

    Every method asks placement, and raises what that raises.
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
        self.new_at: int | None = None
        """The generation at which the provider was just made, when nothing was claimed of it; None: it was not."""
        self.is_disabled = False
        """Whether placement was told to offer nothing here, when this was looked at last."""

    def register(self, is_closing: Callable[[], bool] = lambda: False) -> None:
        """See that the provider is there and is as it is to be, and open, unless an operator disabled it.

        The inventory comes last: as long as it is right, so is the rest. UsageError: placement does not know a trait.
        """
        is_right = providers.is_as(self.placement, self.compute, self.inventory)
        made = is_right is None and providers.ensure(self.placement, self.compute)
        if made:
            log.info('made resource provider %s', self.compute)
        else:
            self._report()
        failpoint('registered')
        # One that was just made has no traits, and is at its first generation.
        described = (bool(self.aggregates or self._wanted[TRAITS]) or not made) and self._describe(is_closing)
        failpoint('described')
        if not is_right:
            known = 0 if made and not described else None
            generation = providers.set_inventory(self.placement, self.compute, self.inventory, known, is_closing)
            self._settled.note(generation)
            self.new_at = generation if made else None

    def keep(self, is_closing: Callable[[], bool], generation: int | None = None) -> None:
        """Register again if placement has it otherwise: its database may have been restored, or somebody was at it.

        `generation` is the provider's, read before; None: not known. Where it is as when all was found right, nothing
        else is asked.
        """
        if self._settled.at(generation):
            return
        # Asked afterwards: what is found closed is closed by us, and then this says so by now.
        if self._is_as_it_should():
            self._settled.note(generation)
        elif not is_closing():
            log.warning('placement does not know this compute as it is (restored from a copy?): registering again')
            self.register(is_closing)

    def close(self) -> None:
        """Reserve all VCPU, and say that it is stopped: nothing is scheduled here until the next start."""
        providers.set_inventory(self.placement, self.compute, closed(self.inventory))
        failpoint('closed')
        providers.change_names(self.placement, self.compute, TRAITS, status.stopped)

    def _report(self) -> None:
        used = providers.usages(self.placement, self.compute)
        log.info('resource provider %s is there, with usages %s', self.compute, used or 'none')
        for name, amount in used.items():
            have = self.inventory.get(name, {'total': 0})
            there = capacity(have['total'], have.get('allocation_ratio', 1))
            if amount > there:
                log.warning('%s of %s is used, and there is only %s of it now', amount, name, there)

    def _is_as_it_should(self) -> bool:
        if not providers.is_as(self.placement, self.compute, self.inventory):
            return False
        there = {kind: providers.names_of(self.placement, self.compute, kind) for kind in self._kinds()}
        return all(names == self._right(kind, names) for kind, names in there.items())

    def _kinds(self) -> list[str]:
        # Of aggregates, most computes have none.
        return [kind for kind in (TRAITS, AGGREGATES) if kind == TRAITS or self._wanted[kind] or self._ours[kind]]

    def _right(self, kind: str, there: Names) -> Names:
        if kind == TRAITS:
            self.is_disabled = status.DISABLED in there
        names = status.changed(there, self._wanted[kind], self._ours[kind])
        return status.opened(names) if kind == TRAITS else names

    def _describe(self, is_closing: Callable[[], bool]) -> bool:
        """True if the provider was changed."""
        self._make_known()
        changed = False
        for kind in self._kinds():

            def to(there: Names, kind: str = kind) -> Names:
                if is_closing():
                    return there
                then = status.ours_then(there, self._wanted[kind], self._ours[kind])
                self._remember(kind, self._ours[kind] | then)
                return self._right(kind, there)

            changed = providers.change_names(self.placement, self.compute, kind, to) or changed
            if not is_closing():
                self._remember(kind, self._ours[kind] & self._wanted[kind])
        return changed

    def _make_known(self) -> None:
        """See that placement knows the traits. What was found out and is unknown to an older one is left out."""
        if not self._wanted[TRAITS]:
            return
        missing = self._wanted[TRAITS] - providers.names_of(self.placement, self.compute, TRAITS)
        unknown = providers.make_known(self.placement, missing)
        _refuse(self.placement, unknown.intersection(self.configured))
        self._wanted[TRAITS] -= unknown

    def _remember(self, kind: str, ours: Names) -> None:
        if ours == self._ours[kind]:
            return
        new = {**self._ours, kind: ours}
        names = {each: sorted(found) for each, found in new.items()}
        try:
            write_durably(self._path, json.dumps({'version': VERSION, 'compute': self.compute, **names}))
        except OSError as error:
            raise EcompError(f'{self._path}: {error.strerror}: traits and aggregates stay as they are') from error
        self._ours = new
        failpoint('described-here')


def check_names(placement: Placement, configured: Collection[str], classes: Collection[str]) -> None:
    """UsageError for a trait of `configured` or a class of `inventory:` that placement does not know.

    Nothing is changed. Asked before the inventory is written: placement's own refusal of that does not say which key of
    compute.yaml is wrong.
    """
    if strange := frozenset(classes).difference(NEEDED):
        never, yet = providers.unknown_names(placement, Named(strange, frozenset()))
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
        data = {}  # another provider's, from before `uuid:` was changed
    named = {kind: data.get(kind) for kind in (TRAITS, AGGREGATES)}
    return {kind: frozenset(map(str, names if isinstance(names, list) else ())) for kind, names in named.items()}
