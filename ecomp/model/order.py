"""An order: what was asked for of one instance or a set, from the command line to its record. Pure.

The fields of Order are the one table of what can be asked for: each is declared with how it is read from JSON, written,
and compared with what was asked for before. In the JSON of a request, of what waits in a queue and of a record they
stand beside the others: "image", "user_id", "project_id", "query" (the placement query it came from), "stages"
({"requested": ISO time, …}), and where they were given "name", "ssh_keys" (a list of OpenSSH public keys), "user_data"
(base64: it may be gzip) or, of a set, "user_data_sha256" (it is at the key /user-data/<sha256>) and "count", and
"group" ({"name", "policy", "strict"}; in a record its name).
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from ecomp.errors import UsageError
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
from ecomp.model.choose import SPREAD, Why, why_from
from ecomp.model.group import Membership, membership_from
from ecomp.model.guest import USER_DATA_LIMIT, SharedUserData
from ecomp.model.image import check_image
from ecomp.model.json_object import dump, is_version, load_if_object, load_object
from ecomp.model.text import is_label, printable

STOP, START, REBOOT = ACTIONS = ('stop', 'start', 'reboot')
ASKED, OFF = 'asked', 'off'
NOT_STARTED = 'it could not be started'
"""How a record's fault begins whose guest could not be started."""


class Power(NamedTuple):
    """What a request asks of a guest's power, and how far the guest's record says it has come.

    A request's `power` is {"action": "stop" | "start" | "reboot", "id": uuid}; the same action asked for again has
    another id. The record's is the id of the last one that was carried out; before that "<id>:asked" once the guest was
    asked to turn itself off, and "<id>:off" once it is off and about to be started. So an action is done once, whoever
    is killed in the middle of it.
    """

    action: str
    id: str

    def is_done(self, said: str | None) -> bool:
        """Whether `said`, a record's `power`, says that this was carried out."""
        return said == self.id

    def at(self, phase: str) -> str:
        """The record's `power` while this is in `phase`, ASKED or OFF."""
        return f'{self.id}:{phase}'


def phase(said: str | None) -> str:
    """How far the last action has come by a record's `power`: ASKED, OFF, or '' for done."""
    return (said or '').partition(':')[2]


def action_id(said: str | None) -> str:
    """The id of the action that a record's `power` is about, '' for none."""
    return (said or '').partition(':')[0]


def parse_power(data: Any) -> Power | None:
    """The Power in a request's `power`; None for None. ValueError for any other data."""
    if data is None:
        return None
    if not isinstance(data, dict) or data.get('action') not in ACTIONS or not keys.is_uuid(data.get('id', '')):
        raise ValueError(f'power: expected {{"action": "{"|".join(ACTIONS)}", "id": a uuid}}, not {data!r}')
    return Power(data['action'], data['id'])


Differs = Callable[['Order'], str]


class Field(NamedTuple):
    """How a field of an order is read, written and compared.

    `parse` takes a JSON object and the field's name, and gives its value; ValueError says what is wrong. `dump` makes
    JSON of a value. `optional`: left out of the JSON where it is not given. `recorded`: a record has it, too. `differs`
    says of an order that is there what it has instead of what is asked for now; None: nobody minds. `compared`: the
    attribute that is compared, in place of the field itself. `told`: of several differences the one with the lowest
    number is said.
    """

    parse: Callable[[Mapping[str, Any], str], Any]
    dump: Callable[[Any], Any]
    optional: bool = True
    recorded: bool = True
    differs: Differs | None = None
    compared: str | None = None
    told: int = 0
    name: str = ''


def _same(value: Any) -> Any:
    return value


def text_field(data: Mapping[str, Any], name: str) -> str:
    """A field of text, '' where there is none."""
    value = data.get(name)
    if value is None:
        return ''
    if not isinstance(value, str):
        raise ValueError(f'{name}: expected text, not {type(value).__name__}')
    return value


def _text_or_none(data: Mapping[str, Any], name: str) -> str | None:
    return None if data.get(name) is None else text_field(data, name)


def _stages(data: Mapping[str, Any], name: str) -> dict[str, str]:
    stages = data.get(name, {})
    if not isinstance(stages, dict) or not all(isinstance(time, str) for time in stages.values()):
        raise ValueError(f'{name}: expected an object of times')
    return stages


def name_field(data: Mapping[str, Any], name: str = 'name') -> str | None:
    """The name that the instance was given."""
    label = text_field(data, name) or None
    if label is not None and not is_label(label):
        raise ValueError(f'{name}: {label[:80]!r} is no host name')
    return label


def _count(data: Mapping[str, Any], name: str) -> int:
    count = data.get(name, 1)
    if not is_amount(count, LARGEST) or not count:
        raise ValueError(f'{name}: {str(count)[:40]!r} is no number of instances')
    return int(count)


