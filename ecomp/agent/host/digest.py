"""Answer audits: write a digest of this compute or what it uses, and remove leftovers on request.

A read-only compute answers, too, unless another ecompute is this compute now. In an unfamiliar etcd the answer is an
error instead of a digest, because that etcd has no requests for this compute's guests.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.provider import measure_usage
from ecomp.agent.images.cache import list_bad, lock_if_idle
from ecomp.agent.jobs import ScheduledJob, Threads
from ecomp.errors import EcompError
from ecomp.files import InstanceLocks
from ecomp.model import keys
from ecomp.model.json_object import dump, load_object
from ecomp.model.planes import Clearance, Digest, Leftover, make_error_page, to_pages
from ecomp.model.stored import decode
from ecomp.model.usage import HOST
from ecomp.store.client import Entry, Put, Store, Unchanged, find_needed
from ecomp.store.sharing import has_unfinished_record, try_revoke
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)

# Lease of an answer, for an eschedule that was killed; longer than any audit waits.
ANSWER_LEASE_SECONDS = 240


def read_digest(hypervisor: Hypervisor, data: GuestData, state: Path) -> Digest:
    """Return the digest of this host; errors are those of the hypervisor."""
    return Digest(
        guests=hypervisor.list_guests(),
        without_base=hypervisor.list_missing_bases(),
        metadata=data.read_instances(),
        seeds=dict.fromkeys(hypervisor.list_seeds(), ''),
        reservations={
            mac: f'{reserved.instance} {reserved.address}' for mac, reserved in hypervisor.list_reservations().items()
        },
        parts=find_abandoned_parts(state),
        open_dhcp=dict.fromkeys(hypervisor.list_open_dhcp(), ''),
        bad_bases=dict.fromkeys(list_bad(state / 'images'), ''),
    )


def find_abandoned_parts(state: Path) -> dict[str, str]:
    """Return {relative path: mark that a write changes} of *.part files, also one level down, without a writer."""
    marks = {}
    for path in [*state.glob('*.part'), *state.glob('*/*.part')]:
        try:
            with lock_if_idle(path) as is_abandoned:
                status = path.stat()
                if is_abandoned:
                    marks[str(path.relative_to(state))] = f'{status.st_ino}/{status.st_mtime_ns}'
        except OSError:
            continue  # it was just renamed
    return marks


@dataclass(eq=False)
class AuditAnswerer:
    """Answers the audits passed to on_audits(), from start() to stop().

    `store` has no guard, and a connection of its own, because a long answer must not delay the writes of instances.
    `may_remove` is called with an instance before something of it is removed, and with '' before a part file is removed
    or an answer written (its result is then ignored); it raises an EcompError if etcd is unfamiliar.
    """

    compute: str
    token: str
    store: Store
    hypervisor: Hypervisor
    data: GuestData
    state: Path
    may_remove: Callable[[str], bool]
    threads: Threads

    def __post_init__(self) -> None:
        self._locks = InstanceLocks(self.state)
        self._audits: Mapping[str, Entry] = {}  # replaced, never changed
        self._answered_keys: set[str] = set()
        self._leases: dict[str, int] = {}  # the lease of the answer, by audit
        self._job = ScheduledJob(self.threads, self.threads.audits, self._answer_all)

    def start(self) -> None:
        """Schedule answers to the audits passed so far."""
        self._job.schedule()

    def stop(self) -> None:
        """Stop, after the answer in flight."""
        self._job.cancel()
        self._job.wait()

    def on_audits(self, state: Mapping[str, Entry]) -> None:
        """Replace the audits, and schedule answers if any came or went. The follower's thread calls this."""
        before, self._audits = self._audits, state
        if state.keys() != before.keys():
            self._job.schedule()

    def _answer_all(self) -> float:
        """Answer new audits of all or this compute once; log errors; revoke leases of finished audits; return inf."""
        audits = self._audits
        new, self._answered_keys = audits.keys() - self._answered_keys, set(audits)
        for key in sorted(new):
            entry = audits[key]
            try:
                audit, _, compute = entry.key.removeprefix(keys.AUDIT).partition('/')
                if compute == keys.USAGE and (not entry.value or self.compute.encode() in entry.value):
                    if self._check_ours():
                        self._write_answer(entry, audit, keys.USAGE, dump(self._measure_usage()))
                elif compute in ('', self.compute) and self._check_ours():
                    self._write_answer(entry, audit, 'heard' if not compute else 'clearing', '')
                    if compute:
                        self._write_answer(entry, audit, 'cleared', dump(self._remove_leftovers(entry)))
                    else:
                        self._send_digest(entry, audit)
            except EcompError as error:
                log.debug('audit %s is not answered: %s', entry.key, error)
            except Exception:
                log.exception('unexpected error while answering %s', entry.key)
        for audit in [leased for leased in self._leases if not any(leased in key for key in self._audits)]:
            try_revoke(self.store, self._leases.pop(audit))
        return math.inf

    def _check_ours(self) -> bool:
        """Read the presence key; return False if another ecompute holds it, and answers. Errors of etcd are raised."""
        entry = self.store.get(keys.compute(self.compute))
        try:
            if entry is None or not entry.lease:
                return True
            return load_object(entry.value).get('token', self.token) == self.token
        except ValueError:
            return True

    def _send_digest(self, entry: Entry, audit: str) -> None:
        """Write the pages of the digest, the first one last; an EcompError in making them becomes the only page."""
        try:
            self.may_remove('')
            pages = to_pages(read_digest(self.hypervisor, self.data, self.state))
        except EcompError as error:
            pages = [make_error_page(str(error))]
        for number in reversed(range(len(pages))):
            self._write_answer(entry, audit, number, pages[number])

    def _measure_usage(self) -> dict[str, object]:
        """Return what this machine and its guests use, from one call of libvirt; see parse_answer()."""
        try:
            self.may_remove('')
            guests = self.hypervisor.read_usage()
            host = {'seconds': time.monotonic(), **measure_usage(self.state)}
        except (EcompError, OSError) as error:
            return {'version': 1, 'error': str(error)}
        return {'version': 1, 'used': {HOST: host, **{name: usage._asdict() for name, usage in guests.items()}}}

    def _write_answer(self, entry: Entry, audit: str, part: int | str, value: str) -> None:
        """Write one part of the answer, on a lease; EcompError if the audit is finished."""
        # The commit compares the audit's key: nothing is written for a finished audit. The answer is not on the audit's
        # lease, whose other keys this compute may not write; the audit removes the answer, or it expires.
        if audit not in self._leases:
            self._leases[audit] = self.store.grant(ANSWER_LEASE_SECONDS)
        put = Put(keys.digest(audit, self.compute, part), value, self._leases[audit])
        if self.store.commit([Unchanged(entry.key, entry.revision)], [put]) is None:
            raise EcompError('the audit has finished')

    def _remove_leftovers(self, entry: Entry) -> list[str]:
        """Remove what still is a leftover; log and return a line about each, or return one about a malformed list."""
        try:
            leftovers = decode(Clearance, entry.value).leftovers
        except ValueError as error:
            return [f'nothing is removed, because the list of leftovers is malformed: {error}']
        results = []
        for leftover in leftovers:
            try:
                outcome = self._remove(leftover)
            except (EcompError, OSError) as error:
                outcome = f'not removed: {error}'
            results.append(f'{leftover.kind} {leftover.name}: {outcome}')
            log.warning('audit: %s', results[-1])
        return results

    def _remove(self, leftover: Leftover) -> str:
        """Remove a leftover if it still is one; return what was done. Raises OSError, errors of etcd, hypervisor."""
        kind, name = leftover.kind, leftover.name
        instance = {'disk': name, 'iso': name, 'reservations': name, 'seed': leftover.mark}.get(kind, '')
        if not self.may_remove(instance):
            return 'not removed: this compute is read-only, or its state directory still lists the instance'
        if kind == 'part':
            return self._remove_part(leftover)
        if not keys.is_uuid(instance):
            return 'not removed: its instance is not a valid uuid'
        # A build of this instance waits for the lock, and then recreates the disk.
        with self._locks.hold(instance, lambda: None):
            guest = self.hypervisor.list_guests().get(instance)
            if self._check_wanted(instance):
                return 'not removed: its instance is requested or alive'
            if guest is not None and (guest.defined or guest.running):
                return 'not removed: its domain exists'
            if kind == 'reservations':
                self.hypervisor.release_addresses(instance)
            elif kind == 'iso' and instance in self.hypervisor.list_seeds():
                self.hypervisor.delete_seed(instance)
            elif kind == 'seed' and self.data.read_instances().get(name) == instance:
                self.data.remove(instance, [name])
            elif kind == 'disk' and guest is not None:
                if users := self.hypervisor.list_disk_users(instance):
                    return f'not removed: in use by domain {", ".join(sorted(users))}'
                self.hypervisor.delete_disk(instance)
            else:
                return 'already gone'
            return 'removed'

    def _remove_part(self, leftover: Leftover) -> str:
        """Remove a part file unless its mark changed, or it is being written; return what was done. Raises OSError."""
        if find_abandoned_parts(self.state).get(leftover.name) != leftover.mark:
            return 'not removed: it has changed since the audit listed it, or is gone'
        path = self.state / leftover.name
        with lock_if_idle(path) as is_abandoned:
            if is_abandoned:
                path.unlink(missing_ok=True)
        return 'removed' if is_abandoned else 'not removed: it is being written'

    def _check_wanted(self, instance: str) -> bool:
        """Read whether the instance has a request here, a queued one or an attempt, or a living or malformed record."""
        if find_needed(self.store, {instance: [self.compute]}):
            return True
        try:
            # On any compute: the leftover here may be the only copy.
            return has_unfinished_record(self.store, instance)
        except ValueError:
            return True
