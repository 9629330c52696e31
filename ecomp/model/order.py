"""Orders of users, and the requests and sets that are made from them. Pure.

Requests, queued requests and records have the fields of an order. A set and a queued request have `user_data_sha256`,
and the data is at /user-data/<sha256>. After an evacuation the new instance `replaces` the old one, whose tombstone and
last record are `replaced_by` it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

from ecomp.errors import Conflict, UsageError
from ecomp.model import keys
from ecomp.model.allocation import (
    MAX_AMOUNT,
    Allocations,
    Resources,
    list_missing_classes,
    parse_allocations,
    parse_resources,
    sum_allocations,
    to_wire,
)
from ecomp.model.choose import SPREAD, Candidate, PlacementReason
from ecomp.model.group import Membership
from ecomp.model.image import check_image
from ecomp.model.json_object import dump, load_object, load_object_or_empty
from ecomp.model.parsers import FLAG, TEXT, UUID, check, dict_of, format_reason, nullable, number, one_of, text
from ecomp.model.stack import Place
from ecomp.model.stored import (
    Field,
    decode,
    is_newer,
    lenient,
    nested,
    optional,
    parse_fields,
    require_same,
    sparse,
    stored,
)
from ecomp.model.text import check_name, is_label
from ecomp.model.user_data import SharedUserData, encode_user_data, parse_user_data

STOP, START, REBOOT = ACTIONS = ('stop', 'start', 'reboot')
# The reason of a stop by `host drain --stop`, which `host enable --start` reverts.
DRAIN = 'drain'
SHUTDOWN_REQUESTED = 'asked'
SHUT_OFF = 'off'
# Starts of the faults in the record of a guest that could not be started or rebuilt, which stay until it is.
START_FAILED = 'it could not be started'
REBUILD_FAILED = 'it could not be rebuilt'
# The largest number of a change, and so the last second.
MAX_CHANGE = 2**53


@stored(action=one_of(ACTIONS), id=UUID, reason=lenient(one_of((DRAIN,)), is_sparse=True))
class PowerAction(NamedTuple):
    """A stop, start or reboot that a request asks for.

    The `power` of a request is {"action": "stop" | "start" | "reboot", "id": uuid}, and each action has a new id. A
    stop by `host drain --stop` also has "reason": "drain", until another action replaces it. The `power` of a record is
    the id of the last completed action. It is "<id>:asked" while the guest shuts down, and "<id>:off" while it is off
    and will be started. So an action is done once, even if a process is killed in the middle of it.
    """

    action: str
    id: str
    reason: str = ''

    def is_done(self, recorded_power: str | None) -> bool:
        return recorded_power == self.id

    def format_phase(self, phase: str) -> str:
        """Return the `power` of a record in this phase, SHUTDOWN_REQUESTED or SHUT_OFF."""
        return f'{self.id}:{phase}'


def parse_phase(recorded_power: str | None) -> str:
    """Return the phase in the `power` of a record, or '' if the action is done."""
    return (recorded_power or '').partition(':')[2]


def parse_action_id(recorded_power: str | None) -> str:
    return (recorded_power or '').partition(':')[0]


@stored(number=number(1, MAX_CHANGE), resources=parse_resources)
class Resize(NamedTuple):
    """The size that a guest gets when it starts, and the number of that change."""

    number: int
    resources: Resources


def _parse_name(text: str) -> str | None:
    if text and not is_label(text):
        raise ValueError(f'{text[:80]!r} is not a valid host name')
    return text or None


def _are_key_lines(lines: object) -> bool:
    return isinstance(lines, list) and all(isinstance(line, str) and line and line.isprintable() for line in lines)


# A reason is logged and put into the record, so it quotes no key and no user-data.
_KEY_LINES = check('a list of public keys, one line each', _are_key_lines, is_secret=True)
_HEX = '[0-9a-f]{64}'
_SHA256 = check('64 hexadecimal digits', lambda raw: isinstance(raw, str) and re.fullmatch(_HEX, raw), is_secret=True)


def _make_field(stored_as: Field, default: Any = None, *, is_recorded: bool = True, check_text: Any = None) -> Any:
    """Make a field of Order, and one of USER_TEXTS if `check_text` validates its values."""
    options: dict[str, Any] = {'default_factory': dict} if default == {} else {'default': default}
    metadata = {'stored': stored_as, 'is_recorded': is_recorded, 'check_text': check_text}
    return field(**options, repr=is_recorded, metadata=metadata)  # keys and user-data are secret, and not recorded


@dataclass(frozen=True)
class Order:
    """A user's order of one instance."""

    instance: str
    _: KW_ONLY
    image: str | None = _make_field(optional(TEXT))  # None in a request to destroy, and of an adopted instance
    user_id: str = _make_field(optional(TEXT), '')
    project_id: str = _make_field(optional(TEXT), '')
    query: str | None = _make_field(optional(TEXT))  # None if unknown
    # The ISO times at which it was requested and scheduled.
    stages: Mapping[str, str] = _make_field(optional(dict_of(TEXT)), {})
    name: str | None = _make_field(sparse(text(_parse_name)), check_text=check_name)
    # None: mdserver.conf of the compute decides, as about user_data.
    ssh_keys: tuple[str, ...] | None = _make_field(sparse(lambda lines: tuple(_KEY_LINES(lines))), is_recorded=False)
    # With it, user_data is None until it is read from /user-data/.
    user_data_sha256: str | None = _make_field(sparse(_SHA256), is_recorded=False)
    user_data: bytes | None = _make_field(sparse(parse_user_data, write=encode_user_data), is_recorded=False)
    count: int = _make_field(sparse(number(1, MAX_AMOUNT)), 1, is_recorded=False)  # of instances ordered together
    group: Membership | None = _make_field(sparse(nested(Membership)))
    stack: Place | None = _make_field(sparse(nested(Place)))
    replaces: str | None = _make_field(sparse(UUID))
    replaced_by: str | None = _make_field(sparse(UUID))
    # Of a domain that ecomp did not create, without query and image.
    is_adopted: bool = _make_field(sparse(FLAG, name='adopted'), False)
    # It is not destroyed, rebuilt or replaced, and is evacuated only if that is asked for.
    is_protected: bool = _make_field(sparse(FLAG, name='protected'), False)

    def copy_fields(self, **changes: Any) -> dict[str, Any]:
        """Return the fields of Order by name, with `changes`, for the constructor of a subclass."""
        return {field_info.name: getattr(self, field_info.name) for field_info in fields(Order)} | changes

    def copy_recorded_fields(self, **changes: Any) -> dict[str, Any]:
        """Return the fields that a record has, of the group only its name, with `changes`."""
        recorded = {name: getattr(self, name) for name in ('instance', *RECORDED_FIELDS)}
        return recorded | {'group': Membership(self.group.name) if self.group else None} | changes

    @property
    def group_name(self) -> str | None:
        return self.group.name if self.group else None

    @property
    def user_data_hash(self) -> str | None:
        """The hash of the user-data, whether or not it is loaded, or None without user-data."""
        return self.user_data_sha256 if self.user_data is None else SharedUserData.from_bytes(self.user_data).sha256


