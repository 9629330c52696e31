"""Find violations in a soak's history. Pure: lines in, violations out.

Run it on a file to print them:

    python -m bench.soak.validator HISTORY.jsonl

A refusal for lack of capacity is checked against an upper bound, because the allocations that placement had at that
moment are unknown: every instance that was requested and not yet reported as finished may have held room. A refusal is
wrong if the undisturbed computes had more room than that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.soak.account import Command, HistoryIndex
from bench.soak.history import Line, read_history
from tests.kit.history import judge

# Seconds that an eschedule may take, without --wait and frozen time: etcd calls of 5 s, a placement call of 30 s.
MAX_COMMAND_SECONDS = 60.0
WAIT_TIMEOUT_SECONDS = 30.0
# Seconds of a control plane's fault after which computes may count as silent: their lease is 30 s.
SILENCING_SECONDS = 10.0
# Seconds after a fault's end during which its consequences may still appear.
AFTERMATH_SECONDS = 15.0
LIVING_STATES = {'active', 'stopped'}
EXIT_CODES = {'create': {0, 3, 5, 7}, 'destroy': {0, 4, 5, 7}}
# Further exit codes that --wait allows.
WAIT_EXIT_CODES = {'create': {1, 4, 6}, 'destroy': {6}}
# Descriptors and threads that an ecompute may gain after the first request: its thread pools fill as needed.
MAX_MORE_FDS = 20
MAX_MORE_THREADS = 16


class Violation(NamedTuple):
    """A finding of the soak.

    `kind` is history (found by the judge of every test), lost, doubled, leaked, answer, late, refused, crash, growth or
    audit.
    """

    kind: str
    text: str


def find_violations(lines: Sequence[Line]) -> list[Violation]:
    """Return all violations in a history."""
    account = HistoryIndex(lines)
    if account.final is None:
        return [Violation('lost', 'the run ended before everything was looked at')]
    rules = (
        _check_answers,
        _check_refusals,
        _check_history,
        _check_final_states,
        _check_guests,
        _check_parts,
        _check_growth,
        _check_audit,
    )
    return [violation for rule in rules for violation in rule(account)]


def _check_answers(account: HistoryIndex) -> Iterator[Violation]:
    """Check each command's time, exit code and output."""
    for ask in account.commands:
        if ask.code is None:
            yield Violation('late', f'{ask}: did not end')
            continue
        waited = WAIT_TIMEOUT_SECONDS if '--timeout' in ask.argv else 0.0
        if ask.seconds > MAX_COMMAND_SECONDS + waited + ask.frozen:
            yield Violation('late', f'{ask}: took {ask.seconds} s')
        wrong = _find_wrong_output(ask)
        if wrong:
            yield Violation('answer', f'{ask}: {wrong}: {ask.stdout!r} {ask.stderr!r}')
        wrong = _find_wrong_code(account, ask)
        if wrong:
            yield Violation('answer', f'{ask}: {wrong}: {ask.stderr!r}')
        if ask.kind == 'destroy' and ask.code == 4:
            yield from _check_not_found(account, ask)


def _find_wrong_output(ask: Command) -> str | None:
    if ask.code is not None and ask.code < 0 and not ask.trouble.startswith(('kill', 'at')):
        return f'ended by signal {-ask.code}, which nobody sent'
    allowed = EXIT_CODES[ask.kind] | (WAIT_EXIT_CODES[ask.kind] if '--timeout' in ask.argv else set())
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


def _find_wrong_code(account: HistoryIndex, ask: Command) -> str | None:
    if ask.code == 7 and not ask.proxied and not account.had_outage(ask.t - AFTERMATH_SECONDS, ask.end):
        return 'a backend could not be reached, and nothing was wrong with it'
    if ask.code == 5 and ask.kind == 'create' and 'not delivered' not in ask.stderr:
        same = [other for other in account.commands if other.instance == ask.instance and other is not ask]
        if ask.instance is None or not any(other.t < ask.end for other in same):
            return 'a conflict with nobody'
    if (
        ask.code == 4
        and ask.kind == 'create'
        and not (ask.notified and account.list_accepted_destroys(ask.notified.instance))
    ):
        return 'nobody destroyed what it waits for'
    return None


