"""The few messages of etcd that we need, as values and as bytes, and what a failed call means. Pure.

https://protobuf.dev/programming-guides/encoding/ and etcd's own api/etcdserverpb/rpc.proto. What is taken of an
answer has the names that it has there, so that it does not matter whether this module or the generated code has read
it.

A CallFailure has one of gRPC's codes (https://grpc.io/docs/guides/status-codes/) by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ecomp.model.text import printable

EQUAL, GREATER = 0, 1
"""How a key's revision compares with the one that is given."""
DELETED = 1
"""The type of an event by which a key goes."""
_MODIFIED = 2
"""What is compared: the revision of the key's last change."""
_VARINT, _BYTES = 0, 2
_OTHER = _VARINT ^ _BYTES
_FIXED = {1: 8, 5: 4}
"""Bytes of the kinds that we read nothing of."""
_LONGEST = 10
"""Bytes of the longest number."""
_SIGN = 1 << 63
"""The first number that is a negative one, where it has a sign."""


class Range(NamedTuple):
    """Read a key, or all from it to before `end`; at most `limit` of them (0: all), of a revision (0: the last).

    `since`: those alone that were changed at this revision or later.
    """

    key: bytes
    end: bytes = b''
    limit: int = 0
    revision: int = 0
    keys_only: bool = False
    count_only: bool = False
    since: int = 0

    def to_bytes(self) -> bytes:
        """RangeRequest."""
        flags = _number(8, self.keys_only) + _number(9, self.count_only) + _number(10, self.since)
        return _text(1, self.key) + _text(2, self.end) + _number(3, self.limit) + _number(4, self.revision) + flags


class Write(NamedTuple):
    """Put a key, on a lease unless that is 0."""

    key: bytes
    value: bytes
    lease: int = 0

    def to_bytes(self) -> bytes:
        """PutRequest."""
        return _text(1, self.key) + _text(2, self.value) + _number(3, self.lease)


class Removal(NamedTuple):
    """Delete a key."""

    key: bytes

    def to_bytes(self) -> bytes:
        """DeleteRangeRequest."""
        return _text(1, self.key)


class Comparison(NamedTuple):
    """A condition: how the revision of a key's last change (0: there is none) compares with this one."""

    key: bytes
    result: int
    revision: int

    def to_bytes(self) -> bytes:
        """Compare. The revision is one of several fields of which etcd wants to see one, so 0 is written, too."""
        revision = _key(6, _VARINT) + _varint(self.revision)
        return _number(1, self.result) + _number(2, _MODIFIED) + _text(3, self.key) + revision


class Transaction(NamedTuple):
    """The first operations where all of `compare` hold, else the second; all or none of them."""

    compare: Sequence[Comparison] = ()
    success: Sequence[Range | Write | Removal] = ()
    failure: Sequence[Range | Write | Removal] = ()

    def to_bytes(self) -> bytes:
        """TxnRequest."""
        parts = [_part(1, each.to_bytes()) for each in self.compare]
        for field, operations in ((2, self.success), (3, self.failure)):
            parts += [_part(field, _part(_OPERATIONS[type(each)], each.to_bytes())) for each in operations]
        return b''.join(parts)


_OPERATIONS: Mapping[type, int] = {Range: 1, Write: 2, Removal: 3}


class Grant(NamedTuple):
    """A new lease of so many seconds."""

    seconds: int

    def to_bytes(self) -> bytes:
        """LeaseGrantRequest."""
        return _number(1, self.seconds)


class KeepAlive(NamedTuple):
    """Refresh a lease."""

    lease: int

    def to_bytes(self) -> bytes:
        """LeaseKeepAliveRequest."""
        return _number(1, self.lease)


class Revoke(NamedTuple):
    """End a lease, and every key on it."""

    lease: int

    def to_bytes(self) -> bytes:
        """LeaseRevokeRequest."""
        return _number(1, self.lease)


class Status(NamedTuple):
    """Ask a member about itself."""

    def to_bytes(self) -> bytes:
        """StatusRequest, which says nothing."""
        return b''