_ROWS = {each.name: each.metadata for each in fields(Order) if each.metadata}
ORDER_FIELDS: dict[str, Field] = {name: row['stored'] for name, row in _ROWS.items()}
RECORDED_FIELDS = tuple(name for name, row in _ROWS.items() if row['is_recorded'])
stored(**ORDER_FIELDS)(Order)
# The texts that a user may give: an option of create, a key in the file of a stack, and shown by `show` and `list`.
USER_TEXTS = {name: row['check_text'] for name, row in _ROWS.items() if row['check_text']}


def _describe_query_and_image(order: Order) -> str:
    return f'with query {order.query!r} and image {order.image}'


def _describe_text(name: str, order: Order) -> str:
    return f'with the {name} {value}' if (value := getattr(order, name)) else f'without a {name}'


# {attribute: what describes its value in the current order if the new one differs}: the first difference is reported.
_DIFFERENCES: Mapping[str, Callable[[Order], str]] = {
    'is_adopted': lambda _: 'by `adopt`',
    'image': _describe_query_and_image,
    'query': _describe_query_and_image,
    **{name: partial(_describe_text, name) for name in USER_TEXTS},
    'project_id': lambda order: f'for project {order.project_id}',
    'group_name': lambda order: f'in group {order.group_name}' if order.group else 'without a group',
    'count': lambda order: f'in a set of {order.count}' if order.count > 1 else 'as a single instance',
    'user_data_hash': lambda _: 'with other user-data',
    'ssh_keys': lambda _: 'with other ssh keys',
}


