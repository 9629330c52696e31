"""`python -m tests.model [--hours N | --minutes N | --seconds N] [--seed N] [SCENARIO...]`: explore for so long.

Each scenario has its share of the time: first all schedules within its bounds, then, by chance, schedules beyond them.
With --seed all of it is by chance, so that pieces of a long run with seeds of their own do not repeat each other. What
is found is told as a story, with what `--replay` takes; then comes a table of all scenarios, and a line that --sum adds
up over the outputs of several runs. Exit 1: something was found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.model.acting import Bounds
from tests.model.explorer import Explored, decode, explore, replay, wander
from tests.model.mutations import MUTATIONS, detect
from tests.model.scenarios import SCENARIOS

SEEDS = 10_000_000
"""Seeds of one piece: each schedule that is chosen by chance has one."""
TOTAL = 'total: '
"""What the line begins with that --sum reads."""


@dataclass
class Total:
    """What one run explored. `piece` is its --seed, 0 for none."""

    piece: int
    scenarios: int
    exhausted: int = 0
    schedules: int = 0
    states: int = 0
    violations: int = 0
    seconds: float = 0.0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser('python -m tests.model', description=(__doc__ or '').split('\n')[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument('--hours', type=float, help='how long in all')
    length.add_argument('--minutes', type=float, help='how long in all')
    length.add_argument('--seconds', type=float, default=60.0, help='how long in all (60)')
    length.add_argument('--sum', nargs='+', metavar='FILE', help='add up what these runs wrote, and explore nothing')
    length.add_argument('--replay', metavar='STRING', help='tell the story of what was found, as it was told with it')
    length.add_argument('--planted', action='store_true', help='plant each bug, and print how many schedules it takes')
    parser.add_argument('scenarios', nargs='*', metavar='SCENARIO', help='these alone')
    parser.add_argument('--seed', type=int, help='choose all schedules by chance, with seeds of this piece')
    options = parser.parse_args(words)
    if options.replay:
        return _replay(options.replay)
    if options.planted:
        return _find_planted()
    if options.sum:
        return _sum(options.sum)
    unknown = [each for each in options.scenarios if each not in SCENARIOS]
    if unknown:
        parser.error(f'no such scenario: {", ".join(unknown)}; there are {", ".join(SCENARIOS)}')
    seconds = (options.hours or 0) * 3600 + (options.minutes or 0) * 60 or options.seconds
    return _explore(options.scenarios or list(SCENARIOS), seconds, options.seed)


def _replay(text: str) -> int:
    name, choices = decode(text)
    wrong, story = replay(SCENARIOS[name], choices)
    sys.stdout.write(f'{SCENARIOS[name].title}\n{story}\n')
    sys.stdout.write(''.join(f'WRONG: {each}\n' for each in wrong) or 'nothing is wrong\n')
    return 1 if wrong else 0


def _find_planted() -> int:
    sys.stdout.write('| planted bug | found by | schedules |\n|---|---|---|\n')
    missed = 0
    for name in MUTATIONS:
        found = detect(name, SCENARIOS)
        missed += found is None
        where = f'`{found.scenario}` | {found.schedules}' if found else 'nothing | -'
        sys.stdout.write(f'| {name} | {where} |\n')
        sys.stdout.flush()
    return 1 if missed else 0


def _explore(names: list[str], seconds: float, piece: int | None) -> int:
    began, rows, total = time.monotonic(), [], Total(piece=piece or 0, scenarios=len(names))
    first_seed = (piece or 0) * SEEDS
    for number, name in enumerate(names):
        scenario = SCENARIOS[name]
        # What one does not need is there for those after it.
        share = (seconds - (time.monotonic() - began)) / (len(names) - number)
        found = Explored()
        if piece is None:
            found = explore(scenario, seconds=share * (0.5 if share > 60 else 0.8), first=False)
        left = seconds - (time.monotonic() - began) - share * (len(names) - number - 1)
        if left > 0 and not found.findings:
            found.add(wander(scenario, _wider(scenario.bounds), first_seed, left, first=False))
        for each in found.findings:
            sys.stdout.write(f'\n{name}: {scenario.title}\n{each.story}\n')
            sys.stdout.write(''.join(f'WRONG: {wrong}\n' for wrong in each.wrong))
            sys.stdout.write(f"python -m tests.model --replay '{each.replay(scenario)}'\n")
        total.schedules += found.schedules
        total.states += found.states
        total.exhausted += found.exhausted
        total.violations += len(found.findings)
        rows.append(_row(name, found))
        sys.stdout.flush()
    total.seconds = time.monotonic() - began
    sys.stdout.write('\n' + '\n'.join([_HEAD, *rows, '', TOTAL + json.dumps(asdict(total))]) + '\n')
    return 1 if total.violations else 0


def _sum(paths: list[str]) -> int:
    lines = [line for path in paths for line in Path(path).read_text().splitlines() if line.startswith(TOTAL)]
    pieces = [Total(**json.loads(line.removeprefix(TOTAL))) for line in lines]
    if len({each.piece for each in pieces}) < len(pieces):
        sys.stdout.write('two of these have one seed: the same schedules are counted twice\n')
    sys.stdout.write(
        f'{len(pieces)} pieces, seeds {", ".join(str(each.piece or "none") for each in pieces)}, '
        f'{sum(each.seconds for each in pieces) / 60:.0f} minutes: '
        f'{sum(each.schedules for each in pieces):,} schedules, {sum(each.states for each in pieces):,} states, '
        f'{sum(each.violations for each in pieces)} violations\n'
    )
    return 1 if any(each.violations for each in pieces) else 0


def _wider(bounds: Bounds) -> Bounds:
    """One more of all that there is."""
    return Bounds(*(each + 1 if each else 0 for each in bounds))._replace(faults=bounds.faults + 1)


_HEAD = f'{"SCENARIO":28} {"SCHEDULES":>10} {"STATES":>9} {"STEPS":>6}  {"ALL":4} FINDINGS'


def _row(name: str, found: Explored) -> str:
    every = 'yes' if found.exhausted else 'no'
    counted = f'{found.schedules:10} {found.states:9} {found.longest:6}'
    return f'{name:28} {counted}  {every:4} {len(found.findings)}'


if __name__ == '__main__':
    if os.environ.get('PYTHONHASHSEED') != '0':
        # The order of a set is by chance, and a replay is to meet the same one.
        again = [sys.executable, '-m', 'tests.model', *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, 'PYTHONHASHSEED': '0'})
    sys.exit(main(sys.argv[1:]))
