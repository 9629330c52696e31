"""Format a schedule as a story: its steps, each with its actor, call and outcome."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ecomp.store.client import Entry, Put, Snapshot
from tests.model.acting import ANSWER, HALVES, INTERRUPT, KILL, LATE, READ, REQUEST, Call, Step
from tests.model.world import World

FAULT_TEXTS = {
    KILL: 'and is killed before that',
    REQUEST: 'and the request is lost on its way',
    ANSWER: 'which is done, and the answer is lost',
    LATE: 'and hears nothing: the request is still on its way',
    HALVES: 'of which the first half is done',
    INTERRUPT: 'and is interrupted by Ctrl-C before that',
    READ: 'and hears nothing',
}


def format_story(world: World) -> str:
    lines = []
    for number, step in enumerate(world.steps, 1):
        lines.append(f'{number:4}. {_format_step(step)}')
    text = '\n'.join(lines)
    for uuid, name in world.names.items():
        text = text.replace(uuid, name)
    return text


def _format_step(step: Step) -> str:
    if step.call is None:
        return f'-- {step.fate} --'
    sentence = f'{step.actor} {CALL_FORMATTERS[step.call.service](step.call)}'
    if step.fate in (KILL, REQUEST, LATE, INTERRUPT, READ):
        return f'{sentence}, {"and placement is killed before that" if step.call.is_second else FAULT_TEXTS[step.fate]}'
    answer = _format_answer(step)
    return f'{sentence}{f": {answer}" if answer else ""}{f", {FAULT_TEXTS[step.fate]}" if step.fate else ""}'


def _format_etcd_call(call: Call) -> str:
    kind, *rest = call.operation
    if kind == 'commit':
        conditions, operations = rest
        writes = [f'{"puts" if isinstance(write, Put) else "deletes"} {write.key}' for write in operations]  # type: ignore[attr-defined]
        compared = ', '.join(dict.fromkeys(key for key, _ in conditions))  # type: ignore[attr-defined]
        return ' and '.join(writes or ['compares']) + (f' (if {compared} is as it was)' if compared else '')
    words = {
        'get': 'reads', 'read': 'reads', 'list': 'lists', 'count': 'counts', 'around': 'reads a few of',
        'grant': 'has a lease granted, of seconds:', 'keep': 'keeps its lease', 'revoke': 'ends its lease',
    }  # fmt: skip
    return f'{words[str(kind)]} {rest[0]}'


def _format_placement_call(call: Call) -> str:
    operation = list(call.operation)
    prefix = 'has placement go on with the second half: ' if call.is_second else ''
    method, path, body = [*operation[call.is_second :], None][:3]
    path = str(path)
    if method == 'GET':
        resource = path.split('?')[0].strip('/').split('/')
        if resource[0] == 'allocations':
            return f'asks placement for the claim of {resource[1]}'
        if resource[0] == 'allocation_candidates':
            return 'asks placement who could'
        return f'asks placement for {path[:120]}'
    data = json.loads(str(body))
    if method == 'PUT' and path.startswith('/allocations/'):
        data = {path.rsplit('/', 1)[-1]: data}
    elif path != '/allocations':
        return f'{method} {path}'
    return prefix + ' and '.join(_format_claim(name, claim) for name, claim in data.items())


def _format_claim(name: str, body: dict[str, Any]) -> str:
    providers = ', '.join(body['allocations'])
    generation = 'null' if body['consumer_generation'] is None else body['consumer_generation']
    action = f'claims {providers} for {name}' if providers else f'releases the claim of {name}'
    return f'{action}, with generation {generation}'


CALL_FORMATTERS: dict[str, Callable[[Call], str]] = {
    'etcd': _format_etcd_call,
    'placement': _format_placement_call,
    'disk': lambda call: f'writes {call.operation[2]} into the state directory of {call.operation[1]}',
    'libvirt': lambda call: ' of '.join(map(str, call.operation)),
    'clock': lambda call: (
        f'sleeps {call.operation[1]} s' if call.operation[0] == 'sleeps' else f'waits for {call.operation[1]}'
    ),
    '': lambda _: 'begins',
}


def _format_answer(step: Step) -> str:
    call, answer = step.call, step.answer
    assert call is not None
    if isinstance(answer, Exception):
        return f'{type(answer).__name__}, {answer}'
    if call.service == 'etcd':
        if isinstance(answer, Snapshot):
            return ', '.join(answer.entries) or 'nothing is there'
        if isinstance(answer, Entry):
            return f'it is there, of revision {answer.revision}'
        if call.operation[0] == 'commit':
            return 'refused' if answer is None else f'done, at revision {answer}'
        return 'it is not there' if call.operation[0] == 'get' else ''
    if call.service == 'placement' and isinstance(answer, dict):
        return _format_placement_answer(answer)
    return 'done' if call.service == 'placement' else ''


def _format_placement_answer(answer: dict[str, Any]) -> str:
    if 'consumer_generation' in answer:
        return f'generation {answer["consumer_generation"]}, on {", ".join(answer["allocations"])}'
    if 'allocation_requests' in answer:
        providers = [provider for request in answer['allocation_requests'] for provider in request['allocations']]
        return ', '.join(providers) or 'nobody'
    if 'allocations' in answer:
        return ', '.join(answer['allocations']) or 'nothing is held'
    return str(answer)[:120]