class WatchCreate(NamedTuple):
    """Hear of every change of the keys from `key` to before `end`, from a revision on; `previous`: and what was there.

    With `fragment` a long answer comes in pieces of about a request's size, each but the last with `fragment` set; a
    piece may end in the middle of a revision. https://etcd.io/docs/v3.4/learning/api/#watch-streams
    """

    key: bytes
    end: bytes
    revision: int
    previous: bool = False
    fragment: bool = False

    def to_bytes(self) -> bytes:
        """WatchRequest, with a WatchCreateRequest in it."""
        whose = _text(1, self.key) + _text(2, self.end)
        how = _number(6, self.previous) + _number(8, self.fragment)
        return _part(1, whose + _number(3, self.revision) + how)


class WatchProgress(NamedTuple):
    """Have etcd say how far the watches of a stream were told: an answer of no watch's, with the revision.

    It says so once nothing up to that is left to tell, and until then nothing; some (3.4.23 is one) say at once which
    revision they are at themselves. https://github.com/etcd-io/etcd/issues/15220
    """

    def to_bytes(self) -> bytes:
        """WatchRequest, with a WatchProgressRequest in it, which says nothing."""
        return _part(3, b'')


Request = Range | Transaction | Grant | KeepAlive | Revoke | Status


METHODS: Mapping[type, tuple[str, str]] = {
    Range: ('/etcdserverpb.KV/Range', 'RangeResponse'),
    Transaction: ('/etcdserverpb.KV/Txn', 'TxnResponse'),
    Grant: ('/etcdserverpb.Lease/LeaseGrant', 'LeaseGrantResponse'),
    KeepAlive: ('/etcdserverpb.Lease/LeaseKeepAlive', 'LeaseKeepAliveResponse'),
    Revoke: ('/etcdserverpb.Lease/LeaseRevoke', 'LeaseRevokeResponse'),
    Status: ('/etcdserverpb.Maintenance/Status', 'StatusResponse'),
    WatchCreate: ('/etcdserverpb.Watch/Watch', 'WatchResponse'),
}
"""What is called for a request: its path, and the name of the message that answers."""


class _Message:
    """What was read of an answer: an attribute for each field that is known."""


class _Shape:
    """How a message is read.

    `fields` is by tag (a field's number and its kind): the field's name, what is in it, and whether there may be many
    of it. `nothing` is what an empty message says, but for `many`, the names of fields of which there are none then.
    """

    def __init__(self, **fields: tuple[int, Any]) -> None:
        """Each field's number, and what is in it: int, _UNSIGNED, bool, bytes, str, a shape or, for many, [a shape]."""
        self.fields: dict[int, tuple[str, Any, bool]] = {}
        self.nothing: dict[str, Any] = {}
        self.many = [name for name, (_, what) in fields.items() if isinstance(what, list)]
        for name, (number, each) in fields.items():
            what = each[0] if isinstance(each, list) else each
            kind = _VARINT if what in (int, bool, _UNSIGNED) else _BYTES
            self.fields[number << 3 | kind] = name, what, isinstance(each, list)
            if isinstance(what, _Shape):
                self.nothing[name] = _message(what, b'', 0, 0, _Budget())
            else:
                self.nothing[name] = 0 if what == _UNSIGNED else what()


_UNSIGNED = 'unsigned'
"""What is not told to be is read as int64."""


MAX_FIELDS = 2**19
"""Fields of an answer, in all its messages: three times as many as 20,000 keys have. An empty key costs 275 bytes."""


class _Budget:
    """How many more fields an answer may have; `go_on` is called at each 1,024th, and may raise."""

    def __init__(self, go_on: Callable[[], None] = lambda: None) -> None:
        self.left, self.go_on = MAX_FIELDS, go_on


def answer(name: str, data: bytes, go_on: Callable[[], None] = lambda: None) -> Any:
    """The message of this name in the bytes, as far as it is read by us. ValueError for what is none.

    What is not there has the value that protobuf has for it: 0, nothing, or a message without anything in it. `go_on`
    is called while it is read, and what it raises ends the reading.
    """
    try:
        return _message(_ANSWERS[name], data, 0, len(data), _Budget(go_on))
    except IndexError as error:
        raise ValueError('a message that ends too early') from error


