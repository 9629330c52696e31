"""Answer audits: write a digest of this compute, and remove leftovers on request.

A read-only compute answers, too, unless another ecompute is this compute now. In an unfamiliar etcd the answer is that
error instead of a digest, because that etcd has no requests for this compute's guests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.images.cache import bad, idle
from ecomp.agent.turns import Threads, Turn
from ecomp.errors import EcompError
from ecomp.files import InstanceLocks
from ecomp.model import keys
from ecomp.model.json_object import dump, load_object
from ecomp.model.planes import Digest, Leftover, clearance_from_json, failed, to_pages
from ecomp.store.client import Entry, Put, Store, Unchanged, at_it
from ecomp.store.sharing import lives, quietly_revoke
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)

# Lease of an answer, for an eschedule that was killed; longer than any audit waits.
ANSWER_SECONDS = 240


def look(hypervisor: Hypervisor, data: GuestData, state: Path) -> Digest:
    """Return the digest of this host; errors are those of the hypervisor."""
    return Digest(
        guests=hypervisor.guests(),
        without_base=hypervisor.without_base(),
        metadata=data.all(),
        seeds=dict.fromkeys(hypervisor.seeds(), ''),
        reservations={
            mac: f'{reserved.instance} {reserved.address}' for mac, reserved in hypervisor.reservations().items()
        },
        parts=parts(state),
        open_dhcp=dict.fromkeys(hypervisor.open_dhcp(), ''),
        bad_bases=dict.fromkeys(bad(state / 'images'), ''),
    )


def parts(state: Path) -> dict[str, str]:
    """Return the abandoned *.part files: {relative path: a mark that changes at each write}."""
    marks = {}
    for path in [*state.glob('*.part'), *state.glob('*/*.part')]:
        try:
            with idle(path) as is_abandoned:
                status = path.stat()
                if is_abandoned:
                    marks[str(path.relative_to(state))] = f'{status.st_ino}/{status.st_mtime_ns}'
        except OSError:
            continue  # it was just renamed
    return marks


@dataclass(eq=False)
class Answerer:
    """Answers the audits passed to on_audits(), from start() to stop().

    `store` has no guard, and a connection of its own, because a long answer must not delay the writes of instances.
    `may_remove` takes an instance before something of it is removed, and '' before a part file is removed or a digest
    written; it raises an EcompError if etcd is unfamiliar.
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
        self._asked: Mapping[str, Entry] = {}  # replaced, never changed
        self._answered: set[str] = set()
        self._leases: dict[str, int] = {}  # the lease of the answer, by audit
        self._turn = Turn(self.threads, self.threads.audits, self._answer_all)

    def start(self) -> None:
        self._turn.at()

    def stop(self) -> None:
        """Stop, after the answer in flight."""
        self._turn.end()
        self._turn.wait()

    def on_audits(self, state: Mapping[str, Entry]) -> None:
        """Replace the audits to answer. The follower's thread calls this."""
        before, self._asked = self._asked, state
        if state.keys() != before.keys():
            self._turn.at()

    def _answer_all(self) -> float:
        audits = self._asked
        new, self._answered = audits.keys() - self._answered, set(audits)
        for key in sorted(new):
            entry = audits[key]
            try:
                audit, _, compute = entry.key.removeprefix(keys.AUDIT).partition('/')
                if compute in ('', self.compute) and self._is_ours():
                    self._put(entry, audit, 'heard' if not compute else 'clearing', '')
                    if compute:
                        self._put(entry, audit, 'cleared', dump(self._clear(entry)))
                    else:
                        self._tell(entry, audit)
            except EcompError as error:
                log.debug('audit %s is not answered: %s', entry.key, error)
            except Exception:
                log.exception('unexpected error while answering %s', entry.key)
        for audit in [leased for leased in self._leases if not any(leased in key for key in self._asked)]:
            quietly_revoke(self.store, self._leases.pop(audit))
        return math.inf

    def _is_ours(self) -> bool:
        """Return False if another ecompute holds the presence key now, and answers instead."""
        entry = self.store.get(keys.compute(self.compute))
        try:
            if entry is None or not entry.lease:
                return True
            return load_object(entry.value).get('token', self.token) == self.token
        except ValueError:
            return True

    def _tell(self, entry: Entry, audit: str) -> None:
        try:
            self.may_remove('')
            pages = to_pages(look(self.hypervisor, self.data, self.state))
        except EcompError as error:
            pages = [failed(str(error))]
        for number in reversed(range(len(pages))):
            self._put(entry, audit, number, pages[number])

    def _put(self, entry: Entry, audit: str, part: int | str, value: str) -> None:
        # The commit compares the audit's key: nothing is written for a finished audit. The answer is not on the audit's
        # lease, whose other keys this compute may not write; the audit removes the answer, or it expires.
        if audit not in self._leases:
            self._leases[audit] = self.store.grant(ANSWER_SECONDS)
        put = Put(keys.digest(audit, self.compute, part), value, self._leases[audit])
        if self.store.commit([Unchanged(entry.key, entry.revision)], [put]) is None:
            raise EcompError('nobody waits for it any more')

    def _clear(self, entry: Entry) -> list[str]:
        """Remove the listed things that are still leftovers; return a line about each."""
        try:
            leftovers = clearance_from_json(entry.value)
        except ValueError as error:
            return [f'nothing is removed: {error}']
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
        kind, name = leftover.kind, leftover.name
        instance = {'disk': name, 'iso': name, 'reservations': name, 'seed': leftover.mark}.get(kind, '')
        if not self.may_remove(instance):
            return 'not removed: this compute is read-only, or remembers that it lives'
        if kind == 'part':
            return self._remove_part(leftover)
        if not keys.is_uuid(instance):
            return 'not removed: it names no instance'
        # A build of this instance waits for the lock, and then recreates the disk.
        with self._locks.held(instance, lambda: None):
            guest = self.hypervisor.guests().get(instance)
            if self._is_wanted(instance):
                return 'not removed: it is wanted now'
            if guest is not None and (guest.defined or guest.running):
                return 'not removed: its domain is there'
            if kind == 'reservations':
                self.hypervisor.release(instance)
            elif kind == 'iso' and instance in self.hypervisor.seeds():
                self.hypervisor.delete_seed(instance)
            elif kind == 'seed' and self.data.all().get(name) == instance:
                self.data.remove(instance, [name])
            elif kind == 'disk' and guest is not None:
                if users := self.hypervisor.users(instance):
                    return f'not removed: domain {", ".join(sorted(users))} has it'
                self.hypervisor.delete_disk(instance)
            else:
                return 'is gone already'
            return 'removed'

    def _remove_part(self, leftover: Leftover) -> str:
        if parts(self.state).get(leftover.name) != leftover.mark:
            return 'not removed: it was written again, or is gone'
        path = self.state / leftover.name
        with idle(path) as is_abandoned:
            if is_abandoned:
                path.unlink(missing_ok=True)
        return 'removed' if is_abandoned else 'not removed: it is being written'

    def _is_wanted(self, instance: str) -> bool:
        """Return whether the instance is requested here, in flight, or alive or malformed anywhere."""
        if self.store.get(keys.request(self.compute, instance)) is not None or instance in at_it(self.store):
            return True
        try:
            # On any compute: the leftover here may be the only copy.
            return lives(self.store, instance)
        except ValueError:
            return True
