"""What each reader makes of a wrong value in each field, compared with fields.txt.

A line has a field, a letter for each of WRONG_VALUES, and the first refusal. `ECOMP_GOLDEN=write pytest` writes the
file. Read the difference before you commit it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ecomp.errors import Unreachable
from ecomp.model import cluster, flavor, group, host, keys, order, queue, quota, record, stack, trouble
from ecomp.model.audit import parse_report
from ecomp.model.facts import Facts, parse_facts
from ecomp.model.stored import decode, decode_lenient
from ecomp.model.user_data import parse_shared_user_data
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.shared.notes import released_from_json
from tests.kit.hostile import COMPUTE, INSTANCE
from tests.kit.transcript import compare_with_file
from tests.security.answers import CALLS_AND_ANSWERS, CannedPlacement
from tests.security.mutants import RAW_JSON, make_nested
from tests.security.readers import READERS, SHARED

pytestmark = pytest.mark.fast

# Each has a letter of its own in a line.
WRONG_VALUES: dict[str, Any] = {
    **{'null': None, 'true': True, '0': 0, '-1': -1, '7': 7, '1.0': 1.0, '1.5': 1.5},
    **{'2^31': 2**31, '2^63': 2**63, '10^51': 10**51},
    **{'5000 digits': 'RAW-ENDLESS', 'infinity': 'RAW-HUGE', 'NaN': 'RAW-NAN'},
    **{'""': '', '"x"': 'x', '"7"': '7', 'two lines': 'a\nb', 'half a character': '\ud800', 'path': '../../x'},
    **{'300 letters': 'x' * 300, 'uuid': '9a1b2c3d-0000-4000-8000-000000000009', 'UUID': INSTANCE.upper()},
    **{'[]': [], '[7]': [7], '["x"]': ['x'], '{}': {}, '{"x": 7}': {'x': 7}, '{"x": "y"}': {'x': 'y'}},
    'too deep': make_nested(70),
}
MISSING = object()
# What Python says differs between its versions.
OF_PYTHON = re.compile('(malformed|not JSON): .*')


def read_answer(call: Callable[[Placement], object]) -> Callable[[bytes], object]:
    """Make a reader of an answer, which raises ValueError where the product is Unreachable."""

    def read(body: bytes) -> object:
        client = CannedPlacement('http://nowhere.invalid')
        client.body = body
        try:
            return call(client)
        except Unreachable as error:
            if 'not as placement does' not in str(error):
                raise
            raise ValueError('not as placement does') from error

    return read


ANSWER_PARSERS: dict[str, Callable[[Placement], object]] = {
    'candidates': lambda client: allocations.read_candidates(client, 'resources=VCPU:1'),
    'consumer': lambda client: allocations.read_consumer(client, INSTANCE),
    'of provider': lambda client: allocations.read_provider_allocations(client, COMPUTE),
    'inventory': lambda client: providers.read_raw_inventory(client, COMPUTE),
    'set inventory': lambda client: providers.set_inventory(client, COMPUTE, {'VCPU': {'total': 1}}),
    'usages': lambda client: providers.read_usages(client, COMPUTE),
    'project': lambda client: providers.read_project_usages(client, 'p'),
    'names': providers.read_provider_names,
    'name': lambda client: providers.read_provider_name(client, COMPUTE),
    'shares': lambda client: providers.read_rooms(client, [COMPUTE]),
    'traits': lambda client: providers.read_names(client, COMPUTE, providers.TRAITS),
}
# What parses a value of this kind, where READERS checks more than that.
PARSERS: dict[str, Callable[[bytes], object]] = {
    'request': lambda value: order.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), value),
    'record': lambda value: record.from_json(value, INSTANCE),
    'waiting': lambda value: queue.parse_queue_entry(keys.queue('f', INSTANCE), value),
    'group': lambda value: decode(group.Group, value, name='g'),
    'quota': lambda value: decode(quota.Quota, value, project='p'),
    'flavor': lambda value: decode(flavor.Flavor, value, name='f'),
    'stack': lambda value: decode(stack.Stack, value, name='shop'),
    'report': lambda value: parse_report(COMPUTE, value),
    'user-data': lambda value: parse_shared_user_data(value, SHARED.sha256),
    'compute': lambda value: decode_lenient(host.PresenceFacts, value),
    'facts': parse_facts,
    'hostname': lambda value: decode_lenient(host.StoredHostname, value),
    'trouble': lambda value: decode(trouble.Trouble, value),
    'name': lambda value: decode(order.NameOwner, value),
    'announced': lambda value: order.parse_attempt_instances(keys.attempt(INSTANCE), value),
    'taker': lambda value: decode_lenient(queue.QueueTaker, value),
    'cluster': lambda value: decode(cluster.ClusterIdentity, value),
    'known': lambda value: decode(cluster.KnownCluster, value),
    'released': released_from_json,
    **{f'answer {name}': read_answer(call) for name, call in ANSWER_PARSERS.items()},
}
VALID_VALUES = {
    **{name: valid for name, (_, valid) in READERS.items() if name in PARSERS},
    'hostname': {'version': 1, 'hostname': 'hv1', 'leases': [7, 8]},
    **{f'answer {name}': CALLS_AND_ANSWERS[name][1] for name in ANSWER_PARSERS},
}
VALID_VALUES['compute'] = {**VALID_VALUES['compute'], **{'kind': 'kvm', 'queues': True}}
VALID_VALUES['record'] = {
    **VALID_VALUES['record'],
    'boots': [{'number': 1, 'reason': 'created', 'stages': {'started': '2026-01-31T12:00:01.000Z'}}],
}


def iterate_places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield place
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from iterate_places(value[key], (*place, key))


def replace_at(value: Any, place: tuple[str | int, ...], new: Any) -> Any:
    """Return a copy of the value that has `new` at this place, or nothing there for MISSING."""
    if not place:
        return new
    changed = copy.deepcopy(value)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    if new is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = new
    return changed


def encode(value: Any) -> bytes:
    text = json.dumps(value)
    for name, raw in RAW_JSON.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


class Outcome(NamedTuple):
    parsed: object
    reason: str = ''


def parse_or_refuse(name: str, value: Any) -> Outcome:
    try:
        parsed = PARSERS[name](encode(value))
    except ValueError as error:
        return Outcome(None, str(error))
    if isinstance(parsed, Facts) and parsed.problem:
        return Outcome(None, parsed.problem)
    return Outcome(None, parsed.reason) if isinstance(parsed, order.InvalidRequest) else Outcome(parsed)


def describe_field(name: str, place: tuple[str | int, ...]) -> str:
    """Describe what happens to a value that is wrong at this place, in one line.

    A letter for each wrong value, the last for a missing one: `-` refused, `=` ignored, as if it were valid, `.` as
    if it were missing, `^` as if what contains it were missing, `+` read.
    """
    valid = VALID_VALUES[name]
    letter_by_outcome = [('=', parse_or_refuse(name, valid))]
    letter_by_outcome += [('.', parse_or_refuse(name, replace_at(valid, place, MISSING)))] if place else []
    letter_by_outcome += [('^', parse_or_refuse(name, replace_at(valid, place[:-1], MISSING)))] if place[1:] else []
    letters, reasons = '', []
    for wrong in [*WRONG_VALUES.values(), MISSING][: None if place else -1]:
        outcome = parse_or_refuse(name, replace_at(valid, place, wrong))
        if outcome.reason:
            reasons.append(OF_PYTHON.sub(r'\1', outcome.reason))
            assert outcome.reason.isprintable(), outcome.reason
            assert len(outcome.reason) <= 2000
            letters += '-'
        else:
            letters += next((letter for letter, other in letter_by_outcome if other == outcome), '+')
    path = '.'.join(map(str, (name, *place)))
    return f'{path} {letters} {reasons[0][:110] if reasons else ""}'.rstrip()


def test_every_reader_has_a_parser() -> None:
    answers = {f'answer {name}' for name in ANSWER_PARSERS}
    assert PARSERS.keys() - answers | {'tombstone'} == READERS.keys() | {'hostname'}


def test_wrong_field_is_refused_or_ignored() -> None:
    lines = [describe_field(name, place) for name, valid in VALID_VALUES.items() for place in iterate_places(valid)]
    heading = f'# {", ".join(WRONG_VALUES)}, missing'
    compare_with_file(Path(__file__).with_name('fields.txt'), '\n'.join([heading, *lines]) + '\n')