def _group(data: Mapping[str, Any], name: str) -> Membership | None:
    return membership_from(data.get(name))


# The next three quote nothing, whatever it holds: a reason is logged, and stands in the record.


def _ssh_keys(data: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    lines = data.get(name)
    if lines is None:
        return None
    if not isinstance(lines, list) or not all(isinstance(each, str) and each and each.isprintable() for each in lines):
        raise ValueError(f'{name}: expected a list of public keys, a line each')
    return tuple(lines)


def _sha256(data: Mapping[str, Any], name: str) -> str | None:
    digest = data.get(name)
    if digest is not None and (not isinstance(digest, str) or not re.fullmatch('[0-9a-f]{64}', digest)):
        raise ValueError(f'{name}: expected 64 hexadecimal digits')
    return digest


def _user_data(data: Mapping[str, Any], name: str) -> bytes | None:
    text = data.get(name)
    if text is None:
        return None
    try:
        decoded = binascii.a2b_base64(text, strict_mode=True) if isinstance(text, str) else None
    except ValueError:
        decoded = None
    if not decoded:
        raise ValueError(f'{name}: expected base64')
    if len(decoded) > USER_DATA_LIMIT:
        raise ValueError(f'{name}: has {len(decoded)} bytes; the limit is {USER_DATA_LIMIT}')
    return decoded


def _other_project(there: Order) -> str:
    return f'of project {there.project_id}'


def _other_query(there: Order) -> str:
    return f'asked for by {there.query!r} with image {there.image}'


def _other_name(there: Order) -> str:
    return f'by the name {there.name}' if there.name else 'without a name'


def _other_group(there: Order) -> str:
    return f'in group {there.group_name}' if there.group else 'in no group'


def _other_count(there: Order) -> str:
    return f'one of {there.count} that were asked for at once' if there.count > 1 else 'asked for by itself'


def _field(
    default: Any, parse: Callable[[Mapping[str, Any], str], Any], dump: Callable[[Any], Any] = _same, **more: Any
) -> Any:
    """A field of Order, and its row; a `default` that can be called makes one."""
    how = {'default_factory': default} if callable(default) else {'default': default}
    shown = parse not in (_ssh_keys, _user_data)
    return field(**how, repr=shown, metadata={'row': Field(parse, dump, **more)})


@dataclass(frozen=True)
class Order:
    """What was asked for of one instance.

    `instance` is its uuid, `image` a URL (None: it is to be destroyed), `query` a placement query (None: not known),
    `name` its host name. `stages` says when it was requested and, once it has a compute, scheduled: ISO times.
    `ssh_keys` and `user_data` None: those of the compute's mdserver.conf. `user_data_sha256`: the user-data is at the
    key of this hash, and `user_data` is None until it was read from there. `count`: how many were asked for at once.
    """

    instance: str
    _: KW_ONLY
    image: str | None = _field(None, _text_or_none, optional=False, differs=_other_query)
    user_id: str = _field('', text_field, optional=False)
    project_id: str = _field('', text_field, optional=False, differs=_other_project, told=2)
    query: str | None = _field(None, _text_or_none, optional=False, differs=_other_query)
    stages: Mapping[str, str] = _field(dict, _stages, dict, optional=False)
    name: str | None = _field(None, name_field, differs=_other_name, told=1)
    ssh_keys: tuple[str, ...] | None = _field(
        None, _ssh_keys, list, recorded=False, differs=lambda _: 'with other ssh keys', told=6
    )
    user_data_sha256: str | None = _field(None, _sha256, recorded=False)
    user_data: bytes | None = _field(
        None,
        _user_data,
        lambda data: binascii.b2a_base64(data, newline=False).decode(),
        recorded=False,
        differs=lambda _: 'with other user-data',
        compared='user_data_hash',
        told=5,
    )
    count: int = _field(1, _count, recorded=False, differs=_other_count, told=4)
    group: Membership | None = _field(
        None, _group, Membership._asdict, differs=_other_group, compared='group_name', told=3
    )

    def parts(self, **changed: Any) -> dict[str, Any]:
        """The fields of the order alone, by name, for something else that holds an order; some of them changed."""
        return {each.name: getattr(self, each.name) for each in fields(Order)} | changed

    @property
    def group_name(self) -> str | None:
        """The name of its group; None for none."""
        return self.group.name if self.group else None

    @property
    def user_data_hash(self) -> str | None:
        """The hash of its user-data, wherever that is; None for none."""
        return self.user_data_sha256 if self.user_data is None else SharedUserData.of(self.user_data).sha256


FIELDS = tuple(each.metadata['row']._replace(name=each.name) for each in fields(Order) if each.metadata)
"""The rows, in the order in which they are written."""


def parse_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an order in a JSON object, by name, but for the instance. ValueError says what is wrong."""
    return {each.name: each.parse(data, each.name) for each in FIELDS}


def dump_fields(order: Order) -> dict[str, Any]:
    """The same of an order, as JSON has them."""
    absent = {each.name: each.default for each in fields(Order)}
    values = [(each, getattr(order, each.name)) for each in FIELDS]
    written = [(each, value) for each, value in values if not each.optional or value != absent[each.name]]
    return {each.name: None if value is None else each.dump(value) for each, value in written}


def difference(there: Order, asked: Order, recorded: bool = False) -> str | None:
    """How the order of a uuid differs from what is asked for by the same uuid now; None where it does not.

    `recorded`: only a record is known of what is there, which says nothing of keys, user-data and the count.
    """
    for each in sorted(FIELDS, key=lambda each: each.told):
        attribute = each.compared or each.name
        if each.differs is None or (recorded and not each.recorded):
            continue
        if each.name == 'project_id' and not there.project_id:
            continue  # an older ecompute writes none
        if getattr(there, attribute) != getattr(asked, attribute):
            return each.differs(there)
    return None


Found = TypeVar('Found')

VERSION = 1
SIZE_LIMIT = 384 * 1024
"""Bytes of a value looked at: nothing larger is parsed. Escaped in a record it may be three times as long, and etcd
takes 1.5 MiB: what is taken here can also be written down. User-data of 256 KiB is 342 KiB of it."""
REASON_LIMIT = 500
"""Characters of a reason: it quotes what is wrong, and that may be the whole value."""


@dataclass(frozen=True)
class Request(Order):
    """A request: what the key /hosts/<compute>/<instance> holds, parsed once at the edge.

    JSON, as in 2019: allocations, instance, image, user_id, project_id, consumer_generation; since then also "version",
    the other fields of an order, "why" ({"weigh", "weight", "of"}), and "power" (once it was asked for). A tombstone is
    the same with allocations {} and image null: the instance is to be destroyed; "resources" ({class: amount}) is then
    what it was allocated.

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

    `dropped`: so many bytes it has, and they were not kept (see ecomp.store.watch).
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
    data = load_if_object(value) if len(value) <= SIZE_LIMIT else {}
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


def check_request_size(value: bytes, dropped: int = 0) -> None:
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
    check_request_size(value, dropped)
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


MOST_BYTES = 1_400_000
"""Of all requests of a set together: etcd takes 1.5 MiB in a transaction (its --max-request-bytes)."""


@dataclass(frozen=True)
class SetOrder(Order):
    """An order of one instance or of a set, and how it is to be placed: `weigh` says which computes are tried first.

    `instance` and `name` are the instance's or, where the `count` is more than one, those of the set. At least
    `minimum` of them are placed, or none.
    """

    weigh: str = field(default=SPREAD, kw_only=True)
    minimum: int = field(default=1, kw_only=True)

    @cached_property
    def orders(self) -> dict[str, Order]:
        """The order of each instance by its uuid. Those of a set follow from its own, so it can be resumed."""
        if self.count == 1:
            return {self.instance: Order(**self.parts())}
        shared = {} if self.shared is None else {'user_data': None, 'user_data_sha256': self.shared.sha256}
        names = {member(self.instance, each): self.name and f'{self.name}-{each}' for each in range(1, self.count + 1)}
        return {each: Order(**self.parts(instance=each, name=name, **shared)) for each, name in names.items()}

    @property
    def instances(self) -> dict[str, str | None]:
        """The name of each instance by its uuid."""
        return {instance: each.name for instance, each in self.orders.items()}

    @cached_property
    def shared(self) -> SharedUserData | None:
        """The user-data of a set, which is in etcd once."""
        return SharedUserData.of(self.user_data) if self.count > 1 and self.user_data is not None else None


def member(whole: str, number: int) -> str:
    """The uuid of an instance of a set, by the set's own and its number, from 1 on."""
    import uuid  # for sets

    return str(uuid.uuid5(uuid.UUID(whole), str(number)))


def check_order_size(wanted: SetOrder) -> None:
    """UsageError, before anything is claimed, for a set too large for the one transaction that delivers it."""
    keys_each = len(dump(wanted.ssh_keys))
    size = wanted.count * (len(dump([wanted.query, wanted.image])) + keys_each + 1000)
    shared = len(wanted.shared.text) if wanted.shared else 0
    if wanted.count > 1 and size + shared > MOST_BYTES:
        what = f'{wanted.count} instances with {keys_each} bytes of ssh keys each'
        more = f' and {shared} bytes of user-data' if shared else ''
        raise UsageError(f'{what}{more} are more than etcd takes at once: name fewer keys, or ask for fewer instances')
