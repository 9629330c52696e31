"""What one compute says is there, for an audit: its answer at /digests/<audit>/<compute>/<page>.

JSON, versioned, in pages that each fit an etcd value. Page 0 is written last and says how many there are:
{"version", "pages", "error", "guests": [{"instance", "compute", "defined", "running", "disk"}], "without_base":
{instance: path}, "seeds": {mac: instance}, "isos": {instance: ""}, "reservations": {mac: "instance address"}, "parts":
{name: mark}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecomp.model.guest import Guest
from ecomp.model.json_object import load_object

VERSION = 1
PAGE_BYTES = 400 * 1024
"""A page is no longer than this and one entry: etcd takes 1.5 MiB."""

_DICTS = ('without_base', 'seeds', 'isos', 'reservations', 'parts')


@dataclass(frozen=True)
class Digest:
    """`guests` carry our mark; `without_base` are those whose base volume is gone, with its path; `seeds` is {mac:
    instance}; `isos` are the instances that have a NoCloud disk; `reservations` is what DHCP keeps, {mac: 'instance
    address'}; `parts` are files nobody is writing, by name, each with a mark that changes if it is written again.
    """

    guests: Mapping[str, Guest] = field(default_factory=dict)
    without_base: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, str] = field(default_factory=dict)
    isos: Mapping[str, str] = field(default_factory=dict)
    reservations: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Leftover:
    """What a compute is asked to remove: a 'disk', an 'iso' or the 'reservations' (an instance's), a 'seed' (of a MAC)
    or a 'part' (of a name).

    `mark` is what the digest said of it: the seed's instance, the part's mark.
    """

    kind: str
    name: str
    mark: str = ''


def to_pages(digest: Digest) -> list[str]:
    """The digest as values for etcd, page 0 first."""
    pages: list[dict[str, Any]] = []
    size = PAGE_BYTES
    for name, key, value, length in _entries(digest):
        if size + length > PAGE_BYTES:
            pages.append({'version': VERSION, 'guests': [], **{each: {} for each in _DICTS}})
            size = 0
        size += length
        if name == 'guests':
            pages[-1][name].append(value)
        else:
            pages[-1][name][key] = value
    pages = pages or [{'version': VERSION}]
    pages[0]['pages'] = len(pages)
    return [json.dumps(each) for each in pages]


def failed(reason: str) -> str:
    """Page 0 of a compute that cannot say what is there, and why."""
    return json.dumps({'version': VERSION, 'pages': 1, 'error': reason})


def from_pages(values: Sequence[bytes]) -> Digest:
    """The digest in its pages, page 0 first. ValueError for anything but all of them, or with the compute's reason."""
    pages = [load_object(each) for each in values]
    if not pages:
        raise ValueError('no page is there')
    versions = {each.get('version') for each in pages}
    if versions != {VERSION}:
        raise ValueError(f'a digest of version {versions}: this ecomp reads {VERSION}')
    if pages[0].get('error'):
        raise ValueError(str(pages[0]['error']))
    if pages[0].get('pages') != len(pages):
        raise ValueError(f'{len(pages)} of its {pages[0].get("pages")} pages are there')
    try:
        guests = [Guest(**each) for page in pages for each in page.get('guests', [])]
        merged = {name: {k: str(v) for page in pages for k, v in page.get(name, {}).items()} for name in _DICTS}
        return Digest({each.instance: each for each in guests}, **merged)
    except (TypeError, AttributeError) as error:
        raise ValueError(f'not a digest: {error}') from error


def clearance_to_json(leftovers: Sequence[Leftover]) -> str:
    """What one compute is asked to remove, for /audit/<audit>/<compute>."""
    return json.dumps({'version': VERSION, 'leftovers': [vars(each) for each in leftovers]})


def clearance_from_json(value: bytes) -> list[Leftover]:
    """What is asked to be removed. ValueError if it cannot be understood."""
    data = load_object(value)
    if data.get('version') != VERSION:
        raise ValueError(f'a clearance of version {data.get("version")!r}: this ecomp reads {VERSION}')
    try:
        return [Leftover(str(each['kind']), str(each['name']), str(each['mark'])) for each in data['leftovers']]
    except (TypeError, KeyError) as error:
        raise ValueError(f'not a clearance: {error}') from error


def _entries(digest: Digest) -> Iterator[tuple[str, str, Any, int]]:
    for guest in digest.guests.values():
        said = {name: getattr(guest, name) for name in ('instance', 'compute', 'defined', 'running', 'disk')}
        yield 'guests', '', said, len(json.dumps(said)) + 2
    for name in _DICTS:
        for key, value in getattr(digest, name).items():
            yield name, key, value, len(json.dumps({key: value})) + 2
