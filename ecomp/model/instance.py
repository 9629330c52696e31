"""A request: what the key /hosts/<compute>/<instance> holds, parsed once at the edge.

JSON, as in 2019: allocations, instance, image, user_id, project_id, consumer_generation; since then also "version",
the other fields of an order (ecomp.model.order), "why" ({"weigh", "weight", "of"}), and "power" (ecomp.model.power;
once it was asked for). A tombstone is the same with allocations {} and image null: the instance is to be destroyed;
"resources" ({class: amount}) is then what it was allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, TypeVar

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
from ecomp.model.group import membership_from
from ecomp.model.image import check_image
from ecomp.model.json_object import dump, is_version, load_object
from ecomp.model.order import Order, dump_fields, name_field, parse_fields, text_field
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
class Request(Order):
    """What one compute is to make of one instance. No allocations: it is to be destroyed.

    `left`: of a tombstone, what it was allocated. `why`: how it came to be on its compute.
    """

    allocations: Allocations
    _: KW_ONLY
    power: Power | None = None
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


class Shares(NamedTuple):
    """What an instance has of what others want, too: a name, a place in a group, what its project's quota counts."""

    name: str | None = None
    group: str | None = None
    project_id: str = ''
    resources: Resources = {}


class Invalid(NamedTuple):
    """A value that cannot be understood, and why. Never half done, never a crash.

    `shares` is what it was delivered with, as far as that can be told: to be let go of with it.
    """

    instance: str
    reason: str
    shares: Shares = Shares()

    @property
    def project_id(self) -> str:
        """The project whose quota counts it, '' where it was delivered by nobody who counts."""
        return self.shares.project_id

    @property
    def resources(self) -> Resources:
        """What it counts for there."""
        return self.shares.resources


def parse_request(compute: str, key: str, value: bytes, dropped: int = 0) -> Request | Invalid:
    """The request at a key under a compute's prefix, or the reason it is none.

    `dropped`: so many bytes it has, and they were not kept (see ecomp.store.cache).
    """
    name = key.removeprefix(keys.request_prefix(compute))
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
    return Shares(wish.name, wish.group_name, wish.project_id, wish.resources)


def shares_in(value: bytes) -> tuple[Shares, Mapping[str, Any]]:
    """The name and the group in a value that is refused, each as far as it can be understood; and all that it says."""
    try:
        data = load_object(value) if len(value) <= SIZE_LIMIT else {}
    except ValueError:
        data = {}
    group = _or_none(lambda: membership_from(data.get('group')))
    return Shares(_or_none(lambda: name_field(data)), group.name if group else None), data


def _shares(value: bytes) -> Shares:
    """What a request that is refused says of it, each field as far as it can be understood."""
    found, data = shares_in(value)
    # Who knows of versions has counted it in its project's quota; what is written by hand nobody has.
    version = data.get('version')
    if type(version) is not int or version <= VERSION:
        return found
    has = _or_none(lambda: total(parse_allocations(data.get('allocations'))) or _left(data))
    return found._replace(project_id=_or_none(lambda: text_field(data, 'project_id')) or '', resources=has or {})


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
    if not is_version(version, VERSION):
        raise ValueError(f'version {version!r} of the request is not known here: this ecompute takes {VERSION}')
    absent = [wanted for wanted in ('allocations', 'instance', 'image') if wanted not in data]
    if absent:
        raise ValueError(f'the request lacks {", ".join(absent)}')
    if data['instance'] != name:
        raise ValueError(f'the request is for instance {data["instance"]!r} but its key says {name}')
    allocations = parse_allocations(data['allocations'])
    image = data['image']
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
    elif image is not None:
        # Neither a request nor a tombstone, and only a tombstone destroys.
        raise ValueError('allocations {} with an image: to destroy, the image has to be null')
    return Request(
        name,
        allocations,
        **parse_fields(data),
        power=parse_power(data.get('power')),
        left=_left(data),
        why=why_from(data.get('why')),
    )


def to_json(request: Request) -> str:
    """The value of the request's key. 2019's fields keep their names and meaning."""
    return dump(
        {
            'version': VERSION,
            'instance': request.instance,
            'allocations': to_wire(request.allocations),
            **dict.fromkeys(('image', 'user_id', 'project_id', 'consumer_generation')),  # 2019's, in 2019's order
            **dump_fields(request),
            **({'resources': dict(request.left)} if request.left else {}),
            **({'why': request.why._asdict()} if request.why else {}),
            **({'power': request.power._asdict()} if request.power else {}),
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


def _left(data: Mapping[str, Any]) -> dict[str, int]:
    left = data.get('resources', {})
    if not isinstance(left, dict) or not all(amount and is_amount(amount, LARGEST) for amount in left.values()):
        raise ValueError('resources: expected an object of amounts')
    return left
