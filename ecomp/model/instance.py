"""A request: what the key /hosts/<compute>/<instance> holds, parsed once at the edge.

JSON, as in 2019: allocations, instance, image, user_id, project_id, consumer_generation; since then also
"version", "query" (the placement query it came from), "stages" ({"requested": ISO time, …}), where they were given
"name", "ssh_keys" (a list of OpenSSH public keys) and "user_data" (base64: it may be gzip) or, of a set,
"user_data_sha256" (it is at the key /user-data/<sha256>) and "count", "group" ({"name", "policy", "strict"}), "why"
({"weigh", "weight", "of"}), and "power" (see ecomp.model.power; only once it was asked for). A tombstone is the same
with allocations {} and image null: the instance is to be destroyed; "resources" ({class: amount}) is then what it was
allocated.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from ecomp.model import keys
from ecomp.model.allocation import (
    LARGEST,
    Allocations,
    Resources,
    is_amount,
    missing,
    parse_allocations,
    to_wire,
    total,
)
from ecomp.model.choose import Why, why_from
from ecomp.model.group import Membership, membership_from
from ecomp.model.guest_data import USER_DATA_LIMIT
from ecomp.model.image import check_image
from ecomp.model.json_object import dump, load_object
from ecomp.model.names import is_label
from ecomp.model.power import Power, parse_power
from ecomp.model.text import printable

Found = TypeVar('Found')

VERSION = 1
SIZE_LIMIT = 384 * 1024
"""Bytes of a value looked at: nothing larger is parsed. Escaped in a record it may be three times as long, and etcd
takes 1.5 MiB: what is taken here can also be written down. User-data of 256 KiB is 342 KiB of it."""
REASON_LIMIT = 500
"""Characters of a reason: it quotes what is wrong, and that may be the whole value."""


@dataclass(frozen=True)
class Request:
    """What one compute is to make of one instance. No allocations: it is to be destroyed.

    `ssh_keys` and `user_data` None: those of the compute's mdserver.conf. `user_data_sha256`: it is at the key of this
    hash, and `user_data` is None until it was read from there. `count`: of how many it was asked for in one request.
    `left`: of a tombstone, what it was allocated.
    """

    instance: str
    allocations: Allocations
    image: str | None
    user_id: str
    project_id: str
    query: str | None = None
    stages: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    ssh_keys: tuple[str, ...] | None = field(default=None, repr=False)
    user_data: bytes | None = field(default=None, repr=False)
    power: Power | None = None
    user_data_sha256: str | None = None
    count: int = 1
    group: Membership | None = None
    left: Resources = field(default_factory=dict)
    why: Why | None = None

    @property
    def resources(self) -> Resources:
        """What it has in all or, to be destroyed, had."""
        return total(self.allocations) or self.left

    @property
    def is_tombstone(self) -> bool:
        """True when the instance is to be destroyed."""
        return not self.allocations


@dataclass(frozen=True)
class Shares:
    """What an instance has of what others want, too: a name, a place in a group, what its project's quota counts."""

    name: str | None = None
    group: str | None = None
    project_id: str = ''
    resources: Resources = field(default_factory=dict)


@dataclass(frozen=True)
class Invalid:
    """A value that cannot be understood, and why. Never half done, never a crash.

    `shares` is what it was delivered with, as far as that can be told: to be let go of with it.
    """

    instance: str
    reason: str
    shares: Shares = Shares()


def parse_request(compute: str, key: str, value: bytes, dropped: int = 0) -> Request | Invalid:
    """The request at a key under a compute's prefix, or the reason it is none.

    `dropped`: so many bytes it has, and they were not kept (see ecomp.store.kept).
    """
    name = key.removeprefix(keys.host_prefix(compute))
    try:
        return _parse(compute, name, value, dropped)
    except ValueError as error:
        return Invalid(name, printable(str(error))[:REASON_LIMIT], _shares(value))
    except RecursionError:  # a reason quotes what is wrong
        return Invalid(name, 'the request is nested too deeply')