def _message(shape: _Shape, data: bytes, at: int, end: int, budget: _Budget) -> _Message:
    """The message that is there from `at` to before `end`. ValueError, IndexError.

    It is called for each key of a list, of which there may be 20,000: so each step in it counts.
    """
    found = shape.nothing.copy()
    for name in shape.many:
        found[name] = []
    fields = shape.fields
    while at < end:
        budget.left -= 1
        if not budget.left & 0x3FF:
            budget.go_on()
            if not budget.left:
                raise ValueError(f'more than {MAX_FIELDS} fields')
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = _read_varint(data, at - 1)
        kind = tag & 7
        if kind in (_VARINT, _BYTES):
            value = data[at]
            at += 1
            if value > 0x7F:
                value, at = _read_varint(data, at - 1)
            start = at
            if kind == _BYTES:
                at += value
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f'a field of kind {kind}')
        if at > end:
            raise ValueError('a field that is longer than its message')
        if tag not in fields:
            if tag < 8:
                raise ValueError('a field without a number')
            if tag ^ _OTHER in fields:
                raise ValueError('a number where bytes should be, or bytes where a number should be')
            continue
        name, what, is_many = fields[tag]
        if what is int:
            found[name] = value if value < _SIGN else value - 2 * _SIGN
        elif what is bytes:
            found[name] = data[start:at]
        elif is_many:
            found[name].append(_message(what, data, start, at, budget))
        elif what is bool:
            found[name] = value != 0
        elif what is str:
            found[name] = str(data[start:at], 'utf-8')
        else:
            found[name] = value if what is _UNSIGNED else _message(what, data, start, at, budget)
    made = _Message()
    made.__dict__ = found
    return made


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it has ended. ValueError, IndexError."""
    value = shift = 0
    for position in range(at, at + _LONGEST):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2 * _SIGN - 1), position + 1
        shift += 7
    raise ValueError('a number without an end')


_HEADER = _Shape(cluster_id=(1, _UNSIGNED), member_id=(2, _UNSIGNED), revision=(3, int), raft_term=(4, _UNSIGNED))
_KEY_VALUE = _Shape(key=(1, bytes), create_revision=(2, int), mod_revision=(3, int), value=(5, bytes), lease=(6, int))
_RANGE = _Shape(header=(1, _HEADER), kvs=(2, [_KEY_VALUE]), more=(3, bool), count=(4, int))
_DONE = _Shape(response_range=(1, _RANGE))
_EVENT = _Shape(type=(1, int), kv=(2, _KEY_VALUE), prev_kv=(3, _KEY_VALUE))
_ANSWERS: Mapping[str, _Shape] = {
    'RangeResponse': _RANGE,
    'TxnResponse': _Shape(header=(1, _HEADER), succeeded=(2, bool), responses=(3, [_DONE])),
    'LeaseGrantResponse': _Shape(header=(1, _HEADER), ID=(2, int), TTL=(3, int), error=(4, str)),
    'LeaseKeepAliveResponse': _Shape(header=(1, _HEADER), ID=(2, int), TTL=(3, int)),
    'LeaseRevokeResponse': _Shape(header=(1, _HEADER)),
    'StatusResponse': _Shape(header=(1, _HEADER), version=(2, str)),
    'WatchResponse': _Shape(
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


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative number has ten bytes
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _number(field: int, value: int) -> bytes:
    """A number; 0 is what is there without it."""
    return _key(field, _VARINT) + _varint(value) if value else b''


def _text(field: int, value: bytes) -> bytes:
    return _part(field, value) if value else b''


def _part(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value


# What a failed call means


UNAVAILABLE, DEADLINE_EXCEEDED, NOT_FOUND = 'UNAVAILABLE', 'DEADLINE_EXCEEDED', 'NOT_FOUND'
INVALID_ARGUMENT, FAILED_PRECONDITION = 'INVALID_ARGUMENT', 'FAILED_PRECONDITION'
RESOURCE_EXHAUSTED, PERMISSION_DENIED = 'RESOURCE_EXHAUSTED', 'PERMISSION_DENIED'
_REFUSED = {
    *('UNAUTHENTICATED', PERMISSION_DENIED, INVALID_ARGUMENT, FAILED_PRECONDITION, 'UNIMPLEMENTED', NOT_FOUND),
    'OUT_OF_RANGE',
}

NAMED = 3
"""Keys that are named in one line."""

_NOBODY = 'etcdserver: user name not found'
_NO_LEASE = 'etcdserver: requested lease not found'
_LEARNER = 'etcdserver: rpc not supported for learner'
_ROLES_CHANGED = 'etcdserver: revision of auth store is old'


class CallFailure(Exception):
    """A call that failed: the code, and etcd's words or ours in one line.

    `unsent`: it certainly never left. Where that is False the code and the words may say so all the same.
    """

    def __init__(self, code: str, details: str | None, unsent: bool = False) -> None:
        super().__init__(code, details)
        self.code = code
        self.details = ' '.join((details or '').split())
        self.unsent = unsent


def is_full(error: CallFailure) -> bool:
    """Whether etcd is out of space. https://etcd.io/docs/v3.4/op-guide/maintenance/#space-quota"""
    return error.code == RESOURCE_EXHAUSTED and 'space exceeded' in error.details


