"""The layout of etcd: every key's name, and what a name says back.

    /hosts/<compute>/<instance>   eschedule's request, ecompute's desired state
    /requests/<request>           somebody is at it; on eschedule's lease
    /booted/<instance>            the address, plain text
    /instances/<compute>/<instance>   the record; <compute> is `none` where no compute ever had it
    /instances/<instance>         the record, as ecomp 1.0 wrote it; read, moved and written no more
    /names/<name>                 whose name it is, {"version", "instance"}; with the delivery, gone with the instance
    /groups/<group>               who is together or apart, and where; changed with each delivery and each end
    /quotas/<project>             what a project may have, and has; changed likewise
    /user-data/<sha256>           a set's or a queue's, {"version", "user_data"} (base64); on a lease of a week
    /flavors/<flavor>             what is asked of placement, by a name; operators'
    /queues/<flavor>/<instance>   a request that waits for a compute to take it
    /queues/<flavor>/<instance>/taker   the compute that is taking it; on that one's lease
    /computes/<compute>           alive: hostname, version, since, token's hash, boot id, pid, kind, queues, room; 30 s
    /hostnames/<compute>          its host's name, {"version", "hostname"}; stays until the compute is forgotten
    /released/<2 digits>/<lease>  generations of claims that were released, of instances that begin so; on this lease
    /cluster                      this etcd's identity, written once
    /accepted/<compute>           the revision at which this compute accepted a restored or new etcd, in decimal digits
    /audit/<audit>                eschedule asks every compute what is there; on its lease
    /audit/<audit>/<compute>      eschedule asks one compute to remove leftovers; on the same lease
    /digests/<compute>/<audit>/…  ecompute's answers; removed by who asked, or with a lease

What only one compute writes lies below its uuid, so that a role of etcd's can be cut to it.
Prefixes end with a slash, or /hosts/1 would also match /hosts/10.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

HOSTS = '/hosts/'
ATTEMPTS = '/requests/'
BOOTED = '/booted/'
INSTANCES = '/instances/'
NAMES = '/names/'
COMPUTES = '/computes/'
HOSTNAMES = '/hostnames/'
USER_DATA = '/user-data/'
FLAVORS = '/flavors/'
GROUPS = '/groups/'
QUOTAS = '/quotas/'
QUEUES = '/queues/'
TAKER = '/taker'
RELEASED = '/released/'
CLUSTER = '/cluster'
ACCEPTED = '/accepted/'
AUDIT = '/audit/'
DIGESTS = '/digests/'
ATTEMPT_SECONDS = 60
"""Seconds of the lease of what is below /requests/: for so long a dead eschedule is at it, and then it is not.

Two looks so far apart say of a claim, or of what else an eschedule makes before its delivery, that it is nobody's
(rule 4).
"""
NONE = 'none'
"""In place of the compute in the record of what was taken out of its queue before a compute took it."""


_UUID = re.compile('(?![0-]+$)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')


class StoredValue(Protocol):
    """What is at a key: its value, the revisions that wrote that and made the key, and its lease (0: none)."""

    @property
    def value(self) -> bytes: ...
    @property
    def revision(self) -> int: ...
    @property
    def created(self) -> int: ...
    @property
    def lease(self) -> int: ...


def version(written: StoredValue) -> tuple[int, int]:
    """What tells one value of a key from another; a value that was too long to be kept may be kept later."""
    return written.revision, len(written.value)


def _below(prefix: str) -> Callable[[str], str]:
    """The function from a name, a uuid or a hash to its key directly below a prefix."""
    return lambda part: prefix + part


attempt = _below(ATTEMPTS)
"""The key that says an eschedule is at it. Two at one uuid collide.

The uuid is the one that was asked for: of a set, the one of the set.
"""
booted = _below(BOOTED)
"""The key of an instance's address."""
old_record = _below(INSTANCES)
"""Where ecomp 1.0 has an instance's record, of whichever compute."""
name = _below(NAMES)
"""The key that says whose name it is."""
group = _below(GROUPS)
"""The key of a group."""
quota = _below(QUOTAS)
"""The key of a project's limits and of what it uses."""
flavor = _below(FLAVORS)
"""The key of a flavor."""
user_data = _below(USER_DATA)
"""The key of user-data that several requests refer to."""
compute = _below(COMPUTES)
"""The key that says an ecompute is alive."""
hostname = _below(HOSTNAMES)
"""The key that says what a compute's host is called, also while that compute is away."""
accepted = _below(ACCEPTED)
"""The key that says at which revision a compute accepted this etcd; it stays when that is forgotten."""
audit = _below(AUDIT)
"""The key that asks every compute for a digest."""


def request_prefix(compute: str) -> str:
    """The prefix one ecompute watches."""
    return f'{HOSTS}{compute}/'


def request(compute: str, instance: str) -> str:
    """The key of one request."""
    return f'{HOSTS}{compute}/{instance}'


def record(compute: str, instance: str) -> str:
    """The key of an instance's record on a compute, '' for none."""
    return f'{INSTANCES}{compute or NONE}/{instance}'


def recorded(key: str) -> tuple[str | None, str]:
    """The compute ('': none; None: only the record itself says) and the instance of a key below INSTANCES."""
    compute, slash, instance = key.removeprefix(INSTANCES).partition('/')
    return ('' if compute == NONE else compute, instance) if slash else (None, compute)


def queue(flavor: str, instance: str) -> str:
    """The key of a request that waits."""
    return f'{QUEUES}{flavor}/{instance}'


def taker(queue_key: str) -> str:
    """The key that says who is taking the request at this key."""
    return queue_key + TAKER


def queued(key: str) -> tuple[str, str] | None:
    """The flavor and the instance of a key in the queues; None for a taker's, and for what belongs to neither."""
    flavor, _, instance = key.removeprefix(QUEUES).partition('/')
    return (flavor, instance) if flavor and instance and '/' not in instance else None


def in_queue(key: str) -> str:
    """The instance that a key in the queues is about, whichever of the two it is."""
    return last(key.removesuffix(TAKER))


def released_prefix(instance: str) -> str:
    """Where it is noted which generation its claim had when it was released."""
    return f'{RELEASED}{instance[:2].lower()}/'


def released(instance: str, lease: int) -> str:
    """The key of one such note."""
    return f'{released_prefix(instance)}{lease:x}'


def clearance(audit: str, compute: str) -> str:
    """The key that asks one compute to remove leftovers."""
    return f'{AUDIT}{audit}/{compute}'


def digest_prefix(audit: str, compute: str) -> str:
    """Where the parts of a compute's answer are."""
    return f'{DIGESTS}{compute}/{audit}/'


def digest(audit: str, compute: str, part: int | str) -> str:
    """The key of one part of a compute's answer: a page's number, or 'cleared'."""
    return f'{digest_prefix(audit, compute)}{part}'


def last(key: str) -> str:
    """What a key is about: its last part."""
    return key.rsplit('/', 1)[-1]


def is_uuid(text: str) -> bool:
    """True for a uuid in its canonical form only: lower case, with dashes, and not nil. It becomes a file name."""
    return isinstance(text, str) and _UUID.fullmatch(text) is not None


def new_uuid(random: bytes) -> str:
    """A random uuid (version 4 of RFC 9562) in its canonical form, of 16 random bytes.

    Python's own does the same, and takes longer to load than a claim has time for.
    """
    digits = f'{int.from_bytes(random, "big") & ~(0xF << 76 | 0x3 << 62) | 0x4 << 76 | 0x2 << 62:032x}'
    return '-'.join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