def describe_difference(current: Order, order: Order, is_recorded: bool = False) -> str | None:
    """Return the first difference of `current` from a new order, `with image …`, or None."""
    for attribute, describe in _DIFFERENCES.items():
        if is_recorded and attribute in ('count', 'user_data_hash', 'ssh_keys'):
            continue  # a record lacks them
        if attribute == 'project_id' and not current.project_id:
            continue  # another client may not write it
        if getattr(current, attribute) != getattr(order, attribute):
            return describe(current)
    return None


def make_create_words(order: Order) -> list[str]:
    """Return the words of the command that creates the instance, without keys and user-data."""
    group = order.group or Membership('')
    values = {f'--{name}': getattr(order, name) for name in USER_TEXTS}
    values |= {'--project': order.project_id, '--group': group.name, '--policy': group.policy}
    # After a space a value that begins with - would be another option.
    pairs = ([f'{flag}={value}'] if value[0] == '-' else [flag, value] for flag, value in values.items() if value)
    strictness = [] if group.strict is None else ['--strict' if group.strict else '--soft']
    return [*filter(None, [order.query, order.image]), *chain.from_iterable(pairs), *strictness]


# Bytes of a value; a larger one is not parsed. Escaped in a record it may be three times as long, and etcd takes 1.5
# MiB. User-data of 256 KiB is 342 KiB of it.
MAX_REQUEST_BYTES = 384 * 1024

_OF_2019 = ('image', 'user_id', 'project_id', 'consumer_generation')
_REQUEST_FIELDS = dict.fromkeys(('instance', 'allocations', *_OF_2019), Field(UUID)) | ORDER_FIELDS
_REQUEST_FIELDS |= {
    'allocations': Field(parse_allocations, to_wire),
    'image': Field(nullable(text(check_image))),
    'consumer_generation': lenient(one_of(())),
    'former_resources': sparse(parse_resources, name='resources'),
    'why': lenient(nested(PlacementReason), is_sparse=True),
    'power': sparse(nested(PowerAction)),
    'change_number': sparse(number(0, MAX_CHANGE), name='changed'),
    'resize': sparse(nested(Resize)),
    'rebuild': sparse(number(0, MAX_CHANGE)),
}


@stored(1, 'request', **_REQUEST_FIELDS)
@dataclass(frozen=True)
class Request(Order):
    """The value of the key /hosts/<compute>/<instance>.

    A tombstone is a request to destroy the instance. It has allocations {} and image null, and its "resources" are what
    the instance was allocated. The JSON also has "written_at", the ISO time of a destroy or of the latest power action,
    for `events`, and "by", who asked for it.
    """

    allocations: Allocations
    _: KW_ONLY
    power: PowerAction | None = None
    # Grows with each change that an older etcd must not take back, see make_change_number().
    change_number: int = 0
    # Until it has taken effect, the allocations are the larger of old and new of each class.
    resize: Resize | None = None
    # The number of the last rebuild that was asked for: `change_number` at that time.
    rebuild: int = 0
    former_resources: Resources = field(default_factory=dict)
    why: PlacementReason | None = None
    consumer_generation: None = None  # of 2019

    @property
    def resources(self) -> Resources:
        return sum_allocations(self.allocations) or self.former_resources

    @property
    def is_tombstone(self) -> bool:
        return not self.allocations

    @property
    def guest_size(self) -> Resources:
        """The amounts that the guest has from its next start on."""
        return self.resize.resources if self.resize else self.resources

    def plan_size(self, amounts: Resources) -> Resources:
        """Return guest_size with these `amounts`, or raise Conflict if adopted, or UsageError."""
        if self.is_adopted:
            raise Conflict(f'{self.instance}: is adopted, so ecomp does not change it. Try: virsh edit')
        classes = [name for held in self.allocations.values() for name in held]
        if unknown := [name for name in amounts if classes.count(name) != 1]:
            cure = f'give amounts of {", ".join(sorted(classes))}'
            raise UsageError(f'{self.instance}: has no {unknown[0]} to change. Fix: {cure}')
        if amounts.get('DISK_GB', math.inf) < self.resources.get('DISK_GB', 0):
            cure = 'create a smaller instance, and copy the data'
            raise UsageError(f'{self.instance}: its disk of {self.resources["DISK_GB"]} GiB cannot shrink. Fix: {cure}')
        return {**self.guest_size, **amounts}

    def allocate(self, resources: Resources) -> Allocations:
        """Return the allocations with these amounts, which plan_size() has returned."""
        return {compute: {name: resources[name] for name in held} for compute, held in self.allocations.items()}

    def make_change_number(self, now: float) -> int:
        """Return the number of a change at `now` (Unix seconds), above that of the last one."""
        # A restored, older etcd has forgotten numbers that the compute knows, and a counter would give them again.
        return max(self.change_number + 1, int(now))


