"""The few messages of etcd that we need, as values and as bytes, without the code that etcd3 generated. Pure.

https://protobuf.dev/programming-guides/encoding/ and etcd's own api/etcdserverpb/rpc.proto. What is taken of an answer
has the names that it has there, so that it does not matter whether this module or the generated code has read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

EQUAL, GREATER = 0, 1
"""How a key's revision compares with the one that is given."""
DELETED = 1
"""The type of an event by which a key goes."""
_MODIFIED = 2
"""What is compared: the revision of the key's last change."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST = 10
"""Bytes of the longest number."""


class Range(NamedTuple):
    """Read a key, or all from it to before `end`; at most `limit` of them (0: all), of a revision (0: the last)."""

    key: bytes
    end: bytes = b''
    limit: int = 0
    revision: int = 0
    keys_only: bool = False
    count_only: bool = False

    def to_bytes(self) -> bytes:
        """RangeRequest."""
        flags = _number(8, self.keys_only) + _number(9, self.count_only)
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

    https://etcd.io/docs/v3.4/learning/api/#watch-streams
    """

    key: bytes
    end: bytes
    revision: int
    previous: bool = False

    def to_bytes(self) -> bytes:
        """WatchRequest, with a WatchCreateRequest in it."""
        whose = _text(1, self.key) + _text(2, self.end)
        return _part(1, whose + _number(3, self.revision) + _number(6, self.previous))


Request = Range | Transaction | Grant | KeepAlive | Revoke | Status


class Method(NamedTuple):
    """What is called for a request: its path, and the name of the message that answers."""

    path: str
    answer: str


METHODS: Mapping[type, Method] = {
    Range: Method('/etcdserverpb.KV/Range', 'RangeResponse'),
    Transaction: Method('/etcdserverpb.KV/Txn', 'TxnResponse'),
    Grant: Method('/etcdserverpb.Lease/LeaseGrant', 'LeaseGrantResponse'),
    KeepAlive: Method('/etcdserverpb.Lease/LeaseKeepAlive', 'LeaseKeepAliveResponse'),
    Revoke: Method('/etcdserverpb.Lease/LeaseRevoke', 'LeaseRevokeResponse'),
    Status: Method('/etcdserverpb.Maintenance/Status', 'StatusResponse'),
    WatchCreate: Method('/etcdserverpb.Watch/Watch', 'WatchResponse'),
}


class _Field(NamedTuple):
    """A field of an answer. `of` is the message in it; without one it is bytes, text or a number, as the default is."""

    name: str
    default: Any = 0
    of: str = ''
    repeated: bool = False


# int64 are read as such, and so is everything that is not told to be unsigned.
_UNSIGNED = {'cluster_id', 'member_id', 'raft_term'}
_HEADER = _Field('header', of='ResponseHeader')
_ANSWERS: Mapping[str, Mapping[int, _Field]] = {
    'ResponseHeader': {1: _Field('cluster_id'), 2: _Field('member_id'), 3: _Field('revision'), 4: _Field('raft_term')},
    'KeyValue': {
        1: _Field('key', b''),
        2: _Field('create_revision'),
        3: _Field('mod_revision'),
        5: _Field('value', b''),
        6: _Field('lease'),
    },
    'RangeResponse': {
        1: _HEADER,
        2: _Field('kvs', of='KeyValue', repeated=True),
        3: _Field('more', False),
        4: _Field('count'),
    },
    'ResponseOp': {1: _Field('response_range', of='RangeResponse')},
    'TxnResponse': {
        1: _HEADER,
        2: _Field('succeeded', False),
        3: _Field('responses', of='ResponseOp', repeated=True),
    },
    'LeaseGrantResponse': {1: _HEADER, 2: _Field('ID'), 3: _Field('TTL'), 4: _Field('error', '')},
    'LeaseKeepAliveResponse': {1: _HEADER, 2: _Field('ID'), 3: _Field('TTL')},
    'LeaseRevokeResponse': {1: _HEADER},
    'StatusResponse': {1: _HEADER, 2: _Field('version', '')},
    'Event': {1: _Field('type'), 2: _Field('kv', of='KeyValue'), 3: _Field('prev_kv', of='KeyValue')},
    'WatchResponse': {
        1: _HEADER,
        2: _Field('watch_id'),
        3: _Field('created', False),
        4: _Field('canceled', False),
        5: _Field('compact_revision'),
        6: _Field('cancel_reason', ''),
        11: _Field('events', of='Event', repeated=True),
    },
}


def answer(name: str, data: bytes) -> Any:
    """The message of this name in the bytes, as far as it is read by us. ValueError for what is none.

    What is not there has the value that protobuf has for it: 0, nothing, or a message without anything in it.
    """
    return _message(name, memoryview(data))


def _message(name: str, data: memoryview) -> Any:
    known = _ANSWERS[name]
    found = SimpleNamespace(**{each.name: _nothing(each) for each in known.values()})
    for number, value in _fields(data):
        field = known.get(number)
        if field is None:
            continue
        if field.repeated:
            getattr(found, field.name).append(_message(field.of, _block(value)))
        else:
            setattr(found, field.name, _value(field, value))
    return found


def _nothing(field: _Field) -> Any:
    if field.repeated:
        return []
    return _message(field.of, memoryview(b'')) if field.of else field.default


def _value(field: _Field, value: int | memoryview) -> Any:
    if field.of:
        return _message(field.of, _block(value))
    if isinstance(field.default, bytes):
        return bytes(_block(value))
    if isinstance(field.default, str):
        return str(_block(value), 'utf-8')
    if not isinstance(value, int):
        raise ValueError('bytes where a number should be')
    if isinstance(field.default, bool):
        return value != 0
    return value if field.name in _UNSIGNED or value < 1 << 63 else value - (1 << 64)


def _block(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError('a number where bytes should be')
    return value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Each field's number, and its number or its bytes. ValueError for what is no message."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ValueError('a field without a number')
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _read_varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f'a field of kind {kind}')
        if length > end - at:
            raise ValueError('a field that is longer than its message')
        if kind == _BYTES:
            yield number, data[at : at + length]
        at += length


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    for position in range(at, min(at + _LONGEST, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), position + 1
        shift += 7
    raise ValueError('a number without an end')


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
