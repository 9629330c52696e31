"""Explore every schedule of a scenario within its bounds, depth-first and by replay.

A state that was visited before is not explored again. Each execution sets the scene in a new cloud, repeats the
recorded choices, and then makes the next untried one.
https://www.microsoft.com/en-us/research/publication/iterative-context-bounding/
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.acting import SHAKY, Bounds, Chooser, Option
from tests.model.cloud import Cloud
from tests.model.end import prior
from tests.model.rest import fingerprint, left_alone
from tests.model.story import tell
from tests.model.truth import untrue
from tests.model.virtual import inside, virtual
from tests.model.world import Pruned, Restless, World

Check = Callable[[], Iterable[str]]
Scene = Callable[[Cloud], Check | None]

_monotonic = time.monotonic


@dataclass(frozen=True)
class Scenario:
    """A scene with its actors, and the bounds of its exploration.

    The scene may return a further check of the cloud, made at the end of the schedule before the cloud is left alone.
    """

    scene: Scene
    bounds: Bounds = SHAKY

    @property
    def name(self) -> str:
        return self.scene.__name__

    @property
    def title(self) -> str:
        return ' '.join((self.scene.__doc__ or '').split())


def within(bounds: Bounds, *scenes: Scene) -> list[Scenario]:
    """Return a scenario with these bounds for each scene."""
    return [Scenario(scene, bounds) for scene in scenes]


class Finding(NamedTuple):
    """The violations at the end of a schedule, its story, and the choices that reproduce it."""

    wrong: tuple[str, ...]
    story: str
    choices: tuple[str, ...]

    def replay(self, scenario: Scenario) -> str:
        return encode(scenario.name, self.choices)


@dataclass
class Explored:
    schedules: int = 0
    pruned: int = 0
    states: int = 0
    longest: int = 0
    exhausted: bool = False
    findings: list[Finding] = field(default_factory=list)

    def judge(self, wrong: Sequence[str], world: World, choices: tuple[str, ...]) -> None:
        """Record the violations of an execution, unless the first of them is already known."""
        self.longest = max(self.longest, len(world.steps))
        if wrong and wrong[0] not in {finding.wrong[0] for finding in self.findings}:
            self.findings.append(Finding(tuple(wrong), tell(world), choices))

    def add(self, other: Explored) -> None:
        self.schedules += other.schedules
        self.pruned += other.pruned
        self.states += other.states
        self.longest = max(self.longest, other.longest)
        recorded = {finding.wrong[0] for finding in self.findings}
        self.findings += [finding for finding in other.findings if finding.wrong[0] not in recorded]


class Choice(NamedTuple):
    """The options at one point, and the index of the chosen one."""

    options: list[Option]
    pick: int

    @property
    def made(self) -> Option:
        return self.options[self.pick]


class Seen:
    """The visited states, each with the remaining bounds at each visit."""

    def __init__(self) -> None:
        self._left: dict[int, list[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, state: Hashable, left: tuple[int, ...]) -> bool:
        """Record a visit; return False if the state was visited with at least these bounds left."""
        before = self._left.setdefault(hash(state), [])
        if any(all(a >= b for a, b in zip(earlier, left, strict=True)) for earlier in before):
            return False
        before.append(left)
        return True


class Follow:
    """Repeats recorded choices, then takes the first or a random option; records all options.

    `before` are the choices of an earlier execution, the last one perhaps changed.
    """

    def __init__(
        self, before: Sequence[Choice] = (), seen: Seen | None = None, rng: random.Random | None = None
    ) -> None:
        self._before, self._seen, self._rng = before, seen, rng
        self.trail: list[Choice] = []

    def known(self) -> Option | None:
        if len(self.trail) >= len(self._before):
            return None
        choice = self._before[len(self.trail)]
        self.trail.append(choice)
        return choice.made

    def choose(self, world: World, options: list[Option]) -> Option:
        if self._seen is not None and not self._seen.add(world.state(), tuple(world.left)):
            raise Pruned
        self.trail.append(Choice(options, 0 if self._rng is None else self._pick(self._rng, options)))
        return self.trail[-1].made

    def _pick(self, rng: random.Random, options: Sequence[Option]) -> int:
        """Return the index of a random option; the actor that is running most often continues."""
        weights = [0.1 if option.fate else 0.3 if number else 1.0 for number, option in enumerate(options)]
        return rng.choices(range(len(options)), weights)[0]

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(choice.made.name for choice in self.trail)


class Named:
    """Makes the choices with these names, then takes the first option."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = iter(names)

    def known(self) -> None:
        """Return None: every choice is looked up by name."""

    def choose(self, _: World, options: list[Option]) -> Option:
        """Return the option with the next name. StopIteration if there is none."""
        name = next(self._names, options[0].name)
        return next(option for option in options if option.name == name)


