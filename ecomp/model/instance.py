"""A request: what the key /hosts/<compute>/<instance> holds, parsed once at the edge.

JSON, as in 2019: allocations, instance, image, user_id, project_id, consumer_generation; since then also
"version", "query" (the placement query it came from), "stages" ({"requested": ISO time, …}), where they were given
"name", "ssh_keys" (a list of OpenSSH public keys) and "user_data" (base64: it may be gzip), and "power" (see
ecomp.model.power; only once it was asked for). A tombstone is the same with allocations {} and image null: the
instance is to be destroyed.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ecomp.model import keys
from ecomp.model.allocation import Allocations, missing, parse_allocations, to_wire, total
from ecomp.model.guest_data import USER_DATA_LIMIT
from ecomp.model.image import check_image
from ecomp.model.names import is_label
from ecomp.model.power import Power, parse_power

VERSION = 1
SIZE_LIMIT = 384 * 1024
"""Bytes of a value looked at: nothing larger is parsed. Escaped in a record it may be three times as long, and etcd
takes 1.5 MiB: what is taken here can also be written down. User-data of 256 KiB is 342 KiB of it."""
VALUE_LIMIT = 1024**2
"""Bytes of any other value looked at: a record, somebody's request key, who is alive."""
REASON_LIMIT = 500
"""Characters of a reason: it quotes what is wrong, and that may be the whole value."""


@dataclass(frozen=True)
class Request:
    """What one compute is to make of one instance. No allocations: it is to be destroyed.

    `ssh_keys` and `user_data` None: those of the compute's mdserver.conf.
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

    @property
    def is_tombstone(self) -> bool:
        """True when the instance is to be destroyed."""
        return not self.allocations


@dataclass(frozen=True)
class Invalid:
    """A value that cannot be understood, and why. Never half done, never a crash."""

    instance: str
    reason: str


def parse_request(compute: str, key: str, value: bytes) -> Request | Invalid:
    """The request at a key under a compute's prefix, or the reason it is none."""
    name = key.removeprefix(keys.host_prefix(compute))
    try:
        return _parse(compute, name, value)
    except ValueError as error:
        return Invalid(name, str(error)[:REASON_LIMIT])
    except RecursionError:  # a reason quotes what is wrong
        return Invalid(name, 'the request is nested too deeply')


def _parse(compute: str, name: str, value: bytes) -> Request:
    if not keys.is_uuid(name):
        raise ValueError(f'{name[:100]!r} is not a uuid')
    if len(value) > SIZE_LIMIT:
        raise ValueError(f'the request has {len(value)} bytes; the limit is {SIZE_LIMIT}')
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
    stages = data.get('stages', {})
    if not isinstance(stages, dict) or not all(isinstance(time, str) for time in stages.values()):
        raise ValueError('stages: expected an object of times')
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
        user_id=_text(data, 'user_id'),
        project_id=_text(data, 'project_id'),
        query=_text(data, 'query') or None,
        stages=stages,
        name=_name(data),
        ssh_keys=_ssh_keys(data),
        user_data=_user_data(data),
        power=parse_power(data.get('power')),
    )


def to_json(request: Request) -> str:
    """The value of the request's key. 2019's fields keep their names and meaning."""
    user_data = request.user_data
    given = {
        'name': request.name,
        'ssh_keys': None if request.ssh_keys is None else list(request.ssh_keys),
        'user_data': None if user_data is None else binascii.b2a_base64(user_data, newline=False).decode(),
    }
    return json.dumps(
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
            **({'power': asdict(request.power)} if request.power else {}),
        }
    )


def announced(key: str, value: bytes) -> set[str]:
    """The instances an eschedule is at, by its /requests key. A value that cannot be read counts for its key's name."""
    try:
        named = {str(each) for each in load_object(value)['instances']}
    except (ValueError, KeyError, TypeError):
        named = set()
    return {keys.last(key), *named}


def name_to_json(instance: str) -> str:
    """The value of the key /names/<name>: whose name it is."""
    return json.dumps({'version': VERSION, 'instance': instance})


def named(value: bytes) -> str:
    """The instance that a /names key is about. ValueError if it says none."""
    instance = load_object(value).get('instance')
    if not isinstance(instance, str) or not keys.is_uuid(instance):
        raise ValueError('it names no instance')
    return instance


def load_object(value: bytes) -> dict[str, Any]:
    """A JSON object from bytes; ValueError in plain words. NaN and doubled keys are refused."""
    if len(value) > VALUE_LIMIT:
        raise ValueError(f'it has {len(value)} bytes; the limit is {VALUE_LIMIT}')
    try:
        data = json.loads(value.decode(), parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except UnicodeDecodeError as error:
        raise ValueError('not text in UTF-8') from error
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON: {error}') from error
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    if not isinstance(data, dict):
        raise ValueError(f'expected a JSON object, not {type(data).__name__}')
    return data


def _no_constant(name: str) -> None:
    raise ValueError(f'not JSON: {name} is not a number')


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError('not JSON we take: a key stands twice')
    return data


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if value is None:
        return ''
    if not isinstance(value, str):
        raise ValueError(f'{name}: expected text, not {type(value).__name__}')
    return value


def _name(data: Mapping[str, Any]) -> str | None:
    name = _text(data, 'name') or None
    if name is not None and not is_label(name):
        raise ValueError(f'name: {name[:80]!r} is no host name')
    return name


# Neither is quoted, whatever it holds: a reason is logged, and stands in the record.


def _ssh_keys(data: Mapping[str, Any]) -> tuple[str, ...] | None:
    lines = data.get('ssh_keys')
    if lines is None:
        return None
    if not isinstance(lines, list) or not all(isinstance(each, str) and each and each.isprintable() for each in lines):
        raise ValueError('ssh_keys: expected a list of public keys, a line each')
    return tuple(lines)


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
