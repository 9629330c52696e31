"""Which etcd this is (rule 10): what a compute remembers of one, what another one looks like, its holes. Pure.

/cluster, written once by the first ecompute that finds none and remembers none, is JSON: {"version", "identity": uuid,
"since": ISO time}. An etcd that was wiped has another one, or none. One restored from an older snapshot has the same:
its revision tells, which never goes back in a healthy cluster; where that has been overtaken already, its raft term
does, with which a restored etcd begins anew, or etcd's own cluster id, if its members have other names now.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ecomp.model import keys
from ecomp.model.json_object import dump, load_object

VERSION = 1

MENDED = {(3, 5): 33, (3, 6): 14, (3, 7): 1}
"""The first release of each minor version without a hole that is known.

https://etcd.io/docs/v3.6/op-guide/versioning/ says which releases are still mended; each release's advisories are at
https://github.com/etcd-io/etcd/security/advisories.
"""


@dataclass(frozen=True)
class Header:
    """What etcd says in every reply: its cluster id, its revision and its raft term."""

    cluster: int
    revision: int
    term: int


@dataclass(frozen=True)
class KnownCluster:
    """What is remembered of an etcd, with the highest revision and term seen; the defaults mean nothing."""

    identity: str = ''
    cluster: int = 0
    revision: int = 0
    term: int = 0

    def with_header(self, header: Header) -> KnownCluster:
        """What is remembered after a reply with this header."""
        return KnownCluster(
            self.identity, header.cluster, max(self.revision, header.revision), max(self.term, header.term)
        )


def accepted_in(entries: Iterable[keys.StoredValue]) -> int:
    """Return the highest revision that the keys below /accepted/ name; 0 for none.

    A key names none above its own: whoever writes a larger number says what cannot be.
    """
    said = ((each.value, each.revision) for each in entries)
    return max((min(int(value), own) for value, own in said if value.isdigit() and len(value) < 20), default=0)


def unfamiliar(known: KnownCluster, header: Header) -> str | None:
    """Why a reply with this header is not from the etcd we knew, in words; None if it may be.

    Right for a linearizable reply to what was sent after `known` was seen: no member of a healthy cluster is behind
    then. Any other, such as a watch's, may come from a member that is.
    """
    if known.cluster and header.cluster != known.cluster:
        return f'its cluster id is {header.cluster:x}, and {known.cluster:x} was known'
    if header.revision < known.revision:
        return f'it is at revision {header.revision}, and {known.revision} was seen'
    if header.term < known.term:
        return f'it is at raft term {header.term}, and {known.term} was seen'
    return None


def unlike(known: KnownCluster, value: bytes | None) -> str | None:
    """Why `value`, that of /cluster or None, is not of the etcd we knew, in words; None if it is."""
    if value is None:
        return f'{keys.CLUSTER} is not there, and identity {known.identity} was known'
    try:
        found = identity(value)
    except ValueError as error:
        return f'{keys.CLUSTER} cannot be read ({error}), and identity {known.identity} was known'
    return None if found == known.identity else f'its identity is {found}, and {known.identity} was known'


def new(identity: str, now: str) -> str:
    """The value of /cluster for this identity; `now` is an ISO time."""
    return dump({'version': VERSION, 'identity': identity, 'since': now})


def identity(value: bytes) -> str:
    """The identity in a value of /cluster. ValueError if it has none."""
    found = load_object(value).get('identity')
    if not isinstance(found, str) or not keys.is_uuid(found):
        raise ValueError('it holds no identity')
    return found


def to_json(known: KnownCluster) -> str:
    """The text in which the state directory keeps what is known."""
    return dump({'version': VERSION, **asdict(known)})


def from_json(value: bytes) -> KnownCluster:
    """What is known, from to_json()'s text. ValueError for any other."""
    data = load_object(value)
    wanted = {name: type(each) for name, each in {'version': VERSION, **asdict(KnownCluster())}.items()}
    if {name: type(each) for name, each in data.items()} != wanted or data.pop('version') != VERSION:
        raise ValueError('not what an ecompute of this version remembers')
    if not keys.is_uuid(data['identity']):
        raise ValueError('it holds no identity')
    return KnownCluster(**data)


def holes(version: str) -> str | None:
    """One line for the log about an etcd of this version (`3.4.23`); None: nothing is known of it."""
    parts = re.match(r'(\d+)\.(\d+)\.(\d+)', version)
    if parts is None:
        return None
    major, minor, patch = (int(each) for each in parts.groups())
    cure = f'{", ".join(f"{m}.{n}.{least}" for (m, n), least in MENDED.items())} and newer have none that is known'
    if (major, minor) < min(MENDED):
        return f'etcd {version} is end-of-life, and its roles are no boundary: {cure}'
    if patch < MENDED.get((major, minor), 0):
        return f'etcd {version} has holes that are known: {cure}'
    return None
