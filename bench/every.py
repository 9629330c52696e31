"""Every benchmark, one after another: bench/run is its front door.

A script that fails, or does not end in its time, is named and its lab is removed, and the others still run. What misses
its target has not failed: the table says so.
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
from result import Result, amount, interrupt_on_signals, read, signals_ignored

HERE = Path(__file__).resolve().parent
CLEANUP_SECONDS = 60
"""Seconds that a script may take to clean up before it is killed."""
LAST_WORDS = 8
"""Lines of what a script that failed said last."""


@dataclass(frozen=True)
class Script:
    """A script of this directory: after how many seconds it is ended, with --quick and without; the lab it makes.

    On a machine with nothing else to do it takes a fraction of them.

    `quickly` False: nothing of it can be said in a minute, so `quick` leaves it out.
    """

    name: str
    quick: int
    whole: int
    lab: str = ''
    quickly: bool = True


SCRIPTS = (
    Script('claim_one', 60, 600),
    Script('plain_yaml', 60, 120),
    Script('look', 60, 300),
    Script('refusal', 60, 600),
    Script('singles', 120, 1800),
    Script('sets', 60, 900),
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
"""In the order in which they run: first what people wait for."""


@dataclass(frozen=True)
class Ran:
    """What came of a script: its figures, and what is to be said of it, '' for nothing; `failed` counts.

    `interrupted`: the user ended the run while it was at work.
    """

    results: Sequence[Result] = ()
    said: str = ''
    failed: bool = False
    interrupted: bool = False


def run(script: Script, quick: bool) -> Ran:
    """Run it. One that does not end in its time is ended, with all that it started, and its lab is removed."""
    path = HERE / f'{script.name}.py'
    if not path.exists():
        return Ran(said='not found')
    if quick and not script.quickly:
        return Ran(said='left out of quick')
    if script.lab and os.geteuid() != 0:
        return Ran(said='not run: it makes a lab, which takes root')
    command = [sys.executable, str(path), '--json', *(['--quick'] if quick else [])]
    limit = script.quick if quick else script.whole
    # A group of its own: what it has started ends with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    interrupted = False
    try:
        out, errors = process.communicate(timeout=limit)
        why = _why(process.returncode)
    except subprocess.TimeoutExpired:
        out, errors = _ended(process)
        why = f'not done after {limit} s'
    except KeyboardInterrupt:
        out, errors = _ended(process)
        why, interrupted = 'interrupted', True
    if script.lab and why:
        try:
            Lab(script.lab).remove()
        except subprocess.CalledProcessError as error:
            why = f'{why}; lab {script.lab} is still up: {error}'
    results = [each for each in map(read, out.splitlines()) if each is not None]
    if not why and not results:
        why = 'it said no figure'
    last = '\n'.join(f'    {line}' for line in errors.splitlines()[-LAST_WORDS:]) if why else ''
    return Ran(results, f'{why}\n{last}'.rstrip(), bool(why), interrupted)


def _why(code: int) -> str:
    if code < 0:
        return f'ended by {signal.Signals(-code).name}'
    return f'exit {code}' if code else ''


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a script as Ctrl-C does, so that it cleans up; what it had said."""
    with signals_ignored():
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=CLEANUP_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def table(results: Sequence[Result]) -> Iterator[str]:
    """A row a figure, in Markdown."""
    names = ('name', 'workload', 'ours', 'floor', 'ratio', 'rounds', 'target', '', 'counts')
    yield f'| {" | ".join(names)} |'
    yield '|---' * len(names) + '|'
    for each in results:
        floor = '' if each.floor is None else amount(each.floor, each.unit)
        ratio = '' if each.floor is None else f'{each.ratio:.2f} ({each.least:.2f} to {each.most:.2f})'
        verdict = {None: '', True: 'met', False: '**missed**'}[each.met]
        counts = ', '.join(f'{what} {number:g}' for what, number in each.counts.items())
        figures = amount(each.ours, each.unit), floor, ratio, str(each.rounds), each.aim, verdict, counts
        yield f'| {" | ".join((each.name, each.workload, *figures))} |'


def chosen(names: Sequence[str]) -> list[Script]:
    """Those of these names, all for none."""
    if wrong := set(names) - {each.name for each in SCRIPTS}:
        sys.exit(f'bench/run: no such script: {", ".join(sorted(wrong))}')
    return [each for each in SCRIPTS if not names or each.name in names]


def report(ran: Mapping[str, Ran], seconds: float) -> int:
    """Print the table, and what was not measured and why; the exit code."""
    results = [result for each in ran.values() for result in each.results]
    print('\n'.join(['', *table(results), '']))
    for name, each in ran.items():
        if each.said:
            print(f'{name}: {each.said}')
    failed = [name for name, each in ran.items() if each.failed]
    missed = sum(each.met is False for each in results)
    named = f'failed: {", ".join(failed)}' if failed else 'no script failed'
    print(f'{len(results)} figures, {missed} missed their target, {named}, {seconds / 60:.0f} min')
    return 1 if failed else 0


def main() -> int:
    """See bench/run."""
    interrupt_on_signals()
    parser = argparse.ArgumentParser(prog='bench/run', description=__doc__)
    parser.add_argument('words', nargs='*', metavar='quick | NAME')
    parser.add_argument('--into', type=Path, help='where the figures go')
    options = parser.parse_intermixed_args()  # the names may stand on both sides of --into
    quick = 'quick' in options.words
    into = options.into or HERE / ('quick.jsonl' if quick else 'results.jsonl')
    began = time.monotonic()
    ran: dict[str, Ran] = {}
    with into.open('w') as file:
        for script in chosen([word for word in options.words if word != 'quick']):
            print(f'== {script.name}', flush=True)
            started = time.monotonic()
            ran[script.name] = found = run(script, quick)
            print(f'   {time.monotonic() - started:.0f} s', flush=True)
            for each in found.results:
                print(each, flush=True)
                print(each.line(), file=file, flush=True)
            if found.interrupted:
                break
    return report(ran, time.monotonic() - began)


if __name__ == '__main__':
    sys.exit(main())
