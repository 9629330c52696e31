"""The one shape of a benchmark's figures, and the arguments that every script of bench/run takes.

A script prints a line a figure: words, or with --json an object with the fields of Result and `met`. With --quick it
has as few rounds as still say something. What else it has to say goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a process to end."""
QUICK = 4
"""Rounds of --quick, unless the script says otherwise."""


@dataclass(frozen=True)
class Result:
    """A figure: `ours` against `floor`, both medians, in `unit`.

    `ratio` is the median of the rounds' ratios, `least` and `most` are the smallest and the largest. Where `floor` is
    None, they are of `ours` itself. `target` is what `ratio` may be at most or, where `at_least`, has to be; None: it
    is only looked at. `counts` are of one round, or of what is counted in it: calls, operations, processes.
    """

    name: str
    workload: str
    unit: str
    floor: float | None
    ours: float
    ratio: float
    least: float
    most: float
    rounds: int
    target: float | None = None
    at_least: bool = False
    counts: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(vars(self) | {'counts': dict(self.counts), 'met': self.met})

    def __str__(self) -> str:
        beside = '' if self.floor is None else f' against {amount(self.floor, self.unit)}'
        times = '' if self.floor is None else f', {self.ratio:.2f} x ({self.least:.2f} to {self.most:.2f})'
        counted = ''.join(f'; {what} {number:g}' for what, number in self.counts.items())
        verdict = {None: '', True: ', met', False: ', missed'}[self.met]
        aim = '' if self.target is None else f'; target {self.aim}{verdict}'
        ours = amount(self.ours, self.unit)
        return f'{self.name}, {self.workload}: {ours}{beside}{times}, {self.rounds} rounds{aim}{counted}'

    @property
    def aim(self) -> str:
        """The target in words, '' for none."""
        if self.target is None:
            return ''
        what = f'{self.target:g} x' if self.floor is not None else amount(self.target, self.unit)
        return f'{">=" if self.at_least else "<="} {what}'


def amount(value: float, unit: str) -> str:
    """A number with its unit; short times in milliseconds."""
    return f'{value * 1000:.1f} ms' if unit == 's' and value < 1 else f'{value:.4g} {unit}'.strip()


def paired(
    name: str, workload: str, ours: Sequence[float], floors: Sequence[float], target: float | None, **more: Any
) -> Result:
    """Of rounds in which both sides ran in turn; the numbers are seconds, unless `unit` says otherwise."""
    ratios = [mine / theirs for mine, theirs in zip(ours, floors, strict=True)]
    middle = median(ours), median(ratios), min(ratios), max(ratios), len(ratios), target
    return Result(name, workload, more.pop('unit', 's'), median(floors), *middle, **more)


def figure(name: str, workload: str, values: Sequence[float], target: float | None, **more: Any) -> Result:
    """Of what has no floor: the values themselves are held against the target."""
    middle = median(values)
    spread = middle, middle, min(values), max(values), len(values), target
    return Result(name, workload, more.pop('unit', 's'), None, *spread, **more)


def read(line: str) -> Result | None:
    """The Result on a line of a script's output; None for any other line."""
    try:
        said = json.loads(line)
        return Result(**{each.name: said[each.name] for each in fields(Result) if each.name in said})
    except (ValueError, TypeError):
        return None


def tell(result: Result, as_json: bool) -> None:
    """Print it, at once: what was measured is not lost with what comes after."""
    print(result.line() if as_json else result, flush=True)


def arguments(description: str | None, rounds: int, quick: int = QUICK) -> argparse.ArgumentParser:
    """[ROUNDS] [--quick] [--json]; see asked()."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('rounds', nargs='?', type=int, metavar='ROUNDS', help=f'{rounds}, or {quick} with --quick')
    parser.add_argument('--quick', action='store_true', help='few rounds')
    parser.add_argument('--json', action='store_true', help='a line of JSON for each figure')
    parser.set_defaults(usual=rounds, few=quick)
    return parser


def asked(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for, with the number of rounds filled in."""
    interrupt_on_signals()
    options = parser.parse_args(words)
    if options.rounds is None:
        options.rounds = options.few if options.quick else options.usual
    return options


def interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt for each signal that asks this process to end, so that it cleans up.

    A shell starts what it runs in the background with SIGINT ignored.
    """
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Clean up in this block: no second signal interrupts it, nor the processes that it starts."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
