"""The layout of etcd: the names of all keys, and how to parse them.

    /hosts/<compute>/<instance>   the request: eschedule writes it, ecompute carries it out
    /requests/<uuid>              an attempt in flight; on eschedule's lease
    /booted/<instance>            the address of the instance, plain text
    /instances/<compute>/<instance>   the record; <compute> is `none` if no compute ever had the instance
    /names/<name>                 the owner of a name, {"version", "instance"}; until the instance is gone
    /groups/<group>               members, their computes and the policy; changed when a member is added or removed
    /quotas/<project>             limits and usage of a project; changed when an instance is added or removed
    /stacks/<stack>               epoch and instances of a stack; written by eschedule, kept when they are gone
    /user-data/<sha256>           user-data of a set or queue, {"version", "user_data"} (base64); on a lease of 30 days
    /flavors/<flavor>             a named query; written by operators
    /queues/<flavor>/<instance>   a request that waits for a compute to take it
    /queues/<flavor>/<instance>/taker   the compute that takes it; on that compute's lease
    /computes/<compute>           presence: hostname, version, since, token hash, boot id, pid, kind, queues; 30 s
    /facts/<compute>              room, limits, traits, aggregates and cached images; on the presence's lease
    /troubles/<compute>           why the compute cannot build; on the same lease, only while it lasts
    /findings/<compute>           what the compute's own checks found; on the same lease
    /foreign/<compute>            the guests there that ecomp did not create; on the same lease
    /hostnames/<compute>          the host's name, {"version", "hostname", "leases"}; until the compute is forgotten
    /released/<2 digits>/<lease>  generations of released claims, by the first digits of instances; on this lease
    /cluster                      this etcd's identity, written once
    /accepted/<compute>           the revision at which this compute accepted a restored or new etcd, in decimal digits
    /audit/<audit>                eschedule asks all computes to look at themselves now; on eschedule's lease
    /audit/<audit>/<compute>      eschedule asks one compute to repair what it finds; on the same lease
    /audit/<audit>/usage          eschedule asks what the named or all computes use; on the same lease
    /usage/<compute>              what the compute and its guests use; on the presence's lease, only while it is asked

A key that only one compute writes contains its uuid, so that an etcd role can be limited to it. Prefixes end with a
slash, because /hosts/1 would also match /hosts/10.
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
FACTS = '/facts/'
TROUBLES = '/troubles/'
FINDINGS = '/findings/'
FOREIGN = '/foreign/'
HOSTNAMES = '/hostnames/'
USER_DATA = '/user-data/'
FLAVORS = '/flavors/'
GROUPS = '/groups/'
QUOTAS = '/quotas/'
QUEUES = '/queues/'
STACKS = '/stacks/'
TAKER = '/taker'
RELEASED = '/released/'
CLUSTER = '/cluster'
ACCEPTED = '/accepted/'
AUDIT = '/audit/'
USAGE = '/usage/'
# The end of the key of a question about usage.
USAGE_QUESTION = '/usage'
# TTL of the lease of keys below /requests/: an attempt whose eschedule died is in flight for at most this long. A
# claim, or anything else that eschedule creates before its delivery, is an orphan if two checks this far apart find no
# request and no attempt for it (rule: orphaned-claim).
ATTEMPT_SECONDS = 60
# Stands for the compute in the record of an instance that was removed from its queue before a compute took it.
NO_COMPUTE = 'none'

_UUID = re.compile('(?![0-]+$)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')


class StoredValue(Protocol):
    """A key's value, the revisions of its last write and of its creation, and its lease or 0."""

    @property
    def value(self) -> bytes: ...
    @property
    def revision(self) -> int: ...
    @property
    def create_revision(self) -> int: ...
    @property
    def lease(self) -> int: ...


def _make_key_function(prefix: str) -> Callable[[str], str]:
    return lambda part: prefix + part


# Two attempts for one uuid collide at this key. The uuid is the one that was ordered: for a set, the set's.
attempt = _make_key_function(ATTEMPTS)
address = _make_key_function(BOOTED)
name = _make_key_function(NAMES)
group = _make_key_function(GROUPS)
quota = _make_key_function(QUOTAS)
stack = _make_key_function(STACKS)
flavor = _make_key_function(FLAVORS)
user_data = _make_key_function(USER_DATA)
compute = _make_key_function(COMPUTES)
facts = _make_key_function(FACTS)
troubles = _make_key_function(TROUBLES)
findings = _make_key_function(FINDINGS)
foreign = _make_key_function(FOREIGN)
hostname = _make_key_function(HOSTNAMES)
# This key stays when the compute is forgotten.
acceptance = _make_key_function(ACCEPTED)
audit = _make_key_function(AUDIT)
usage = _make_key_function(USAGE)


def request_prefix(compute: str) -> str:
    return f'{HOSTS}{compute}/'


def request(compute: str, instance: str) -> str:
    return f'{HOSTS}{compute}/{instance}'


def record(compute: str, instance: str) -> str:
    """Return the key of an instance's record, where the compute is '' if none had the instance."""
    return f'{INSTANCES}{compute or NO_COMPUTE}/{instance}'


def parse_record_key(key: str) -> tuple[str, str]:
    """Return compute and instance in a record's key, the compute '' if the key has none."""
    compute, slash, instance = key.removeprefix(INSTANCES).partition('/')
    return ('' if compute == NO_COMPUTE else compute, instance) if slash else ('', compute)


def queue(flavor: str, instance: str) -> str:
    return f'{QUEUES}{flavor}/{instance}'


def taker(queue_key: str) -> str:
    return queue_key + TAKER


def parse_queue_key(key: str) -> tuple[str, str] | None:
    """Return flavor and instance in a queued request's key, unchecked, or None for other keys."""
    flavor, _, instance = key.removeprefix(QUEUES).partition('/')
    return (flavor, instance) if flavor and instance and '/' not in instance else None


def get_queued_instance(key: str) -> str:
    """Return the instance in the key of a queued request or of its taker."""
    return get_last_part(key.removesuffix(TAKER))


def released_claims_prefix(instance: str) -> str:
    """Return the prefix of keys of released claims, by the first two digits of the instance."""
    return f'{RELEASED}{instance[:2].lower()}/'


def released_claims(instance: str, lease: int) -> str:
    return f'{released_claims_prefix(instance)}{lease:x}'


def adoption(compute: str) -> str:
    """Return the key of the one attempt that may adopt guests of a compute."""
    return attempt(derive_uuid(compute, 'adopt'))


def get_last_part(key: str) -> str:
    return key.rsplit('/', 1)[-1]


def is_uuid(text: str) -> bool:
    """Return whether a value is a uuid in lower case with dashes, and not only zeros."""
    return isinstance(text, str) and _UUID.fullmatch(text) is not None


def derive_uuid(base: str, text: str) -> str:
    """Return the uuid (version 5) of a text in the namespace of another uuid."""
    import uuid  # imported here because few commands need it, and it is slow to load

    return str(uuid.uuid5(uuid.UUID(base), text))


def make_uuid(random_bytes: bytes) -> str:
    """Make a uuid (version 4) from 16 bytes, without Python's uuid module, which loads slowly."""
    digits = f'{int.from_bytes(random_bytes, "big") & ~(0xF << 76 | 0x3 << 62) | 0x4 << 76 | 0x2 << 62:032x}'
    return '-'.join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
