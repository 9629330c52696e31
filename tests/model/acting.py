"""The actors of a world, the calls that they make, and the faults that hit the calls."""

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
# A sleep of at least this many seconds counts as waiting for other actors.
LONG_SLEEP_SECONDS = 1.0


class Bounds(NamedTuple):
    """The limits of an exploration.

    `preemptions` counts switches away from an actor that could continue, `faults` all faults together.
    The other fields limit each kind of fault. `requests` and `answers` are lost messages of writes, `reads` lost reads.
    `late` requests arrive after their sender has given up.
    `halves` are writes to placement that another actor or a crash of placement interrupts between their transactions.
    `expiries` are leases of living owners that expire, `minutes` minutes that pass, and `interrupts` Ctrl-C.
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


# The usual bounds: one process may be killed, or the network may lose one message.
SINGLE_FAULT = Bounds(2, 1, kills=1, requests=1, answers=1)

FIELD_INDEX = {
    name: Bounds._fields.index(field)
    for name, field in (
        *((KILL, 'kills'), (REQUEST, 'requests'), (ANSWER, 'answers'), (LATE, 'late'), (HALVES, 'halves')),
        *((EXPIRY, 'expiries'), (MINUTE, 'minutes'), (INTERRUPT, 'interrupts'), (READ, 'reads')),
    )
}
PREEMPTIONS_INDEX = 0
FAULTS_INDEX = 1


@dataclass(frozen=True)
class Call:
    """The next call of an actor. With the world's state, `operation` determines the answer."""

    service: str
    operation: tuple[Hashable, ...]
    writes: bool = False
    # Runs the first half alone, so that other actors act before the second; None if the call is atomic.
    run_first_half: Callable[[], object] | None = None
    is_divisible: Callable[[], bool] = lambda: False
    # This is the second half of a write to placement. The only possible fault is a crash of placement.
    is_second: bool = False


class Step(NamedTuple):
    actor: str
    call: Call | None
    fate: str
    answer: object


@dataclass(eq=False)
class Actor:
    name: str
    work: Callable[[], object]
    mortal: bool = True
    is_ready: Callable[[], bool] = lambda: True
    call: Call = Call('', ('begins',))
    history: int = 0
    wakes_at: float | None = None
    # The time by which placement has done the second half of the actor's write.
    half_done_until: float = math.inf
    done: bool = False
    dead: bool = False
    leases: int = 0
    uuids: int = 0
    outcome: object = None
    # The command that the user is told to repeat if the actor was killed or its outcome is unknown.
    retry: Callable[[], object] | None = None
    # Actors with the same process are killed together.
    process: object = None
    # The user's command, as tests/model/truth.py names it; '' if the actor reports nothing to a user.
    command: str = ''
    # The uuids, or the project, that the command is about; without a command see FinalState.touched.
    subjects: tuple[str, ...] = ()
    power: str = ''
    greenlet: Any = None

    @property
    def is_active(self) -> bool:
        return not self.done and not self.dead

    @property
    def is_waiting(self) -> bool:
        return self.wakes_at is not None and self.call.operation[1] >= LONG_SLEEP_SECONDS  # type: ignore[operator]


class Option(NamedTuple):
    """A possible next step: the actor or event that is next, the call's fault, and its cost."""

    subject: str
    fate: str = ''
    preempts: bool = False
    is_event: bool = False

    @property
    def name(self) -> str:
        return f'{self.subject}/{self.fate}' if self.fate and not self.is_event else self.subject


class Chooser(Protocol):
    """Decides what comes next. The options of a recorded choice are not computed again."""

    def get_recorded(self) -> Option | None:
        """Return the option that was recorded for this point, or None if one must be chosen."""

    def choose(self, world: World, options: list[Option]) -> Option:
        """Return one of the options, or raise Pruned."""


# The name of an event, its kind (see Bounds), and the function that carries it out.
Event = tuple[str, str, Callable[[], None]]
