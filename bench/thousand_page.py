"""The results of bench/thousand.py as a picture and a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PARTS = ('etcd', 'placement', 'postgres', 'computes', 'requesters')
COLOURS = dict(zip(PARTS, ('tab:blue', 'tab:orange', 'tab:green', 'tab:red', 'tab:purple'), strict=True))
# Keys of a row that the table shows for its phase.
SHOWN_KEYS = ('placed', 'per_second', 'p50', 'p95', 'replaced', 'late', 'destroyed', 'dead after', 'alive again after')
Row = dict[str, Any]


def draw(results: Path, picture: Path) -> None:
    """Draw the picture, and print the table."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    plot(rows, picture)
    print('\n'.join(render_table(rows)))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot processor and memory of each part, one group of bars for each phase."""
    import matplotlib

    matplotlib.use('svg')
    matplotlib.rcParams |= {'svg.fonttype': 'none', 'svg.hashsalt': 'ecomp', 'font.size': 8}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(8, 5), layout='constrained', sharex=True)
    width = 0.8 / len(PARTS)
    for number, part in enumerate(PARTS):
        positions = [place - 0.4 + (number + 0.5) * width for place in range(len(rows))]
        for axis, quantity, scale in zip(axes, ('cpu', 'memory'), (100, 1), strict=True):
            values = [scale * row[quantity][part] for row in rows]
            axis.bar(positions, values, width, color=COLOURS[part], label=part if quantity == 'cpu' else None)
    axes[0].set_ylabel('% of a core')
    axes[1].set_ylabel('MB')
    axes[1].set_xticks(range(len(rows)), [f'{row["phase"]}\n{row["seconds"]:.0f} s' for row in rows])
    for axis in axes:
        axis.grid(axis='y', alpha=0.3)
    figure.legend(loc='outside upper center', ncols=len(PARTS))
    figure.savefig(path, metadata={'Date': None})


def render_table(rows: Sequence[Row]) -> Iterator[str]:
    """Render the results in Markdown."""
    yield f'| phase | what | seconds | {" | ".join(f"{part} % of a core, MB" for part in PARTS)} |'
    yield '|---' * (3 + len(PARTS)) + '|'
    for row in rows:
        details = ', '.join(f'{name} {row[name]}' for name in SHOWN_KEYS if name in row)
        parts = ' | '.join(f'{100 * row["cpu"][part]:.0f}, {row["memory"][part]}' for part in PARTS)
        yield f'| {row["phase"]} | {details} | {row["seconds"]} | {parts} |'
