"""The messages of etcd as values and as bytes, and what a failed call means. Pure.

https://protobuf.dev/programming-guides/encoding/, and etcd's api/etcdserverpb/rpc.proto, which names the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ecomp.model.text import make_printable

if TYPE_CHECKING:  # TLS is slow to load
    from ecomp.tls import TlsFailure

# Results of a comparison.
_EQUAL = 0
_GREATER = 1
EVENT_DELETE = 1
# The target of a comparison: the revision of the key's last change.
_TARGET_MOD_REVISION = 2
# Wire types.
_VARINT = 0
_BYTES = 2
_WIRE_TYPE_FLIP = _VARINT ^ _BYTES
# Sizes in bytes of the wire types that are skipped.
_FIXED_BYTES = {1: 8, 5: 4}
_MAX_VARINT_BYTES = 10
# A signed 64-bit number is negative from here on.
_SIGN_BIT = 1 << 63
# A varint type; other integers are read as int64.
_UNSIGNED = 'unsigned'
# The wire type of each type, and the function that converts a value.
_KINDS: Mapping[Any, tuple[int, Any]] = {
    int: (_VARINT, lambda value: value if value < _SIGN_BIT else value - 2 * _SIGN_BIT),
    _UNSIGNED: (_VARINT, int),
    bool: (_VARINT, bool),
    bytes: (_BYTES, bytes),
    str: (_BYTES, lambda value: str(value, 'utf-8')),
}
# Fields of an answer, in all its messages: three times as many as 20,000 keys have. An empty key takes 275 bytes.
MAX_FIELDS = 2**19
UNAVAILABLE = 'UNAVAILABLE'
# Details of a call to a member whose connection is still being made.
CONNECTING = 'not connected yet'
DEADLINE_EXCEEDED = 'DEADLINE_EXCEEDED'
NOT_FOUND = 'NOT_FOUND'
INVALID_ARGUMENT = 'INVALID_ARGUMENT'
FAILED_PRECONDITION = 'FAILED_PRECONDITION'
RESOURCE_EXHAUSTED = 'RESOURCE_EXHAUSTED'
PERMISSION_DENIED = 'PERMISSION_DENIED'
_REFUSAL_CODES = {PERMISSION_DENIED, INVALID_ARGUMENT, FAILED_PRECONDITION, NOT_FOUND}
_REFUSAL_CODES |= {'UNAUTHENTICATED', 'UNIMPLEMENTED', 'OUT_OF_RANGE'}
MAX_NAMED_KEYS = 3
_USER_NOT_FOUND = 'etcdserver: user name not found'
_LEASE_NOT_FOUND = 'etcdserver: requested lease not found'
_LEARNER_REFUSAL = 'etcdserver: rpc not supported for learner'
TOO_MANY_OPERATIONS = 'etcdserver: too many operations in txn request'
_ROLES_CHANGED = 'etcdserver: revision of auth store is old'


class Range(NamedTuple):
    """Read the keys from `key` to before `end`, or only `key` if `end` is b''.

    A zero byte as `end` is after the last key. The answer has at most `limit` keys (0: all) as of `revision` (0: now).
    """

    key: bytes
    end: bytes = b''
    limit: int = 0
    revision: int = 0
    keys_only: bool = False
    count_only: bool = False
    min_mod_revision: int = 0

    def to_bytes(self) -> bytes:
        flags = {8: self.keys_only, 9: self.count_only, 10: self.min_mod_revision}
        return _encode_nonzero({1: self.key, 2: self.end, 3: self.limit, 4: self.revision, **flags})


class Put(NamedTuple):
    """An operation: write the value to the key, bound to the lease unless that is 0."""

    key: str
    value: str
    lease: int = 0

    def to_bytes(self) -> bytes:
        return _encode_nonzero({1: encode_key(self.key), 2: self.value.encode(), 3: self.lease})


class Touch(NamedTuple):
    """An operation: write the existing key again as it is, so that only its revision changes."""

    key: str

    def to_bytes(self) -> bytes:
        # https://etcd.io/docs/v3.4/dev-guide/api_reference_v3/ (PutRequest: ignore_value, ignore_lease)
        return _encode_nonzero({1: encode_key(self.key), 5: True, 6: True})


class Delete(NamedTuple):
    key: str

    def to_bytes(self) -> bytes:
        return _encode_nonzero({1: encode_key(self.key)})


class Unchanged(NamedTuple):
    """A condition: the key was last written at this revision (0: it does not exist)."""

    key: str
    revision: int

    def to_bytes(self) -> bytes:
        return _encode_comparison(_EQUAL, self.key, self.revision)


class Exists(NamedTuple):
    key: str

    def to_bytes(self) -> bytes:
        return _encode_comparison(_GREATER, self.key, 0)


class Transaction(NamedTuple):
    """Do the operations in `success` if all of `compare` hold, else those in `failure`."""

    compare: Sequence[Unchanged | Exists] = ()
    success: Sequence[Range | Put | Touch | Delete] = ()
    failure: Sequence[Range | Put | Touch | Delete] = ()

    def to_bytes(self) -> bytes:
        parts = [_encode_field(1, comparison.to_bytes()) for comparison in self.compare]
        for field, operations in ((2, self.success), (3, self.failure)):
            for request in operations:
                parts.append(_encode_field(field, _encode_field(_OPERATIONS[type(request)], request.to_bytes())))
        return b''.join(parts)


_OPERATIONS: Mapping[type, int] = {Range: 1, Put: 2, Touch: 2, Delete: 3}


class Grant(NamedTuple):
    seconds: int

    def to_bytes(self) -> bytes:
        return _encode_nonzero({1: self.seconds})


class _LeaseRequest(NamedTuple):
    lease: int

    def to_bytes(self) -> bytes:
        return _encode_nonzero({1: self.lease})


class KeepAlive(_LeaseRequest):
    """Refresh a lease."""


class Revoke(_LeaseRequest):
    """End a lease and delete its keys."""


class TimeToLive(_LeaseRequest):
    """Ask for the seconds that a lease has left."""


class Status(NamedTuple):
    def to_bytes(self) -> bytes:
        return b''


class AuthRequest(NamedTuple):
    """A call `name` of etcd's service Auth, whose message has the fields `values`, by number.

    With a `token` (from Authenticate) it is made as that user, whatever the certificate.
    """

    name: str
    values: Mapping[int, str | bytes] = {}
    token: str = ''

    def to_bytes(self) -> bytes:
        values = self.values.items()
        return _encode_nonzero({number: each.encode() if isinstance(each, str) else each for number, each in values})


def make_permission(kind: int, key: str, end: str) -> bytes:
    return _encode_nonzero({1: kind, 2: key.encode(), 3: end.encode()})


class WatchCreate(NamedTuple):
    """Watch the keys from `key` to before `end` from a revision on.

    With `with_previous` each event has the earlier value. With `fragment` a long answer arrives in parts, each but the
    last with `fragment` set. A part may end within a revision. https://etcd.io/docs/v3.4/learning/api/#watch-streams
    """

    key: bytes
    end: bytes
    revision: int
    with_previous: bool = False
    fragment: bool = False

    def to_bytes(self) -> bytes:
        flags = {6: self.with_previous, 8: self.fragment}
        return _encode_field(1, _encode_nonzero({1: self.key, 2: self.end, 3: self.revision, **flags}))


class WatchProgress(NamedTuple):
    """Ask for the progress of a stream's watches, whose answer has a revision but no watch.

    etcd answers once it has sent all events up to that revision. Some versions (3.4.23 is one) immediately answer with
    their own revision instead. https://github.com/etcd-io/etcd/issues/15220
    """

    def to_bytes(self) -> bytes:
        return _encode_field(3, b'')


Request = Range | Transaction | Grant | KeepAlive | Revoke | TimeToLive | Status | AuthRequest


# The gRPC path of each request, and the name of its answer's message.
METHODS: Mapping[type, tuple[str, str]] = {
    Range: ('/etcdserverpb.KV/Range', 'RangeResponse'),
    Transaction: ('/etcdserverpb.KV/Txn', 'TxnResponse'),
    Grant: ('/etcdserverpb.Lease/LeaseGrant', 'LeaseGrantResponse'),
    KeepAlive: ('/etcdserverpb.Lease/LeaseKeepAlive', 'LeaseKeepAliveResponse'),
    Revoke: ('/etcdserverpb.Lease/LeaseRevoke', 'LeaseRevokeResponse'),
    TimeToLive: ('/etcdserverpb.Lease/LeaseTimeToLive', 'LeaseTimeToLiveResponse'),
    Status: ('/etcdserverpb.Maintenance/Status', 'StatusResponse'),
    WatchCreate: ('/etcdserverpb.Watch/Watch', 'WatchResponse'),
}


def find_method(request: Request) -> tuple[str, str]:
    if isinstance(request, AuthRequest):
        answer = 'AuthRoleGetResponse' if request.name == 'RoleGet' else 'AuthResponse'
        return f'/etcdserverpb.Auth/{request.name}', answer
    return METHODS[type(request)]


class _Message:
    """A parsed answer, with an attribute for each field that is used."""


class _Schema:
    """The fields of a message by tag (number and wire type), and how to convert each."""

    def __init__(self, **fields: tuple[int, Any]) -> None:
        """Take each field as its number and type: a schema, a key of _KINDS, or a list of one."""
        # {tag: (name, convert, schema, is repeated)}: `convert` is for a field that is not itself a message.
        self.fields: dict[int, tuple[str, Any, _Schema | None, bool]] = {}
        self.defaults: dict[str, Any] = {}
        self.repeated = [name for name, (_, spec) in fields.items() if isinstance(spec, list)]
        for name, (number, spec) in fields.items():
            kind = spec[0] if isinstance(spec, list) else spec
            schema = kind if isinstance(kind, _Schema) else None
            wire_type, convert = _KINDS.get(kind, (_BYTES, None))
            empty = b'' if wire_type == _BYTES else 0
            self.defaults[name] = convert(empty) if convert else kind.parse(b'', 0, 0, _Budget())
            self.fields[number << 3 | wire_type] = name, convert, schema, isinstance(spec, list)

    def parse(self, data: bytes, position: int, end: int, budget: _Budget) -> _Message:
        # This must be fast: a list has 20,000 messages.
        values = self.defaults.copy()
        for name in self.repeated:
            values[name] = []
        fields = self.fields
        while position < end:
            budget.remaining_fields -= 1
            if not budget.remaining_fields & 0x3FF:
                budget.check()
            tag = data[position]
            position += 1
            if tag > 0x7F:
                tag, position = _read_varint(data, position - 1)
            wire_type = tag & 7
            if wire_type in (_VARINT, _BYTES):
                value = data[position]
                position += 1
                if value > 0x7F:
                    value, position = _read_varint(data, position - 1)
                start = position
                if wire_type == _BYTES:
                    position += value
            elif wire_type in _FIXED_BYTES:
                position += _FIXED_BYTES[wire_type]
            else:
                raise ValueError(f'a field has the unknown wire type {wire_type}')
            if position > end:
                raise ValueError('a field is longer than its message')
            if tag not in fields:
                _require_unknown(tag, fields)
                continue
            name, convert, schema, is_repeated = fields[tag]
            parsed: Any
            if schema is not None:
                parsed = schema.parse(data, start, position, budget)
            else:
                parsed = convert(value if wire_type == _VARINT else data[start:position])
            if is_repeated:
                values[name].append(parsed)
            else:
                values[name] = parsed
        message = _Message()
        message.__dict__ = values
        return message


class _Budget:
    """The fields that an answer may still have, with a call of `on_progress` every 1,024."""

    def __init__(self, on_progress: Callable[[], None] = lambda: None) -> None:
        self.remaining_fields, self._on_progress = MAX_FIELDS, on_progress

    def check(self) -> None:
        self._on_progress()
        if not self.remaining_fields:
            raise ValueError(f'more than {MAX_FIELDS} fields')


def parse_answer(name: str, data: bytes, on_progress: Callable[[], None] = lambda: None) -> Any:
    """Parse the message `name` into an object with the fields that are used as attributes.

    A missing field has protobuf's default: 0, empty, or an empty message. An error of `on_progress` ends the parsing.

    Raises:
        ValueError: the answer is malformed, or has more than MAX_FIELDS.
    """
    try:
        return _ANSWERS[name].parse(data, 0, len(data), _Budget(on_progress))
    except IndexError as error:
        raise ValueError('a message ends too early') from error


def _require_unknown(tag: int, fields: Mapping[int, object]) -> None:
    if tag < 8:
        raise ValueError('a field has no number')
    if tag ^ _WIRE_TYPE_FLIP in fields:
        raise ValueError('a field has the wrong wire type')


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    for position in range(start, start + _MAX_VARINT_BYTES):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2 * _SIGN_BIT - 1), position + 1
        shift += 7
    raise ValueError(f'a number has more than {_MAX_VARINT_BYTES} bytes')


_HEADER = _Schema(cluster_id=(1, _UNSIGNED), member_id=(2, _UNSIGNED), revision=(3, int), raft_term=(4, _UNSIGNED))
_KEY_VALUE = _Schema(key=(1, bytes), create_revision=(2, int), mod_revision=(3, int), value=(5, bytes), lease=(6, int))
_RANGE = _Schema(header=(1, _HEADER), kvs=(2, [_KEY_VALUE]), more=(3, bool), count=(4, int))
_DONE = _Schema(response_range=(1, _RANGE))
_EVENT = _Schema(type=(1, int), kv=(2, _KEY_VALUE), prev_kv=(3, _KEY_VALUE))
_ANSWERS: Mapping[str, _Schema] = {
    'RangeResponse': _RANGE,
    'TxnResponse': _Schema(header=(1, _HEADER), succeeded=(2, bool), responses=(3, [_DONE])),
    'LeaseGrantResponse': _Schema(header=(1, _HEADER), ID=(2, int), TTL=(3, int), error=(4, str)),
    'LeaseKeepAliveResponse': _Schema(header=(1, _HEADER), ID=(2, int), TTL=(3, int)),
    'LeaseRevokeResponse': _Schema(header=(1, _HEADER)),
    'LeaseTimeToLiveResponse': _Schema(header=(1, _HEADER), TTL=(3, int), grantedTTL=(4, int)),
    'StatusResponse': _Schema(header=(1, _HEADER), version=(2, str)),
    # All answers of the service Auth but one: names, a token or nothing.
    'AuthResponse': _Schema(names=(2, [str])),
    'AuthRoleGetResponse': _Schema(permissions=(2, [_Schema(kind=(1, int), key=(2, bytes), range_end=(3, bytes))])),
    'WatchResponse': _Schema(
        header=(1, _HEADER),
        watch_id=(2, int),
        created=(3, bool),
        canceled=(4, bool),
        compact_revision=(5, int),
        cancel_reason=(6, str),
        fragment=(7, bool),
        events=(11, [_EVENT]),
    ),
}


def encode_key(key: str) -> bytes:
    # A part of a key may come from JSON, which allows lone surrogates.
    return key.encode(errors='surrogatepass')


def _encode_comparison(result: int, key: str, revision: int) -> bytes:
    # The revision is in a oneof, so 0 must be written, too.
    return _encode_nonzero({1: result, 2: _TARGET_MOD_REVISION, 3: encode_key(key)}) + _encode_field(6, revision)


def _encode_varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative number takes ten bytes
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _encode_field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _encode_varint(number << 3 | _VARINT) + _encode_varint(value)
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(value)) + value


def _encode_nonzero(values: Mapping[int, int | bytes]) -> bytes:
    return b''.join(_encode_field(number, value) for number, value in values.items() if value)


# The codes by name: https://grpc.io/docs/guides/status-codes/
class CallFailure(Exception):
    """A failed call: gRPC's code, its details in one line, and whether it was not sent."""

    def __init__(self, code: str, details: str | None, unsent: bool = False, failure: TlsFailure | None = None) -> None:
        super().__init__(code, details)
        self.code = code
        self.details = ' '.join((details or '').split())
        self.unsent = unsent
        self.tls_failure = failure


