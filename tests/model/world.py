"""One execution: actors that stop before every call, and the faults of the calls.

The actors run functions of the product, each in a greenlet. Before each call, which is atomic, the actor stops.
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
    FAULTS_INDEX,
    FIELD_INDEX,
    HALVES,
    INTERRUPT,
    KILL,
    LATE,
    PREEMPTIONS_INDEX,
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
MAX_WRITE_SECONDS = 2.0
# Steps of one execution; a longer one does not come to rest.
MAX_STEPS = 1_500


class Killed(BaseException):
    """Ends a killed actor. The product never swallows it."""


class Pruned(Exception):
    """Every continuation of this state has been explored."""


class NotAtRest(Exception):
    """The execution does not come to rest."""


@dataclass(eq=False)
class World:
    """Runs `actors` as `chooser` decides. `state_parts` return further parts of the state."""

    bounds: Bounds
    chooser: Chooser
    actors: list[Actor] = field(default_factory=list)
    state_parts: list[Callable[[], Hashable]] = field(default_factory=list)
    events: list[Callable[[], list[Event]]] = field(default_factory=list)
    # The name of each uuid in the story.
    names: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    clock: float = 1000.0
    current: Actor | None = None
    last_actor: Actor | None = None
    scene_uuids: int = 0
    # Unexpected errors that the product caught and logged.
    unexpected_errors: list[str] = field(default_factory=list)
    # Checks that run after every step of the schedule and yield violations.
    invariants: list[Callable[[], Iterable[str]]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.remaining = list(self.bounds)
        self._possible_faults: frozenset[str] = frozenset()
        self._update_possible_faults()
        self._hub: Any = None
        self.scene_history = hash('scene')

    def add_actor(self, name: str, work: Callable[[], object], mortal: bool = True, **fields: Any) -> Actor:
        """Add an actor. Its name must be unique: a choice names the actor that continues."""
        assert all(other.name != name for other in self.actors), name
        actor = Actor(name, work, mortal, history=hash(name), **fields)
        self.actors.append(actor)
        if self._hub is not None:
            self._start(actor)
        return actor

    # Called by the models

    def call(
        self, call: Call, function: Callable[[], Value], make_fingerprint: Callable[[Any], Hashable] = repr
    ) -> Value:
        """Carry out a call when it is chosen, or raise the error of a lost message.

        `make_fingerprint` reduces the answer to what distinguishes it from others.
        """
        actor = self.current
        if actor is None or self.is_over:
            if self.is_over:
                raise Killed
            self.scene_history = hash((self.scene_history, call.operation)) if call.writes else self.scene_history
            result = function()
            if call.writes and self._hub is not None:  # a scene may set up a state that no schedule reaches
                self.check_invariants()
            return result
        fate = self._pause(actor, call)
        if fate == INTERRUPT:
            self._record_step(actor, call, fate, None)
            raise KeyboardInterrupt
        if fate == LATE:
            before = sum(other.name.startswith(f'late request of {actor.name}') for other in self.actors)
            name = f'late request of {actor.name} ({before + 1})'
            self.add_actor(name, lambda: self.call(call, function, make_fingerprint), mortal=False)
        if fate in (REQUEST, LATE, READ, KILL):  # KILL comes here only for a second half
            self._record_step(actor, call, fate, None)
            raise _make_lost_error(call)
        try:
            answer = function() if fate != HALVES or call.run_first_half is None else call.run_first_half()
        except EcompError as error:
            self._record_step(actor, call, fate, error)
            actor.history = hash((actor.history, call.operation, fate, type(error), str(error)))
            raise
        self._record_step(actor, call, fate, answer)
        actor.half_done_until = self.clock + MAX_WRITE_SECONDS if fate == HALVES else math.inf
        actor.history = hash((actor.history, call.operation, fate, make_fingerprint(answer)))
        if fate == ANSWER:
            raise _make_lost_error(call)
        return answer  # type: ignore[return-value]

    def sleep(self, seconds: float) -> None:
        if self.is_over:
            raise Killed
        if self.current is None:
            self.clock += seconds
            return
        actor = self.current
        actor.wakes_at = self.clock + max(seconds, 0.0)
        self._pause(actor, Call('clock', ('sleeps', round(seconds, 3))))
        self.clock = max(self.clock, actor.wakes_at)
        actor.wakes_at = None
        self._record_step(actor, actor.call, '', None)
        actor.history = hash((actor.history, 'sleeps', self.clock))

    def wait(self, reason: str, is_ready: Callable[[], bool]) -> None:
        actor = self.current
        assert actor is not None, reason
        actor.is_ready = is_ready
        self._pause(actor, Call('clock', ('waits', reason)))
        actor.is_ready = lambda: True
        actor.history = hash((actor.history, 'waited', reason))

    def read_clock(self) -> float:
        if self.current is not None:
            self.current.history = hash((self.current.history, self.clock))
        return self.clock

    def get_writer_mark(self) -> int:
        """Return an id of a write that does not depend on the order of other actors' writes."""
        return hash((self.current.name, self.current.history)) if self.current is not None else self.scene_history

    # Running the world

    def run(self) -> None:
        self._hub = greenlet.getcurrent()
        try:
            for actor in list(self.actors):
                self._start(actor)
            while True:
                option = self.chooser.get_recorded()
                if option is None:
                    options = self._list_options()
                    if not options:
                        return
                    option = self.chooser.choose(self, options)
                if len(self.steps) > MAX_STEPS:
                    raise NotAtRest
                self._apply(option)
                self.check_invariants()
        finally:
            self._kill_all()

    def check_invariants(self) -> None:
        for check in self.invariants:
            for violation in check():
                if violation not in self.violations:
                    self.violations.append(violation)
                    self.steps.append(Step('', None, f'WRONG from here on: {violation}', None))

    def get_state(self) -> Hashable:
        """Return everything that decides what can follow, except the remaining bounds."""
        actors = tuple((each.history, each.call.operation, each.done, each.dead, each.wakes_at) for each in self.actors)
        last = self.last_actor.name if self.last_actor is not None else ''
        return actors, self.clock, last, tuple(part() for part in self.state_parts)

    def _list_options(self) -> list[Option]:
        ready = [candidate for candidate in self.actors if candidate.is_active and candidate.is_ready()]
        if not ready:
            return []
        until = min(candidate.half_done_until for candidate in ready)
        ready = [candidate for candidate in ready if candidate.wakes_at is None or candidate.wakes_at <= until]
        awake = [candidate for candidate in ready if not candidate.is_waiting]
        first = min(ready, key=lambda each: each.wakes_at or 0.0)
        goes_on = self.last_actor if self.last_actor in awake else None
        options: list[Option] = []
        for actor in sorted(ready, key=lambda each: (each is not goes_on, each.wakes_at or 0.0)):
            # Switching away from an actor that could continue costs a preemption, unless it pauses anyway. Waking an
            # actor before its time costs one, too.
            early = actor.is_waiting and (bool(awake) or actor is not first)
            abandons = goes_on is not None and actor is not goes_on and goes_on.wakes_at is None
            preempts = early or abandons
            if preempts and not self.remaining[PREEMPTIONS_INDEX]:
                continue
            options.append(Option(actor.name, '', preempts))
            if self._possible_faults:
                options += [
                    Option(actor.name, fate, preempts)
                    for fate in self._list_faults(actor)
                    if fate in self._possible_faults
                ]
        if self._possible_faults:
            events = (event for list_events in self.events for event in list_events())
            options += [Option(name, kind, is_event=True) for name, kind, _ in events if kind in self._possible_faults]
        return options

    def _list_faults(self, actor: Actor) -> list[str]:
        call = actor.call
        if call.is_second:
            return [KILL]
        if not actor.mortal or call.service in ('', 'clock'):
            return []
        if call.service not in ('etcd', 'placement'):
            return [KILL, INTERRUPT]
        if not call.writes:
            return [KILL, INTERRUPT, READ]
        halves = [HALVES] if HALVES in self._possible_faults and call.is_divisible() else []
        return [KILL, INTERRUPT, ANSWER, REQUEST, *([LATE] if call.service == 'etcd' else halves)]

    def _apply(self, option: Option) -> None:
        if option.preempts:
            self.remaining[PREEMPTIONS_INDEX] -= 1
        if option.fate:
            self.remaining[FAULTS_INDEX] -= 1
            self.remaining[FIELD_INDEX[option.fate]] -= 1
            self._update_possible_faults()
        if option.is_event:
            self.steps.append(Step('', None, option.subject, None))
            next(action for list_events in self.events for name, _, action in list_events() if name == option.subject)()
            return
        actor = next(other for other in self.actors if other.name == option.subject)
        if option.fate == KILL and not actor.call.is_second:
            self._record_step(actor, actor.call, KILL, None)
            for other in self.actors:
                other.dead = (
                    other.dead or other is actor or (other.process is not None and other.process is actor.process)
                )
            self.last_actor = None
            return
        self.last_actor = actor
        self._switch(actor, option.fate)

    def _update_possible_faults(self) -> None:
        is_any_left = self.remaining[FAULTS_INDEX] > 0
        self._possible_faults = frozenset(
            fate for fate, number in FIELD_INDEX.items() if is_any_left and self.remaining[number] > 0
        )

    def _start(self, actor: Actor) -> None:
        def body() -> None:
            try:
                actor.outcome = actor.work()
            except (EcompError, KeyboardInterrupt) as error:
                actor.outcome = error
            except Killed:
                return
            actor.done = True

        actor.greenlet = greenlet.greenlet(body)
        before, self.current = self.current, actor
        # An actor that another one starts runs to its first call, then the other one continues.
        actor.greenlet.parent = greenlet.getcurrent()
        actor.greenlet.switch()
        actor.greenlet.parent = self._hub
        self.current = before

    def _switch(self, actor: Actor, fate: str) -> None:
        self.current = actor
        actor.greenlet.switch(fate)
        self.current = None

    def _pause(self, actor: Actor, call: Call) -> str:
        actor.call = call
        fate = str(actor.greenlet.parent.switch())
        if self.is_over:
            raise Killed
        return fate

    def _record_step(self, actor: Actor, call: Call, fate: str, answer: object) -> None:
        self.steps.append(Step(actor.name, call, fate, answer))

    def _kill_all(self) -> None:
        self.is_over = True
        for actor in self.actors:
            if actor.greenlet is not None and not actor.greenlet.dead:
                self.current = actor
                actor.greenlet.parent = greenlet.getcurrent()
                actor.greenlet.throw(Killed)
        self.current, self.is_over = None, False


def _make_lost_error(call: Call) -> Unreachable:
    error = UnknownOutcome if call.writes else Unreachable
    return error(f'{call.service} gives no answer', call.service)
