"""The result of a benchmark, and the arguments of every script of bench/run.

A script prints one line a result, as text or, with --json, as an object with the fields of Result and `is_met`. --quick
takes the fewest rounds that are still meaningful. All other output goes to stderr.
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

# The signals that ask a process to end.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Rounds with --quick, by default.
QUICK_ROUNDS = 4


@dataclass(frozen=True)
class Result:
    """A figure: `ours` against `floor`, both medians, in `unit`.

    `ratio` is the median of the rounds' ratios, `least` and `most` are the smallest and largest one; without a `floor`
    (None) they are those of `ours`. `target` is the maximum of `ratio`, or its minimum with `at_least`; None means no
    target. `counts` are for one round, or one counted item: calls, operations, processes.
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
    def is_met(self) -> bool | None:
        """True if the target is met, None without one."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def to_json_line(self) -> str:
        """Format the result as one line of JSON."""
        return json.dumps(vars(self) | {'counts': dict(self.counts), 'met': self.is_met})

    def __str__(self) -> str:
        against = '' if self.floor is None else f' against {format_amount(self.floor, self.unit)}'
        times = '' if self.floor is None else f', {self.ratio:.2f} x ({self.least:.2f} to {self.most:.2f})'
        counts = ''.join(f'; {name} {number:g}' for name, number in self.counts.items())
        verdict = {None: '', True: ', met', False: ', missed'}[self.is_met]
        target = '' if self.target is None else f'; target {self.target_text}{verdict}'
        ours = format_amount(self.ours, self.unit)
        return f'{self.name}, {self.workload}: {ours}{against}{times}, {self.rounds} rounds{target}{counts}'

    @property
    def target_text(self) -> str:
        """The target as text, '' for none."""
        if self.target is None:
            return ''
        limit = f'{self.target:g} x' if self.floor is not None else format_amount(self.target, self.unit)
        return f'{">=" if self.at_least else "<="} {limit}'


def format_amount(value: float, unit: str) -> str:
    """Format a number with its unit, times below a second in milliseconds."""
    return f'{value * 1000:.1f} ms' if unit == 's' and value < 1 else f'{value:.4g} {unit}'.strip()


def paired(
    name: str, workload: str, ours: Sequence[float], floors: Sequence[float], target: float | None, **more: Any
) -> Result:
    """Make the result of rounds that measured both sides in turn, by default in seconds."""
    ratios = [mine / theirs for mine, theirs in zip(ours, floors, strict=True)]
    figures = median(ours), median(ratios), min(ratios), max(ratios), len(ratios), target
    return Result(name, workload, more.pop('unit', 's'), median(floors), *figures, **more)


def make_result(name: str, workload: str, values: Sequence[float], target: float | None, **more: Any) -> Result:
    """Make the result of values without a floor, which are compared with the target themselves."""
    middle = median(values)
    spread = middle, middle, min(values), max(values), len(values), target
    return Result(name, workload, more.pop('unit', 's'), None, *spread, **more)


def read(line: str) -> Result | None:
    """Parse a line of a script's output as a Result, None for any other line."""
    try:
        data = json.loads(line)
        return Result(**{item.name: data[item.name] for item in fields(Result) if item.name in data})
    except (ValueError, TypeError):
        return None


def tell(result: Result, as_json: bool) -> None:
    """Print a result immediately, so that it is not lost if the script fails later."""
    print(result.to_json_line() if as_json else result, flush=True)


def arguments(description: str | None, rounds: int, quick_rounds: int = QUICK_ROUNDS) -> argparse.ArgumentParser:
    """Make a parser of [ROUNDS] [--quick] [--json], for asked()."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'rounds', nargs='?', type=int, metavar='ROUNDS', help=f'{rounds}, or {quick_rounds} with --quick'
    )
    parser.add_argument('--quick', action='store_true', help='few rounds')
    parser.add_argument('--json', action='store_true', help='a line of JSON for each figure')
    parser.set_defaults(usual=rounds, few=quick_rounds)
    return parser


def asked(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments and fill in the number of rounds; signals now interrupt."""
    interrupt_on_signals()
    options = parser.parse_args(words)
    if options.rounds is None:
        options.rounds = options.few if options.quick else options.usual
    return options


def interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt for each signal that ends this process, so that it cleans up.

    A shell starts background jobs with SIGINT ignored.
    """
    for number in END_SIGNALS:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore signals in this block, here and in child processes, so that cleanup completes."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
