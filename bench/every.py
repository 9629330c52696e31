"""Every benchmark, one after another: bench/run is its front door.

A script that fails, or says nothing in its time, is named, and the others still run. What misses its target has not
failed: the table says so.
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

from result import Result, amount, read

HERE = Path(__file__).resolve().parent
LAST_WORDS = 8
"""Lines of what a script that failed said last."""


@dataclass(frozen=True)
class Script:
    """A script of this directory: after how many seconds it is ended, with --quick and without; whether it makes a lab.

    On a machine with nothing else to do it takes a fraction of them.

    `quickly` False: nothing of it can be said in a minute, so `quick` leaves it out.
    """

    name: str
    quick: int
    whole: int
    lab: bool = False
    quickly: bool = True


SCRIPTS = (
    Script('claim_one', 60, 600),
    Script('look', 60, 300),
    Script('refusal', 60, 600),
    Script('singles', 120, 1800),
    Script('sets', 60, 900),
    Script('pull', 120, 1800),
    Script('comparison', 120, 3600, quickly=False),
    Script('image_to_disk', 120, 300, lab=True),
    Script('domain_start', 180, 900, lab=True),
    Script('destroy', 180, 1200, lab=True, quickly=False),
    Script('lease_to_booted', 120, 300, lab=True, quickly=False),
    Script('footprint', 120, 1800),
    Script('cycle', 60, 600),
    Script('cycle_real', 300, 1200, lab=True, quickly=False),
    Script('many_flavors', 60, 300, quickly=False),
    Script('slopes', 120, 1200, quickly=False),
    Script('thousand', 120, 5400, quickly=False),
)
"""In the order in which they run: first what people wait for."""


@dataclass(frozen=True)
class Ran:
    """What came of a script: its figures, and what is to be said of it, '' for nothing; `failed` counts."""

    results: Sequence[Result] = ()
    said: str = ''
    failed: bool = False


def run(script: Script, quick: bool) -> Ran:
    """Run it. One that does not end in its time is ended, with all that it started."""
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
    try:
        out, errors = process.communicate(timeout=limit)
        why = f'exit {process.returncode}' if process.returncode else ''
    except subprocess.TimeoutExpired:
        out, errors = _ended(process)
        why = f'not done after {limit} s'
    except KeyboardInterrupt:
        _ended(process)
        raise
    results = [each for each in map(read, out.splitlines()) if each is not None]
    if not why and not results:
        why = 'it said no figure'
    last = '\n'.join(f'    {line}' for line in errors.splitlines()[-LAST_WORDS:]) if why else ''
    return Ran(results, f'{why}\n{last}'.rstrip(), bool(why))


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a script as Ctrl-C does, so that it removes its lab; what it had said."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=60)
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
    failed = sum(each.failed for each in ran.values())
    missed = sum(each.met is False for each in results)
    print(f'{len(results)} figures, {missed} missed their target, {failed} scripts failed, {seconds / 60:.0f} min')
    return 1 if failed else 0


def main() -> int:
    """See bench/run."""
    # A shell has what it runs in the background ignore Ctrl-C, and so would all that is started here: it is ended so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog='bench/run', description=__doc__)
    parser.add_argument('words', nargs='*', metavar='quick | NAME')
    parser.add_argument('--into', type=Path, help='where the figures go')
    options = parser.parse_args()
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
    return report(ran, time.monotonic() - began)


if __name__ == '__main__':
    sys.exit(main())