def is_full(error: CallFailure) -> bool:
    """Return whether etcd is full: https://etcd.io/docs/v3.4/op-guide/maintenance/#space-quota."""
    return error.code == RESOURCE_EXHAUSTED and 'space exceeded' in error.details


def is_too_long(error: CallFailure) -> bool:
    return error.code == RESOURCE_EXHAUSTED and 'Received message larger than max' in error.details


def is_refusal(error: CallFailure) -> bool:
    """Return whether etcd understood the call and refused it, or a message was too large."""
    too_large = error.code == RESOURCE_EXHAUSTED and 'larger than max' in error.details
    return too_large or error.code in _REFUSAL_CODES


def suggest_remedy(error: CallFailure) -> str:
    """Return why a lease has expired and the remedy, to append to a message, or ''."""
    if error.details != _LEASE_NOT_FOUND:
        return ''
    reason = ': the lease expired (this process may have been suspended), and nothing was written'
    return f'{reason}. Try: the same command again'


def is_denied(error: CallFailure) -> bool:
    # https://etcd.io/docs/v3.4/op-guide/authentication/
    nobody = error.code == FAILED_PRECONDITION and error.details == _USER_NOT_FOUND
    return nobody or error.code == PERMISSION_DENIED


def describe_denial(certificate: str, about: Sequence[str], is_read: bool) -> str:
    """Return the rest of 'etcd … does not let': who lacks access to which keys, and a fix."""
    user = certificate or 'a client without a certificate (cert_cert)'
    key_names = [make_printable(key, 200) for key in about[:MAX_NAMED_KEYS]]
    more = [f'{len(about) - MAX_NAMED_KEYS} more'] if len(about) > MAX_NAMED_KEYS else []
    access = f'{"read" if is_read else "write"} {", ".join([*key_names, *more])}' if about else 'do that'
    cure = 'use the certificate of another role, or run `elab certs DIR --enable` again'
    return f'{user} {access}: its role does not allow that. Fix: {cure}'


def is_transient(error: CallFailure) -> bool:
    """Return whether etcd did nothing, but will if it is asked again soon."""
    electing = error.code == UNAVAILABLE and error.details == 'etcdserver: no leader'
    return electing or (error.code == INVALID_ARGUMENT and error.details == _ROLES_CHANGED)


def is_learner(error: CallFailure) -> bool:
    # Not by its code, which varies: etcd.io/docs/v3.4/learning/design-learner.
    return error.details == _LEARNER_REFUSAL


def is_unsent(error: CallFailure) -> bool:
    """Return whether the call was not sent, or not passed on: then nothing was changed."""
    return error.unsent or is_transient(error) or is_learner(error)


def can_retry_elsewhere(error: CallFailure, is_repeatable: bool) -> bool:
    """Return whether to try the next endpoint, even after no answer if `is_repeatable`."""
    if not is_repeatable:
        return is_unsent(error)
    return error.code in (UNAVAILABLE, DEADLINE_EXCEEDED) or is_learner(error)
