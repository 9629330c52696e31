"""A pytest plugin for the distribution of tests, skips, and last runs of slow tests.

Tests that share something expensive to make (a lab, a libvirt host, a module's fixture) run in one process, one after
the other; all others run in any free process. The longest tests start first.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

# Each lab is made by one process, for the fixtures `shared_lab` and `hypervisors`.
LABS = 'lab of the stories', 'first lab of the faults', 'second lab of the faults'
# With slow tests, modules up to this name share the first fault lab, later ones the second. Without slow tests all
# share the first.
HALF = 'test_j'
LONG = 'long'
# A longer parameter is shortened in the name of a test.
LONGEST_ID = 100
# At most this many tests that never passed are named; the rest is counted.
NAMED = 5
SLOW = pytest.StashKey[list[str]]()
# When each test that only --all runs last passed: lines `2026-01-31 NODEID`, written by `tests/run --all`.
LAST_RUN = Path(__file__).parents[1] / 'last_run'


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup('ecomp')
    group.addoption('--nothing-skipped', action='store_true', help='a test that is skipped has failed')
    group.addoption('--note-last-run', action='store_true', help=f'write down in {LAST_RUN.name} which slow tests pass')


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten the id of a long parameter, which each report and process would contain."""
    if not isinstance(val, str | bytes) or len(val) <= LONGEST_ID:
        return None
    data = val.encode(errors='surrogatepass') if isinstance(val, str) else val
    return f'{val[:20]!r}..{len(val)}..{zlib.crc32(data):08x}'


def pytest_itemcollected(item: pytest.Item) -> None:
    """Group tests that share something.

    xdist reads the groups before other hooks may change the items.
    """
    group = _group(item)
    if group:
        item.add_marker(pytest.mark.xdist_group(group))
    if 'unit' in item.path.parts:
        item.add_marker(pytest.mark.fast)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest tests first, and remember the slow ones before any are deselected."""
    items.sort(key=_rank)
    slow = [_own_name(item.nodeid) for item in items if item.get_closest_marker('slow')]
    getattr(config, 'workeroutput', {})['slow'] = slow
    config.stash[SLOW] = slow


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over a worker's list of slow tests; the controller of xdist collects nothing itself."""
    node.config.stash[SLOW] = getattr(node, 'workeroutput', {}).get('slow', [])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that xdist respects the groups.

    Raises:
        AssertionError: it does not, and each process would make its own lab.
    """
    if getattr(session.config.option, 'loadgroup', False):
        for item in session.items:
            mark = item.get_closest_marker('xdist_group')
            assert mark is None or item.nodeid.endswith(f'@{mark.args[0]}'), f'{item.nodeid} is in no group'


def _group(item: pytest.Item) -> str | None:
    assert isinstance(item, pytest.Function)
    if 'hypervisors' in item.fixturenames:
        # The slow ones wait so long that a single lab for all of them would finish last.
        return LABS[1 + (item.path.stem > HALF and 'not slow' not in item.config.option.markexpr)]
    if 'whole' in item.fixturenames:
        return LABS[0]
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return item.path.stem if any(fixtures[-1].scope in ('module', 'class') for fixtures in definitions) else None


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker(LONG):
        return 0
    group = item.get_closest_marker('xdist_group')
    if group:
        return 1 if group.args[0] in LABS else 2
    return 4 if 'unit' in item.path.parts else 3


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> object:
    """With --nothing-skipped a module that skips itself fails."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and collector.config.getoption('nothing_skipped'):
        report.outcome = 'failed'
        report.longrepr = f'skipped, where nothing may be: {report.longrepr}'


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    """With --nothing-skipped a skipped test fails."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, 'wasxfail') and item.config.getoption('nothing_skipped'):
        report.outcome = 'failed'
        report.longrepr = f'skipped, where nothing may be: {report.longrepr}'
    # Output with surrogates from a hostile text cannot be sent to xdist's controller.
    report.sections = [(name, _encodable(text)) for name, text in report.sections]
    if report.failed and (failure := str(report.longrepr)) != _encodable(failure):
        report.longrepr = _encodable(failure)
    if report.passed and report.when == 'call':
        report.user_properties.append(('slow', item.get_closest_marker('slow') is not None))


class LastRuns:
    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.dates = {name: date for date, _, name in (line.partition(' ') for line in lines)}

    def oldest(self) -> str:
        """Return `DATE NODEID` of the test that passed longest ago; '' if none ever did."""
        return min((f'{date} {name}' for name, date in self.dates.items()), default='')

    def never(self, names: Iterable[str]) -> list[str]:
        return sorted(set(names) - self.dates.keys())

    def write(self, passed: list[str], today: str) -> None:
        self.dates.update(dict.fromkeys(passed, today))
        self._path.write_text(''.join(f'{date} {name}\n' for name, date in sorted(self.dates.items())))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print which slow test passed longest ago; with --note-last-run record those that passed."""
    passed = terminalreporter.stats.get('passed', [])
    slow = [_own_name(report.nodeid) for report in passed if ('slow', True) in report.user_properties]
    runs = LastRuns(LAST_RUN)
    if config.getoption('note_last_run') and slow:
        runs.write(slow, datetime.datetime.now(datetime.UTC).date().isoformat())
    oldest = runs.oldest() or 'none, no run of it is noted'
    terminalreporter.write_line(f'of --all alone, passed longest ago: {oldest} ({len(runs.dates)} in {LAST_RUN.name})')
    never_passed = runs.never(config.stash.get(SLOW, [])) if runs.dates else []
    for name in never_passed[:NAMED]:
        terminalreporter.write_line(f'of --all alone, never passed: {name}')
    if never_passed[NAMED:]:
        terminalreporter.write_line(f'of --all alone, never passed: {len(never_passed[NAMED:])} more')


def _own_name(nodeid: str) -> str:
    # xdist appends @GROUP after the parameters.
    return nodeid[: nodeid.rfind('@')] if nodeid.rfind('@') > nodeid.rfind(']') else nodeid


def _encodable(text: str) -> str:
    return text.encode('utf-8', 'backslashreplace').decode()
