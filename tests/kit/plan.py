"""A plugin of pytest: which process runs what, what a skip means, and when a test was last run.

Tests that share something that is dear to make (a lab, a libvirt host, what a module makes for itself) are run by one
process, one after the other; all else by whichever is free. What takes longest begins first.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

LABS = 'lab of the stories', 'first lab of the faults', 'second lab of the faults'
"""Each is made by one process, for the fixtures `whole` and `hypervisors`."""
HALF = 'test_j'
"""Modules up to here share the first lab of the faults, where slow tests are run; what is not slow shares one lab."""
LONG = 'long'
LONGEST_ID = 100
"""Characters of a parameter that are part of a test's name as they stand."""
NAMED = 5
"""Tests that never passed, and are named; of more it is said how many there are."""
SLOW = pytest.StashKey[list[str]]()
LAST_RUN = Path(__file__).parents[1] / 'last_run'
"""When each test that only --all runs passed last: a line each, `2026-01-31 NODEID`. `tests/run --all` writes it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup('ecomp')
    group.addoption('--nothing-skipped', action='store_true', help='a test that is skipped has failed')
    group.addoption('--note-last-run', action='store_true', help=f'write down in {LAST_RUN.name} which slow tests pass')


def pytest_make_parametrize_id(val: object) -> str | None:
    """A short name for a long parameter: as it stands it would be in every report, and sent to every process."""
    if not isinstance(val, str | bytes) or len(val) <= LONGEST_ID:
        return None
    data = val.encode(errors='surrogatepass') if isinstance(val, str) else val
    return f'{val[:20]!r}..{len(val)}..{zlib.crc32(data):08x}'


def pytest_itemcollected(item: pytest.Item) -> None:
    """Group what shares something: here, for xdist reads the groups before anybody else may change the items."""
    group = _group(item)
    if group:
        item.add_marker(pytest.mark.xdist_group(group))
    if 'unit' in item.path.parts:
        item.add_marker(pytest.mark.fast)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest; remember which are slow, before any of them are left out."""
    items.sort(key=_rank)
    slow = [_own_name(each.nodeid) for each in items if each.get_closest_marker('slow')]
    getattr(config, 'workeroutput', {})['slow'] = slow
    config.stash[SLOW] = slow


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of xdist's processes has ended, and says what there was; in the one that starts them nothing is read."""
    node.config.stash[SLOW] = getattr(node, 'workeroutput', {}).get('slow', [])


def pytest_collection_finish(session: pytest.Session) -> None:
    """AssertionError where xdist has passed over the groups: each process would make a lab of its own."""
    if getattr(session.config.option, 'loadgroup', False):
        for item in session.items:
            mark = item.get_closest_marker('xdist_group')
            assert mark is None or item.nodeid.endswith(f'@{mark.args[0]}'), f'{item.nodeid} is in no group'


def _group(item: pytest.Item) -> str | None:
    assert isinstance(item, pytest.Function)
    if 'hypervisors' in item.fixturenames:
        # The slow ones wait for so much that one lab of theirs would be the last to be done.
        return LABS[1 + (item.path.stem > HALF and 'not slow' not in item.config.option.markexpr)]
    if 'whole' in item.fixturenames:
        return LABS[0]
    found = item._fixtureinfo.name2fixturedefs.values()
    return item.path.stem if any(each[-1].scope in ('module', 'class') for each in found) else None


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker(LONG):
        return 0
    group = item.get_closest_marker('xdist_group')
    if group:
        return 1 if group.args[0] in LABS else 2
    return 4 if 'unit' in item.path.parts else 3


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> object:
    """The same of a module that skips itself."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and collector.config.getoption('nothing_skipped'):
        report.outcome = 'failed'
        report.longrepr = f'skipped, where nothing may be: {report.longrepr}'


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    """With --nothing-skipped: what is skipped is what somebody relies on having been tried."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, 'wasxfail') and item.config.getoption('nothing_skipped'):
        report.outcome = 'failed'
        report.longrepr = f'skipped, where nothing may be: {report.longrepr}'
    # What a test printed of a hostile text cannot be sent to xdist's first process as it is.
    report.sections = [(name, _encodable(text)) for name, text in report.sections]
    if report.failed and (said := str(report.longrepr)) != _encodable(said):
        report.longrepr = _encodable(said)
    if report.passed and report.when == 'call':
        report.user_properties.append(('slow', item.get_closest_marker('slow') is not None))


class LastRuns:
    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.dates = {name: date for date, _, name in (line.partition(' ') for line in lines)}

    def oldest(self) -> str:
        """`DATE NODEID` of the one that has not passed for longest; '' if none ever did."""
        return min((f'{date} {name}' for name, date in self.dates.items()), default='')

    def never(self, names: Iterable[str]) -> list[str]:
        return sorted(set(names) - self.dates.keys())

    def write(self, passed: list[str], today: str) -> None:
        self.dates.update(dict.fromkeys(passed, today))
        self._path.write_text(''.join(f'{date} {name}\n' for name, date in sorted(self.dates.items())))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which slow test has not been run for longest; with --note-last-run, write down those that passed."""
    passed = terminalreporter.stats.get('passed', [])
    slow = [_own_name(each.nodeid) for each in passed if ('slow', True) in each.user_properties]
    runs = LastRuns(LAST_RUN)
    if config.getoption('note_last_run') and slow:
        runs.write(slow, datetime.datetime.now(datetime.UTC).date().isoformat())
    oldest = runs.oldest() or 'none, no run of it is noted'
    terminalreporter.write_line(f'of --all alone, passed longest ago: {oldest} ({len(runs.dates)} in {LAST_RUN.name})')
    never = runs.never(config.stash.get(SLOW, [])) if runs.dates else []
    for name in never[:NAMED]:
        terminalreporter.write_line(f'of --all alone, never passed: {name}')
    if never[NAMED:]:
        terminalreporter.write_line(f'of --all alone, never passed: {len(never[NAMED:])} more')


def _own_name(nodeid: str) -> str:
    # xdist adds @GROUP behind the parameters.
    return nodeid[: nodeid.rfind('@')] if nodeid.rfind('@') > nodeid.rfind(']') else nodeid


def _encodable(text: str) -> str:
    return text.encode('utf-8', 'backslashreplace').decode()
