"""An order, what a user asks for before it is placed; requests and sets made from it. Pure.

Requests, queued requests and records have the fields of an order. A set and a queue have `user_data_sha256`, and the
data is at /user-data/<sha256>. An instance `replaces` the one that it was evacuated from, of which the tombstone and
the last record are `replaced_by` it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from ecomp.errors import UsageError
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
from ecomp.model.text import is_label
from ecomp.model.user_data import SharedUserData, encode_user_data, parse_user_data

STOP, START, REBOOT = ACTIONS = ('stop', 'start', 'reboot')
# The reason of a stop by `host drain --stop`, which `host enable --start` reverts.
DRAIN = 'drain'
SHUTDOWN_REQUESTED = 'asked'
SHUT_OFF = 'off'
# Start of the fault in the record of a guest that could not be started.
START_FAILED = 'it could not be started'


@stored(action=one_of(ACTIONS), id=UUID, reason=lenient(one_of((DRAIN,)), is_sparse=True))
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

    def is_done(self, recorded_power: str | None) -> bool:
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


def _parse_name(text: str) -> str | None:
    if text and not is_label(text):
        raise ValueError(f'{text[:80]!r} is not a valid host name')
    return text or None


def _are_key_lines(lines: object) -> bool:
    return isinstance(lines, list) and all(isinstance(line, str) and line and line.isprintable() for line in lines)


# A reason is logged and put into the record, so it quotes no key and no user-data.
_KEY_LINES = check('a list of public keys, one line each', _are_key_lines, is_secret=True)
_DIGEST = re.compile('[0-9a-f]{64}')
_SHA256 = check('64 hexadecimal digits', lambda text: isinstance(text, str) and _DIGEST.fullmatch(text), is_secret=True)

ORDER_FIELDS = {
    **dict.fromkeys(('image', 'user_id', 'project_id', 'query'), optional(TEXT)),
    'stages': optional(dict_of(TEXT)),
    'name': sparse(text(_parse_name)),
    'ssh_keys': sparse(lambda lines: tuple(_KEY_LINES(lines))),
    'user_data_sha256': sparse(_SHA256),
    'user_data': sparse(parse_user_data, write=encode_user_data),
    'count': sparse(number(1, MAX_AMOUNT)),
    'group': sparse(nested(Membership)),
    'stack': sparse(nested(Place)),
    **dict.fromkeys(('replaces', 'replaced_by'), sparse(UUID)),
    'is_adopted': sparse(FLAG, name='adopted'),
}
_UNRECORDED = {'ssh_keys', 'user_data_sha256', 'user_data', 'count'}
RECORDED_FIELDS = tuple(name for name in ORDER_FIELDS if name not in _UNRECORDED)


@stored(**ORDER_FIELDS)
@dataclass(frozen=True)
class Order:
    """A user's order of one instance.

    `image` is a URL, or None to destroy the instance. `query` is None if unknown. `stages` has the ISO times at which
    it was requested and scheduled. If `ssh_keys` or `user_data` is None, the compute's mdserver.conf decides.
    With `user_data_sha256`, `user_data` is None until read from /user-data/. `count` instances are ordered together.
    An adopted instance has a domain that ecomp did not create, and neither query nor image.
    """

    instance: str
    _: KW_ONLY
    image: str | None = None
    user_id: str = ''
    project_id: str = ''
    query: str | None = None
    stages: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    ssh_keys: tuple[str, ...] | None = field(default=None, repr=False)
    user_data_sha256: str | None = None
    user_data: bytes | None = field(default=None, repr=False)
    count: int = 1
    group: Membership | None = None
    stack: Place | None = None
    replaces: str | None = None
    replaced_by: str | None = None
    is_adopted: bool = False

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


def _describe_query_and_image(existing: Order) -> str:
    return f'with query {existing.query!r} and image {existing.image}'


# {attribute: what describes an existing order's value if another is requested}: of differences the first is reported.
_DIFFERENCES: Mapping[str, Callable[[Order], str]] = {
    'is_adopted': lambda _: 'by `adopt`',
    'image': _describe_query_and_image,
    'query': _describe_query_and_image,
    'name': lambda existing: f'with the name {existing.name}' if existing.name else 'without a name',
    'project_id': lambda existing: f'for project {existing.project_id}',
    'group_name': lambda existing: f'in group {existing.group_name}' if existing.group else 'without a group',
    'count': lambda existing: f'in a set of {existing.count}' if existing.count > 1 else 'as a single instance',
    'user_data_hash': lambda _: 'with other user-data',
    'ssh_keys': lambda _: 'with other ssh keys',
}


def describe_difference(existing: Order, requested: Order, is_recorded: bool = False) -> str | None:
    """Describe one difference of an existing order from the one requested for its uuid (`for project p`), or None.

    An existing order without a project matches every project. With `is_recorded` it is from a record, which lacks
    keys, user-data and count: these are not compared. User, stages and strategy are never compared.
    """
    for attribute, describe in _DIFFERENCES.items():
        if is_recorded and attribute in ('count', 'user_data_hash', 'ssh_keys'):
            continue
        if attribute == 'project_id' and not existing.project_id:
            continue  # another client may not write it
        if getattr(existing, attribute) != getattr(requested, attribute):
            return describe(existing)
    return None


def make_create_words(order: Order) -> list[str]:
    """Return the words of the command that creates an order's instance, without those for ssh keys and user-data."""
    group = order.group or Membership('')
    values = {'--name': order.name, '--project': order.project_id, '--group': group.name, '--policy': group.policy}
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
}


