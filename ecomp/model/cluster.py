"""The identity of an etcd cluster (rule: familiar-etcd), and known problems of etcd versions. Pure.

/cluster holds the identity, a uuid, which the first ecompute writes once. A wiped etcd has another identity, or none.
An etcd that was restored from an older snapshot has a lower revision. If new writes have raised it again, the raft term
is lower, because a restored etcd starts with a low one. If the members have new names, etcd's own cluster id differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ecomp.errors import Problem
from ecomp.model import keys
from ecomp.model.parsers import TEXT, UUID, number
from ecomp.model.stored import decode, lenient, sparse, stored

# The first patch release of each minor version without a known vulnerability. Maintained versions are listed at
# https://etcd.io/docs/v3.6/op-guide/versioning/, advisories at https://github.com/etcd-io/etcd/security/advisories.
FIXED_PATCHES = {(3, 5): 33, (3, 6): 14, (3, 7): 1}


class Header(NamedTuple):
    """The header of every reply of etcd: its cluster id, revision and raft term."""

    cluster: int
    revision: int
    term: int


_COUNT = number(0, 2**64 - 1)


@stored(
    1, 'known etcd', identity=UUID, cluster=_COUNT, revision=_COUNT, term=_COUNT, first_seen_revision=sparse(_COUNT)
)
class KnownCluster(NamedTuple):
    """An etcd as a compute remembers it, with the highest revision and term."""

    identity: str = ''
    cluster: int = 0
    revision: int = 0
    term: int = 0
    first_seen_revision: int = 0  # at which the compute first saw or accepted it, 0 if not noted

    def with_header(self, header: Header) -> KnownCluster:
        revision, term = max(self.revision, header.revision), max(self.term, header.term)
        return self._replace(cluster=header.cluster, revision=revision, term=term)


@stored(1, 'identity of etcd', identity=UUID, since=lenient(TEXT))
class ClusterIdentity(NamedTuple):
    identity: str
    since: str = ''  # an ISO time


def find_accepted_revision(entries: Iterable[keys.StoredValue]) -> int:
    """Return the highest valid revision in values below /accepted/, or 0."""
    # A value above the revision of its own key counts as that revision.
    values = ((entry.value, entry.revision) for entry in entries)
    return max((min(int(value), own) for value, own in values if value.isdigit() and len(value) < 20), default=0)


def explain_header_mismatch(remembered: KnownCluster, header: Header) -> str | None:
    """Explain why a reply's header is not from the remembered etcd, or return None if it may be.

    The reply must be linearizable, and its call sent after `remembered` was read: no member of a healthy cluster is
    behind then. Another reply, such as a watch's, may come from a member that lags.
    """
    if remembered.cluster and header.cluster != remembered.cluster:
        return f'its cluster id is {header.cluster:x}, not {remembered.cluster:x} as before'
    if header.revision < remembered.revision:
        return f'its revision is {header.revision}, and was {remembered.revision} before'
    if header.term < remembered.term:
        return f'its raft term is {header.term}, and was {remembered.term} before'
    return None


def explain_identity_mismatch(remembered: KnownCluster, value: bytes | None) -> str | None:
    """Explain why a value of /cluster is not the remembered identity, or return None if it is."""
    if value is None:
        return f'its {keys.CLUSTER} is missing, and had identity {remembered.identity} before'
    try:
        current = decode(ClusterIdentity, value).identity
    except ValueError as error:
        return f'its {keys.CLUSTER} is malformed ({error}), and had identity {remembered.identity} before'
    return None if current == remembered.identity else f'its identity is {current}, not {remembered.identity} as before'


def describe_vulnerabilities(version: str) -> Problem | None:
    """Return the problem of a vulnerable etcd, or None, also if its version is malformed."""
    parts = re.match(r'(\d+)\.(\d+)\.(\d+)', version)
    if parts is None:
        return None
    major, minor, patch = (int(part) for part in parts.groups())
    fixed = ', '.join(f'{m}.{n}.{patch}' for (m, n), patch in FIXED_PATCHES.items())
    cure = f'upgrade etcd; {fixed} and newer have no known vulnerabilities'
    if (major, minor) < min(FIXED_PATCHES):
        return Problem(f'etcd {version} is end-of-life, and its roles do not protect its keys', cure)
    if patch < FIXED_PATCHES.get((major, minor), 0):
        return Problem(f'etcd {version} has known vulnerabilities', cure)
    return None