def shares(wish: Request | Invalid) -> Shares:
    """What it shares with others."""
    if isinstance(wish, Invalid):
        return wish.shares
    return Shares(wish.name, wish.group.name if wish.group else None, wish.project_id, wish.resources)


def _shares(value: bytes) -> Shares:
    """What a request that is refused says of it, each field as far as it can be understood."""
    try:
        data = load_object(value) if len(value) <= SIZE_LIMIT else {}
    except ValueError:
        data = {}
    group = _or_none(lambda: membership_from(data.get('group')))
    found = Shares(_or_none(lambda: name_field(data)), group.name if group else None)
    # Who knows of versions has counted it in its project's quota; what is written by hand nobody has.
    version = data.get('version')
    if type(version) is not int or version <= VERSION:
        return found
    has = _or_none(lambda: total(parse_allocations(data.get('allocations'))) or _left(data))
    return replace(found, project_id=_or_none(lambda: text_field(data, 'project_id')) or '', resources=has or {})


def check_size(value: bytes, dropped: int = 0) -> None:
    """ValueError for a request that is too large to be written down."""
    # The one letter of ASCII that is escaped without need is then six.
    size = dropped or len(value) + 5 * value.count(b'\x7f')
    if size > SIZE_LIMIT:
        raise ValueError(f'the request has {size} bytes; the limit is {SIZE_LIMIT}')
    if dropped:
        raise ValueError(f'the request has {size} bytes, and with what else is asked of this compute that is too much')


def _or_none(read: Callable[[], Found]) -> Found | None:
    try:
        return read()
    except (ValueError, RecursionError):  # a reason quotes what is wrong
        return None


def _parse(compute: str, name: str, value: bytes, dropped: int) -> Request:
    if not keys.is_uuid(name):
        raise ValueError(f'{name[:100]!r} is not a uuid')
    check_size(value, dropped)
    data = load_object(value)
    version = data.get('version', VERSION)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(f'version {version!r} of the request is not known here: this ecompute takes {VERSION}')
    absent = [wanted for wanted in ('allocations', 'instance', 'image') if wanted not in data]
    if absent:
        raise ValueError(f'the request lacks {", ".join(absent)}')
    if data['instance'] != name:
        raise ValueError(f'the request is for instance {data["instance"]!r} but its key says {name}')
    allocations = parse_allocations(data['allocations'])
    image = data['image']
    stages = stages_field(data)
    if allocations:
        if compute not in allocations:
            others = ', '.join(sorted(allocations))
            raise ValueError(f'the allocations are for {others}, not for this compute {compute}')
        if not isinstance(image, str):
            raise ValueError(f'image: expected a URL, not {image!r}')
        check_image(image)
        lacking = missing(total(allocations))
        if lacking:
            raise ValueError(f'the allocations have no {", ".join(lacking)}: a guest needs all of them')
        image_or_none: str | None = image
    elif image is not None:
        # Neither a request nor a tombstone, and only a tombstone destroys.
        raise ValueError('allocations {} with an image: to destroy, the image has to be null')
    else:
        image_or_none = None
    return Request(
        instance=name,
        allocations=allocations,
        image=image_or_none,
        user_id=text_field(data, 'user_id'),
        project_id=text_field(data, 'project_id'),
        query=text_field(data, 'query') or None,
        stages=stages,
        name=name_field(data),
        ssh_keys=ssh_keys_field(data),
        user_data=_user_data(data),
        power=parse_power(data.get('power')),
        user_data_sha256=sha256_field(data),
        count=_count(data),
        group=membership_from(data.get('group')),
        left=_left(data),
        why=why_from(data.get('why')),
    )


