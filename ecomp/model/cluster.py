"""Which etcd this is (rule 10): what a compute remembers of one, and what another one looks like. Pure.

/cluster, written once by the first ecompute that finds none and remembers none, is JSON: {"version", "identity": uuid,
"since": ISO time}. An etcd that was wiped has another one, or none. One restored from an older snapshot has the same:
its revision tells, which never goes back in a healthy cluster; where that has been overtaken already, its raft term
does, with which a restored etcd begins anew, or etcd's own cluster id, if its members have other names now.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ecomp.model import keys
from ecomp.model.json_object import dump, load_object

VERSION = 1


@dataclass(frozen=True)
class Header:
    """What etcd says of itself in every reply."""

    cluster: int
    revision: int
    term: int


@dataclass(frozen=True)
class Known:
    """What is remembered of an etcd, the highest revision and term seen; all empty: nothing."""

    identity: str = ''
    cluster: int = 0
    revision: int = 0
    term: int = 0

    def with_header(self, header: Header) -> Known:
        """What is remembered after one more reply."""
        return Known(
            self.identity, header.cluster, max(self.revision, header.revision), max(self.term, header.term)
        )


def unfamiliar(known: Known, header: Header) -> str | None:
    """Why the sender of a reply is not the etcd we knew, in words; None if it may be.

    Sound for a linearizable reply to what was sent after `known` was seen: no member of a healthy cluster is behind
    then. Anything else, such as a watch, may come from one that is.
    """
    if known.cluster and header.cluster != known.cluster:
        return f'its cluster id is {header.cluster:x}, and {known.cluster:x} was known'
    if header.revision < known.revision:
        return f'it is at revision {header.revision}, and {known.revision} was seen'
    if header.term < known.term:
        return f'it is at raft term {header.term}, and {known.term} was seen'
    return None


def unlike(known: Known, value: bytes | None) -> str | None:
    """Why /cluster is not that of the etcd we knew, in words; None if it is."""
    if value is None:
        return f'{keys.CLUSTER} is not there, and identity {known.identity} was known'
    try:
        found = identity(value)
    except ValueError as error:
        return f'{keys.CLUSTER} cannot be read ({error}), and identity {known.identity} was known'
    return None if found == known.identity else f'its identity is {found}, and {known.identity} was known'


def new(identity: str, now: str) -> str:
    """The value of /cluster."""
    return dump({'version': VERSION, 'identity': identity, 'since': now})


def identity(value: bytes) -> str:
    """The identity in /cluster. ValueError for a value that has none."""
    found = load_object(value).get('identity')
    if not isinstance(found, str) or not keys.is_uuid(found):
        raise ValueError('it holds no identity')
    return found


def to_json(known: Known) -> str:
    """As the state directory keeps it."""
    return dump({'version': VERSION, **asdict(known)})


def from_json(value: bytes) -> Known:
    """What the state directory keeps. ValueError if it is none of it."""
    data = load_object(value)
    wanted = {name: type(each) for name, each in {'version': VERSION, **asdict(Known())}.items()}
    if {name: type(each) for name, each in data.items()} != wanted or data.pop('version') != VERSION:
        raise ValueError('not what an ecompute of this version remembers')
    if not keys.is_uuid(data['identity']):
        raise ValueError('it holds no identity')
    return Known(**data)