def play(
    scenario: Scenario, chooser: Chooser, bounds: Bounds | None = None, ends: set[int] | None = None
) -> tuple[list[str], World]:
    """Execute one schedule; return its violations and its world.

    Errors: Pruned; StopIteration if a named choice is not available. `checked_ends` are fingerprints of final states
    that were checked before without a violation; they are not checked again.
    """
    world = World(bounds or scenario.bounds, chooser)
    with inside(world):
        cloud = Cloud(world)
        check = scenario.scene(cloud)
        before = prior(cloud)
        try:
            world.run()
        except Restless:
            return [f'does not come to rest: {len(world.steps)} steps, and somebody is still at it'], world
        except Pruned:
            if not world.broken:
                raise
        if world.broken:
            return world.broken, world
        violations = untrue(cloud, before) or (list(check() or ()) if check is not None else [])
        end = fingerprint(cloud)
        if not violations and (ends is None or end not in ends):
            violations = left_alone(cloud) or world.broken
        if not violations and ends is not None:
            ends.add(end)
        return violations, world


@contextmanager
def quiet_cloud() -> Iterator[Cloud]:
    """Yield a cloud without actors, with the current thread inside its world."""
    world = World(Bounds(), Follow())
    with virtual(), inside(world):
        yield Cloud(world)


def explore(
    scenario: Scenario,
    bounds: Bounds | None = None,
    seconds: float | None = None,
    schedules: int | None = None,
    first: bool = True,
) -> Explored:
    """Explore all schedules within the bounds, at most `schedules` of them or for `seconds`.

    With `stop_at_first` stop at the first finding. Schedules with fewer preemptions come first, so that a finding is as
    simple as possible.
    """
    bounds, began, total = bounds or scenario.bounds, _monotonic(), Explored()
    ends: set[int] = set()
    with virtual():
        for preemptions in range(bounds.preemptions + 1):
            max_seconds = None if seconds is None else seconds - (_monotonic() - began)
            max_schedules = None if schedules is None else schedules - total.schedules
            result = _explore(
                scenario, bounds._replace(preemptions=preemptions), max_seconds, max_schedules, first, ends
            )
            states = max(total.states, result.states)
            total.add(result)
            total.states, total.exhausted = states, result.exhausted
            if (first and total.findings) or not result.exhausted:
                break
    return total


def _explore(
    scenario: Scenario, bounds: Bounds, seconds: float | None, schedules: int | None, first: bool, ends: set[int]
) -> Explored:
    result, visited, before, began = Explored(), Seen(), [Choice([], 0)][:0], _monotonic()
    while True:
        chooser = Follow(before, visited)
        result.schedules += 1
        try:
            result.judge(*play(scenario, chooser, bounds, ends), chooser.choices)
        except Pruned:
            result.pruned += 1
        result.states = len(visited)
        trail = chooser.trail
        while trail and trail[-1].pick + 1 >= len(trail[-1].options):
            trail.pop()
        result.exhausted = not trail
        is_late = seconds is not None and _monotonic() - began > seconds
        is_enough = schedules is not None and result.schedules >= schedules
        if result.exhausted or is_late or is_enough or (first and result.findings):
            return result
        options, pick = trail.pop()
        before = [*trail, Choice(options, pick + 1)]


def look_for(scenario: Scenario, schedules: int, seed: int = 1) -> Explored:
    """Run schedules until something is found: half of them in order, the others at random."""
    result = explore(scenario, schedules=schedules // 2)
    if not result.exhausted and not result.findings:
        result.add(wander(scenario, scenario.bounds, seed, schedules=schedules - result.schedules))
    return result


def wander(
    scenario: Scenario,
    bounds: Bounds,
    seed: int,
    seconds: float | None = None,
    schedules: int | None = None,
    first: bool = True,
) -> Explored:
    """Run random schedules beyond what can be explored exhaustively."""
    result, began = Explored(), _monotonic()
    ends: set[int] = set()
    with virtual():
        while not (first and result.findings):
            is_late = seconds is not None and _monotonic() - began > seconds
            if is_late or (schedules is not None and result.schedules >= schedules):
                break
            chooser = Follow(rng=random.Random(seed + result.schedules))
            result.schedules += 1
            result.judge(*play(scenario, chooser, bounds, ends), chooser.choices)
    return result


WIDE = Bounds(*(99 for _ in Bounds._fields))


def replay(scenario: Scenario, choices: Sequence[str]) -> tuple[list[str], str]:
    """Return the violations at the end of these choices, and the story."""
    with virtual():
        violations, world = play(scenario, Named(choices), WIDE)
        return violations, tell(world)


def encode(name: str, choices: Sequence[str]) -> str:
    """Return a scenario's name and choices as one line, in which repeated choices are counted."""
    runs: list[tuple[str, int]] = []
    for choice in choices:
        if runs and runs[-1][0] == choice:
            runs[-1] = choice, runs[-1][1] + 1
        else:
            runs.append((choice, 1))
    return f'{name}: ' + '; '.join(choice if number == 1 else f'{number} x {choice}' for choice, number in runs)


def decode(text: str) -> tuple[str, list[str]]:
    name, _, rest = text.partition(': ')
    choices: list[str] = []
    for run in filter(None, rest.split('; ')):
        number, times, choice = run.partition(' x ')
        choices += [choice] * int(number) if times and number.isdecimal() else [run]
    return name, choices
