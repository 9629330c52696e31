"""What one compute says is there, for an audit: its answer at /digests/<compute>/<audit>/<page>.

JSON, versioned, in pages that each fit an etcd value. Page 0 is written last and says how many there are:
{"version", "pages", "error", "guests": [{"instance", "compute", "defined", "running", "disk"}], "without_base":
{instance: path}, "seeds": {mac: instance}, "isos": {instance: ""}, "reservations": {mac: "instance address"}, "parts":
{name: mark}, "open_dhcp": {network: ""}, "bad_bases": {sha256: ""}}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecomp.model.guest import Guest
from ecomp.model.json_object import dump, is_version, load, load_object
from ecomp.model.text import printable

VERSION = 1
PAGE_BYTES = 400 * 1024
"""Bytes of a page after which the next one begins: one entry more must fit into the 1.5 MiB that etcd takes."""
REASON = 500
"""Characters of a compute's reason why it gives no digest; the rest is cut off."""

_DICTS = {
    **{'without_base': 'without_base', 'metadata': 'seeds', 'seeds': 'isos'},
    **{name: name for name in ('reservations', 'parts', 'open_dhcp', 'bad_bases')},
}
"""What is a dictionary of a digest: {field: its name in JSON}, where ecomp 1.0 called the metadata seeds."""


@dataclass(frozen=True)
class Digest:
    """What one compute has. `guests` are the domains and disks with our mark, by instance.

    `without_base` is {instance: path of its missing base volume}; `metadata` {MAC: instance} of the metadata server's
    files; `seeds` the instances with a NoCloud disk; `reservations` {MAC: 'instance address'} of DHCP. `parts` is {file
    that no process writes: a mark that changes if it is written again}; `open_dhcp` the networks whose DHCP answers any
    MAC; `bad_bases` the SHA-256s of base volumes whose content has changed.
    """

    guests: Mapping[str, Guest] = field(default_factory=dict)
    without_base: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, str] = field(default_factory=dict)
    reservations: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    open_dhcp: Mapping[str, str] = field(default_factory=dict)
    bad_bases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Leftover:
    """What a compute is asked to remove.

    `kind` is an instance's 'disk', its NoCloud disk ('iso') or its 'reservations', the metadata of a MAC ('seed'), or a
    'part'. `mark` is what the digest said of metadata or a part: the instance, the mark; what differs since is kept.
    """

    kind: str
    name: str
    mark: str = ''


def to_pages(digest: Digest) -> list[str]:
    """The digest as values of its keys, page 0 first."""
    pages: list[dict[str, Any]] = []
    size = PAGE_BYTES
    for name, key, value, length in _entries(digest):
        if size + length > PAGE_BYTES:
            pages.append({'version': VERSION, 'guests': [], **{each: {} for each in _DICTS.values()}})
            size = 0
        size += length
        if name == 'guests':
            pages[-1][name].append(value)
        else:
            pages[-1][name][key] = value
    pages = pages or [{'version': VERSION}]
    pages[0]['pages'] = len(pages)
    return [dump(each) for each in pages]


def failed(reason: str) -> str:
    """The value of page 0 of a compute that gives no digest, for this reason."""
    return dump({'version': VERSION, 'pages': 1, 'error': reason})


def from_pages(values: Sequence[bytes]) -> Digest:
    """The digest in these values, page 0 first. ValueError for a missing or wrong page, or for a compute's reason."""
    pages = [load_object(each) for each in values]
    if not pages:
        raise ValueError('no page is there')
    for each in pages:
        _check_version(each, 'digest')
    if pages[0].get('error'):
        raise ValueError(printable(str(pages[0]['error']))[:REASON])
    if pages[0].get('pages') != len(pages):
        raise ValueError(f'{len(pages)} of its {printable(str(pages[0].get("pages")), 20)} pages are there')
    try:
        guests = [_guest(**each) for page in pages for each in page.get('guests', [])]
        merged = {
            name: {key: _text(value) for page in pages for key, value in page.get(each, {}).items()}
            for name, each in _DICTS.items()
        }
        return Digest({each.instance: each for each in guests}, **merged)
    except (TypeError, AttributeError) as error:
        raise ValueError(f'not a digest: {printable(str(error))[:REASON]}') from error


def clearance_to_json(leftovers: Sequence[Leftover]) -> str:
    """The value of /audit/<audit>/<compute>: what that compute is asked to remove."""
    return dump({'version': VERSION, 'leftovers': [vars(each) for each in leftovers]})


def clearance_from_json(value: bytes) -> list[Leftover]:
    """The leftovers in such a value. ValueError if it cannot be understood."""
    data = load_object(value)
    _check_version(data, 'clearance')
    try:
        return [Leftover(*(_text(each[name]) for name in ('kind', 'name', 'mark'))) for each in data['leftovers']]
    except (TypeError, KeyError) as error:
        raise ValueError(f'not a clearance: {printable(str(error))[:REASON]}') from error


def cleared_from_json(value: bytes) -> list[str]:
    """The lines in which a compute says what it removed. ValueError for a value without them."""
    lines = load(value)
    if not isinstance(lines, list) or not all(isinstance(each, str) for each in lines):
        raise ValueError('it does not say what it removed')
    return lines


def _check_version(data: Mapping[str, Any], what: str) -> None:
    version = data.get('version')
    if not is_version(version, VERSION):
        raise ValueError(f'a {what} of version {version!r:.40}: this ecomp reads {VERSION}')


def _guest(instance: Any, compute: Any, defined: Any, running: Any, disk: Any) -> Guest:
    """The Guest in these values. TypeError if one of them is of another type."""
    if not all(isinstance(each, bool) for each in (defined, running, disk)):
        raise TypeError('whether a guest is defined, runs and has a disk is true or false')
    return Guest(_text(instance), None if compute is None else _text(compute), defined, running, disk)


def _text(value: Any) -> str:
    """The value, which is text. TypeError if it is not."""
    if not isinstance(value, str):
        raise TypeError(f'expected text, not {type(value).__name__}')
    return value


def _entries(digest: Digest) -> Iterator[tuple[str, str, Any, int]]:
    for guest in digest.guests.values():
        said = {name: getattr(guest, name) for name in ('instance', 'compute', 'defined', 'running', 'disk')}
        yield 'guests', '', said, len(dump(said)) + 2
    for name, each in _DICTS.items():
        for key, value in getattr(digest, name).items():
            yield each, key, value, len(dump({key: value})) + 2
