"""What a soak's history must not show. Pure: lines in, violations out; run it on a file to see them.

    python -m tests.faults.validator HISTORY.jsonl

What can be checked of a refusal for lack of capacity: nobody knows what placement held at that moment, but there is a
most that it can have held: every instance that was asked for and not yet seen to end. A refusal is wrong when the
computes that nothing had happened to had more room than that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faults.history import Line, read
from tests.faults.soak_account import Account, Ask
from tests.kit.history import judge

DEADLINE = 60.0
"""Seconds an eschedule may take, --wait and being frozen apart: some calls of 5 s to etcd, one of 30 s to placement."""
WAIT = 30.0
LONG = 10.0
"""Seconds of a control plane's fault from which on computes may count as silent: their lease is 30 s."""
AFTER = 15.0
"""Seconds after a fault's end in which its consequences may still be met."""
LIVING = {'active', 'stopped'}
CODES = {'create': {0, 3, 5, 7}, 'destroy': {0, 4, 5, 7}}
WAITING = {'create': {1, 4, 6}, 'destroy': {6}}
"""What --wait adds."""
MORE_FDS, MORE_THREADS = 20, 16
"""What an ecompute may have more at the end than before the first request: its pools of threads fill as needed."""


class Violation(NamedTuple):
    """`kind` is history (what the judge of every test finds), lost, doubled, leaked, answer, late, refused, crash,
    growth or audit.
    """

    kind: str
    text: str


def violations(lines: Sequence[Line]) -> list[Violation]:
    """Everything in a history that must not be."""
    account = Account(lines)
    if account.final is None:
        return [Violation('lost', 'the run ended before everything was looked at')]
    rules = (_answers, _refusals, _judged, _fates, _guests, _parts, _growth, _audit)
    return [found for rule in rules for found in rule(account)]


def _answers(account: Account) -> Iterator[Violation]:
    """Each command: its time, its code and its words."""
    for ask in account.asks:
        if ask.code is None:
            yield Violation('late', f'{ask}: did not end')
            continue
        waited = WAIT if '--timeout' in ask.argv else 0.0
        if ask.seconds > DEADLINE + waited + ask.frozen:
            yield Violation('late', f'{ask}: took {ask.seconds} s')
        wrong = _wrong_words(ask)
        if wrong:
            yield Violation('answer', f'{ask}: {wrong}: {ask.stdout!r} {ask.stderr!r}')
        wrong = _wrong_code(account, ask)
        if wrong:
            yield Violation('answer', f'{ask}: {wrong}: {ask.stderr!r}')
        if ask.kind == 'destroy' and ask.code == 4:
            yield from _not_found(account, ask)


def _wrong_words(ask: Ask) -> str | None:
    if ask.code is not None and ask.code < 0 and not ask.trouble.startswith(('kill', 'at')):
        return f'ended by signal {-ask.code}, which nobody sent'
    allowed = CODES[ask.kind] | (WAITING[ask.kind] if '--timeout' in ask.argv else set())
    if ask.code is not None and ask.code >= 0 and ask.code not in allowed:
        return f'exit {ask.code} means nothing here'
    placed = ask.notified is not None
    # One that was killed, or whose --wait ended otherwise, may have said where it placed it.
    right = placed or not ask.stdout
    if ask.kind == 'create' and ask.code in (0, 3):
        right = placed if ask.code == 0 else ask.stdout == 'NO ALLOCATIONS LEFT\n'
    if not right:
        return 'not what belongs on stdout'
    lines = ask.stderr.splitlines()
    if any(not line.startswith('eschedule: ') or 'Traceback' in line for line in lines):
        return 'stderr is not lines for a person'
    if ask.code is not None and ask.code > 0 and not lines:
        return 'a failure without a reason'
    return None


def _wrong_code(account: Account, ask: Ask) -> str | None:
    if ask.code == 7 and not ask.proxied and not account.outage(ask.t - AFTER, ask.end):
        return 'a backend could not be reached, and nothing was wrong with it'
    if ask.code == 5 and ask.kind == 'create' and 'not delivered' not in ask.stderr:
        same = [each for each in account.asks if each.instance == ask.instance and each is not ask]
        if ask.instance is None or not any(each.t < ask.end for each in same):
            return 'a conflict with nobody'
    if ask.code == 4 and ask.kind == 'create' and not (ask.notified and account.destroys(ask.notified.instance)):
        return 'nobody destroyed what it waits for'
    return None


