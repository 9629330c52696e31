"""`python -m tests.model [OPTION...] [SCENARIO...]`: explore the schedules of scenarios.

The scenarios share the time. Each is first explored exhaustively within its bounds, then at random beyond them.
With --seed all schedules are random, so that the pieces of a long run do not repeat each other.
`--sum` adds up the last lines of several runs. Exit status 1 means that something was found.
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
from tests.model.explorer import Exploration, decode_choices, explore, explore_randomly, replay
from tests.model.mutations import MUTATIONS, detect
from tests.model.scenarios import SCENARIOS

# Number of seeds reserved for one piece of a long run: each random schedule has a seed.
SEEDS_PER_PIECE = 10_000_000
# The line that `--sum` reads begins with this.
TOTAL_PREFIX = 'total: '


@dataclass
class Total:
    """The totals of one run. `piece` is its --seed, 0 without one."""

    piece: int
    scenarios: int
    exhausted: int = 0
    schedules: int = 0
    states: int = 0
    violations: int = 0
    seconds: float = 0.0


def main(arguments: list[str]) -> int:
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
    options = parser.parse_args(arguments)
    if options.replay:
        return _replay(options.replay)
    if options.planted:
        return _detect_planted_bugs()
    if options.sum:
        return _sum_totals(options.sum)
    unknown = [name for name in options.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f'no such scenario: {", ".join(unknown)}; there are {", ".join(SCENARIOS)}')
    seconds = (options.hours or 0) * 3600 + (options.minutes or 0) * 60 or options.seconds
    return _explore(options.scenarios or list(SCENARIOS), seconds, options.seed)


def _replay(text: str) -> int:
    name, choices = decode_choices(text)
    violations, story = replay(SCENARIOS[name], choices)
    sys.stdout.write(f'{SCENARIOS[name].title}\n{story}\n')
    sys.stdout.write(''.join(f'WRONG: {violation}\n' for violation in violations) or 'nothing is wrong\n')
    return 1 if violations else 0


def _detect_planted_bugs() -> int:
    sys.stdout.write('| planted bug | found by | schedules |\n|---|---|---|\n')
    missed = 0
    for name in MUTATIONS:
        detection = detect(name, SCENARIOS)
        missed += detection is None
        columns = f'`{detection.scenario}` | {detection.schedules}' if detection else 'nothing | -'
        sys.stdout.write(f'| {name} | {columns} |\n')
        sys.stdout.flush()
    return 1 if missed else 0


def _explore(names: list[str], seconds: float, seed: int | None) -> int:
    began, rows, total = time.monotonic(), [], Total(piece=seed or 0, scenarios=len(names))
    first_seed = (seed or 0) * SEEDS_PER_PIECE
    for number, name in enumerate(names):
        scenario = SCENARIOS[name]
        # A scenario that finishes early leaves its time to those after it.
        share = (seconds - (time.monotonic() - began)) / (len(names) - number)
        result = Exploration()
        if seed is None:
            result = explore(scenario, seconds=share * (0.5 if share > 60 else 0.8), stop_at_first=False)
        remaining_seconds = seconds - (time.monotonic() - began) - share * (len(names) - number - 1)
        if remaining_seconds > 0 and not result.findings:
            result.add(
                explore_randomly(
                    scenario, _widen_bounds(scenario.bounds), first_seed, remaining_seconds, stop_at_first=False
                )
            )
        for finding in result.findings:
            sys.stdout.write(f'\n{name}: {scenario.title}\n{finding.story}\n')
            sys.stdout.write(''.join(f'WRONG: {violation}\n' for violation in finding.violations))
            sys.stdout.write(f"python -m tests.model --replay '{finding.encode(scenario)}'\n")
        total.schedules += result.schedules
        total.states += result.states
        total.exhausted += result.exhausted
        total.violations += len(result.findings)
        rows.append(_format_row(name, result))
        sys.stdout.flush()
    total.seconds = time.monotonic() - began
    sys.stdout.write('\n' + '\n'.join([_TABLE_HEADER, *rows, '', TOTAL_PREFIX + json.dumps(asdict(total))]) + '\n')
    return 1 if total.violations else 0


def _sum_totals(paths: list[str]) -> int:
    lines = [line for path in paths for line in Path(path).read_text().splitlines() if line.startswith(TOTAL_PREFIX)]
    pieces = [Total(**json.loads(line.removeprefix(TOTAL_PREFIX))) for line in lines]
    if len({piece.piece for piece in pieces}) < len(pieces):
        sys.stdout.write('two of these have one seed: the same schedules are counted twice\n')
    sys.stdout.write(
        f'{len(pieces)} pieces, seeds {", ".join(str(piece.piece or "none") for piece in pieces)}, '
        f'{sum(piece.seconds for piece in pieces) / 60:.0f} minutes: '
        f'{sum(piece.schedules for piece in pieces):,} schedules, {sum(piece.states for piece in pieces):,} states, '
        f'{sum(piece.violations for piece in pieces)} violations\n'
    )
    return 1 if any(piece.violations for piece in pieces) else 0


def _widen_bounds(bounds: Bounds) -> Bounds:
    """Return the bounds with every nonzero limit, and the number of faults, raised by one."""
    return Bounds(*(limit + 1 if limit else 0 for limit in bounds))._replace(faults=bounds.faults + 1)


_TABLE_HEADER = f'{"SCENARIO":28} {"SCHEDULES":>10} {"STATES":>9} {"STEPS":>6}  {"ALL":4} FINDINGS'


def _format_row(name: str, result: Exploration) -> str:
    is_exhausted = 'yes' if result.exhausted else 'no'
    counts = f'{result.schedules:10} {result.states:9} {result.longest:6}'
    return f'{name:28} {counts}  {is_exhausted:4} {len(result.findings)}'


if __name__ == '__main__':
    if os.environ.get('PYTHONHASHSEED') != '0':
        # The iteration order of a set depends on the hash seed, and a replay must meet the same order.
        again = [sys.executable, '-m', 'tests.model', *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, 'PYTHONHASHSEED': '0'})
    sys.exit(main(sys.argv[1:]))
