"""One execution: actors that stop before every call, and the faults of the calls.

The actors run functions of the product, each in a greenlet. A call is atomic. Before it the actor stops, and the
chooser decides which actor continues and how: normally, with a lost request or answer, or killed.
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

# The maximum number of seconds between the two halves of a write to placement, unless placement crashes.
LIVE = 2.0
# Steps of one execution; a longer one does not come to rest.
TOO_LONG = 600


class Killed(BaseException):
    """Ends a killed actor. The product never swallows it."""


class Pruned(Exception):
    """Every continuation of this state has been explored."""


class Restless(Exception):
    """The execution does not come to rest."""


@dataclass(eq=False)
class World:
    """Runs `actors` as `chooser` decides.

    `state_parts` return further parts of the state, `events` the events that may happen.
    """

    bounds: Bounds
    chooser: Chooser
    actors: list[Actor] = field(default_factory=list)
    prints: list[Callable[[], Hashable]] = field(default_factory=list)
    events: list[Callable[[], list[Event]]] = field(default_factory=list)
    # The name of each uuid in the story.
    names: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    clock: float = 1000.0
    now: Actor | None = None
    last: Actor | None = None
    quiet: int = 0
    # Unexpected errors that the product caught and logged.
    surprises: list[str] = field(default_factory=list)
    # Checks that run after every step of the schedule and yield violations.
    invariants: list[Callable[[], Iterable[str]]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self.left = list(self.bounds)
        self._left_of: frozenset[str] = frozenset()
        self._reckon()
        self._hub: Any = None
        self.hushed = hash('scene')

    def act(self, name: str, work: Callable[[], object], mortal: bool = True, **what: Any) -> Actor:
        """Add an actor. Its name must be unique: a choice names the actor that continues."""
        assert all(other.name != name for other in self.actors), name
        actor = Actor(name, work, mortal, history=hash(name), **what)
        self.actors.append(actor)
        if self._hub is not None:
            self._begin(actor)
        return actor

    # Called by the models

    def call(self, call: Call, do: Callable[[], Value], shape: Callable[[Any], Hashable] = repr) -> Value:
        """Carry out a call when it is chosen, or raise the error of a lost message.

        Errors: Unreachable, UnknownOutcome. `make_fingerprint` reduces the answer to what distinguishes it from others.
        """
        actor = self.now
        if actor is None or self.over:
            if self.over:
                raise Killed
            self.hushed = hash((self.hushed, call.what)) if call.writes else self.hushed
            result = do()
            if call.writes and self._hub is not None:  # a scene may set up a state that no schedule reaches
                self.check_invariants()
            return result
        fate = self._pause(actor, call)
        if fate == INTERRUPT:
            self._tell(actor, call, fate, None)
            raise KeyboardInterrupt
        if fate == LATE:
            before = sum(other.name.startswith(f'late request of {actor.name}') for other in self.actors)
            name = f'late request of {actor.name} ({before + 1})'
            self.act(name, lambda: self.call(call, do, shape), mortal=False)
        if fate in (REQUEST, LATE, READ, KILL):  # KILL comes here only for a second half
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
        """Return an id of a write that does not depend on the order of other actors' writes."""
        return hash((self.now.name, self.now.history)) if self.now is not None else self.hushed

    # Running the world

    def run(self) -> None:
        """Run until no actor can continue.

        Errors: Pruned, NotAtRest, and an error of an actor that is not an EcompError.
        """
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
        """Record new violations after this step, and mark the step in the story."""
        for check in self.invariants:
            for violation in check():
                if violation not in self.broken:
                    self.broken.append(violation)
                    self.steps.append(Step('', None, f'WRONG from here on: {violation}', None))

    def state(self) -> Hashable:
        """Return everything that decides what can follow, except the remaining bounds."""
        actors = tuple((actor.history, actor.call.what, actor.done, actor.dead, actor.wakes) for actor in self.actors)
        last = self.last.name if self.last is not None else ''
        return actors, self.clock, last, tuple(part() for part in self.prints)

    def _options(self) -> list[Option]:
        ready = [candidate for candidate in self.actors if candidate.is_at_it and candidate.ready()]
        if not ready:
            return []
        until = min(candidate.until for candidate in ready)
        ready = [candidate for candidate in ready if candidate.wakes is None or candidate.wakes <= until]
        awake = [candidate for candidate in ready if not candidate.sleeps]
        first = min(ready, key=lambda each: each.wakes or 0.0)
        goes_on = self.last if self.last in awake else None
        options: list[Option] = []
        for actor in sorted(ready, key=lambda each: (each is not goes_on, each.wakes or 0.0)):
            # Switching away from an actor that could continue costs a preemption, unless it pauses anyway. Waking an
            # actor before its time costs one, too.
            early = actor.sleeps and (bool(awake) or actor is not first)
            abandons = goes_on is not None and actor is not goes_on and goes_on.wakes is None
            preempts = early or abandons
            if preempts and not self.left[PREEMPTIONS]:
                continue
            options.append(Option(actor.name, '', preempts))
            if self._left_of:
                options += [Option(actor.name, fate, preempts) for fate in self._fates(actor) if fate in self._left_of]
        if self._left_of:
            events = (event for list_events in self.events for event in list_events())
            options += [Option(name, kind, is_event=True) for name, kind, _ in events if kind in self._left_of]
        return options

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
            next(action for list_events in self.events for name, _, action in list_events() if name == option.who)()
            return
        actor = next(other for other in self.actors if other.name == option.who)
        if option.fate == KILL and not actor.call.is_second:
            self._tell(actor, actor.call, KILL, None)
            for other in self.actors:
                other.dead = (
                    other.dead or other is actor or (other.process is not None and other.process is actor.process)
                )
            self.last = None
            return
        self.last = actor
        self._switch(actor, option.fate)

    def _reckon(self) -> None:
        is_any_left = self.left[FAULTS] > 0
        self._left_of = frozenset(fate for fate, number in FIELD.items() if is_any_left and self.left[number] > 0)

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
        # An actor that another one starts runs to its first call, then the other one continues.
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
    error = UnknownOutcome if call.writes else Unreachable
    return error(f'{call.where} gives no answer', call.where)
