"""The Hypervisor of `ecompute --fake`, whose guests are entries in memory or in files."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ecomp.errors import BuildFailed, Conflict, EcompError, UsageError
from ecomp.model.allocation import MIB
from ecomp.model.foreign import ForeignGuest
from ecomp.model.guest import Address, Guest, GuestSpec, GuestTrouble, ReservedAddress, Usage, make_mac_conflict
from ecomp.model.stored import parse_fields, to_dict
from ecomp.virt import image

T = TypeVar('T')


class Fake(NamedTuple):
    hostname: str = ''  # '' for this machine's
    boot_seconds: int | None = None


class FakeHypervisor:
    """Fake guests, kept in the directory `state`, or in memory if that is None.

    A started guest has an address after `boot_seconds`. After as many more `report` gets its instance.
    With None it has its address immediately, and is never ready.
    """

    def __init__(
        self, state: Path | None = None, boot_seconds: int | None = None, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self._state, self._boot_seconds, self._report_ready = state, boot_seconds, report
        # What find_troubles() returns.
        self.troubles: list[str] = []
        self._unaddressed: set[str] = set()
        self._lock = threading.RLock()
        self._notify: Callable[[str], None] | None = None
        self._guests: dict[str, Guest] = {}
        self._foreign: dict[str, ForeignGuest] = {}
        self._reservations: dict[str, ReservedAddress] = {}
        self._seeds: frozenset[str] = frozenset()

    def prepare(self) -> None:
        if (state := self._state) is None:
            return
        state.mkdir(parents=True, exist_ok=True)
        path = state / 'fake-reserved.json'
        reservations = _read(path, lambda data: {mac: ReservedAddress(*row) for mac, row in data.items()})
        seeds = _read(state / 'fake-seeds.json', lambda data: frozenset(map(str, data)))
        guests = _read(state / 'fake.json', lambda data: {row['instance']: _parse_guest(row) for row in data})
        path = state / 'fake-foreign.json'
        foreign = _read(path, lambda data: {row['instance']: parse_fields(ForeignGuest, row) for row in data})
        self._foreign = foreign or {}
        with self._lock:
            self._reservations, self._seeds, self._guests = reservations or {}, seeds or frozenset(), guests or {}
        for guest in self._guests.values():
            if guest.running:
                self._boot(guest.instance)  # an earlier process may not have reported it

    def choose_virt_type(self, setting: str) -> str:
        if setting == 'kvm':
            reason = 'the guests are fake (--fake). Fix: set `virt_type: auto`'
            raise UsageError(f'virt_type: kvm is not available, because {reason}')
        return 'qemu'

    def read_cpu_features(self, _virt_type: str) -> Set[str]:
        return frozenset()

    def get_image_directory(self) -> Path | None:
        return None

    def list_guests(self) -> Mapping[str, Guest]:
        with self._lock:
            return self._guests | {name: each.as_guest() for name, each in self._foreign.items() if each.adopted_by}

    def list_foreign(self, _instance: str = '') -> Mapping[str, ForeignGuest]:
        return dict(self._foreign)

    def set_adoption(self, instance: str, compute: str | None) -> None:
        with self._lock:
            if instance in self._foreign:
                self._save_foreign(self._foreign[instance]._replace(adopted_by=compute or ''))
            elif compute is not None:
                raise BuildFailed('started', 'its domain is gone')

    def is_running(self, instance: str) -> bool:
        with self._lock:
            return self._get_guest(instance).running

    def read_usage(self) -> Mapping[str, Usage]:
        guests = self.list_guests()
        return {name: Usage(0, each.size.get('MEMORY_MB', 0) * MIB) for name, each in guests.items() if each.running}

    def list_missing_bases(self) -> Mapping[str, str]:
        return {}

    def list_open_dhcp(self) -> Set[str]:
        return set()

    def find_troubles(self) -> list[str]:
        return self.troubles

    def list_disk_users(self, instance: str) -> Set[str]:
        with self._lock:
            guest = self._get_guest(instance)
        return {instance} if guest.disk and guest.defined else set()

    def create_disk(self, spec: GuestSpec) -> None:
        image.determine_capacity(spec)
        with self._lock:
            guest = self._get_guest(spec.instance)
            if guest.running:
                raise BuildFailed('disk', f'domain {spec.instance} is running: its disk is not replaced')
            self._save_guest(replace(guest, disk=True), 'disk')

    def create_seed(self, instance: str, _files: Mapping[str, bytes]) -> None:
        with self._lock:
            if self._get_guest(instance).running:
                raise BuildFailed('disk', f'domain {instance} is running: its seed is not replaced')
            self._save_seeds(self._seeds | {instance}, 'disk')

    def list_seeds(self) -> Set[str]:
        return self._seeds

    def delete_seed(self, instance: str) -> None:
        with self._lock:
            if self._get_guest(instance).running:
                raise Conflict(f'domain {instance} is running: its seed is not removed')
            self._save_seeds(self._seeds - {instance})

    def start(self, spec: GuestSpec) -> None:
        with self._lock:
            guest = self._get_own_guest(spec.instance, spec.compute)
            if not guest.disk:
                raise BuildFailed('started', f'the disk of {spec.instance} is missing')
            if spec.seed is not None and spec.instance not in self._seeds:
                raise BuildFailed('started', f'the seed of {spec.instance} is missing')
            size = {'VCPU': spec.vcpus, 'MEMORY_MB': spec.memory_mb, 'MEMORY_MB now': spec.memory_mb}
            size |= {} if spec.disk_gb is None else {'DISK_GB': spec.disk_gb}
            owned = replace(guest, compute=spec.compute, size=size, rebuilt=spec.rebuilt)
            self._save_guest(replace(owned, defined=True, running=True), 'started')
            self._unaddressed.add(spec.instance)
        self._boot(spec.instance)
        self._notify_change(f'fake: domain {spec.instance} started')

    def start_existing(self, instance: str, compute: str) -> None:
        with self._lock:
            if self._change_adopted(instance, compute, True):
                return
            guest = self._get_own_guest(instance, compute)
            if not guest.defined or not guest.disk:
                raise BuildFailed('started', 'its domain is gone' if not guest.defined else 'its disk is gone')
            size = guest.size if guest.running else guest.next_size or guest.size
            self._save_guest(replace(guest, running=True, troubles=(), size=size))
            self._unaddressed.add(instance)
        self._boot(instance)
        self._notify_change(f'fake: domain {instance} started')

    def resize(self, spec: GuestSpec) -> None:
        with self._lock:
            guest = self._get_own_guest(spec.instance, spec.compute)
            if not guest.defined:
                raise BuildFailed('started', 'its domain is gone')
            size = {'VCPU': spec.vcpus, 'MEMORY_MB': spec.memory_mb, 'MEMORY_MB now': spec.memory_mb}
            disk = {} if spec.disk_gb is None else {'DISK_GB': spec.disk_gb}
            now = {**guest.size, **disk} if guest.running else {**size, **disk}
            self._save_guest(replace(guest, size=now, next_size={**size, **disk}))
        self._notify_change(f'fake: domain {spec.instance} has another definition')

    def _boot(self, instance: str) -> None:
        # First the guest has its address, then it is ready.
        def boot(seconds: int) -> None:
            time.sleep(seconds)
            self._unaddressed.discard(instance)
            self._notify_change(f'fake: domain {instance} has its address')
            time.sleep(seconds)
            with self._lock:  # or a destroy might remove the report before it is written
                if self.is_running(instance):
                    self._report_ready(instance)
            self._notify_change(f'fake: the guest of {instance} is ready')

        if self._boot_seconds is None:
            self._unaddressed.discard(instance)
        else:
            threading.Thread(target=boot, args=(self._boot_seconds,), name='boot', daemon=True).start()

    def shutdown(self, instance: str, compute: str) -> None:
        """Switch the guest off immediately: the fake has no guest that could do it."""
        self.switch_off(instance, compute)

    def switch_off(self, instance: str, compute: str) -> None:
        with self._lock:
            if self._change_adopted(instance, compute, False):
                return
            self._save_guest(replace(self._get_own_guest(instance, compute), running=False, troubles=()))
        self._notify_change(f'fake: domain {instance} is off')

    def destroy(self, instance: str, compute: str) -> None:
        with self._lock:
            guest = replace(self._get_own_guest(instance, compute), compute=None, defined=False, running=False)
            self._save_guest(replace(guest, troubles=(), rebuilt=0))
        self._notify_change(f'fake: domain {instance} destroyed')

    def delete_disk(self, instance: str) -> None:
        with self._lock:
            guest = self._get_guest(instance)
            if guest.running:
                raise Conflict(f'domain {instance} is running: its disk is not removed')
            self.delete_seed(instance)
            self._save_guest(replace(guest, disk=False))

    def get_console_path(self, _instance: str) -> Path | None:
        return None

    def reserve_address(self, instance: str, mac: str, _network: str, _preferred: str | None = None) -> str | None:
        digest = hashlib.sha256(mac.encode()).digest()
        address = f'10.{digest[0]}.{digest[1]}.{digest[2] % 254 + 1}'
        with self._lock:
            if (holder := self._reservations.get(mac)) is not None and holder.instance != instance:
                raise make_mac_conflict(mac, holder.instance)
            self._save_reservations({**self._reservations, mac: ReservedAddress(instance, address)}, 'scheduled')
        return address

    def list_reservations(self) -> Mapping[str, ReservedAddress]:
        with self._lock:
            return dict(self._reservations)

    def release_addresses(self, instance: str) -> None:
        with self._lock:
            remaining = {mac: entry for mac, entry in self._reservations.items() if entry.instance != instance}
            if remaining != self._reservations:
                self._save_reservations(remaining)

    def find_addresses(self, instance: str) -> Mapping[str, Address]:
        with self._lock:
            if instance in self._unaddressed or instance not in self._guests or not self._guests[instance].running:
                return {}
            reservations = self._reservations.items()
        return {mac: Address(entry.address, 'lease') for mac, entry in reservations if entry.instance == instance}

    def replug_interfaces(self) -> None:
        """Do nothing: a fake guest has no interfaces, filters or autostart."""

    restore_filters = disable_autostart = replug_interfaces

    def watch_changes(self, notify: Callable[[str], None], _on_network: Callable[[str], None] | None = None) -> None:
        """Call `notify` with a reason in words, not an instance, at each change of a guest."""
        self._notify = notify

    def close(self) -> None:
        self._notify = None

    def _get_guest(self, instance: str) -> Guest:
        return self._guests.get(instance, _make_empty_guest(instance))

    def _get_own_guest(self, instance: str, compute: str) -> Guest:
        guest = self._get_guest(instance)
        if guest.compute not in (None, compute):
            raise Conflict(f'domain {instance} belongs to compute {guest.compute}: it is left as it is')
        return guest

    def _save_guest(self, guest: Guest, stage: str | None = None) -> None:
        guests = {**self._guests, guest.instance: guest}
        if guest == _make_empty_guest(guest.instance):
            del guests[guest.instance]
        rows = [asdict(guest) for guest in guests.values()]
        if rows != [asdict(guest) for guest in self._guests.values()]:  # also sizes, which Guest does not compare
            self._write('', rows, stage)
            self._guests = guests

    def _change_adopted(self, instance: str, compute: str, is_running: bool) -> bool:
        """Switch an adopted guest on or off, or return False if the guest is not foreign."""
        foreign = self._foreign.get(instance)
        if foreign is None:
            return False
        if foreign.adopted_by != compute or foreign.is_transient:
            raise Conflict(f'domain {instance} exists, but was not created by ecompute: it is left as it is')
        self._save_foreign(foreign._replace(is_running=is_running))
        return True

    def _save_foreign(self, guest: ForeignGuest) -> None:
        foreign = {**self._foreign, guest.instance: guest}
        self._write('-foreign', [to_dict(each) for each in foreign.values()], None)
        self._foreign = foreign
        self._notify_change(f'fake: domain {guest.instance} changed')

    def _save_reservations(self, reservations: dict[str, ReservedAddress], stage: str | None = None) -> None:
        self._write('-reserved', reservations, stage)
        self._reservations = reservations

    def _save_seeds(self, seeds: frozenset[str], stage: str | None = None) -> None:
        if seeds != self._seeds:
            self._write('-seeds', sorted(seeds), stage)
            self._seeds = seeds

    def _write(self, suffix: str, content: object, stage: str | None) -> None:
        if self._state is None:
            return
        path = self._state / f'fake{suffix}.json'
        temporary = path.with_suffix('.new')
        try:
            # Not durably: no fake guest outlives a power cut.
            temporary.write_text(json.dumps(content))
            temporary.rename(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            reason = f'{path}: {error.strerror}'
            raise BuildFailed(stage, reason) if stage else EcompError(reason) from error

    def _notify_change(self, reason: str) -> None:
        if self._notify is not None:
            self._notify(reason)


def _read(path: Path, parse: Callable[[Any], T]) -> T | None:
    try:
        return parse(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (AttributeError, ValueError, TypeError) as error:
        fix = 'remove the file, and with it the fake guests in it'
        raise EcompError(f'{path} is malformed: {error}. Fix: {fix}') from error


def _parse_guest(row: dict[str, Any]) -> Guest:
    # Fields that an older version wrote are left out.
    known = {name: row[name] for name in row.keys() & Guest.__dataclass_fields__.keys()}
    return Guest(**{**known, 'troubles': tuple(GuestTrouble(*each) for each in row.get('troubles', ()))})


def _make_empty_guest(instance: str) -> Guest:
    return Guest(instance, compute=None, defined=False, running=False, disk=False)
