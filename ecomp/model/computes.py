"""The computes as etcd tells of them: what each is called, and what the living ones say of themselves. Pure.

A compute is called by its host's name wherever people read or type. It says that name while it is alive, and the key
/hostnames/<compute> keeps it, as JSON {"version", "hostname"}, until the compute is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from ecomp.model import hints, keys
from ecomp.model.json_object import dump, load_if_object
from ecomp.model.text import printable, renamed, some

VERSION = 1
LONGEST = 64
"""Characters that are shown of a version or a kind."""

_SAID_VERSION = re.compile('[0-9A-Za-z.+!-]*')
_HOSTNAME = re.compile('[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}')


class Living(NamedTuple):
    """What a living compute says of itself; None: it does not say it, as ecomp 1.0 does not say the last two.

    `kind` is what its guests are: kvm, qemu or fake. `queues`: it takes requests out of queues. `room` is a hint.
    """

    hostname: str | None = None
    version: str | None = None
    kind: str | None = None
    queues: bool | None = None
    room: hints.Hint | None = None


class Naming(Protocol):
    """What computes are called, and nothing else of them: it may be that etcd could not be asked for more."""

    def host(self, compute: str) -> str | None: ...
    def called(self, compute: str) -> str: ...


@dataclass(frozen=True)
class Computes:
    """All computes of which etcd knows a name or a life; `remembered` has the host names of those that may be away."""

    living: Mapping[str, Living] = field(default_factory=dict)
    remembered: Mapping[str, str] = field(default_factory=dict)

    def host(self, compute: str) -> str | None:
        """The name of the compute's host; None if it never said one."""
        return self._hosts.get(compute)

    def called(self, compute: str) -> str:
        """What it is called in a sentence: its host's name, with the uuid where that name is not its alone."""
        host = self.host(compute)
        if host is None:
            return compute
        return host if compute in self._alone else f'{host} ({compute})'

    def named(self, host: str) -> list[str]:
        """The computes whose host has this name, alive or not, sorted.

        The only one that is alive is not meant for that: each says its own name, also that of one that is away.
        """
        return self._by_host.get(host, [])

    @property
    def takers(self) -> list[str]:
        """The living computes that take requests out of queues, sorted."""
        return sorted(compute for compute, said in self.living.items() if said.queues)

    @property
    def no_taker(self) -> str | None:
        """That none of them takes from queues, in one sentence; None if one does. An ecompute of 1.0 does not say."""
        if self.takers:
            return None
        unsaid = sorted(self.called(compute) for compute, said in self.living.items() if said.queues is None)
        if unsaid:
            older = f'of {some(unsaid, 1)}, of an older version, it is not known'
            return f'no compute says that it takes from queues; {older}'
        return 'no compute takes from queues: `queues: True` in the compute.yaml of one has it do so'

    def unserved(self, waiting: Sequence[str]) -> str | None:
        """That those `waiting` in queues wait for nobody, in one line; None where that is not so, or not known."""
        if not waiting or self.no_taker is None or any(said.queues is None for said in self.living.values()):
            return None
        return printable(f'{some(waiting, 1)} wait{"s" if len(waiting) == 1 else ""} in a queue, and {self.no_taker}')

    def translated(self, text: str) -> str:
        """The text with what a compute is called in place of its uuid; a key's path stays as it is."""
        return renamed(text, self.names)

    @cached_property
    def names(self) -> dict[str, str]:
        """{uuid: what it is called} of all that have a host's name."""
        return {compute: self.called(compute) for compute in self._hosts}

    @cached_property
    def _hosts(self) -> dict[str, str]:
        said = {compute: each.hostname for compute, each in self.living.items() if each.hostname is not None}
        return {**self.remembered, **said}

    @cached_property
    def _alone(self) -> frozenset[str]:
        """Those who are meant by their host's name, and nobody else is."""
        meant = map(self.named, self._by_host)
        return frozenset(each[0] for each in meant if len(each) == 1)

    @cached_property
    def _by_host(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for compute, host in sorted(self._hosts.items()):
            found.setdefault(host, []).append(compute)
        return found


NOBODY = Computes()
"""No compute is known by name: each is called by its uuid.

Who has not read etcd passes it as a Naming: what else it would say, as that nobody takes from queues, is not known.
"""


def is_hostname(text: object) -> bool:
    """True for what may be shown and typed as a host's name: it is not a uuid, and has no blank in it."""
    if not isinstance(text, str) or not _HOSTNAME.fullmatch(text):
        return False
    if len(text.replace('-', '')) != 32:
        return True
    import uuid  # here, because it takes its time

    try:
        uuid.UUID(text)
    except ValueError:
        return True
    return False


def to_json(hostname: str) -> str:
    """The value of a compute's key below /hostnames/."""
    return dump({'version': VERSION, 'hostname': hostname})


def hostname_in(value: bytes) -> str | None:
    """The host name that such a value, or that of a compute's presence, says; None if it says none."""
    return _hostname(load_if_object(value))


def computes_of(lives: Mapping[str, keys.StoredValue], names: Mapping[str, keys.StoredValue]) -> Computes:
    """The computes in what is below /computes/, where a life is on a lease, and in what is below /hostnames/."""
    named = {keys.last(key): hostname_in(each.value) for key, each in names.items()}
    return Computes(
        {keys.last(key): living_in(each.value) for key, each in lives.items() if each.lease},
        {compute: name for compute, name in named.items() if name is not None and keys.is_uuid(compute)},
    )


def silent_cure(host: str) -> str:
    """Say what can be done where a silent compute holds a claim, in the order in which to try it.

    `host` is what the compute is called, `NAME (UUID)` where two have that name: then the command has its uuid.
    """
    word = host.rpartition('(')[2].rstrip(')')
    return (
        f'wait; or bring {host} back (after a restore of etcd: `ecompute --accept-new-etcd` there); or use another '
        f'uuid; or, if the machine is off for good, `eschedule host forget {word} --fenced`'
    )


def unproven(
    providers: Mapping[str, str], presence: Mapping[str, keys.StoredValue], began_at: int, has_lease_ended: bool
) -> list[str]:
    """List the computes of placement, {uuid: name}, of which nothing proves that they live in this etcd.

    A key on a lease does not: in a restored etcd it is back, with a full lease. It proves it once it was written after
    `began_at`, etcd's revision when this process began, or once every lease of then has ended.
    """
    alive = {
        keys.last(key)
        for key, each in presence.items()
        if each.lease and (has_lease_ended or each.revision > began_at)
    }
    return sorted(uuid for uuid, name in providers.items() if uuid == name and uuid not in alive)


def living_in(value: bytes) -> Living:
    """What a living compute's own key says of it: whatever makes no sense is not said."""
    said = load_if_object(value)
    version, kind = (_short(said.get(name)) for name in ('version', 'kind'))
    if version is not None and not _SAID_VERSION.fullmatch(version):  # doctor says it where a command is to be copied
        version = None
    queues = said.get('queues')
    taking = queues if isinstance(queues, bool) else None
    return Living(_hostname(said), version, kind, taking, hints.read(said.get('room')))


def _hostname(said: Mapping[str, Any]) -> str | None:
    name = said.get('hostname')
    return name if isinstance(name, str) and is_hostname(name) else None


def _short(text: object) -> str | None:
    return text[:LONGEST] if isinstance(text, str) and text else None
