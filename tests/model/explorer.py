"""Every schedule of a scenario within its bounds, depth-first with replay; a state that was seen is not explored twice.

A scenario sets a scene in a new cloud each time; what was chosen before is chosen again, by name, and then the next thing
that has not been tried. https://www.microsoft.com/en-us/research/publication/iterative-context-bounding/
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.cloud import Cloud
from tests.model.rest import left_alone
from tests.model.story import tell
from tests.model.virtual import inside, virtual
from tests.model.world import SHAKY, Bounds, Option, Pruned, Restless, World

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
        """What it is asked for by."""
        return self.scene.__name__

    @property
    def title(self) -> str:
        """What it is about."""
        return ' '.join((self.scene.__doc__ or '').split())


class Finding(NamedTuple):
    """What is wrong, the story of how it came to be, and the choices that lead there again."""

    wrong: tuple[str, ...]
    story: str
    choices: tuple[str, ...]

    def replay(self, scenario: Scenario) -> str:
        """What `--replay` takes."""
        return encode(scenario.name, self.choices)


@dataclass
class Explored:
    """What became of an exploration."""

    schedules: int = 0
    pruned: int = 0
    states: int = 0
    longest: int = 0
    exhausted: bool = False
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Explored) -> None:
        """Both."""
        self.schedules += other.schedules
        self.pruned += other.pruned
        self.states += other.states
        self.longest = max(self.longest, other.longest)
        known = {each.wrong[0] for each in self.findings}
        self.findings += [each for each in other.findings if each.wrong[0] not in known]


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


class _Follow:
    """Chooses as was chosen before, then the first of all; remembers what else there was."""

    def __init__(self, choices: Sequence[str], seen: Seen | None, rng: random.Random | None = None) -> None:
        self._choices, self._seen, self._rng = choices, seen, rng
        self.trail: list[tuple[list[str], int]] = []

    def __call__(self, world: World, options: Sequence[Option]) -> int:
        names = [each.name for each in options]
        if len(self.trail) < len(self._choices):
            pick = names.index(self._choices[len(self.trail)])
        else:
            if self._seen is not None and not self._seen.add(world.state(), world.left):
                raise Pruned
            pick = 0 if self._rng is None else self._pick(options)
        self.trail.append((names, pick))
        return pick

    def _pick(self, options: Sequence[Option]) -> int:
        """By chance: mostly whoever is at it goes on."""
        assert self._rng is not None
        weights = [0.1 if each.fate else 0.3 if number else 1.0 for number, each in enumerate(options)]
        return self._rng.choices(range(len(options)), weights)[0]


def play(scenario: Scenario, chooser: _Follow, bounds: Bounds | None = None) -> tuple[list[str], World]:
    """One execution: what is wrong in the end. Errors: Pruned; ValueError where a choice is not there to be made."""
    world = World(bounds or scenario.bounds, chooser)
    with inside(world):
        cloud = Cloud(world)
        check = scenario.scene(cloud)
        try:
            world.run()
        except Restless:
            return [f'does not come to rest: {len(world.steps)} steps, and somebody is still at it'], world
        wrong = list(check() or ()) if check is not None else []
        return wrong or left_alone(cloud), world


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
    with virtual():
        for preemptions in range(bounds.preemptions + 1):
            left = None if seconds is None else seconds - (_monotonic() - began)
            more = None if schedules is None else schedules - total.schedules
            found = _explore(scenario, bounds._replace(preemptions=preemptions), left, more, first)
            states = max(total.states, found.states)
            total.add(found)
            total.states, total.exhausted = states, found.exhausted
            if (first and total.findings) or not found.exhausted:
                break
    return total


def _explore(
    scenario: Scenario, bounds: Bounds, seconds: float | None, schedules: int | None, first: bool
) -> Explored:
    found, seen, choices, began = Explored(), Seen(), [''][:0], _monotonic()
    while True:
        chooser = _Follow(choices, seen)
        found.schedules += 1
        try:
            wrong, world = play(scenario, chooser, bounds)
            found.longest = max(found.longest, len(world.steps))
            if wrong and wrong[0] not in {each.wrong[0] for each in found.findings}:
                made = tuple(names[pick] for names, pick in chooser.trail)
                found.findings.append(Finding(tuple(wrong), tell(world), made))
        except Pruned:
            found.pruned += 1
        found.states = len(seen)
        trail = chooser.trail
        while trail and trail[-1][1] + 1 >= len(trail[-1][0]):
            trail.pop()
        found.exhausted = not trail
        late = seconds is not None and _monotonic() - began > seconds
        many = schedules is not None and found.schedules >= schedules
        if found.exhausted or late or many or (first and found.findings):
            return found
        names, pick = trail[-1]
        choices = [*(names[pick] for names, pick in trail[:-1]), names[pick + 1]]


def wander(scenario: Scenario, bounds: Bounds, seed: int, seconds: float) -> Explored:
    """Schedules by chance, for so long: what is beyond the bounds that can be exhausted."""
    found, began = Explored(), _monotonic()
    with virtual():
        while _monotonic() - began < seconds:
            chooser = _Follow((), None, random.Random(seed + found.schedules))
            found.schedules += 1
            wrong, world = play(scenario, chooser, bounds)
            found.longest = max(found.longest, len(world.steps))
            if wrong and wrong[0] not in {each.wrong[0] for each in found.findings}:
                made = tuple(names[pick] for names, pick in chooser.trail)
                found.findings.append(Finding(tuple(wrong), tell(world), made))
    return found


WIDE = Bounds(*(99 for _ in Bounds._fields))
"""All that ever could be chosen can be."""


def replay(scenario: Scenario, choices: Sequence[str]) -> tuple[list[str], str]:
    """What is wrong at the end of these choices, and their story."""
    with virtual():
        wrong, world = play(scenario, _Follow(choices, None), WIDE)
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
    """The scenario's name, and the choices."""
    name, _, rest = text.partition(': ')
    choices: list[str] = []
    for run in filter(None, rest.split('; ')):
        number, times, each = run.partition(' x ')
        choices += [each] * int(number) if times and number.isdecimal() else [run]
    return name, choices
