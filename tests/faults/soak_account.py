"""A soak's history, sorted: who asked for what and was told what, which fault was when. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tests.faults.history import Line
from tests.kit import history as judging
from tests.kit.ending import Kept

NOTIFIED = re.compile(r'NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})\n')
IN_TREE = re.compile(r'in_tree=([0-9a-f-]{36})')
CONTROL = ('etcd-kill', 'etcd-freeze', 'placement-kill', 'placement-freeze')
SILENCING = (*CONTROL, 'cut', 'partition')
FOR_EVER = float('inf')


class Placed(NamedTuple):
    """What a NOTIFIED line says."""

    compute: str
    instance: str


@dataclass(frozen=True)
class Ask:
    """One command and its answer. `instance` is the uuid it named; `end` is never, and `code` None, if it hung."""

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
    def notified(self) -> Placed | None:
        """Where it placed which instance: that is the acknowledgement, whatever --wait said later."""
        found = NOTIFIED.match(self.stdout) if self.kind == 'create' else None
        return Placed(found[1], found[2]) if found else None

    @property
    def in_tree(self) -> str | None:
        """The one compute it wanted."""
        found = IN_TREE.search(self.argv[0])
        return found[1] if found else None


class Span(NamedTuple):
    """A fault: from its beginning until what it hit was itself again."""

    kind: str
    target: str
    begin: float
    end: float
    instance: str | None


class Account:
    """Questions to a history."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.computes: dict[str, Any] = next(self.of('plan'), {}).get('computes', {})
        self.final = next(self.of('final'), None)

    def of(self, what: str) -> Iterator[Line]:
        """The lines of a kind."""
        return (line for line in self.lines if line['what'] == what)

    @property
    def planes(self) -> dict[str, Any]:
        """All planes at the end."""
        assert self.final is not None  # the first thing that is looked at
        planes: dict[str, Any] = self.final['planes']
        return planes

    @cached_property
    def asks(self) -> list[Ask]:
        """Every command, in order."""
        answers = {line['id']: line for line in self.of('answer')}
        nothing = {'t': FOR_EVER, 'code': None, 'stdout': '', 'stderr': '', 'seconds': FOR_EVER}
        found = []
        for line in self.of('ask'):
            answer = answers.get(line['id'], nothing)
            own = {name: line[name] for name in ('t', 'kind', 'instance', 'image', 'proxied', 'trouble', 'frozen')}
            said = {name: answer[name] for name in ('code', 'stdout', 'stderr', 'seconds')}
            found.append(Ask(line['id'], end=answer['t'], argv=tuple(line['argv']), **own, **said))
        return found

    @cached_property
    def creates(self) -> dict[str, list[Ask]]:
        """The creates of each instance whose uuid is known, by --uuid or by the answer."""
        found: dict[str, list[Ask]] = {}
        for ask in self.asks:
            instance = ask.notified.instance if ask.notified else ask.instance
            if ask.kind == 'create' and instance is not None:
                found.setdefault(instance, []).append(ask)
        return found

    @cached_property
    def acknowledged(self) -> dict[str, list[Ask]]:
        """The creates of each instance that were told NOTIFIED."""
        told = {instance: [ask for ask in asks if ask.notified] for instance, asks in self.creates.items()}
        return {instance: asks for instance, asks in told.items() if asks}

    def destroys(self, instance: str) -> list[Ask]:
        """The destroys of an instance that were, or may have been, accepted."""
        return [
            ask
            for ask in self.asks
            if ask.kind == 'destroy' and ask.instance == instance and ask.code not in (2, 4, 5)
        ]

    @cached_property
    def history(self) -> judging.History:
        """What the judge of every test judges."""
        asks = [
            judging.Ask(each.argv, each.code, each.stdout, each.stderr, each.t, each.end) for each in self.asks
        ]
        changes = [
            judging.Change(line['revision'], line['key'], line['value'] and Kept(line['value'].encode(), line['lease']))
            for line in self.of('change')
        ]
        return judging.History(asks, {}, changes, self.planes['allocations'], self.planes['capacity'])

    @cached_property
    def faults(self) -> list[Span]:
        """Every fault."""
        over = {line['id']: line['t'] for line in self.of('over')}
        recovered = {line['id']: line['t'] for line in self.of('recovered')}
        found = []
        for line in self.of('fault'):
            last = line['t'] if line['seconds'] == 0 else FOR_EVER
            end = recovered.get(line['id']) or over.get(line['id']) or last
            found.append(Span(line['kind'], line['target'], line['t'], end, line.get('instance')))
        return found

    @property
    def killed_guests(self) -> set[str | None]:
        """The instances whose QEMU was killed."""
        return {fault.instance for fault in self.faults if fault.kind == 'qemu-kill'}

    def outage(self, begin: float, end: float) -> bool:
        """Whether a part of the control plane was away in this time."""
        return any(each.kind in CONTROL and each.begin < end and each.end > begin for each in self.faults)

    def silenced(self, begin: float, end: float, long: float) -> bool:
        """Whether computes may have been silent: something was between them and etcd for long."""
        return any(
            each.kind in SILENCING and each.begin < end and each.end > begin and each.end - each.begin >= long
            for each in self.faults
        )

    def disturbed(self, name: str, begin: float, end: float) -> bool:
        """Whether anything happened to a compute in this time."""
        return any(each.target == name and each.begin < end and each.end > begin for each in self.faults) or any(
            line['part'].startswith(name) and begin < line['t'] < end for line in self.of('exit')
        )

    def most_held(self, ask: Ask, compute: str | None) -> int:
        """The most instances that can have held room (of this compute) while `ask` was asking, itself apart."""
        ends = (line for line in self.of('state') if line['state'] in ('gone', 'error'))
        ended = {line['instance'] for line in ends if line['t'] < ask.t}
        held = set()
        for each in self.asks:
            if each.kind != 'create' or each is ask or each.t > ask.end:
                continue
            placed = each.notified
            name = placed.instance if placed else each.instance
            refused = each.code in (2, 3, 5) and each.end < ask.t
            elsewhere = compute is not None and (placed.compute if placed else each.in_tree or compute) != compute
            if name not in ended and not refused and not elsewhere:
                held.add(name or f'of {each.number}')
        return len(held)
