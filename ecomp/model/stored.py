"""The codec of values that are stored as JSON: a version, and for each field a parser. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

from ecomp.errors import Unreadable
from ecomp.model.json_object import dump, load_object, load_object_or_empty
from ecomp.model.parsers import OBJECT, Parser, format_reason, quote

T = TypeVar('T')

COMPACT = (',', ':')


def to_plain(value: Any) -> Any:
    """Return the value for dump(), with stored values as dicts and tuples as lists."""
    if type(value) in CODECS:
        return to_dict(value)
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


class Field(NamedTuple):
    """How a field is read and, unless `write` is None, written."""

    parse: Parser
    write: Callable[[Any], Any] | None = to_plain
    name: str = ''  # its name in the JSON, if another one
    is_optional: bool = False
    is_lenient: bool = False
    is_sparse: bool = False


def optional(parse: Parser, **more: Any) -> Field:
    """Make a field that has its class's default if it is absent or null."""
    return Field(parse, is_optional=True, **more)


def lenient(parse: Parser, **more: Any) -> Field:
    """Make an optional field that has its default also if it is malformed."""
    return optional(parse, is_lenient=True, **more)


def sparse(parse: Parser, **more: Any) -> Field:
    """Make an optional field that is not written if it has its default."""
    return optional(parse, is_sparse=True, **more)


def in_key(parse: Parser) -> Field:
    """Make a field that only the key has."""
    return Field(parse, write=None)


class _Codec(NamedTuple):
    fields: Mapping[str, Field]
    defaults: Mapping[str, Any]
    version: int
    noun: str
    separators: tuple[str, str] | None


CODECS: dict[type, _Codec] = {}


def stored(
    version: int = 0, noun: str = '', separators: tuple[str, str] | None = None, /, **parsers: Parser | Field
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass or NamedTuple a stored value, written in the order of its parsers.

    `version` is the newest that can be read, and that is written, or 0 for a part of another value. An error calls the
    value `noun`.
    """

    def register(kind: type[T]) -> type[T]:
        defaults = getattr(kind, '_field_defaults', {})
        if is_dataclass(kind):
            factories = {each.name: each.default_factory for each in fields(kind)}
            defaults = {name: make() for name, make in factories.items() if make is not MISSING}
            defaults |= {each.name: each.default for each in fields(kind) if each.default is not MISSING}
        rows = {name: each if isinstance(each, Field) else Field(each) for name, each in parsers.items()}
        rows = {name: field._replace(name=field.name or name) for name, field in rows.items()}
        CODECS[kind] = _Codec(rows, defaults, version, noun, separators)
        return kind

    return register


def decode(kind: type[T], value: bytes, **key_fields: Any) -> T:
    """Parse a stored value, with the fields that its key holds, or raise ValueError."""
    codec = CODECS[kind]
    try:
        data = load_object(value)
        require_version(data, codec.version, codec.noun)
        return parse_fields(kind, data, **key_fields)
    except ValueError as error:
        raise ValueError(format_reason(error)) from error


def decode_at(key: str, kind: type[T], value: bytes, **key_fields: Any) -> T:
    """Parse the value of a key as decode() does, but raise Unreadable, which names the key."""
    try:
        return decode(kind, value, **key_fields)
    except ValueError as error:
        raise Unreadable(key, error) from error


def decode_lenient(kind: type[T], value: bytes) -> T:
    """Parse a value of lenient fields and any version, with defaults for malformed parts."""
    return parse_fields(kind, load_object_or_empty(value))


def is_newer(kind: type[Any], value: bytes) -> bool:
    """Return whether a newer ecomp wrote the value, so that it must not be overwritten."""
    version = load_object_or_empty(value).get('version')
    return type(version) is int and version > CODECS[kind].version


def require_same(name: str, value: object, in_key: object) -> None:
    """Raise ValueError unless a field has the value that its key names."""
    if value != in_key:
        raise ValueError(f'{name}: {quote(value)} differs from {quote(in_key)} in its key')


def require_version(data: Mapping[str, Any], newest: int, noun: str) -> None:
    """Raise ValueError unless the version, 1 if absent, is an int from 1 to `newest`."""
    version = data.get('version', 1)
    if type(version) is not int or not 1 <= version <= newest:
        known = f'this ecomp reads versions up to {newest}; a newer ecomp may read it'
        raise ValueError(f'format version {repr(version)[:40]} of the {noun} is not supported: {known}')


def parse_fields(kind: type[T], data: Mapping[str, Any], **key_fields: Any) -> T:
    """Parse the fields of a stored value from a JSON object, or raise ValueError."""
    values, data = dict(key_fields), {**data, **key_fields}
    for name, field in CODECS[kind].fields.items():
        value = data.get(field.name)
        if value is None and field.is_optional:
            continue
        if value is None and field.name not in data:
            raise ValueError(f'{field.name} is missing')
        try:
            values[name] = field.parse(value)
        except ValueError as error:
            if not field.is_lenient:
                raise ValueError(f'{field.name}: {error}') from None
    return kind(**values)


def encode(value: Any, **more: str) -> str:
    """Return the JSON of a stored value, with its version and more fields, such as a stamp."""
    codec = CODECS[type(value)]
    return dump({'version': codec.version, **to_dict(value), **more}, separators=codec.separators)


def to_dict(value: Any) -> dict[str, Any]:
    codec, data = CODECS[type(value)], {}
    for name, field in codec.fields.items():
        item = getattr(value, name)
        if field.write is not None and not (field.is_sparse and item == codec.defaults[name]):
            data[field.name] = None if item is None else field.write(item)
    return data


def nested(kind: type[Any]) -> Parser:
    return lambda value: parse_fields(kind, OBJECT(value))
