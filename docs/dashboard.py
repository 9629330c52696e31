"""Draw the panels of the Grafana dashboard as one picture, from a Prometheus that collects ecomp's metrics.

    python -m docs.dashboard http://localhost:9090 --minutes 60 > picture.svg

It needs no Grafana. Each panel has its title, unit and legend from examples/prometheus/dashboard.json.
tests/scenario/test_monitoring.py draws docs/howto/dashboard.svg with it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

DASHBOARD = Path(__file__).resolve().parents[1] / 'examples/prometheus/dashboard.json'
# Grafana's units of the dashboard: prefixes with their factors, and the suffix of all of them.
BINARY_PREFIXES = (('', 1.0), ('Ki', 2.0**10), ('Mi', 2.0**20), ('Gi', 2.0**30), ('Ti', 2.0**40))
UNITS = {
    'short': ((('', 1.0), ('k', 1e3), ('M', 1e6)), ''),
    'percentunit': ((('', 0.01),), '%'),
    's': ((('µ', 1e-6), ('m', 1e-3), ('', 1.0)), 's'),
    'bytes': (BINARY_PREFIXES, 'B'),
    'binBps': (BINARY_PREFIXES, 'B/s'),
}
# Points of a line. Prometheus evaluates each expression so often.
POINTS = 120
# Pixels: a unit of Grafana's grid in both directions, of which a panel has 8 x 8, and the parts of a panel.
GRID_WIDTH, GRID_HEIGHT = 50, 34
MARGIN, TITLE_HEIGHT, AXIS_WIDTH, TIME_HEIGHT, LEGEND_LINE_HEIGHT, LEGEND_LINES = 8, 26, 64, 18, 15, 4
CHARACTER_WIDTH = 7
INK, PALE, LINE, PAPER = '#1f2733', '#5d6875', '#d9e0e8', '#f4f6f9'
COLOURS = ('#3d7f4f', '#c98a00', '#1f5fa8', '#c8442f', '#7a4fa3', '#0f8f8f', '#b3407f', '#6b6f1d', '#8a5a3c', '#555f6b')


@dataclass(frozen=True)
class Series:
    """A line of a panel: its legend, and its values by their time in seconds; values that are not finite are absent."""

    legend: str
    values: Mapping[float, float]


class LegendEntry(NamedTuple):
    """An entry of a panel's legend: its line, from 0, its left edge, the number of its series, and its text."""

    line: int
    x: float
    number: int
    text: str


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    grid: Mapping[str, int]
    is_stacked: bool
    # {expression: its series}
    series: Mapping[str, list[Series]]
    # {legend of a series: its colour}; the others have those of COLOURS
    colours: Mapping[str, str]

    def choose_colour(self, number: int, legend: str) -> str:
        return self.colours.get(legend, COLOURS[number % len(COLOURS)])


def get_json(url: str, **parameters: str) -> Any:
    """Return the data that Prometheus' HTTP API answers."""
    with urllib.request.urlopen(f'{url}?{urllib.parse.urlencode(parameters)}', timeout=30) as answer:
        return json.load(answer)['data']


def load_panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())['panels']
    return panels


def describe_panels(panels: list[dict[str, Any]]) -> str:
    """Return the titles and expressions of panels as text in XML: a picture tells of which dashboard it is."""
    return escape('; '.join(' '.join([each['title'], *(t['expr'] for t in each['targets'])]) for each in panels))


def read_panels(prometheus: str, start: float, end: float) -> list[Panel]:
    """Evaluate each expression of the dashboard from `start` to `end`, as seconds since 1970."""
    panels = []
    for panel in load_panels():
        defaults = panel['fieldConfig']['defaults']
        series = {
            target['expr']: list(_read_series(prometheus, target['expr'], target['legendFormat'], start, end))
            for target in panel['targets']
        }
        is_stacked = defaults.get('custom', {}).get('stacking', {}).get('mode') == 'normal'
        colours = read_colours(panel)
        panels.append(Panel(panel['title'], defaults['unit'], panel['gridPos'], is_stacked, series, colours))
    return panels