def _check_not_found(account: HistoryIndex, ask: Command) -> Iterator[Violation]:
    assert ask.instance is not None  # a destroy always names an instance
    others = [other for other in account.list_accepted_destroys(ask.instance) if other is not ask and other.t < ask.end]
    earlier_creates = [other for other in account.acknowledged.get(ask.instance, []) if other.end < ask.t]
    if 'gone since' in ask.stderr and not others:
        yield Violation('lost', f'{ask}: it is gone, and nobody asked for that')
    if 'gone since' not in ask.stderr and earlier_creates and not others:
        yield Violation('lost', f'{ask}: it is not known, and {earlier_creates[0]} placed it')


def _check_refusals(account: HistoryIndex) -> Iterator[Violation]:
    for ask in account.commands:
        if (
            ask.kind != 'create'
            or ask.code != 3
            or account.may_have_silenced_computes(ask.t - MAX_COMMAND_SECONDS, ask.end, SILENCING_SECONDS)
        ):
            continue
        compute = ask.required_compute
        undisturbed = [
            uuid
            for uuid, facts in account.computes.items()
            if compute in (None, uuid) and not account.was_disturbed(facts['name'], ask.t - AFTERMATH_SECONDS, ask.end)
        ]
        room = sum(account.computes[uuid]['slots'] for uuid in undisturbed)
        max_held = account.max_held(ask, compute)
        if max_held < room:
            yield Violation('refused', f'{ask}: at most {max_held} instances, and room for {room}')


def _check_history(account: HistoryIndex) -> Iterator[Violation]:
    """Report the findings of the judge of every test: the commands and all changes of etcd."""
    judgement = judge(account.history)
    yield from (Violation('history', text) for text in [*judgement.permanent, *judgement.pending])


def _check_final_states(account: HistoryIndex) -> Iterator[Violation]:
    """Check that every instance's final state has a cause known to the soak."""
    records = account.planes['records']
    for instance, asks in account.acknowledged.items():
        record = records.get(instance)
        if record is None:
            continue
        state = record['state']
        if state == 'gone' and not account.list_accepted_destroys(instance):
            yield Violation('lost', f'{asks[0]}: {instance} is gone, and nobody asked for that')
        if state == 'stopped' and instance not in account.killed_guests:
            yield Violation('lost', f'{asks[0]}: {instance} is off, and nobody switched it off')
        if state in LIVING_STATES and asks[0].image == 'missing' and account.computes[record['compute']]['real']:
            yield Violation('answer', f'{asks[0]}: {instance} is {state} from an image that is not there')


def _check_guests(account: HistoryIndex) -> Iterator[Violation]:
    """Check that every living instance has exactly one guest, and that nothing else is left."""
    planes = account.planes
    where: dict[str, list[str]] = {}
    for compute, guests in planes['guests'].items():
        for instance in guests:
            where.setdefault(instance, []).append(compute)
    living = {name: record for name, record in planes['records'].items() if record['state'] in LIVING_STATES}
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


def _check_parts(account: HistoryIndex) -> Iterator[Violation]:
    for line in account.lines:
        if line['what'] == 'exit' and line['ready']:
            yield Violation('crash', f'{line["part"]} ended by itself with {line["code"]} at {line["t"]}')
        if line['what'] == 'stuck':
            yield Violation('late', f'{line["part"]} did not end when asked to, at {line["t"]}')
    for compute, bad in account.planes['logs'].items():
        yield from (Violation('crash', f'{account.computes[compute]["name"]}: {line}') for line in bad)


def _check_growth(account: HistoryIndex) -> Iterator[Violation]:
    first = {(line['compute'], line['pid']): line for line in account.iter_lines('process') if line['when'] == 'start'}
    for line in account.iter_lines('process'):
        before = first.get((line['compute'], line['pid']))
        if line['when'] != 'end' or before is None:
            continue
        for kind, allowed in (('fds', MAX_MORE_FDS), ('threads', MAX_MORE_THREADS)):
            if line[kind] > before[kind] + allowed:
                name = account.computes[line['compute']]['name']
                yield Violation('growth', f'{name}: {before[kind]} {kind} at the start, {line[kind]} at the end')


def _check_audit(account: HistoryIndex) -> Iterator[Violation]:
    assert account.final is not None  # find_violations() checks this first
    yield from (Violation('audit', str(finding)) for finding in account.final['audit'])


def main(argv: Sequence[str]) -> int:
    """Print the violations of a history; return 1 if there are any."""
    all_violations = find_violations(read_history(Path(argv[0])))
    for kind, text in all_violations:
        print(f'{kind}: {text}')
    return 1 if all_violations else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
