"""An order, what a user asks for before it is placed; requests and sets made from it. Pure.

The JSON of a request, a queued request and a record contains these fields of the order: "image", "user_id",
"project_id", "query" (the placement query) and "stages" ({"requested": ISO time, …}). The order may also have "name",
"ssh_keys" (a list of OpenSSH public keys), "user_data" (base64) or, for a set or a queue, "user_data_sha256" (the data
is at /user-data/<sha256>), "count", "group" ({"name", "policy", "strict"}; in a record only the name), "stack" (see
ecomp.model.stack), "replaces" (the uuid of the instance that it was evacuated from) and, in a tombstone and the last
record, "replaced_by".
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
    MAX_AMOUNT,
    Allocations,
    Resources,
    is_amount,
    list_missing_classes,
    parse_allocations,
    sum_allocations,
    to_wire,
)
from ecomp.model.choose import SPREAD, PlacementReason, parse_placement_reason
from ecomp.model.group import Membership
from ecomp.model.guest import MAX_USER_DATA_BYTES, SharedUserData
from ecomp.model.image import check_image
from ecomp.model.json_object import check_version, dump, load_object, load_object_or_empty
from ecomp.model.stack import Place
from ecomp.model.stored import nested
from ecomp.model.text import is_label, make_printable

STOP, START, REBOOT = ACTIONS = ('stop', 'start', 'reboot')
# The reason of a stop by `host drain --stop`, which `host enable --start` reverts.
DRAIN = 'drain'
SHUTDOWN_REQUESTED = 'asked'
SHUT_OFF = 'off'
# Start of the fault in the record of a guest that could not be started.
START_FAILED = 'it could not be started'


class PowerAction(NamedTuple):
    """A stop, start or reboot that a request asks for.

    The `power` of a request is {"action": "stop" | "start" | "reboot", "id": uuid}; each action has a new id. A stop
    by `host drain --stop` also has "reason": "drain", until another action replaces it. The `power` of a record is the
    id of the last completed action, "<id>:asked" while the guest shuts down, or "<id>:off" while it is off and will be
    started. So an action is done once, even if a process is killed in the middle of it.
    """

    action: str
    id: str
    reason: str = ''

    def to_dict(self) -> dict[str, str]:
        """Return the `power` of a request, for JSON."""
        return {name: value for name, value in self._asdict().items() if value}

    def is_done(self, recorded_power: str | None) -> bool:
        """Return whether a record's `power` says that this action is completed."""
        return recorded_power == self.id

    def format_phase(self, phase: str) -> str:
        """Return a record's `power` while this action is SHUTDOWN_REQUESTED or SHUT_OFF."""
        return f'{self.id}:{phase}'


def parse_phase(recorded_power: str | None) -> str:
    """Return the phase in a record's `power`: SHUTDOWN_REQUESTED, SHUT_OFF; '' if done or None."""
    return (recorded_power or '').partition(':')[2]


def parse_action_id(recorded_power: str | None) -> str:
    """Return the id of the action in a record's `power`; '' for None."""
    return (recorded_power or '').partition(':')[0]


def parse_power(data: Any) -> PowerAction | None:
    """Parse a request's `power`; None for None, ValueError if it is malformed."""
    if data is None:
        return None
    if not isinstance(data, dict) or data.get('action') not in ACTIONS or not keys.is_uuid(data.get('id', '')):
        raise ValueError(f'power: expected {{"action": "{"|".join(ACTIONS)}", "id": a uuid}}, not {data!r}')
    return PowerAction(data['action'], data['id'], DRAIN if data.get('reason') == DRAIN else '')


DifferenceDescriber = Callable[['Order'], str]


class OrderField(NamedTuple):
    """Specifies how a field of an order is parsed, written and compared.

    `parse` takes a JSON object and the field's name, and raises ValueError. `optional`: a default value is not written.
    `recorded`: records contain it, too. `differs` describes an existing order's value if another is requested; None:
    not compared. `compared`: the attribute to compare instead. Of differences, the lowest `report_rank` is reported.
    """

    parse: Callable[[Mapping[str, Any], str], Any]
    dump: Callable[[Any], Any]
    optional: bool = True
    recorded: bool = True
    differs: DifferenceDescriber | None = None
    compared: str | None = None
    report_rank: int = 0
    name: str = ''


