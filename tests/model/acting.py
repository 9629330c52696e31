"""Those who act in a world, what they are about to do, and what may become of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from tests.model.world import World

KILL, REQUEST, ANSWER, LATE, HALVES, EXPIRY, MINUTE, INTERRUPT, READ = (
    *('kill', 'request', 'answer', 'late', 'halves', 'expiry', 'minute', 'interrupt', 'read'),
)
LONG = 1.0
"""Seconds of sleep that are waiting for others."""


class Bounds(NamedTuple):
    """How far it is explored: `preemptions` of an actor that could go on, `faults` in all, and so many of each kind.

    `requests` and `answers` of writes are lost, and `reads`; `late` requests arrive after their sender has given up;
    `halves` are writes of placement that another one may come between, or its end; `expiries` of leases of the living,
    `minutes` that pass, `interrupts` by Ctrl-C.
    """

    preemptions: int = 2
    faults: int = 1
    kills: int = 0
    requests: int = 0
    answers: int = 0
    late: int = 0
    halves: int = 0
    expiries: int = 0
    minutes: int = 0
    interrupts: int = 0
    reads: int = 0


SHAKY = Bounds(2, 1, kills=1, requests=1, answers=1)
"""The usual: somebody may die, or a network may lose one message."""

FIELD = {
    name: Bounds._fields.index(field)
    for name, field in (
        *((KILL, 'kills'), (REQUEST, 'requests'), (ANSWER, 'answers'), (LATE, 'late'), (HALVES, 'halves')),
        *((EXPIRY, 'expiries'), (MINUTE, 'minutes'), (INTERRUPT, 'interrupts'), (READ, 'reads')),
    )
}
PREEMPTIONS, FAULTS = 0, 1


@dataclass(frozen=True)
class Call:
    """What an actor is about to do. `what` decides, with the state of the world, what the answer is."""

    where: str
    what: tuple[Hashable, ...]
    writes: bool = False
    half: Callable[[], object] | None = None
    """What is done of it when others come between its two halves; None: it is done at once."""
    divisible: Callable[[], bool] = lambda: False
    is_second: bool = False
    """Placement goes on with a second half: all that may come between is placement's end."""


class Step(NamedTuple):
    actor: str
    call: Call | None
    fate: str
    answer: object


@dataclass(eq=False)
class Actor:
    """One of those who act. `outcome` is what its work returned, or the error it ended with."""

    name: str
    work: Callable[[], object]
    mortal: bool = True
    ready: Callable[[], bool] = lambda: True
    call: Call = Call('', ('begins',))
    history: int = 0
    wakes: float | None = None
    until: float = math.inf
    """When placement has done the second half of what it is at."""
    done: bool = False
    dead: bool = False
    leases: int = 0
    uuids: int = 0
    outcome: object = None
    again: Callable[[], object] | None = None
    """What its user is told to do where it was killed, or its outcome is not known."""
    process: object = None
    """Those of one process are killed together."""
    command: str = ''
    """Which command of a user this is, as tests/model/truth.py calls it; '' for what tells a user nothing."""
    about: tuple[str, ...] = ()
    """The uuids, or the project, that the command is about; see End.touched without a command."""
    power: str = ''
    greenlet: Any = None

    @property
    def is_at_it(self) -> bool:
        return not self.done and not self.dead

    @property
    def sleeps(self) -> bool:
        """Whether it lets others go on, and not for a mere moment between two tries."""
        return self.wakes is not None and self.call.what[1] >= LONG  # type: ignore[operator]


class Option(NamedTuple):
    """What may come next: who goes on, or what happens by itself; what becomes of the call; what that costs."""

    who: str
    fate: str = ''
    preempts: bool = False
    is_event: bool = False

    @property
    def name(self) -> str:
        return f'{self.who}/{self.fate}' if self.fate and not self.is_event else self.who


class Chooser(Protocol):
    """Says what comes next. What it knows already is not looked at anew."""

    def known(self) -> Option | None:
        """What was chosen at this point before; None: choose."""

    def choose(self, world: World, options: list[Option]) -> Option:
        """One of them. Pruned."""


Event = tuple[str, str, Callable[[], None]]
"""Its name, its kind (see Bounds), and what it does."""
