"""Explore every schedule of a scenario within its bounds, depth-first and by replay.

A state that was visited before is not explored again.
https://www.microsoft.com/en-us/research/publication/iterative-context-bounding/
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ecomp.store.client import Put
from tests.model import acting
from tests.model.acting import ANSWER, HALVES, INTERRUPT, KILL, LATE, READ, REQUEST, Bounds, Call, Chooser, Option, Step
from tests.model.cloud import Cloud
from tests.model.end import list_prior_instances
from tests.model.rest import check_left_alone, make_fingerprint
from tests.model.truth import find_false_sentences
from tests.model.virtual import enter_world, patch_environment
from tests.model.world import NotAtRest, Pruned, World

FAULT_TEXTS = {
    KILL: 'and is killed before that',
    REQUEST: 'and the request is lost on its way',
    ANSWER: 'which is done, and the answer is lost',
    LATE: 'and hears nothing: the request is still on its way',
    HALVES: 'of which the first half is done',
    INTERRUPT: 'and is interrupted by Ctrl-C before that',
    READ: 'and hears nothing',
}


def format_story(world: World) -> str:
    lines = []
    for number, step in enumerate(world.steps, 1):
        lines.append(f'{number:4}. {_format_step(step)}')
    text = '\n'.join(lines)
    for uuid, name in world.names.items():
        text = text.replace(uuid, name)
    return text


def _format_step(step: Step) -> str:
    if step.call is None:
        return f'-- {step.fate} --'
    sentence = f'{step.actor} {CALL_FORMATTERS[step.call.service](step.call)}'
    if step.fate in (KILL, REQUEST, LATE, INTERRUPT, READ):
        return f'{sentence}, {"and placement is killed before that" if step.call.is_second else FAULT_TEXTS[step.fate]}'
    answer = _format_answer(step)
    return f'{sentence}{f": {answer}" if answer else ""}{f", {FAULT_TEXTS[step.fate]}" if step.fate else ""}'


def _format_etcd_call(call: Call) -> str:
    kind, *rest = call.operation
    if kind == 'commit':
        conditions, operations = rest
        writes = [f'{"puts" if isinstance(write, Put) else "deletes"} {write.key}' for write in operations]  # type: ignore[attr-defined]
        compared = ', '.join(dict.fromkeys(key for key, _ in conditions))  # type: ignore[attr-defined]
        return ' and '.join(writes or ['compares']) + (f' (if {compared} is as it was)' if compared else '')
    words = {
        'get': 'reads', 'read': 'reads', 'list': 'lists', 'count': 'counts', 'around': 'reads a few of',
        'grant': 'has a lease granted, of seconds:', 'keep': 'keeps its lease', 'revoke': 'ends its lease',
    }  # fmt: skip
    return f'{words[str(kind)]} {rest[0]}'


def _format_placement_call(call: Call) -> str:
    operation = list(call.operation)
    prefix = 'has placement go on with the second half: ' if call.is_second else ''
    method, path, body = [*operation[call.is_second :], None][:3]
    path = str(path)
    if method == 'GET':
        resource = path.split('?')[0].strip('/').split('/')
        if resource[0] == 'allocations':
            return f'asks placement for the claim of {resource[1]}'
        if resource[0] == 'allocation_candidates':
            return 'asks placement who could'
        return f'asks placement for {path[:120]}'
    data = json.loads(str(body))
    if method == 'PUT' and path.startswith('/allocations/'):
        data = {path.rsplit('/', 1)[-1]: data}
    elif path != '/allocations':
        return f'{method} {path}'
    return prefix + ' and '.join(_format_claim(name, claim) for name, claim in data.items())


def _format_claim(name: str, body: dict[str, Any]) -> str:
    providers = ', '.join(body['allocations'])
    generation = 'null' if body['consumer_generation'] is None else body['consumer_generation']
    action = f'claims {providers} for {name}' if providers else f'releases the claim of {name}'
    return f'{action}, with generation {generation}'


CALL_FORMATTERS: dict[str, Callable[[Call], str]] = {
    'etcd': _format_etcd_call,
    'placement': _format_placement_call,
    'disk': lambda call: f'writes {call.operation[2]} into the state directory of {call.operation[1]}',
    'libvirt': lambda call: ' of '.join(map(str, call.operation)),
    'clock': lambda call: (
        f'sleeps {call.operation[1]} s' if call.operation[0] == 'sleeps' else f'waits for {call.operation[1]}'
    ),
    '': lambda _: 'begins',
}


def _format_answer(step: Step) -> str:
    call, answer = step.call, step.answer
    assert call is not None
    if isinstance(answer, Exception):
        return f'{type(answer).__name__}, {answer}'
    if call.service == 'etcd':
        if call.writes and call.operation[0] == 'commit':
            return 'refused' if answer is None else f'done, at revision {answer}'
        if call.operation[0] in ('get', 'list'):
            found = [f'{kv.key.decode()} of revision {kv.mod_revision}' for kv in answer.kvs]  # type: ignore[attr-defined]
            return ', '.join(found) or 'nothing is there'
        return ''
    if call.service == 'placement' and isinstance(answer, dict):
        return _format_placement_answer(answer)
    return 'done' if call.service == 'placement' else ''


def _format_placement_answer(answer: dict[str, Any]) -> str:
    if 'consumer_generation' in answer:
        return f'generation {answer["consumer_generation"]}, on {", ".join(answer["allocations"])}'
    if 'allocation_requests' in answer:
        providers = [provider for request in answer['allocation_requests'] for provider in request['allocations']]
        return ', '.join(providers) or 'nobody'
    if 'allocations' in answer:
        return ', '.join(answer['allocations']) or 'nothing is held'
    return str(answer)[:120]


Check = Callable[[], Iterable[str]]
Scene = Callable[[Cloud], Check | None]

_monotonic = time.monotonic


@dataclass(frozen=True)
class Scenario:
    """A scene with its actors, and the bounds of its exploration.

    The scene may return a further check of the cloud, made before the cloud is left alone.
    """

    scene: Scene
    bounds: Bounds = acting.SINGLE_FAULT

    @property
    def name(self) -> str:
        return self.scene.__name__

    @property
    def title(self) -> str:
        return ' '.join((self.scene.__doc__ or '').split())


def make_scenarios(bounds: Bounds, *scenes: Scene) -> list[Scenario]:
    return [Scenario(scene, bounds) for scene in scenes]


class Finding(NamedTuple):
    violations: tuple[str, ...]
    story: str
    choices: tuple[str, ...]

    def encode(self, scenario: Scenario) -> str:
        return encode_choices(scenario.name, self.choices)


@dataclass
class Exploration:
    schedules: int = 0
    pruned: int = 0
    states: int = 0
    longest: int = 0
    exhausted: bool = False
    findings: list[Finding] = field(default_factory=list)

    def add_result(self, violations: Sequence[str], world: World, choices: tuple[str, ...]) -> None:
        self.longest = max(self.longest, len(world.steps))
        if violations and violations[0] not in {finding.violations[0] for finding in self.findings}:
            self.findings.append(Finding(tuple(violations), format_story(world), choices))

    def add(self, other: Exploration) -> None:
        self.schedules += other.schedules
        self.pruned += other.pruned
        self.states += other.states
        self.longest = max(self.longest, other.longest)
        recorded = {finding.violations[0] for finding in self.findings}
        self.findings += [finding for finding in other.findings if finding.violations[0] not in recorded]


class Choice(NamedTuple):
    options: list[Option]
    pick: int

    @property
    def chosen(self) -> Option:
        return self.options[self.pick]


class VisitedStates:
    def __init__(self) -> None:
        self._remaining: dict[int, list[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._remaining)

    def add(self, state: Hashable, remaining: tuple[int, ...]) -> bool:
        """Record a visit. Return False if the state was visited with at least these bounds left."""
        before = self._remaining.setdefault(hash(state), [])
        if any(all(a >= b for a, b in zip(earlier, remaining, strict=True)) for earlier in before):
            return False
        before.append(remaining)
        return True


class RecordingChooser:
    """Repeats the choices of `before`, then takes the first or a random option."""

    def __init__(
        self, before: Sequence[Choice] = (), visited: VisitedStates | None = None, rng: random.Random | None = None
    ) -> None:
        self._before, self._visited, self._rng = before, visited, rng
        self.trail: list[Choice] = []

    def get_recorded(self) -> Option | None:
        if len(self.trail) >= len(self._before):
            return None
        choice = self._before[len(self.trail)]
        self.trail.append(choice)
        return choice.chosen

    def choose(self, world: World, options: list[Option]) -> Option:
        if self._visited is not None and not self._visited.add(world.get_state(), tuple(world.remaining)):
            raise Pruned
        self.trail.append(Choice(options, 0 if self._rng is None else self._pick(self._rng, options)))
        return self.trail[-1].chosen

    def _pick(self, rng: random.Random, options: Sequence[Option]) -> int:
        """Return the index of a random option: mostly the actor that is running continues."""
        weights = [0.1 if option.fate else 0.3 if number else 1.0 for number, option in enumerate(options)]
        return rng.choices(range(len(options)), weights)[0]

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(choice.chosen.name for choice in self.trail)


class NamedChooser:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = iter(names)

    def get_recorded(self) -> None:
        """Return None: every choice is looked up by name."""

    def choose(self, _: World, options: list[Option]) -> Option:
        # StopIteration if there is no option with the next name.
        name = next(self._names, options[0].name)
        return next(option for option in options if option.name == name)


def run_schedule(
    scenario: Scenario, chooser: Chooser, bounds: Bounds | None = None, checked_ends: set[int] | None = None
) -> tuple[list[str], World]:
    """Execute one schedule. Return its violations and its world.

    `checked_ends` are fingerprints of final states that had no violation, and are not checked again.

    Raises:
        StopIteration: a named choice is not available.
    """
    world = World(bounds or scenario.bounds, chooser)
    with enter_world(world):
        cloud = Cloud(world)
        check = scenario.scene(cloud)
        before = list_prior_instances(cloud)
        try:
            world.run()
        except NotAtRest:
            return [f'does not come to rest: {len(world.steps)} steps, and somebody is still at it'], world
        except Pruned:
            if not world.violations:
                raise
        if world.violations:
            return world.violations, world
        violations = find_false_sentences(cloud, before) or (list(check() or ()) if check is not None else [])
        end = make_fingerprint(cloud)
        if not violations and (checked_ends is None or end not in checked_ends):
            violations = check_left_alone(cloud) or world.violations
        if not violations and checked_ends is not None:
            checked_ends.add(end)
        return violations, world


@contextmanager
def open_quiet_cloud() -> Iterator[Cloud]:
    world = World(Bounds(), RecordingChooser())
    with patch_environment(), enter_world(world):
        yield Cloud(world)


def explore(
    scenario: Scenario,
    bounds: Bounds | None = None,
    seconds: float | None = None,
    schedules: int | None = None,
    stop_at_first: bool = True,
) -> Exploration:
    """Explore all schedules within the bounds, at most `schedules` of them or for `seconds`.

    Schedules with fewer preemptions come first, so that a finding is as simple as possible.
    """
    bounds, began, total = bounds or scenario.bounds, _monotonic(), Exploration()
    ends: set[int] = set()
    with patch_environment():
        for preemptions in range(bounds.preemptions + 1):
            max_seconds = None if seconds is None else seconds - (_monotonic() - began)
            max_schedules = None if schedules is None else schedules - total.schedules
            result = _explore_depth_first(
                scenario, bounds._replace(preemptions=preemptions), max_seconds, max_schedules, stop_at_first, ends
            )
            states = max(total.states, result.states)
            total.add(result)
            total.states, total.exhausted = states, result.exhausted
            if (stop_at_first and total.findings) or not result.exhausted:
                break
    return total


def _explore_depth_first(
    scenario: Scenario,
    bounds: Bounds,
    seconds: float | None,
    schedules: int | None,
    stop_at_first: bool,
    ends: set[int],
) -> Exploration:
    result, visited, before, began = Exploration(), VisitedStates(), [Choice([], 0)][:0], _monotonic()
    while True:
        chooser = RecordingChooser(before, visited)
        result.schedules += 1
        try:
            result.add_result(*run_schedule(scenario, chooser, bounds, ends), chooser.choices)
        except Pruned:
            result.pruned += 1
        result.states = len(visited)
        trail = chooser.trail
        while trail and trail[-1].pick + 1 >= len(trail[-1].options):
            trail.pop()
        result.exhausted = not trail
        is_late = seconds is not None and _monotonic() - began > seconds
        is_enough = schedules is not None and result.schedules >= schedules
        if result.exhausted or is_late or is_enough or (stop_at_first and result.findings):
            return result
        options, pick = trail.pop()
        before = [*trail, Choice(options, pick + 1)]


def search(scenario: Scenario, schedules: int, seed: int = 1) -> Exploration:
    """Run schedules until something is found: half of them in order, the others at random."""
    result = explore(scenario, schedules=schedules // 2)
    if not result.exhausted and not result.findings:
        result.add(explore_randomly(scenario, scenario.bounds, seed, schedules=schedules - result.schedules))
    return result


def explore_randomly(
    scenario: Scenario,
    bounds: Bounds,
    seed: int,
    seconds: float | None = None,
    schedules: int | None = None,
    stop_at_first: bool = True,
) -> Exploration:
    result, began = Exploration(), _monotonic()
    ends: set[int] = set()
    with patch_environment():
        while not (stop_at_first and result.findings):
            is_late = seconds is not None and _monotonic() - began > seconds
            if is_late or (schedules is not None and result.schedules >= schedules):
                break
            chooser = RecordingChooser(rng=random.Random(seed + result.schedules))
            result.schedules += 1
            result.add_result(*run_schedule(scenario, chooser, bounds, ends), chooser.choices)
    return result


UNLIMITED = Bounds(*(99 for _ in Bounds._fields))


def replay(scenario: Scenario, choices: Sequence[str]) -> tuple[list[str], str]:
    """Return the violations at the end of these choices, and the story."""
    with patch_environment():
        violations, world = run_schedule(scenario, NamedChooser(choices), UNLIMITED)
        return violations, format_story(world)


def encode_choices(name: str, choices: Sequence[str]) -> str:
    runs: list[tuple[str, int]] = []
    for choice in choices:
        if runs and runs[-1][0] == choice:
            runs[-1] = choice, runs[-1][1] + 1
        else:
            runs.append((choice, 1))
    return f'{name}: ' + '; '.join(choice if number == 1 else f'{number} x {choice}' for choice, number in runs)


def decode_choices(text: str) -> tuple[str, list[str]]:
    name, _, rest = text.partition(': ')
    choices: list[str] = []
    for run in filter(None, rest.split('; ')):
        number, times, choice = run.partition(' x ')
        choices += [choice] * int(number) if times and number.isdecimal() else [run]
    return name, choices