def read_colours(panel: Mapping[str, Any]) -> dict[str, str]:
    """Return the colours that a panel of the dashboard sets, by the legend of the series."""
    return {
        override['matcher']['options']: each['value']['fixedColor']
        for override in panel['fieldConfig']['overrides']
        for each in override['properties']
        if each['id'] == 'color'
    }


def _read_series(prometheus: str, expression: str, legend: str, start: float, end: float) -> Iterator[Series]:
    step = (end - start) / POINTS
    data = get_json(
        f'{prometheus}/api/v1/query_range', query=expression, start=f'{start}', end=f'{end}', step=f'{step}'
    )
    for found in data['result']:
        text = legend
        for name in re.findall(r'{{(\w+)}}', legend):
            text = text.replace(f'{{{{{name}}}}}', found['metric'].get(name, ''))
        values = {round((at - start) / step) * step: float(value) for at, value in found['values']}
        yield Series(text.strip(), {at: value for at, value in values.items() if math.isfinite(value)})


def draw(panels: list[Panel], seconds: float) -> str:
    """Draw the panels, whose values are of the last `seconds`, as an SVG."""
    width = GRID_WIDTH * max(panel.grid['x'] + panel.grid['w'] for panel in panels)
    height = GRID_HEIGHT * max(panel.grid['y'] + panel.grid['h'] for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="11" role="img">',
        f'<title>The dashboard of ecomp</title><desc>{describe_panels(load_panels())}</desc>',
        f'<rect width="{width}" height="{height}" fill="{LINE}"/>',
        *(line for panel in panels for line in _draw_panel(panel, seconds)),
    ]
    return '\n'.join([*parts, '</svg>']) + '\n'


def _draw_panel(panel: Panel, seconds: float) -> Iterator[str]:
    left, top = panel.grid['x'] * GRID_WIDTH, panel.grid['y'] * GRID_HEIGHT
    width, height = panel.grid['w'] * GRID_WIDTH - MARGIN, panel.grid['h'] * GRID_HEIGHT - MARGIN
    yield f'<g transform="translate({left + MARGIN // 2} {top + MARGIN // 2})">'
    yield f'<rect width="{width}" height="{height}" rx="4" fill="white"/>'
    yield f'<text x="10" y="18" font-size="13" font-weight="bold" fill="{INK}">{escape(panel.title)}</text>'
    series = [each for found in panel.series.values() for each in found]
    legend = list(_place_legend(series, width - 20))
    bottom = height - TIME_HEIGHT - LEGEND_LINE_HEIGHT * (max((entry.line for entry in legend), default=0) + 1) - 8
    right = width - 12
    bases = _stack(series) if panel.is_stacked else [{} for _ in series]
    tops = [
        {at: value + base.get(at, 0) for at, value in each.values.items()}
        for each, base in zip(series, bases, strict=True)
    ]
    highest = max((value for line in tops for value in line.values()), default=0.0)
    ticks = choose_ticks(highest, panel.unit)

    def place(at: float, value: float) -> str:
        x = AXIS_WIDTH + (right - AXIS_WIDTH) * at / seconds
        return f'{x:.0f},{bottom - (bottom - TITLE_HEIGHT - 6) * value / ticks[-1]:.1f}'

    for tick in ticks:
        y = place(0, tick).partition(',')[2]
        yield f'<path d="M{AXIS_WIDTH},{y}H{right}" stroke="{LINE}"/>'
        text = escape(format_value(tick, panel.unit))
        yield f'<text x="{AXIS_WIDTH - 6}" y="{float(y) + 4:.1f}" text-anchor="end" fill="{PALE}">{text}</text>'
    for at, text, anchor in (
        (0.0, f'-{seconds / 60:.2g} min', 'middle'),
        (seconds / 2, f'-{seconds / 120:.2g} min', 'middle'),
        (seconds, 'now', 'end'),
    ):
        x = place(at, 0).partition(',')[0]
        yield f'<text x="{x}" y="{bottom + 15}" text-anchor="{anchor}" fill="{PALE}">{text}</text>'
    for number, (line, base) in enumerate(zip(tops, bases, strict=True)):
        colour = panel.choose_colour(number, series[number].legend)
        for times in _split_at_gaps(line, seconds / POINTS):
            path = 'L'.join(place(at, line[at]) for at in times)
            if panel.is_stacked:
                back = 'L'.join(place(at, base.get(at, 0)) for at in reversed(times))
                yield f'<path d="M{path}L{back}z" fill="{colour}" fill-opacity="0.3"/>'
            yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    for entry in legend:
        base_line = bottom + TIME_HEIGHT + 15 + LEGEND_LINE_HEIGHT * entry.line
        colour = panel.choose_colour(entry.number, series[entry.number].legend)
        yield f'<rect x="{entry.x:.0f}" y="{base_line - 5}" width="12" height="3" fill="{colour}"/>'
        yield f'<text x="{entry.x + 16:.0f}" y="{base_line}" fill="{INK}">{escape(entry.text)}</text>'
    yield '</g>'