def to_json(request: Request) -> str:
    """The value of the request's key. 2019's fields keep their names and meaning."""
    user_data = request.user_data
    given = {
        'name': request.name,
        'ssh_keys': None if request.ssh_keys is None else list(request.ssh_keys),
        'user_data_sha256': request.user_data_sha256,
        'user_data': None if user_data is None else binascii.b2a_base64(user_data, newline=False).decode(),
    }
    return dump(
        {
            'version': VERSION,
            'instance': request.instance,
            'allocations': to_wire(request.allocations),
            'image': request.image,
            'user_id': request.user_id,
            'project_id': request.project_id,
            'consumer_generation': None,
            'query': request.query,
            'stages': dict(request.stages),
            **{field: value for field, value in given.items() if value is not None},
            **({'count': request.count} if request.count > 1 else {}),
            **({'group': request.group._asdict()} if request.group else {}),
            **({'resources': dict(request.left)} if request.left else {}),
            **({'why': request.why._asdict()} if request.why else {}),
            **({'power': asdict(request.power)} if request.power else {}),
        }
    )


def announced(key: str, value: bytes) -> set[str]:
    """The instances an eschedule is at, by its /requests key. A value that cannot be read counts for its key's name."""
    try:
        named = {str(each)[:REASON_LIMIT] for each in load_object(value)['instances']}
    except (ValueError, KeyError, TypeError):
        named = set()
    return {keys.last(key), *named}


def name_to_json(instance: str) -> str:
    """The value of the key /names/<name>: whose name it is."""
    return dump({'version': VERSION, 'instance': instance})


def named(value: bytes) -> str:
    """The instance that a /names key is about. ValueError if it says none."""
    instance = load_object(value).get('instance')
    if not isinstance(instance, str) or not keys.is_uuid(instance):
        raise ValueError('it names no instance')
    return instance


def stages_field(data: Mapping[str, Any]) -> dict[str, str]:
    """When each stage was reached."""
    stages = data.get('stages', {})
    if not isinstance(stages, dict) or not all(isinstance(time, str) for time in stages.values()):
        raise ValueError('stages: expected an object of times')
    return stages


def text_field(data: Mapping[str, Any], name: str) -> str:
    """A field of text, '' where there is none."""
    value = data.get(name)
    if value is None:
        return ''
    if not isinstance(value, str):
        raise ValueError(f'{name}: expected text, not {type(value).__name__}')
    return value


def name_field(data: Mapping[str, Any]) -> str | None:
    """The name that the instance was given."""
    name = text_field(data, 'name') or None
    if name is not None and not is_label(name):
        raise ValueError(f'name: {name[:80]!r} is no host name')
    return name


# Neither is quoted, whatever it holds: a reason is logged, and stands in the record.


def ssh_keys_field(data: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The public keys that it was given."""
    lines = data.get('ssh_keys')
    if lines is None:
        return None
    if not isinstance(lines, list) or not all(isinstance(each, str) and each and each.isprintable() for each in lines):
        raise ValueError('ssh_keys: expected a list of public keys, a line each')
    return tuple(lines)


def sha256_field(data: Mapping[str, Any]) -> str | None:
    """The hash of the user-data that it was given."""
    digest = data.get('user_data_sha256')
    if digest is not None and (not isinstance(digest, str) or not re.fullmatch('[0-9a-f]{64}', digest)):
        raise ValueError('user_data_sha256: expected 64 hexadecimal digits')
    return digest


def _count(data: Mapping[str, Any]) -> int:
    count = data.get('count', 1)
    if not is_amount(count, LARGEST) or not count:
        raise ValueError(f'count: {str(count)[:40]!r} is no number of instances')
    return int(count)


def _left(data: Mapping[str, Any]) -> dict[str, int]:
    left = data.get('resources', {})
    if not isinstance(left, dict) or not all(amount and is_amount(amount, LARGEST) for amount in left.values()):
        raise ValueError('resources: expected an object of amounts')
    return left


def _user_data(data: Mapping[str, Any]) -> bytes | None:
    text = data.get('user_data')
    if text is None:
        return None
    try:
        decoded = binascii.a2b_base64(text, strict_mode=True) if isinstance(text, str) else None
    except ValueError:
        decoded = None
    if not decoded:
        raise ValueError('user_data: expected base64')
    if len(decoded) > USER_DATA_LIMIT:
        raise ValueError(f'user_data: has {len(decoded)} bytes; the limit is {USER_DATA_LIMIT}')
    return decoded
