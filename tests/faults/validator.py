"""Find violations in a soak's history. Pure: lines in, violations out.

Run it on a file to print them:

    python -m tests.faults.validator HISTORY.jsonl

A refusal for lack of capacity is checked against an upper bound, because the allocations that placement had at that
moment are unknown: every instance that was requested and not yet reported as finished may have held room. A refusal is
wrong if the undisturbed computes had more room than that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faults.history import Line, read
from tests.faults.soak_account import Account, Ask
from tests.kit.history import judge

# Seconds that an eschedule may take, without --wait and frozen time: etcd calls of 5 s, a placement call of 30 s.
DEADLINE = 60.0
WAIT = 30.0
# Seconds of a control plane's fault after which computes may count as silent: their lease is 30 s.
LONG = 10.0
# Seconds after a fault's end during which its consequences may still appear.
AFTER = 15.0
LIVING = {'active', 'stopped'}
CODES = {'create': {0, 3, 5, 7}, 'destroy': {0, 4, 5, 7}}
# Further exit codes that --wait allows.
WAITING = {'create': {1, 4, 6}, 'destroy': {6}}
# Descriptors and threads that an ecompute may gain after the first request: its thread pools fill as needed.
MORE_FDS = 20
MORE_THREADS = 16


class Violation(NamedTuple):
    """A finding of the soak.

    `kind` is history (found by the judge of every test), lost, doubled, leaked, answer, late, refused, crash, growth or
    audit.
    """

    kind: str
    text: str


def violations(lines: Sequence[Line]) -> list[Violation]:
    """Return all violations in a history."""
    account = Account(lines)
    if account.final is None:
        return [Violation('lost', 'the run ended before everything was looked at')]
    rules = (_answers, _refusals, _judged, _fates, _guests, _parts, _growth, _audit)
    return [violation for rule in rules for violation in rule(account)]


def _answers(account: Account) -> Iterator[Violation]:
    """Check each command's time, exit code and output."""
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
    # A command that was killed, or whose --wait ended otherwise, may have printed the compute it used.
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
        same = [other for other in account.asks if other.instance == ask.instance and other is not ask]
        if ask.instance is None or not any(other.t < ask.end for other in same):
            return 'a conflict with nobody'
    if ask.code == 4 and ask.kind == 'create' and not (ask.notified and account.destroys(ask.notified.instance)):
        return 'nobody destroyed what it waits for'
    return None


def _not_found(account: Account, ask: Ask) -> Iterator[Violation]:
    assert ask.instance is not None  # a destroy always names an instance
    others = [other for other in account.destroys(ask.instance) if other is not ask and other.t < ask.end]
    earlier_creates = [other for other in account.acknowledged.get(ask.instance, []) if other.end < ask.t]
    if 'gone since' in ask.stderr and not others:
        yield Violation('lost', f'{ask}: it is gone, and nobody asked for that')
    if 'gone since' not in ask.stderr and earlier_creates and not others:
        yield Violation('lost', f'{ask}: it is not known, and {earlier_creates[0]} placed it')


def _refusals(account: Account) -> Iterator[Violation]:
    for ask in account.asks:
        if ask.kind != 'create' or ask.code != 3 or account.silenced(ask.t - DEADLINE, ask.end, LONG):
            continue
        compute = ask.in_tree
        undisturbed = [
            uuid
            for uuid, facts in account.computes.items()
            if compute in (None, uuid) and not account.disturbed(facts['name'], ask.t - AFTER, ask.end)
        ]
        room = sum(account.computes[uuid]['slots'] for uuid in undisturbed)
        max_held = account.most_held(ask, compute)
        if max_held < room:
            yield Violation('refused', f'{ask}: at most {max_held} instances, and room for {room}')


def _judged(account: Account) -> Iterator[Violation]:
    """Report the findings of the judge of every test: the commands and all changes of etcd."""
    judgement = judge(account.history)
    yield from (Violation('history', text) for text in [*judgement.never, *judgement.still])


def _fates(account: Account) -> Iterator[Violation]:
    """Check that every instance's final state has a cause known to the soak."""
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
    """Check that every living instance has exactly one guest, and that nothing else is left."""
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
    owners_by_kind = {'guest': list(where)}
    for compute, leftovers in planes['left'].items():
        owners_by_kind[f'guest data on {compute}'] = leftovers['guest data']
        if leftovers['parts']:
            yield Violation('leaked', f'{compute}: {leftovers["parts"]}')
    for kind, names in owners_by_kind.items():
        yield from (Violation('leaked', f'{name}: a {kind}, and no instance') for name in set(names) - living.keys())
    doubled = {name: sorted(owners) for name, owners in where.items() if len(owners) > 1}
    yield from (Violation('doubled', f'{name}: guests on {computes}') for name, computes in doubled.items())


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
        for kind, allowed in (('fds', MORE_FDS), ('threads', MORE_THREADS)):
            if line[kind] > before[kind] + allowed:
                name = account.computes[line['compute']]['name']
                yield Violation('growth', f'{name}: {before[kind]} {kind} at the start, {line[kind]} at the end')


def _audit(account: Account) -> Iterator[Violation]:
    assert account.final is not None  # find_violations() checks this first
    yield from (Violation('audit', str(finding)) for finding in account.final['audit'])


def main(argv: Sequence[str]) -> int:
    """Print the violations of a history; return 1 if there are any."""
    all_violations = violations(read(Path(argv[0])))
    for kind, text in all_violations:
        print(f'{kind}: {text}')
    return 1 if all_violations else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

