"""One execution: actors that stop at every call to etcd or placement, and what becomes of each of them there.

The actors are functions of the product, each in a greenlet. A call is atomic: before it the actor stops, and somebody
else decides who goes on, and how: as if nothing were, or with the request lost, or its answer, or killed for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import greenlet

from ecomp.errors import EcompError, UnknownOutcome, Unreachable
from tests.model.acting import (
    ANSWER,
    FAULTS,
    FIELD,
    HALVES,
    INTERRUPT,
    KILL,
    LATE,
    PREEMPTIONS,
    READ,
    REQUEST,
    Actor,
    Bounds,
    Call,
    Chooser,
    Event,
    Option,
    Step,
)

Value = TypeVar('Value')

LIVE = 2.0
"""Seconds that placement takes for a write at most, if it does not end meanwhile."""
TOO_LONG = 600
"""Steps of one execution: what takes more does not come to rest."""


class Killed(BaseException):
    """Nothing of the product catches this for good."""


class Pruned(Exception):
    """Whatever could follow has been seen."""


class Restless(Exception):
    """It goes on and on."""


@dataclass(eq=False)
class World:
    """Runs `actors` by what `chooser` says. `prints` say what else there is to tell two moments apart.

    `events` say what may happen by itself.
    """

    bounds: Bounds
    chooser: Chooser
    actors: list[Actor] = field(default_factory=list)
    prints: list[Callable[[], Hashable]] = field(default_factory=list)
    events: list[Callable[[], list[Event]]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """What each uuid is called in the story."""
    steps: list[Step] = field(default_factory=list)
    clock: float = 1000.0
    now: Actor | None = None
    last: Actor | None = None
    quiet: int = 0
    surprises: list[str] = field(default_factory=list)
    """What the product caught and nobody thought of."""
    invariants: list[Callable[[], Iterable[str]]] = field(default_factory=list)
    """Checks that run after every step of the schedule, and yield what does not hold."""
    broken: list[str] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self.left = list(self.bounds)
        self._left_of: frozenset[str] = frozenset()
        self._reckon()
        self._hub: Any = None
        self.hushed = hash('scene')

    def act(self, name: str, work: Callable[[], object], mortal: bool = True, **what: Any) -> Actor:
        """One more who acts. The name is nobody else's: a choice says who goes on by it."""
        assert all(each.name != name for each in self.actors), name
        actor = Actor(name, work, mortal, history=hash(name), **what)
        self.actors.append(actor)
        if self._hub is not None:
            self._begin(actor)
        return actor

    # What the models call

    def call(self, call: Call, do: Callable[[], Value], shape: Callable[[Any], Hashable] = repr) -> Value:
        """Do it when it is its turn; Unreachable or UnknownOutcome where the request or its answer was lost.

        `shape` makes of the answer what tells it from others.
        """
        actor = self.now
        if actor is None or self.over:
            if self.over:
                raise Killed
            self.hushed = hash((self.hushed, call.what)) if call.writes else self.hushed
            result = do()
            if call.writes and self._hub is not None:  # a scene may set up what no schedule leads to
                self.check_invariants()
            return result
        fate = self._pause(actor, call)
        if fate == INTERRUPT:
            self._tell(actor, call, fate, None)
            raise KeyboardInterrupt
        if fate == LATE:
            before = sum(each.name.startswith(f'late request of {actor.name}') for each in self.actors)
            name = f'late request of {actor.name} ({before + 1})'
            self.act(name, lambda: self.call(call, do, shape), mortal=False)
        if fate in (REQUEST, LATE, READ, KILL):  # of those that are killed only a second half is here
            self._tell(actor, call, fate, None)
            raise _lost(call)
        try:
            answer = do() if fate != HALVES or call.half is None else call.half()
        except EcompError as error:
            self._tell(actor, call, fate, error)
            actor.history = hash((actor.history, call.what, fate, type(error), str(error)))
            raise
        self._tell(actor, call, fate, answer)
        actor.until = self.clock + LIVE if fate == HALVES else math.inf
        actor.history = hash((actor.history, call.what, fate, shape(answer)))
        if fate == ANSWER:
            raise _lost(call)
        return answer  # type: ignore[return-value]

    def sleep(self, seconds: float) -> None:
        if self.over:
            raise Killed
        if self.now is None:
            self.clock += seconds
            return
        actor = self.now
        actor.wakes = self.clock + max(seconds, 0.0)
        self._pause(actor, Call('clock', ('sleeps', round(seconds, 3))))
        self.clock = max(self.clock, actor.wakes)
        actor.wakes = None
        self._tell(actor, actor.call, '', None)
        actor.history = hash((actor.history, 'sleeps', self.clock))

    def wait(self, what: str, ready: Callable[[], bool]) -> None:
        actor = self.now
        assert actor is not None, what
        actor.ready = ready
        self._pause(actor, Call('clock', ('waits', what)))
        actor.ready = lambda: True
        actor.history = hash((actor.history, 'waited', what))

    def read_clock(self) -> float:
        if self.now is not None:
            self.now.history = hash((self.now.history, self.clock))
        return self.clock

    def mark(self) -> int:
        """A name for what is written now, that is the same in whatever order others write."""
        return hash((self.now.name, self.now.history)) if self.now is not None else self.hushed

    # What runs it

    def run(self) -> None:
        """Until nobody can go on. Errors: Pruned, Restless, and what an actor raises that is no error of ours."""
        self._hub = greenlet.getcurrent()
        try:
            for actor in list(self.actors):
                self._begin(actor)
            while True:
                option = self.chooser.known()
                if option is None:
                    options = self._options()
                    if not options:
                        return
                    option = self.chooser.choose(self, options)
                if len(self.steps) > TOO_LONG:
                    raise Restless
                self._do(option)
                self.check_invariants()
        finally:
            self._abandon()

    def check_invariants(self) -> None:
        """Keep what does not hold after this step, and mark the step in the story."""
        for check in self.invariants:
            for wrong in check():
                if wrong not in self.broken:
                    self.broken.append(wrong)
                    self.steps.append(Step('', None, f'WRONG from here on: {wrong}', None))

    def state(self) -> Hashable:
        """All that decides what can follow, but for what is left of the bounds."""
        actors = tuple((each.history, each.call.what, each.done, each.dead, each.wakes) for each in self.actors)
        last = self.last.name if self.last is not None else ''
        return actors, self.clock, last, tuple(each() for each in self.prints)

    def _options(self) -> list[Option]:
        able = [each for each in self.actors if each.is_at_it and each.ready()]
        if not able:
            return []
        until = min(each.until for each in able)
        able = [each for each in able if each.wakes is None or each.wakes <= until]
        awake = [each for each in able if not each.sleeps]
        first = min(able, key=lambda each: each.wakes or 0.0)
        goes_on = self.last if self.last in awake else None
        found: list[Option] = []
        for actor in sorted(able, key=lambda each: (each is not goes_on, each.wakes or 0.0)):
            # To leave one that could go on costs, unless it waits a moment anyway; so does to wake one before its time.
            early = actor.sleeps and (bool(awake) or actor is not first)
            left = goes_on is not None and actor is not goes_on and goes_on.wakes is None
            preempts = early or left
            if preempts and not self.left[PREEMPTIONS]:
                continue
            found.append(Option(actor.name, '', preempts))
            if self._left_of:
                found += [Option(actor.name, fate, preempts) for fate in self._fates(actor) if fate in self._left_of]
        if self._left_of:
            events = (each for event in self.events for each in event())
            found += [Option(name, kind, is_event=True) for name, kind, _ in events if kind in self._left_of]
        return found

    def _fates(self, actor: Actor) -> list[str]:
        call = actor.call
        if call.is_second:
            return [KILL]
        if not actor.mortal or call.where in ('', 'clock'):
            return []
        if call.where not in ('etcd', 'placement'):
            return [KILL, INTERRUPT]
        if not call.writes:
            return [KILL, INTERRUPT, READ]
        halves = [HALVES] if HALVES in self._left_of and call.divisible() else []
        return [KILL, INTERRUPT, ANSWER, REQUEST, *([LATE] if call.where == 'etcd' else halves)]

    def _do(self, option: Option) -> None:
        if option.preempts:
            self.left[PREEMPTIONS] -= 1
        if option.fate:
            self.left[FAULTS] -= 1
            self.left[FIELD[option.fate]] -= 1
            self._reckon()
        if option.is_event:
            self.steps.append(Step('', None, option.who, None))
            next(do for each in self.events for name, _, do in each() if name == option.who)()
            return
        actor = next(each for each in self.actors if each.name == option.who)
        if option.fate == KILL and not actor.call.is_second:
            self._tell(actor, actor.call, KILL, None)
            for each in self.actors:
                each.dead = each.dead or each is actor or (each.process is not None and each.process is actor.process)
            self.last = None
            return
        self.last = actor
        self._switch(actor, option.fate)

    def _reckon(self) -> None:
        some = self.left[FAULTS] > 0
        self._left_of = frozenset(fate for fate, number in FIELD.items() if some and self.left[number] > 0)

    def _begin(self, actor: Actor) -> None:
        def body() -> None:
            try:
                actor.outcome = actor.work()
            except (EcompError, KeyboardInterrupt) as error:
                actor.outcome = error
            except Killed:
                return
            actor.done = True

        actor.greenlet = greenlet.greenlet(body)
        before, self.now = self.now, actor
        # One that another one begins stops at its first call, and that one goes on.
        actor.greenlet.parent = greenlet.getcurrent()
        actor.greenlet.switch()
        actor.greenlet.parent = self._hub
        self.now = before

    def _switch(self, actor: Actor, fate: str) -> None:
        self.now = actor
        actor.greenlet.switch(fate)
        self.now = None

    def _pause(self, actor: Actor, call: Call) -> str:
        actor.call = call
        fate = str(actor.greenlet.parent.switch())
        if self.over:
            raise Killed
        return fate

    def _tell(self, actor: Actor, call: Call, fate: str, answer: object) -> None:
        self.steps.append(Step(actor.name, call, fate, answer))

    def _abandon(self) -> None:
        self.over = True
        for actor in self.actors:
            if actor.greenlet is not None and not actor.greenlet.dead:
                self.now = actor
                actor.greenlet.parent = greenlet.getcurrent()
                actor.greenlet.throw(Killed)
        self.now, self.over = None, False


def _lost(call: Call) -> Unreachable:
    kind = UnknownOutcome if call.writes else Unreachable
    return kind(f'{call.where} gives no answer', call.where)
