"""Every schedule of a scenario within its bounds, depth-first with replay; a state that was seen is not explored twice.

A scenario sets a scene in a new cloud each time; what was chosen before is chosen again, and then the next thing that
has not been tried. https://www.microsoft.com/en-us/research/publication/iterative-context-bounding/
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
    """Who acts in what scene, how far it is explored, and the letter of the defect it shows ('': none is known).

    The scene may return what else is to be checked of the cloud at the end of the schedule, before it is left alone.
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
    """The scenarios of these scenes, all explored as far."""
    return [Scenario(scene, bounds) for scene in scenes]


class Finding(NamedTuple):
    """What is wrong, the story of how it came to be, and the choices that lead there again."""

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
        """Keep what is wrong with an execution, unless that is known."""
        self.longest = max(self.longest, len(world.steps))
        if wrong and wrong[0] not in {each.wrong[0] for each in self.findings}:
            self.findings.append(Finding(tuple(wrong), tell(world), choices))

    def add(self, other: Explored) -> None:
        self.schedules += other.schedules
        self.pruned += other.pruned
        self.states += other.states
        self.longest = max(self.longest, other.longest)
        known = {each.wrong[0] for each in self.findings}
        self.findings += [each for each in other.findings if each.wrong[0] not in known]


class Choice(NamedTuple):
    """What there was to choose from, and which of it was chosen."""

    options: list[Option]
    pick: int

    @property
    def made(self) -> Option:
        return self.options[self.pick]


class Seen:
    """The states there were, each with what was left of the bounds."""

    def __init__(self) -> None:
        self._left: dict[int, list[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, state: Hashable, left: tuple[int, ...]) -> bool:
        """False if it was seen with as much left."""
        before = self._left.setdefault(hash(state), [])
        if any(all(a >= b for a, b in zip(each, left, strict=True)) for each in before):
            return False
        before.append(left)
        return True


class Follow:
    """Chooses as was chosen before, then the first of all; remembers what else there was.

    `before` is what there was to choose from in an earlier execution, and what was chosen: it is so again.
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
        """By chance: mostly whoever is at it goes on."""
        weights = [0.1 if each.fate else 0.3 if number else 1.0 for number, each in enumerate(options)]
        return rng.choices(range(len(options)), weights)[0]

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(each.made.name for each in self.trail)


class Named:
    """Chooses what somebody named, then the first of all."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = iter(names)

    def known(self) -> None:
        """See Chooser: each is looked up."""

    def choose(self, _: World, options: list[Option]) -> Option:
        """See Chooser. StopIteration where there is no such choice."""
        name = next(self._names, options[0].name)
        return next(each for each in options if each.name == name)


def play(
    scenario: Scenario, chooser: Chooser, bounds: Bounds | None = None, ends: set[int] | None = None
) -> tuple[list[str], World]:
    """One execution: what is wrong in the end. Errors: Pruned; StopIteration where a choice is not there to be made.

    `ends` are those that were left alone before, and then all was well.
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
        wrong = untrue(cloud, before) or (list(check() or ()) if check is not None else [])
        end = fingerprint(cloud)
        if not wrong and (ends is None or end not in ends):
            wrong = left_alone(cloud) or world.broken
        if not wrong and ends is not None:
            ends.add(end)
        return wrong, world


@contextmanager
def quiet_cloud() -> Iterator[Cloud]:
    """A cloud in which nobody acts, inside its world."""
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
    """All schedules within the bounds, or so many, or for so long; `first`: until something is found.

    With fewer preemptions first: what is found is as simple as can be.
    """
    bounds, began, total = bounds or scenario.bounds, _monotonic(), Explored()
    ends: set[int] = set()
    with virtual():
        for preemptions in range(bounds.preemptions + 1):
            left = None if seconds is None else seconds - (_monotonic() - began)
            more = None if schedules is None else schedules - total.schedules
            found = _explore(scenario, bounds._replace(preemptions=preemptions), left, more, first, ends)
            states = max(total.states, found.states)
            total.add(found)
            total.states, total.exhausted = states, found.exhausted
            if (first and total.findings) or not found.exhausted:
                break
    return total


def _explore(
    scenario: Scenario, bounds: Bounds, seconds: float | None, schedules: int | None, first: bool, ends: set[int]
) -> Explored:
    found, seen, before, began = Explored(), Seen(), [Choice([], 0)][:0], _monotonic()
    while True:
        chooser = Follow(before, seen)
        found.schedules += 1
        try:
            found.judge(*play(scenario, chooser, bounds, ends), chooser.choices)
        except Pruned:
            found.pruned += 1
        found.states = len(seen)
        trail = chooser.trail
        while trail and trail[-1].pick + 1 >= len(trail[-1].options):
            trail.pop()
        found.exhausted = not trail
        late = seconds is not None and _monotonic() - began > seconds
        many = schedules is not None and found.schedules >= schedules
        if found.exhausted or late or many or (first and found.findings):
            return found
        options, pick = trail.pop()
        before = [*trail, Choice(options, pick + 1)]


def look_for(scenario: Scenario, schedules: int, seed: int = 1) -> Explored:
    """So many schedules at most, until something is found: half of them in order, the others by chance."""
    found = explore(scenario, schedules=schedules // 2)
    if not found.exhausted and not found.findings:
        found.add(wander(scenario, scenario.bounds, seed, schedules=schedules - found.schedules))
    return found


def wander(
    scenario: Scenario,
    bounds: Bounds,
    seed: int,
    seconds: float | None = None,
    schedules: int | None = None,
    first: bool = True,
) -> Explored:
    """Schedules by chance, so many or for so long: what is beyond the bounds that can be exhausted."""
    found, began = Explored(), _monotonic()
    ends: set[int] = set()
    with virtual():
        while not (first and found.findings):
            late = seconds is not None and _monotonic() - began > seconds
            if late or (schedules is not None and found.schedules >= schedules):
                break
            chooser = Follow(rng=random.Random(seed + found.schedules))
            found.schedules += 1
            found.judge(*play(scenario, chooser, bounds, ends), chooser.choices)
    return found


WIDE = Bounds(*(99 for _ in Bounds._fields))


def replay(scenario: Scenario, choices: Sequence[str]) -> tuple[list[str], str]:
    """What is wrong at the end of these choices, and their story."""
    with virtual():
        wrong, world = play(scenario, Named(choices), WIDE)
        return wrong, tell(world)


def encode(name: str, choices: Sequence[str]) -> str:
    """A scenario and choices, as one line: what is chosen several times in a row is said once."""
    runs: list[tuple[str, int]] = []
    for each in choices:
        if runs and runs[-1][0] == each:
            runs[-1] = each, runs[-1][1] + 1
        else:
            runs.append((each, 1))
    return f'{name}: ' + '; '.join(each if number == 1 else f'{number} x {each}' for each, number in runs)


def decode(text: str) -> tuple[str, list[str]]:
    name, _, rest = text.partition(': ')
    choices: list[str] = []
    for run in filter(None, rest.split('; ')):
        number, times, each = run.partition(' x ')
        choices += [each] * int(number) if times and number.isdecimal() else [run]
    return name, choices
