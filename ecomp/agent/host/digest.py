"""Audits are answered: what is on this compute, told when eschedule asks, and leftovers removed when it asks for that.

Nothing is done while nobody asks. A compute that is read-only answers, too, unless another one is this compute now.
In an etcd that is not the one it knew it says that, and not what it has: nothing there asks for its guests.
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

ANSWER_SECONDS = 240
"""How long an answer stays whose asker was killed: longer than any audit waits."""


def look(hypervisor: Hypervisor, data: GuestData, state: Path) -> Digest:
    """Look at what this host has now. Errors: those of the hypervisor."""
    return Digest(
        guests=hypervisor.guests(),
        without_base=hypervisor.without_base(),
        metadata=data.all(),
        seeds=dict.fromkeys(hypervisor.seeds(), ''),
        reservations={mac: f'{each.instance} {each.address}' for mac, each in hypervisor.reservations().items()},
        parts=parts(state),
        open_dhcp=dict.fromkeys(hypervisor.open_dhcp(), ''),
        bad_bases=dict.fromkeys(bad(state / 'images'), ''),
    )


def parts(state: Path) -> dict[str, str]:
    """The half-written files that nobody is writing, by name in the state directory, with what changes if one is."""
    found = {}
    for path in [*state.glob('*.part'), *state.glob('*/*.part')]:
        try:
            with idle(path) as left_over:
                status = path.stat()
                if left_over:
                    found[str(path.relative_to(state))] = f'{status.st_ino}/{status.st_mtime_ns}'
        except OSError:
            continue  # renamed this moment
    return found


@dataclass(eq=False)
class Answerer:
    """Answers the audits that on_audits() is told of, from start() to stop().

    `store` has a connection of its own, for an answer is long and must not hold up what the instances' threads write;
    and no guard. `may_remove` is asked of an instance before anything of it is removed, and of '' before a half-written
    file is, and before what is here is told: it raises where etcd is not the one that was known.
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
        self._asked: Mapping[str, Entry] = {}  # never changed, only put in place of the one before
        self._answered: set[str] = set()
        self._leases: dict[str, int] = {}  # of each audit that is being answered
        self._turn = Turn(self.threads, self.threads.audits, self._answer_all)

    def start(self) -> None:
        self._turn.at()

    def stop(self) -> None:
        """End, when the answer in work is given."""
        self._turn.end()
        self._turn.wait()

    def on_audits(self, state: Mapping[str, Entry]) -> None:
        """Take all audits that are asked for now: a follower's callback, in one thread."""
        before, self._asked = self._asked, state
        if state.keys() != before.keys():
            self._turn.at()

    def _answer_all(self) -> float:
        asked = self._asked
        new, self._answered = asked.keys() - self._answered, set(asked)
        for key in sorted(new):
            entry = asked[key]
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
        for audit in [each for each in self._leases if not any(each in key for key in self._asked)]:
            quietly_revoke(self.store, self._leases.pop(audit))
        return math.inf

    def _is_ours(self) -> bool:
        """False if another ecompute is this compute now: it is to answer."""
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
        # Whoever asked and has gone is told nothing. Not on its lease, whose other keys are not ours to write: whoever
        # asked removes the answer, or it runs out.
        if audit not in self._leases:
            self._leases[audit] = self.store.grant(ANSWER_SECONDS)
        put = Put(keys.digest(audit, self.compute, part), value, self._leases[audit])
        if self.store.commit([Unchanged(entry.key, entry.revision)], [put]) is None:
            raise EcompError('nobody waits for it any more')

    def _clear(self, entry: Entry) -> list[str]:
        """Remove what is asked for, where it is still a leftover; what was done, a line each."""
        try:
            leftovers = clearance_from_json(entry.value)
        except ValueError as error:
            return [f'nothing is removed: {error}']
        done = []
        for leftover in leftovers:
            try:
                said = self._remove(leftover)
            except (EcompError, OSError) as error:
                said = f'not removed: {error}'
            done.append(f'{leftover.kind} {leftover.name}: {said}')
            log.warning('audit: %s', done[-1])
        return done

    def _remove(self, leftover: Leftover) -> str:
        kind, name = leftover.kind, leftover.name
        instance = {'disk': name, 'iso': name, 'reservations': name, 'seed': leftover.mark}.get(kind, '')
        if not self.may_remove(instance):
            return 'not removed: this compute is read-only, or remembers that it lives'
        if kind == 'part':
            return self._remove_part(leftover)
        if not keys.is_uuid(instance):
            return 'not removed: it names no instance'
        # Nobody builds it inside: whoever wants to, has to wait, and then makes the disk anew.
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
        with idle(path) as left_over:
            if left_over:
                path.unlink(missing_ok=True)
        return 'removed' if left_over else 'not removed: it is being written'

    def _is_wanted(self, instance: str) -> bool:
        """True if anybody asks for it, or it lives anywhere, or nobody can tell."""
        if self.store.get(keys.request(self.compute, instance)) is not None or instance in at_it(self.store):
            return True
        try:
            # Wherever that is: what lies here may be the only copy.
            return lives(self.store, instance)
        except ValueError:
            return True