def _not_found(account: Account, ask: Ask) -> Iterator[Violation]:
    assert ask.instance is not None  # a destroy names one
    others = [each for each in account.destroys(ask.instance) if each is not ask and each.t < ask.end]
    known = [each for each in account.acknowledged.get(ask.instance, []) if each.end < ask.t]
    if 'gone since' in ask.stderr and not others:
        yield Violation('lost', f'{ask}: it is gone, and nobody asked for that')
    if 'gone since' not in ask.stderr and known and not others:
        yield Violation('lost', f'{ask}: it is not known, and {known[0]} placed it')


def _refusals(account: Account) -> Iterator[Violation]:
    for ask in account.asks:
        if ask.kind != 'create' or ask.code != 3 or account.silenced(ask.t - DEADLINE, ask.end, LONG):
            continue
        wanted = ask.in_tree
        undisturbed = [
            uuid
            for uuid, each in account.computes.items()
            if wanted in (None, uuid) and not account.disturbed(each['name'], ask.t - AFTER, ask.end)
        ]
        room = sum(account.computes[uuid]['slots'] for uuid in undisturbed)
        most = account.most_held(ask, wanted)
        if most < room:
            yield Violation('refused', f'{ask}: at most {most} instances, and room for {room}')


def _judged(account: Account) -> Iterator[Violation]:
    """What every test is judged by: the commands, and all that etcd held meanwhile."""
    found = judge(account.history)
    yield from (Violation('history', text) for text in [*found.never, *found.still])


def _fates(account: Account) -> Iterator[Violation]:
    """What became of an instance has a cause that the soak knows."""
    records = account.planes['records']
    for instance, asks in account.acknowledged.items():
        record = records.get(instance)
        if record is None:
            continue
        state = record['state']
        if state == 'gone' and not account.destroys(instance):
            yield Violation('lost', f'{asks[0]}: {instance} is gone, and nobody asked for that')
        if state == 'stopped' and instance not in account.killed_guests:
            yield Violation('lost', f'{asks[0]}: {instance} is off, and nobody switched it off')
        if state in LIVING and asks[0].image == 'missing' and account.computes[record['compute']]['real']:
            yield Violation('answer', f'{asks[0]}: {instance} is {state} from an image that is not there')


def _guests(account: Account) -> Iterator[Violation]:
    """At the end: the guest of what lives is there once, and of all else nothing is left on any compute."""
    planes = account.planes
    where: dict[str, list[str]] = {}
    for compute, guests in planes['guests'].items():
        for instance in guests:
            where.setdefault(instance, []).append(compute)
    living = {name: record for name, record in planes['records'].items() if record['state'] in LIVING}
    for instance, record in living.items():
        state, compute = record['state'], record['compute']
        guest = planes['guests'].get(compute, {}).get(instance)
        if guest is None or not guest['disk'] or guest['running'] != (state == 'active'):
            yield Violation('lost', f'{instance}: {state} on {compute}, its guest there is {guest}')
    there = {'guest': list(where)}
    for compute, left in planes['left'].items():
        there[f'guest data on {compute}'] = left['guest data']
        if left['parts']:
            yield Violation('leaked', f'{compute}: {left["parts"]}')
    for what, names in there.items():
        yield from (Violation('leaked', f'{name}: a {what}, and no instance') for name in set(names) - living.keys())
    found = {name: sorted(each) for name, each in where.items() if len(each) > 1}
    yield from (Violation('doubled', f'{name}: guests on {computes}') for name, computes in found.items())


def _parts(account: Account) -> Iterator[Violation]:
    for line in account.lines:
        if line['what'] == 'exit' and line['ready']:
            yield Violation('crash', f'{line["part"]} ended by itself with {line["code"]} at {line["t"]}')
        if line['what'] == 'stuck':
            yield Violation('late', f'{line["part"]} did not end when asked to, at {line["t"]}')
    for compute, bad in account.planes['logs'].items():
        yield from (Violation('crash', f'{account.computes[compute]["name"]}: {line}') for line in bad)


def _growth(account: Account) -> Iterator[Violation]:
    first = {(line['compute'], line['pid']): line for line in account.of('process') if line['when'] == 'start'}
    for line in account.of('process'):
        before = first.get((line['compute'], line['pid']))
        if line['when'] != 'end' or before is None:
            continue
        for what, more in (('fds', MORE_FDS), ('threads', MORE_THREADS)):
            if line[what] > before[what] + more:
                name = account.computes[line['compute']]['name']
                yield Violation('growth', f'{name}: {before[what]} {what} at the start, {line[what]} at the end')


def _audit(account: Account) -> Iterator[Violation]:
    assert account.final is not None  # the first thing that is looked at
    yield from (Violation('audit', str(finding)) for finding in account.final['audit'])


def main(argv: Sequence[str]) -> int:
    """Print the violations of a history; 1 if there are any."""
    found = violations(read(Path(argv[0])))
    for kind, text in found:
        print(f'{kind}: {text}')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

