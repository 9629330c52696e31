"""Run every benchmark, one after another, for bench/run.

A script that fails or exceeds its time is reported and its lab is removed; the others still run. A missed target is not
a failure: the table shows it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lab import Lab
from result import Result, format_amount, interrupt_on_signals, read, signals_ignored

HERE = Path(__file__).resolve().parent
# For a script to clean up before it is killed.
CLEANUP_SECONDS = 60
# Last lines of stderr that are shown of a failed script.
MAX_ERROR_LINES = 8


@dataclass(frozen=True)
class Script:
    """A script of this directory, its limits in seconds with --quick and without, and its lab.

    On an idle machine it takes a fraction of the limits. `quickly` False means that `quick` leaves it out, because it
    has no meaningful result in a minute.
    """

    name: str
    quick: int
    whole: int
    lab: str = ''
    quickly: bool = True


# In the order to run them: first what users wait for.
SCRIPTS = (
    Script('claim_one', 60, 600),
    Script('plain_yaml', 60, 120),
    Script('look', 60, 300),
    Script('refusal', 60, 600),
    Script('singles', 120, 1800),
    Script('sets', 60, 900),
    Script('apply', 60, 600),
    Script('what_if', 120, 600),
    Script('evacuate', 120, 900),
    Script('pull', 120, 1800),
    Script('comparison', 120, 3600, quickly=False),
    Script('image_to_disk', 120, 300, lab='benchi'),
    Script('domain_start', 180, 900, lab='benchd'),
    Script('destroy', 180, 1200, lab='benchx', quickly=False),
    Script('lease_to_booted', 120, 300, lab='benchl', quickly=False),
    Script('footprint', 400, 1800, lab='bench-footprint'),
    Script('cycle', 60, 600),
    Script('cycle_real', 300, 1200, lab='benchc', quickly=False),
    Script('many_flavors', 60, 300, quickly=False),
    Script('slopes', 120, 1200, quickly=False),
    Script('thousand', 120, 5400, quickly=False),
)


@dataclass(frozen=True)
class Ran:
    """The outcome of a script: its results, and a message about it, '' for none.

    `failed` sets the exit code; `interrupted` means that the user ended the run during the script.
    """

    results: Sequence[Result] = ()
    said: str = ''
    failed: bool = False
    interrupted: bool = False


def run(script: Script, quick: bool) -> Ran:
    """Run a script; after its limit end it and its child processes, and remove its lab."""
    path = HERE / f'{script.name}.py'
    if not path.exists():
        return Ran(said='not found')
    if quick and not script.quickly:
        return Ran(said='left out of quick')
    if script.lab and os.geteuid() != 0:
        return Ran(said='not run: it makes a lab, which takes root')
    command = [sys.executable, str(path), '--json', *(['--quick'] if quick else [])]
    limit = script.quick if quick else script.whole
    # Its own process group, so that its child processes end with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    interrupted = False
    try:
        out, errors = process.communicate(timeout=limit)
        problem = _describe_exit(process.returncode)
    except subprocess.TimeoutExpired:
        out, errors = _end(process)
        problem = f'not done after {limit} s'
    except KeyboardInterrupt:
        out, errors = _end(process)
        problem, interrupted = 'interrupted', True
    if script.lab and problem:
        try:
            Lab(script.lab).remove()
        except subprocess.CalledProcessError as error:
            problem = f'{problem}; lab {script.lab} is still up: {error}'
    results = [result for result in map(read, out.splitlines()) if result is not None]
    if not problem and not results:
        problem = 'it said no figure'
    last_lines = '\n'.join(f'    {line}' for line in errors.splitlines()[-MAX_ERROR_LINES:]) if problem else ''
    return Ran(results, f'{problem}\n{last_lines}'.rstrip(), bool(problem), interrupted)


def _describe_exit(code: int) -> str:
    if code < 0:
        return f'ended by {signal.Signals(-code).name}'
    return f'exit {code}' if code else ''


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a script as Ctrl-C does, so that it cleans up; return its output."""
    with signals_ignored():
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=CLEANUP_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def render_table(results: Sequence[Result]) -> Iterator[str]:
    """Render the results in Markdown."""
    names = ('name', 'workload', 'ours', 'floor', 'ratio', 'rounds', 'target', '', 'counts')
    yield f'| {" | ".join(names)} |'
    yield '|---' * len(names) + '|'
    for result in results:
        floor = '' if result.floor is None else format_amount(result.floor, result.unit)
        ratio = '' if result.floor is None else f'{result.ratio:.2f} ({result.least:.2f} to {result.most:.2f})'
        verdict = {None: '', True: 'met', False: '**missed**'}[result.is_met]
        counts = ', '.join(f'{name} {number:g}' for name, number in result.counts.items())
        figures = (
            format_amount(result.ours, result.unit),
            floor,
            ratio,
            str(result.rounds),
            result.target_text,
            verdict,
            counts,
        )
        yield f'| {" | ".join((result.name, result.workload, *figures))} |'


def select_scripts(names: Sequence[str]) -> list[Script]:
    """Return the scripts of these names, or all; exit for an unknown name."""
    if unknown := set(names) - {script.name for script in SCRIPTS}:
        sys.exit(f'bench/run: no such script: {", ".join(sorted(unknown))}')
    return [script for script in SCRIPTS if not names or script.name in names]


def report(outcomes: Mapping[str, Ran], seconds: float) -> int:
    """Print the table and what was not measured, and why; return the exit code."""
    results = [result for outcome in outcomes.values() for result in outcome.results]
    print('\n'.join(['', *render_table(results), '']))
    for name, outcome in outcomes.items():
        if outcome.said:
            print(f'{name}: {outcome.said}')
    failed = [name for name, outcome in outcomes.items() if outcome.failed]
    missed = sum(row.is_met is False for row in results)
    summary = f'failed: {", ".join(failed)}' if failed else 'no script failed'
    print(f'{len(results)} figures, {missed} missed their target, {summary}, {seconds / 60:.0f} min')
    return 1 if failed else 0


def main() -> int:
    """Run bench/run."""
    interrupt_on_signals()
    parser = argparse.ArgumentParser(prog='bench/run', description=__doc__)
    parser.add_argument('words', nargs='*', metavar='quick | NAME')
    parser.add_argument('--into', type=Path, help='where the figures go')
    options = parser.parse_intermixed_args()  # the names may stand on both sides of --into
    quick = 'quick' in options.words
    into = options.into or HERE / ('quick.jsonl' if quick else 'results.jsonl')
    start = time.monotonic()
    ran: dict[str, Ran] = {}
    with into.open('w') as file:
        for script in select_scripts([word for word in options.words if word != 'quick']):
            print(f'== {script.name}', flush=True)
            started = time.monotonic()
            ran[script.name] = outcome = run(script, quick)
            print(f'   {time.monotonic() - started:.0f} s', flush=True)
            for result in outcome.results:
                print(result, flush=True)
                print(result.to_json_line(), file=file, flush=True)
            if outcome.interrupted:
                break
    return report(ran, time.monotonic() - start)


if __name__ == '__main__':
    sys.exit(main())