@stored(1, 'request', **_REQUEST_FIELDS)
@dataclass(frozen=True)
class Request(Order):
    """The value of the key /hosts/<compute>/<instance>.

    A tombstone, a request to destroy the instance, has allocations {} and image null; its "resources" are what
    the instance was allocated. The JSON also has "written_at", the ISO time of a destroy or of the latest power action,
    for `events`, and "by", who asked for it.
    """

    allocations: Allocations
    _: KW_ONLY
    power: PowerAction | None = None
    former_resources: Resources = field(default_factory=dict)
    why: PlacementReason | None = None
    consumer_generation: None = None  # of 2019

    @property
    def resources(self) -> Resources:
        """The total that the instance is allocated or, for a tombstone, was."""
        return sum_allocations(self.allocations) or self.former_resources

    @property
    def is_tombstone(self) -> bool:
        """True if it asks to destroy the instance: it has no allocations."""
        return not self.allocations


def make_request(order: Order, candidate: Candidate, weigh: str, compute_count: int, **changes: Any) -> Request:
    """Return the request for a candidate, chosen of so many computes; `changes` replace fields of the order."""
    why = PlacementReason(weigh, candidate.weight, compute_count, candidate.is_troubled, candidate.has_image)
    return Request(allocations=candidate.allocations, why=why, **order.copy_fields(**changes))


@stored(name=lenient(text(_parse_name)), group=lenient(lambda data: nested(Membership)(data).name))
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
        return InvalidRequest(name, format_reason(error), _parse_request_holdings(value))


def get_holdings(request: Request | InvalidRequest) -> Holdings:
    """Return the cluster-wide resources that a request holds."""
    if isinstance(request, InvalidRequest):
        return request.holdings
    return Holdings(request.name, request.group_name, request.project_id, request.resources)


def parse_holdings(value: bytes) -> tuple[Holdings, Mapping[str, Any]]:
    """Return a malformed request's name and group (None if invalid), and its JSON object ({} if none or too large)."""
    data = load_object_or_empty(value) if len(value) <= MAX_REQUEST_BYTES else {}
    return parse_fields(Holdings, data), data


@stored(project_id=lenient(TEXT), allocations=lenient(parse_allocations), resources=lenient(parse_resources))
class _Charge(NamedTuple):
    project_id: str = ''
    allocations: Allocations = {}
    resources: Resources = {}


def _parse_request_holdings(value: bytes) -> Holdings:
    """Parse what a malformed delivered request holds (a charge only in a newer version), without invalid fields."""
    holdings, data = parse_holdings(value)
    # A newer eschedule, whose request is malformed here, has charged a quota; a manually written request has not.
    if not is_newer(Request, value):
        return holdings
    charge = parse_fields(_Charge, data)
    resources = sum_allocations(charge.allocations) or charge.resources
    return holdings._replace(project_id=charge.project_id, resources=resources)


def check_request_size(value: bytes, dropped_bytes: int = 0) -> None:
    """Raise ValueError if a request is too large to be recorded, or `dropped_bytes` is not 0."""
    # JSON may contain DEL itself, and dump() escapes it to six bytes.
    size = dropped_bytes or len(value) + 5 * value.count(b'\x7f')
    if size > MAX_REQUEST_BYTES:
        raise ValueError(f'the request has {size} bytes; the limit is {MAX_REQUEST_BYTES}')
    if dropped_bytes:
        raise ValueError(f'the request has {size} bytes, too many together with the other requests to this compute')


def _parse_request(compute: str, name: str, value: bytes, dropped_bytes: int) -> Request:
    if not keys.is_uuid(name):
        raise ValueError(f'{name[:100]!r} is not a uuid')
    check_request_size(value, dropped_bytes)
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
    """Return the uuid in an attempt's key and the instances in its value (none if malformed), each cut off."""
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