def make_request(order: Order, candidate: Candidate, weigh: str, compute_count: int, **changes: Any) -> Request:
    """Make the request for a candidate, in which `changes` replace fields of the order."""
    why = PlacementReason(weigh, candidate.weight, compute_count, candidate.is_troubled, candidate.has_image)
    return Request(allocations=candidate.allocations, why=why, **order.copy_fields(**changes))


@stored(name=lenient(text(_parse_name)), group=lenient(lambda data: nested(Membership)(data).name))
class Holdings(NamedTuple):
    """What an instance holds of the whole cluster: its name, group and quota charge."""

    name: str | None = None
    group: str | None = None
    project_id: str = ''
    resources: Resources = {}


class InvalidRequest(NamedTuple):
    """A malformed request, of which nothing is carried out."""

    instance: str
    reason: str
    holdings: Holdings = Holdings()  # to be released, as far as they could be parsed

    @property
    def project_id(self) -> str:
        return self.holdings.project_id

    @property
    def resources(self) -> Resources:
        return self.holdings.resources


def parse_request(compute: str, key: str, value: bytes, dropped_bytes: int = 0) -> Request | InvalidRequest:
    """Parse a compute's request, or return why it is malformed or was dropped as too large."""
    name = key.removeprefix(keys.request_prefix(compute))
    try:
        return _parse_request(compute, name, value, dropped_bytes)
    except ValueError as error:
        return InvalidRequest(name, format_reason(error), _parse_request_holdings(value))


def get_holdings(request: Request | InvalidRequest) -> Holdings:
    if isinstance(request, InvalidRequest):
        return request.holdings
    return Holdings(request.name, request.group_name, request.project_id, request.resources)


def parse_holdings(value: bytes) -> tuple[Holdings, Mapping[str, Any]]:
    """Return a malformed request's name and group, as far as valid, and its JSON object or {}."""
    data = load_object_or_empty(value) if len(value) <= MAX_REQUEST_BYTES else {}
    return parse_fields(Holdings, data), data


@stored(project_id=lenient(TEXT), allocations=lenient(parse_allocations), resources=lenient(parse_resources))
class _Charge(NamedTuple):
    project_id: str = ''
    allocations: Allocations = {}
    resources: Resources = {}


def _parse_request_holdings(value: bytes) -> Holdings:
    holdings, data = parse_holdings(value)
    # A newer eschedule, whose request is malformed here, has charged a quota; a manually written request has not.
    if not is_newer(Request, value):
        return holdings
    charge = parse_fields(_Charge, data)
    resources = sum_allocations(charge.allocations) or charge.resources
    return holdings._replace(project_id=charge.project_id, resources=resources)


def refuse_big_request(value: bytes, dropped_bytes: int = 0) -> None:
    """Raise ValueError if a request is too large to be recorded, or was dropped."""
    # `dropped_bytes` is the size of a value that ecomp.store.watch dropped, or 0.
    # JSON may contain DEL itself, and dump() escapes it to six bytes.
    size = dropped_bytes or len(value) + 5 * value.count(b'\x7f')
    if size > MAX_REQUEST_BYTES:
        raise ValueError(f'the request has {size} bytes; the limit is {MAX_REQUEST_BYTES}')
    if dropped_bytes:
        raise ValueError(f'the request has {size} bytes, too many together with the other requests to this compute')