def is_too_long(error: CallFailure) -> bool:
    """Whether it is our own side that takes no message as long as the answer."""
    exhausted = error.code == RESOURCE_EXHAUSTED
    return exhausted and 'Received message larger than max' in error.details


def is_refusal(error: CallFailure) -> bool:
    """Whether etcd understood the call and says no."""
    too_large = error.code == RESOURCE_EXHAUSTED and 'larger than max' in error.details
    return too_large or error.code in _REFUSED


def advice(error: CallFailure) -> str:
    """Say what to do about a refusal that the same command does not meet again; '' for any other."""
    if error.details != _NO_LEASE:
        return ''
    return ': its lease has ended (was this suspended?), and this is not written. Try: the same command again'


def is_denied(error: CallFailure) -> bool:
    """Whether it is etcd's roles that say no. https://etcd.io/docs/v3.4/op-guide/authentication/"""
    nobody = error.code == FAILED_PRECONDITION and error.details == _NOBODY
    return nobody or error.code == PERMISSION_DENIED


def denied(certificate: str, about: Sequence[str], read: bool) -> str:
    """Whom it does not let do what, and why ('': nobody's certificate). Of several keys etcd does not say which."""
    who = certificate or 'whoever has no certificate (cert_cert)'
    named = [printable(each, 200) for each in about[:NAMED]]
    more = [f'{len(about) - NAMED} more'] if len(about) > NAMED else []
    what = f'{"read" if read else "write"} {", ".join([*named, *more])}' if about else 'do that'
    return f'{who} {what}: it is for another certificate, or `elab certs DIR --enable` has to run again'


def is_passing(error: CallFailure) -> bool:
    """Whether etcd did nothing, and soon will: it has no leader just now, or its roles were changed meanwhile."""
    electing = error.code == UNAVAILABLE and error.details == 'etcdserver: no leader'
    changed = error.code == INVALID_ARGUMENT and error.details == _ROLES_CHANGED
    return electing or changed


def is_learner(error: CallFailure) -> bool:
    """Whether the member has no vote yet, and did nothing for it. The code differs between versions of etcd.

    https://etcd.io/docs/v3.4/learning/design-learner/
    """
    return error.details == _LEARNER


def was_not_sent(error: CallFailure) -> bool:
    """Whether the call never left, or was not passed on, so that nothing was changed."""
    return error.unsent or is_passing(error) or is_learner(error)


def may_work_elsewhere(error: CallFailure, repeatable: bool) -> bool:
    """Whether to try the next endpoint. What is not `repeatable` is tried again only if it never left."""
    if not repeatable:
        return was_not_sent(error)
    return error.code in (UNAVAILABLE, DEADLINE_EXCEEDED) or is_learner(error)