def read_text_field(data: Mapping[str, Any], name: str) -> str:
    """Return a text field, '' if it is absent or null; ValueError for another type."""
    value = data.get(name)
    if value is None:
        return ''
    if not isinstance(value, str):
        raise ValueError(f'{name}: expected text, not {type(value).__name__}')
    return value


def _read_optional_text(data: Mapping[str, Any], name: str) -> str | None:
    """Return a text field, None if it is absent or null; ValueError for another type."""
    return None if data.get(name) is None else read_text_field(data, name)


def _read_nested(kind: type[Any]) -> Callable[[Mapping[str, Any], str], Any]:
    parse = nested(kind)
    return lambda data, name: None if data.get(name) is None else parse(data[name])


def _read_stages(data: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return an object of texts, which are not parsed; {} if absent, ValueError for null."""
    stages = data.get(name, {})
    if not isinstance(stages, dict) or not all(isinstance(time, str) for time in stages.values()):
        raise ValueError(f'{name}: expected an object of times')
    return stages


def read_name_field(data: Mapping[str, Any], name: str = 'name') -> str | None:
    """Return a name, None if absent or empty; ValueError unless it is a label. Reserved names and uuids pass."""
    label = read_text_field(data, name) or None
    if label is not None and not is_label(label):
        raise ValueError(f'{name}: {label[:80]!r} is not a valid host name')
    return label


def _read_uuid(data: Mapping[str, Any], name: str) -> str | None:
    """Return a uuid, None if absent or null; ValueError for another value."""
    text = _read_optional_text(data, name)
    if text is not None and not keys.is_uuid(text):
        raise ValueError(f'{name}: {text[:80]!r} is not a uuid')
    return text


def _read_count(data: Mapping[str, Any], name: str) -> int:
    """Return a number of instances, 1 if absent; ValueError unless from 1 to MAX_AMOUNT."""
    count = data.get(name, 1)
    if not is_amount(count, MAX_AMOUNT) or not count:
        raise ValueError(f'{name}: {str(count)[:40]!r} is not a valid number of instances')
    return int(count)


# The next three errors never quote the value, which may be secret: a reason is logged and put into the record.


def _read_ssh_keys(data: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """Return lines, None if absent or null; ValueError if one is empty or not printable."""
    lines = data.get(name)
    if lines is None:
        return None
    if not isinstance(lines, list) or not all(isinstance(line, str) and line and line.isprintable() for line in lines):
        raise ValueError(f'{name}: expected a list of public keys, one line each')
    return tuple(lines)


def _read_sha256(data: Mapping[str, Any], name: str) -> str | None:
    """Return a hash, None if absent or null; ValueError unless 64 lower-case hex digits."""
    digest = data.get(name)
    if digest is not None and (not isinstance(digest, str) or not re.fullmatch('[0-9a-f]{64}', digest)):
        raise ValueError(f'{name}: expected 64 hexadecimal digits')
    return digest


def _read_user_data(data: Mapping[str, Any], name: str) -> bytes | None:
    """Decode base64; None if absent or null, ValueError if malformed, empty or too large."""
    text = data.get(name)
    if text is None:
        return None
    try:
        decoded = binascii.a2b_base64(text, strict_mode=True) if isinstance(text, str) else None
    except ValueError:
        decoded = None
    if not decoded:
        raise ValueError(f'{name}: expected base64')
    if len(decoded) > MAX_USER_DATA_BYTES:
        raise ValueError(f'{name}: has {len(decoded)} bytes; the limit is {MAX_USER_DATA_BYTES}')
    return decoded


def _describe_project(existing: Order) -> str:
    return f'for project {existing.project_id}'


def _describe_query_and_image(existing: Order) -> str:
    return f'with query {existing.query!r} and image {existing.image}'


def _describe_name(existing: Order) -> str:
    return f'with the name {existing.name}' if existing.name else 'without a name'


def _describe_group(existing: Order) -> str:
    return f'in group {existing.group_name}' if existing.group else 'without a group'


def _describe_count(existing: Order) -> str:
    return f'in a set of {existing.count}' if existing.count > 1 else 'as a single instance'


def _declare_field(
    default: Any,
    parse: Callable[[Mapping[str, Any], str], Any],
    dump: Callable[[Any], Any] = lambda value: value,
    **more: Any,
) -> Any:
    """Declare a field of Order: a callable `default` is a factory, `more` is for OrderField; repr() omits secrets."""
    default_option = {'default_factory': default} if callable(default) else {'default': default}
    is_public = parse not in (_read_ssh_keys, _read_user_data)
    return field(**default_option, repr=is_public, metadata={'row': OrderField(parse, dump, **more)})


@dataclass(frozen=True)
class Order:
    """A user's order of one instance.

    `image` is a URL, or None to destroy the instance. `query` is None if unknown. `stages` has the ISO times at which
    it was requested and scheduled. If `ssh_keys` or `user_data` is None, the compute's mdserver.conf decides.
    With `user_data_sha256`, `user_data` is None until read from /user-data/. `count` instances are ordered together.
    """

    instance: str
    _: KW_ONLY
    image: str | None = _declare_field(None, _read_optional_text, optional=False, differs=_describe_query_and_image)
    user_id: str = _declare_field('', read_text_field, optional=False)
    project_id: str = _declare_field('', read_text_field, optional=False, differs=_describe_project, report_rank=2)
    query: str | None = _declare_field(None, _read_optional_text, optional=False, differs=_describe_query_and_image)
    stages: Mapping[str, str] = _declare_field(dict, _read_stages, dict, optional=False)
    name: str | None = _declare_field(None, read_name_field, differs=_describe_name, report_rank=1)
    ssh_keys: tuple[str, ...] | None = _declare_field(
        None, _read_ssh_keys, list, recorded=False, differs=lambda _: 'with other ssh keys', report_rank=6
    )
    user_data_sha256: str | None = _declare_field(None, _read_sha256, recorded=False)
    user_data: bytes | None = _declare_field(
        None,
        _read_user_data,
        lambda data: binascii.b2a_base64(data, newline=False).decode(),
        recorded=False,
        differs=lambda _: 'with other user-data',
        compared='user_data_hash',
        report_rank=5,
    )
    count: int = _declare_field(1, _read_count, recorded=False, differs=_describe_count, report_rank=4)
    group: Membership | None = _declare_field(
        None,
        _read_nested(Membership),
        Membership._asdict,
        differs=_describe_group,
        compared='group_name',
        report_rank=3,
    )
    stack: Place | None = _declare_field(None, _read_nested(Place), Place._asdict)
    replaces: str | None = _declare_field(None, _read_uuid)
    replaced_by: str | None = _declare_field(None, _read_uuid)

    def copy_fields(self, **changes: Any) -> dict[str, Any]:
        """Return the fields of Order, by name, with some replaced; for constructing a subclass."""
        return {field_info.name: getattr(self, field_info.name) for field_info in fields(Order)} | changes

    @property
    def group_name(self) -> str | None:
        return self.group.name if self.group else None

    @property
    def user_data_hash(self) -> str | None:
        """The hash of its user-data, whether or not that is loaded; None without user-data."""
        return self.user_data_sha256 if self.user_data is None else SharedUserData.from_bytes(self.user_data).sha256


# In the order in which they are written.
FIELDS = tuple(each.metadata['row']._replace(name=each.name) for each in fields(Order) if each.metadata)


def parse_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Parse an order's fields, but no instance, as {name: value}, absent ones by default; ValueError if invalid."""
    return {row.name: row.parse(data, row.name) for row in FIELDS}


def dump_fields(order: Order) -> dict[str, Any]:
    """Return the fields of an order, except the instance and optional defaults, for JSON."""
    defaults = {each.name: each.default for each in fields(Order)}
    values = [(row, getattr(order, row.name)) for row in FIELDS]
    included = [(row, value) for row, value in values if not row.optional or value != defaults[row.name]]
    return {row.name: None if value is None else row.dump(value) for row, value in included}


def describe_difference(existing: Order, requested: Order, is_recorded: bool = False) -> str | None:
    """Describe one difference of an existing order from the one requested for its uuid (`for project p`), or None.

    An existing order without a project matches every project. With `is_recorded` it is from a record, which lacks
    keys, user-data and count: these are not compared. User, stages and strategy are never compared.
    """
    for each in sorted(FIELDS, key=lambda each: each.report_rank):
        attribute = each.compared or each.name
        if each.differs is None or (is_recorded and not each.recorded):
            continue
        if each.name == 'project_id' and not existing.project_id:
            continue  # an older ecompute does not write it
        if getattr(existing, attribute) != getattr(requested, attribute):
            return each.differs(existing)
    return None


def make_create_words(order: Order) -> list[str]:
    """Return the words of the command that creates an order's instance, without those for ssh keys and user-data."""
    group = order.group or Membership('')
    values = {'--name': order.name, '--project': order.project_id, '--group': group.name, '--policy': group.policy}
    options = [word for option in values.items() if option[1] for word in option]
    strictness = [] if group.strict is None else ['--strict' if group.strict else '--soft']
    return [*filter(None, [order.query, order.image, *options]), *strictness]


Found = TypeVar('Found')

VERSION = 1
# Bytes of a value; a larger one is not parsed. Escaped in a record it may be three times as long, and etcd takes 1.5
# MiB. User-data of 256 KiB is 342 KiB of it.
MAX_REQUEST_BYTES = 384 * 1024
# A reason, which may quote the whole value, is cut off after this number of characters.
MAX_REASON_CHARACTERS = 500


@dataclass(frozen=True)
class Request(Order):
    """The value of the key /hosts/<compute>/<instance>.

    JSON: "allocations", "instance", "consumer_generation", "version", the fields of an order, "why" ({"weigh",
    "weight", "of"}: how its compute was chosen), "power" (see Power) and "written_at" (ISO time of a destroy or of the
    latest power action, for `events`). A tombstone, a request to destroy the instance, has allocations {} and image
    null; its "resources" ({class: amount}) are what the instance was allocated.
    """

    allocations: Allocations
    _: KW_ONLY
    power: PowerAction | None = None
    former_resources: Resources = field(default_factory=dict)
    why: PlacementReason | None = None

    @property
    def resources(self) -> Resources:
        """The total that the instance is allocated or, for a tombstone, was."""
        return sum_allocations(self.allocations) or self.former_resources

    @property
    def is_tombstone(self) -> bool:
        """True if it asks to destroy the instance: it has no allocations."""
        return not self.allocations


class Holdings(NamedTuple):
    """Cluster-wide resources that an instance holds: name, group membership, quota charge."""

    name: str | None = None
    group: str | None = None
    project_id: str = ''
    resources: Resources = {}


class InvalidRequest(NamedTuple):
    """A malformed request, never carried out in part; `holdings`, as far as it can be parsed, is to be released."""

    instance: str
    reason: str
    holdings: Holdings = Holdings()

    @property
    def project_id(self) -> str:
        """The project whose quota it is charged to; '' if it was not charged."""
        return self.holdings.project_id

    @property
    def resources(self) -> Resources:
        """The amounts charged to that quota."""
        return self.holdings.resources


def parse_request(compute: str, key: str, value: bytes, dropped_bytes: int = 0) -> Request | InvalidRequest:
    """Parse the request at a key below a compute's prefix; if malformed, return an InvalidRequest and raise nothing.

    `dropped_bytes`, unless 0, is the size of a value that was dropped (see ecomp.store.watch): it counts as malformed.
    """
    name = key.removeprefix(keys.request_prefix(compute))
    try:
        return _parse_request(compute, name, value, dropped_bytes)
    except ValueError as error:
        return InvalidRequest(name, make_printable(str(error))[:MAX_REASON_CHARACTERS], _parse_request_holdings(value))
    except RecursionError:  # from repr() in a reason, which quotes the value
        return InvalidRequest(name, 'the request is nested too deeply')


def get_holdings(request: Request | InvalidRequest) -> Holdings:
    """Return the cluster-wide resources that a request holds."""
    if isinstance(request, InvalidRequest):
        return request.holdings
    return Holdings(request.name, request.group_name, request.project_id, request.resources)


def parse_holdings(value: bytes) -> tuple[Holdings, Mapping[str, Any]]:
    """Return a malformed request's name and group (None if invalid), and its JSON object ({} if none or too large)."""
    data = load_object_or_empty(value) if len(value) <= MAX_REQUEST_BYTES else {}
    group = _read_or_none(lambda: _read_nested(Membership)(data, 'group'))
    return Holdings(_read_or_none(lambda: read_name_field(data)), group.name if group else None), data


def _parse_request_holdings(value: bytes) -> Holdings:
    """Parse what a malformed delivered request holds (a charge only in a newer version), without invalid fields."""
    holdings, data = parse_holdings(value)
    # A newer eschedule, whose request is malformed here, has charged a quota; a manually written request has not.
    version = data.get('version')
    if type(version) is not int or version <= VERSION:
        return holdings
    amounts = _read_or_none(
        lambda: sum_allocations(parse_allocations(data.get('allocations'))) or _read_former_resources(data)
    )
    return holdings._replace(
        project_id=_read_or_none(lambda: read_text_field(data, 'project_id')) or '', resources=amounts or {}
    )


def check_request_size(value: bytes, dropped_bytes: int = 0) -> None:
    """Raise ValueError if a request is too large to be recorded, or `dropped_bytes` is not 0."""
    # JSON may contain DEL itself, and dump() escapes it to six bytes.
    size = dropped_bytes or len(value) + 5 * value.count(b'\x7f')
    if size > MAX_REQUEST_BYTES:
        raise ValueError(f'the request has {size} bytes; the limit is {MAX_REQUEST_BYTES}')
    if dropped_bytes:
        raise ValueError(f'the request has {size} bytes, too many together with the other requests to this compute')


def _read_or_none(read: Callable[[], Found]) -> Found | None:
    """Return what read() returns, or None if it raises ValueError or RecursionError."""
    try:
        return read()
    except (ValueError, RecursionError):  # RecursionError: from repr() in a reason, which quotes the value
        return None


def _parse_request(compute: str, name: str, value: bytes, dropped_bytes: int) -> Request:
    """Parse the request or tombstone of instance `name`; ValueError if malformed, too large or with `dropped_bytes`."""
    if not keys.is_uuid(name):
        raise ValueError(f'{name[:100]!r} is not a uuid')
    check_request_size(value, dropped_bytes)
    data = load_object(value)
    check_version(data.get('version', VERSION), VERSION, 'request', max_quoted=None)
    absent_fields = [field_name for field_name in ('allocations', 'instance', 'image') if field_name not in data]
    if absent_fields:
        raise ValueError(f'the request lacks {", ".join(absent_fields)}')
    if data['instance'] != name:
        raise ValueError(f'the request is for instance {data["instance"]!r}, but its key has {name}')
    allocations = parse_allocations(data['allocations'])
    image = data['image']
    if allocations:
        if compute not in allocations:
            others = ', '.join(sorted(allocations))
            raise ValueError(f'the allocations are for {others}, not for this compute {compute}')
        if not isinstance(image, str):
            raise ValueError(f'image: expected a URL, not {image!r}')
        check_image(image)
        lacking = list_missing_classes(sum_allocations(allocations))
        if lacking:
            raise ValueError(f'the allocations lack {", ".join(lacking)}, which every guest needs')
    elif image is not None:
        # Neither a request nor a tombstone; nothing but a valid tombstone may destroy an instance.
        raise ValueError('allocations are {}, but image is not null: a request to destroy has image null')
    return Request(
        name,
        allocations,
        **parse_fields(data),
        power=parse_power(data.get('power')),
        former_resources=_read_former_resources(data),
        why=parse_placement_reason(data.get('why')),
    )


def to_json(request: Request) -> str:
    """Return the value of the request's key. Fields of 2019 keep their names and meaning."""
    return dump(
        {
            'version': VERSION,
            'instance': request.instance,
            'allocations': to_wire(request.allocations),
            **dict.fromkeys(('image', 'user_id', 'project_id', 'consumer_generation')),  # in the order of 2019
            **dump_fields(request),
            **({'resources': dict(request.former_resources)} if request.former_resources else {}),
            **({'why': request.why._asdict()} if request.why else {}),
            **({'power': request.power.to_dict()} if request.power else {}),
        }
    )


def parse_attempt_instances(key: str, value: bytes) -> set[str]:
    """Return the uuid in an attempt's key and the instances in its value (none if malformed), each cut off."""
    try:
        instances = {str(instance)[:MAX_REASON_CHARACTERS] for instance in load_object(value)['instances']}
    except (ValueError, KeyError, TypeError):
        instances = set()
    return {keys.get_last_part(key), *instances}


def name_to_json(instance: str) -> str:
    """Return the value of the key /names/<name>, which names the owner."""
    return dump({'version': VERSION, 'instance': instance})


def parse_name_owner(value: bytes) -> str:
    """Parse the owner of a name from the value of its key; ValueError if malformed."""
    instance = load_object(value).get('instance')
    if not isinstance(instance, str) or not keys.is_uuid(instance):
        raise ValueError('its value contains no uuid of an instance')
    return instance


def _read_former_resources(data: Mapping[str, Any]) -> dict[str, int]:
    """Return `resources`, {} if absent; ValueError unless amounts are from 1 to MAX_AMOUNT."""
    amounts = data.get('resources', {})
    if not isinstance(amounts, dict) or not all(
        amount and is_amount(amount, MAX_AMOUNT) for amount in amounts.values()
    ):
        raise ValueError('resources: expected an object of amounts')
    return amounts


# Bytes of all requests of a set; etcd takes 1.5 MiB in a transaction (its --max-request-bytes).
MAX_SET_BYTES = 1_400_000


@dataclass(frozen=True)
class SetOrder(Order):
    """An order of one instance or, if `count` is above 1, of a set; and how to place it.

    A set has a uuid, `instance`, and a name of its own. `weigh` is the strategy (see ecomp.model.choose). At least
    `minimum` instances are placed, or none.
    """

    weigh: str = field(default=SPREAD, kw_only=True)
    minimum: int = field(default=1, kw_only=True)

    @cached_property
    def orders(self) -> dict[str, Order]:
        """The order of each instance by uuid. In a set these are hashes of the set's uuid, so that it can be resumed.

        Members of a set are named `<name>-1`, `<name>-2`, … (or None), with `user_data_sha256` for `user_data`.
        """
        if self.count == 1:
            return {self.instance: Order(**self.copy_fields())}
        shared = dict[str, str | None]()
        if self.shared_user_data is not None:
            shared = {'user_data': None, 'user_data_sha256': self.shared_user_data.sha256}
        names = {
            make_member_uuid(self.instance, each): self.name and f'{self.name}-{each}'
            for each in range(1, self.count + 1)
        }
        return {key: Order(**self.copy_fields(instance=key, name=name, **shared)) for key, name in names.items()}

    @property
    def instances(self) -> dict[str, str | None]:
        """The name of each instance by its uuid."""
        return {instance: order.name for instance, order in self.orders.items()}

    @cached_property
    def shared_user_data(self) -> SharedUserData | None:
        """The user-data of a set, which is stored in etcd once; None for a single instance, or without user-data."""
        return SharedUserData.from_bytes(self.user_data) if self.count > 1 and self.user_data is not None else None


def make_member_uuid(set_uuid: str, number: int) -> str:
    """Return the uuid of an instance of a set, from the set's uuid and the number from 1 on."""
    return keys.derive_uuid(set_uuid, str(number))


def check_order_size(order: SetOrder) -> None:
    """Raise UsageError for a set whose estimated size exceeds one transaction; never for a single instance."""
    key_bytes = len(dump(order.ssh_keys))
    size = order.count * (len(dump([order.query, order.image])) + key_bytes + 1000)
    user_data_bytes = len(order.shared_user_data.text) if order.shared_user_data else 0
    if order.count > 1 and size + user_data_bytes > MAX_SET_BYTES:
        text = f'{order.count} instances with {key_bytes} bytes of ssh keys each'
        more = f' and {user_data_bytes} bytes of user-data' if user_data_bytes else ''
        raise UsageError(
            f'{text}{more} exceed the limit of a transaction in etcd. Fix: give fewer keys, or request fewer instances'
        )
