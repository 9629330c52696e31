"""Index a soak's history: each command with its answer, and the time of each fault. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from bench.soak.history import Line
from tests.kit import history as judging
from tests.kit.ending import StoredValue

NOTIFIED = re.compile(r'NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})\n')
IN_TREE = re.compile(r'in_tree=([0-9a-f-]{36})')
CONTROL_FAULTS = ('etcd-kill', 'etcd-freeze', 'placement-kill', 'placement-freeze')
SILENCING_FAULTS = (*CONTROL_FAULTS, 'cut', 'partition')
NEVER_ENDED = float('inf')


class Placement(NamedTuple):
    """The compute and the instance of a NOTIFIED line."""

    compute: str
    instance: str


@dataclass(frozen=True)
class Command:
    """One command and its answer.

    `instance` is the uuid in the command. If the command hung, `end` is infinite and `code` None.
    """

    number: int
    t: float
    end: float
    kind: str
    argv: tuple[str, ...]
    instance: str | None
    image: str
    proxied: bool
    trouble: str
    frozen: float
    code: int | None
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return f'{self.kind} {self.number} at {self.t} (exit {self.code})'

    @property
    def notified(self) -> Placement | None:
        """Return the placement that the command acknowledged, even if --wait failed later."""
        match = NOTIFIED.match(self.stdout) if self.kind == 'create' else None
        return Placement(match[1], match[2]) if match else None

    @property
    def required_compute(self) -> str | None:
        """Return the only compute that the query allows, or None."""
        match = IN_TREE.search(self.argv[0])
        return match[1] if match else None


class Span(NamedTuple):
    """A fault, from its beginning until the part that it hit has recovered."""

    kind: str
    target: str
    begin: float
    end: float
    instance: str | None


class HistoryIndex:
    """Queries on a history."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.computes: dict[str, Any] = next(self.iter_lines('plan'), {}).get('computes', {})
        self.final = next(self.iter_lines('final'), None)

    def iter_lines(self, what: str) -> Iterator[Line]:
        """Return the lines of one kind."""
        return (line for line in self.lines if line['what'] == what)

    @property
    def planes(self) -> dict[str, Any]:
        """Return all planes at the end."""
        assert self.final is not None  # the validator checks this first
        planes: dict[str, Any] = self.final['planes']
        return planes

    @cached_property
    def commands(self) -> list[Command]:
        """Return every command, in order."""
        answers = {line['id']: line for line in self.iter_lines('answer')}
        no_answer = {'t': NEVER_ENDED, 'code': None, 'stdout': '', 'stderr': '', 'seconds': NEVER_ENDED}
        asks = []
        for line in self.iter_lines('ask'):
            answer = answers.get(line['id'], no_answer)
            request = {name: line[name] for name in ('t', 'kind', 'instance', 'image', 'proxied', 'trouble', 'frozen')}
            reply = {name: answer[name] for name in ('code', 'stdout', 'stderr', 'seconds')}
            asks.append(Command(line['id'], end=answer['t'], argv=tuple(line['argv']), **request, **reply))
        return asks

    @cached_property
    def creates(self) -> dict[str, list[Command]]:
        """Return the creates of each instance whose uuid is known, from --uuid or the answer."""
        by_instance: dict[str, list[Command]] = {}
        for ask in self.commands:
            instance = ask.notified.instance if ask.notified else ask.instance
            if ask.kind == 'create' and instance is not None:
                by_instance.setdefault(instance, []).append(ask)
        return by_instance

    @cached_property
    def acknowledged(self) -> dict[str, list[Command]]:
        """Return the creates of each instance that were answered NOTIFIED."""
        notified = {instance: [ask for ask in asks if ask.notified] for instance, asks in self.creates.items()}
        return {instance: asks for instance, asks in notified.items() if asks}

    def list_accepted_destroys(self, instance: str) -> list[Command]:
        """Return the destroys of an instance that were, or may have been, accepted."""
        return [
            ask
            for ask in self.commands
            if ask.kind == 'destroy' and ask.instance == instance and ask.code not in (2, 4, 5)
        ]

    @cached_property
    def history(self) -> judging.History:
        """Convert to the history that the judge of every test reads."""
        asks = [judging.CommandRun(ask.argv, ask.code, ask.stdout, ask.stderr, ask.t, ask.end) for ask in self.commands]
        changes = [
            judging.Change(
                line['revision'], line['key'], line['value'] and StoredValue(line['value'].encode(), line['lease'])
            )
            for line in self.iter_lines('change')
        ]
        return judging.History(asks, {}, changes, self.planes['allocations'], self.planes['capacity'])

    @cached_property
    def faults(self) -> list[Span]:
        """Return every fault."""
        end_times = {line['id']: line['t'] for line in self.iter_lines('over')}
        recovery_times = {line['id']: line['t'] for line in self.iter_lines('recovered')}
        spans = []
        for line in self.iter_lines('fault'):
            default_end = line['t'] if line['seconds'] == 0 else NEVER_ENDED
            end = recovery_times.get(line['id']) or end_times.get(line['id']) or default_end
            spans.append(Span(line['kind'], line['target'], line['t'], end, line.get('instance')))
        return spans

    @property
    def killed_guests(self) -> set[str | None]:
        """Return the instances whose QEMU was killed."""
        return {fault.instance for fault in self.faults if fault.kind == 'qemu-kill'}

    def had_outage(self, begin: float, end: float) -> bool:
        """Return True if a part of the control plane was away in this period."""
        return any(fault.kind in CONTROL_FAULTS and fault.begin < end and fault.end > begin for fault in self.faults)

    def may_have_silenced_computes(self, begin: float, end: float, long: float) -> bool:
        """Return True if computes may have been silent.

        That is so if a fault between them and etcd lasted `long` seconds or more.
        """
        return any(
            fault.kind in SILENCING_FAULTS
            and fault.begin < end
            and fault.end > begin
            and fault.end - fault.begin >= long
            for fault in self.faults
        )

    def was_disturbed(self, name: str, begin: float, end: float) -> bool:
        """Return True if a fault or an exit hit a compute in this period."""
        return any(fault.target == name and fault.begin < end and fault.end > begin for fault in self.faults) or any(
            line['part'].startswith(name) and begin < line['t'] < end for line in self.iter_lines('exit')
        )

    def max_held(self, ask: Command, compute: str | None) -> int:
        """Return the maximum number of other instances that can have held room during `ask`.

        With `compute`, only room on that compute counts.
        """
        ends = (line for line in self.iter_lines('state') if line['state'] in ('gone', 'error'))
        finished = {line['instance'] for line in ends if line['t'] < ask.t}
        held = set()
        for other in self.commands:
            if other.kind != 'create' or other is ask or other.t > ask.end:
                continue
            placed = other.notified
            name = placed.instance if placed else other.instance
            refused = other.code in (2, 3, 5) and other.end < ask.t
            elsewhere = (
                compute is not None and (placed.compute if placed else other.required_compute or compute) != compute
            )
            if name not in finished and not refused and not elsewhere:
                held.add(name or f'of {other.number}')
        return len(held)