def _parse_request(compute: str, name: str, value: bytes, dropped_bytes: int) -> Request:
    if not keys.is_uuid(name):
        raise ValueError(f'{name[:100]!r} is not a uuid')
    refuse_big_request(value, dropped_bytes)
    request = decode(Request, value)
    require_same('instance', request.instance, name)
    if request.is_tombstone:
        if request.image is not None:
            # Neither a request nor a tombstone; nothing but a valid tombstone may destroy an instance.
            raise ValueError('allocations are {}, but image is not null: a request to destroy has image null')
        return request
    if compute not in request.allocations:
        others = ', '.join(sorted(request.allocations))
        raise ValueError(f'the allocations are for {others}, not for this compute {compute}')
    if request.image is None and not request.is_adopted:
        raise ValueError('image: expected a URL, not None')
    if (lacking := list_missing_classes(request.resources)) and not request.is_adopted:
        raise ValueError(f'the allocations lack {", ".join(lacking)}, which every guest needs')
    return request


def parse_attempt_instances(key: str, value: bytes) -> set[str]:
    """Return the instances of an attempt: the uuid in its key, and those in its value."""
    try:
        instances = {format_reason(instance) for instance in load_object(value)['instances']}
    except (ValueError, KeyError, TypeError):
        instances = set()
    return {keys.get_last_part(key), *instances}


@stored(1, 'name', instance=UUID)
class NameOwner(NamedTuple):
    """The value of the key /names/<name>: the instance that owns the name."""

    instance: str


# Bytes of all requests of a set; etcd takes 1.5 MiB in a transaction (its --max-request-bytes).
MAX_SET_BYTES = 1_400_000


@dataclass(frozen=True)
class SetOrder(Order):
    """An order of one instance or, if `count` is above 1, of a set, and how to place it."""

    weigh: str = field(default=SPREAD, kw_only=True)  # the strategy, see ecomp.model.choose
    minimum: int = field(default=1, kw_only=True)  # at least so many instances are placed, or none

    @cached_property
    def orders(self) -> dict[str, Order]:
        """The order of each instance, by uuid."""
        if self.count == 1:
            return {self.instance: Order(**self.copy_fields())}
        shared = dict[str, str | None]()
        if self.shared_user_data is not None:
            shared = {'user_data': None, 'user_data_sha256': self.shared_user_data.sha256}
        # The uuids are hashes of the set's uuid, so that it can be resumed.
        numbers = range(1, self.count + 1)
        names = {make_member_uuid(self.instance, each): self.name and f'{self.name}-{each}' for each in numbers}
        return {key: Order(**self.copy_fields(instance=key, name=name, **shared)) for key, name in names.items()}

    @property
    def instances(self) -> dict[str, str | None]:
        """The name of each instance, by uuid."""
        return {instance: order.name for instance, order in self.orders.items()}

    @cached_property
    def shared_user_data(self) -> SharedUserData | None:
        """The user-data of a set, which etcd stores once, or None for other orders."""
        return SharedUserData.from_bytes(self.user_data) if self.count > 1 and self.user_data is not None else None


def make_member_uuid(set_uuid: str, number: int) -> str:
    return keys.derive_uuid(set_uuid, str(number))


def refuse_big_order(order: SetOrder) -> None:
    """Raise UsageError if a set of several instances is probably too large for a transaction."""
    key_bytes = len(dump(order.ssh_keys))
    size = order.count * (len(dump([order.query, order.image])) + key_bytes + 1000)
    user_data_bytes = len(order.shared_user_data.text) if order.shared_user_data else 0
    if order.count > 1 and size + user_data_bytes > MAX_SET_BYTES:
        keys_text = f'{order.count} instances with {key_bytes} bytes of ssh keys each'
        more = f' and {user_data_bytes} bytes of user-data' if user_data_bytes else ''
        cure = 'give fewer keys, or request fewer instances'
        raise UsageError(f'{keys_text}{more} exceed the limit of a transaction in etcd. Fix: {cure}')
