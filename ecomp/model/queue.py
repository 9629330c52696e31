"""A request that waits in a flavor's queue, as it is written and read. Pure.

The value of /queues/<flavor>/<instance>, JSON: version, instance, flavor, and the fields of an order
(ecomp.model.order), of which query is the flavor's as it was then: that is what is claimed, whatever becomes of the
flavor. It is never written again: its revision is its place in the queue. Below it, at …/taker, is the mark of the
compute that is taking it: {"version", "compute"}.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ecomp.model import keys
from ecomp.model.allocation import Resources, missing
from ecomp.model.choose import QUEUE, Why
from ecomp.model.flavor import Flavor, parse_flavor
from ecomp.model.image import check_image
from ecomp.model.json_object import dump, is_text, is_version, load_object
from ecomp.model.order import (
    REASON_LIMIT,
    Invalid,
    Order,
    Request,
    Shares,
    check_request_size,
    dump_fields,
    parse_fields,
    shares_in,
    text_field,
)
from ecomp.model.record import QUEUED, Record, recorded, refused_record
from ecomp.model.text import printable

VERSION = 1


@dataclass(frozen=True)
class QueueEntry(Order):
    """An order that waits for a compute. `flavor` is as it was when it was asked for, and `query` is its query."""

    flavor: Flavor

    def __post_init__(self) -> None:
        """What it asks for is what its flavor asks for."""
        object.__setattr__(self, 'query', self.flavor.query)

    @property
    def key(self) -> str:
        """Where it waits."""
        return keys.queue(self.flavor.name, self.instance)

    @property
    def resources(self) -> Resources:
        """What it will have."""
        return self.flavor.resources

    def request(self, compute: str, now: str) -> Request:
        """What the compute that took it is asked for."""
        stages = {**self.stages, 'scheduled': now}
        allocations = {compute: dict(self.flavor.resources)}
        return Request(allocations=allocations, why=Why(QUEUE, None, 1), **self.parts(stages=stages))


def to_json(waiting: QueueEntry) -> str:
    """The value of the request's key."""
    place = {'instance': waiting.instance, 'flavor': waiting.flavor.name, 'query': waiting.flavor.query}
    return dump({'version': VERSION, **place, **dump_fields(waiting)})


def parse_waiting(key: str, value: bytes) -> QueueEntry | Invalid:
    """The request at a key in the queues, or the reason it is none: then nobody takes it."""
    try:
        return _parse(key, value)
    except ValueError as error:
        return Invalid(keys.last(key), printable(str(error))[:REASON_LIMIT], _shares(value))
    except RecursionError:  # a reason quotes what is wrong
        return Invalid(keys.last(key), 'the request is nested too deeply')


def _shares(value: bytes) -> Shares:
    """What one that is refused was queued with: whoever queued it has counted it, whatever became of it since."""
    found, data = shares_in(value)
    with suppress(ValueError, RecursionError):  # a reason quotes what is wrong
        resources = parse_flavor('x', _needed(data, 'query')).resources
        return found._replace(project_id=_needed(data, 'project_id'), resources=resources)
    return found


def _parse(key: str, value: bytes) -> QueueEntry:
    place = keys.queued(key)
    if place is None or not keys.is_uuid(place[1]):
        raise ValueError(f'{key[:200]!r} is not {keys.QUEUES}<flavor>/<uuid>')
    check_request_size(value)
    data = load_object(value)
    version = data.get('version')
    if not is_version(version, VERSION):
        raise ValueError(f'version {version!r} of a waiting request is not known here: {VERSION} is')
    told = data.get('flavor'), data.get('instance')
    if told != place:
        raise ValueError(f'its key says {"/".join(place)}, and it says {told[0]!r} and {told[1]!r}')
    flavor = parse_flavor(place[0], _needed(data, 'query'))
    lacking = missing(flavor.resources)
    if lacking:
        raise ValueError(f'its flavor has no {", ".join(lacking)}: a guest needs all of them')
    check_image(_needed(data, 'image'))
    for name in ('user_id', 'project_id'):
        _needed(data, name)
    return QueueEntry(place[1], flavor, **parse_fields(data))


def _needed(data: Mapping[str, Any], name: str) -> str:
    text = text_field(data, name)
    if not text:
        raise ValueError(f'the request lacks {name}')
    if not is_text(text):  # placement fails over it each time, and all that waits would wait for that
        raise ValueError(f'{name}: {text[:40]!r} is no text')
    return text


def record_of(key: str, value: bytes) -> Record:
    """What there is to show of a request that waits: no compute has a record of it."""
    waiting = parse_waiting(key, value)
    if isinstance(waiting, Invalid):
        refused = refused_record('', waiting, '')
        return replace(refused, state=QUEUED, stages={}, fault=f'nobody takes it: {waiting.reason}')
    return Record(compute='', state=QUEUED, resources=waiting.resources, **recorded(waiting))


def mark_to_json(compute: str) -> str:
    """The value of a taker's key."""
    return dump({'version': VERSION, 'compute': compute})


def marked_by(value: bytes) -> str | None:
    """The compute that a taker's key is of; None if it makes no sense."""
    try:
        compute = load_object(value).get('compute')
    except ValueError:
        return None
    return compute if isinstance(compute, str) else None