def _stack(series: list[Series]) -> list[dict[float, float]]:
    """Return for each series the sum of those before it, at each of its times."""
    sums: dict[float, float] = {}
    bases = []
    for each in series:
        bases.append({at: sums.get(at, 0.0) for at in each.values})
        sums |= {at: sums.get(at, 0.0) + value for at, value in each.values.items()}
    return bases


def _split_at_gaps(line: Mapping[float, float], step: float) -> list[list[float]]:
    """Return the times of a line in parts without gaps, as Grafana draws it."""
    parts: list[list[float]] = []
    for at in sorted(line):
        if not parts or at - parts[-1][-1] > 1.5 * step:
            parts.append([])
        parts[-1].append(at)
    return parts


def _place_legend(series: list[Series], width: int) -> Iterator[LegendEntry]:
    """Place an entry for each series; the last one counts those for which there is no room."""
    line, x = 0, 10.0
    for number, each in enumerate(series):
        needed = CHARACTER_WIDTH * len(each.legend) + 30
        if x > 10 and x + needed > width:
            line, x = line + 1, 10.0
        if line == LEGEND_LINES - 1 and number + 1 < len(series):
            yield LegendEntry(line, x, number, f'{each.legend}, and {len(series) - number - 1} more')
            return
        yield LegendEntry(line, x, number, each.legend)
        x += needed


def choose_ticks(highest: float, unit: str) -> list[float]:
    """Return at most six ticks from 0 to at least the highest value, in round steps of the unit."""
    highest = highest or 1.0
    factor = _choose_prefix(highest, unit)[1]
    size = 10 ** math.floor(math.log10(highest / factor))
    step = next(step for part in (0.2, 0.5, 1, 2, 5) if highest <= 5 * (step := part * size * factor))
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)]


def format_value(value: float, unit: str) -> str:
    """Write a value with its unit, as `1.5 KiB` or `30%`."""
    prefix, factor = _choose_prefix(value, unit)
    suffix = prefix + UNITS[unit][1]
    return f'{value / factor:.3g}{"" if suffix in ("", "%") else " "}{suffix}' if value else '0'


def _choose_prefix(value: float, unit: str) -> tuple[str, float]:
    prefixes = UNITS[unit][0]
    return next((each for each in reversed(prefixes) if value >= each[1]), prefixes[0])


def main() -> None:
    parser = argparse.ArgumentParser(description='Draw the Grafana dashboard of ecomp, as an SVG on stdout.')
    parser.add_argument('prometheus', help='the URL of Prometheus, as http://localhost:9090')
    parser.add_argument('--minutes', type=float, default=60.0, help='the time to show, until now (default: 60)')
    options = parser.parse_args()
    now, seconds = time.time(), 60 * options.minutes
    try:
        panels = read_panels(options.prometheus.rstrip('/'), now - seconds, now)
    except OSError as error:
        sys.exit(
            f'dashboard: no answer from Prometheus at {options.prometheus} ({error}). Fix: start it, or correct the URL'
        )
    sys.stdout.write(draw(panels, seconds))


if __name__ == '__main__':
    main()
