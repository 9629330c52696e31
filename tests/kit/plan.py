"""A pytest plugin: distribution of tests, skips, starts of QEMU, last runs of slow tests.

Tests that share something expensive to make (a lab, a libvirt host, a module's fixture) run in one process, one after
the other; all others run in any free process. The longest tests start first.
"""

from __future__ import annotations

import datetime
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.qemu_starts import STARTED_GUESTS

# Each lab is made by one process, for the fixtures `shared_lab` and `hypervisors`.
LAB_GROUPS = 'lab of the stories', 'first lab of the faults', 'second lab of the faults'
# With slow tests, modules up to this name share the first fault lab, later ones the second. Without slow tests all
# share the first.
FIRST_LAB_END = 'test_j'
LONG_MARKER = 'long'
# A longer parameter is shortened in the name of a test.
MAX_ID_CHARACTERS = 100
# At most this many tests that never passed are named; the rest is counted.
MAX_NAMED = 5
# The parts of `tests/run --all` that are not a whole folder. Each part takes at most 30 minutes on two cores.
PARTS = {
    'readme': ('scenario/test_readme.py',),
    'machines': ('scenario/test_debian_packages.py', 'scenario/test_real_machines.py'),
    'images': (
        *('scenario/test_cloud_image.py', 'scenario/test_docker.py', 'scenario/test_install.py'),
        'scenario/test_monitoring.py',
    ),
    'versions': ('faults/test_mixed_versions.py',),
    'kills': ('faults/test_kills.py', 'faults/test_soak.py'),
}
FOLDERS = ('unit', 'golden', 'functional', 'model', 'scenario', 'faults', 'security', 'mutations')
SLOW_TESTS = pytest.StashKey[list[str]]()
# Each costs seconds of both processors, so that more of them are stories for --all.
MAX_QEMU_STARTS = 25
# The starts in this process, or in all of xdist's workers.
QEMU_STARTS = pytest.StashKey[int]()
# The test that first showed the error of a shared fixture, by the error.
FAILED_SETUPS = pytest.StashKey[dict[BaseException, str]]()
# When each test that only --all runs last passed: lines `2026-01-31 NODEID`, written by `tests/run --all`.
TESTS = Path(__file__).parents[1]
LAST_RUN_PATH = TESTS / 'last_run'


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup('ecomp')
    group.addoption('--nothing-skipped', action='store_true', help='a test that is skipped has failed')
    group.addoption('--real-servers', action='store_true', help='use real servers where those in memory would do')
    group.addoption(
        '--part', action='append', choices=(*FOLDERS, *PARTS), help='run these tests alone; several times for several'
    )
    group.addoption(
        '--note-last-run', action='store_true', help=f'write down in {LAST_RUN_PATH.name} which slow tests pass'
    )


def pytest_make_parametrize_id(val: object) -> str | None:
    # Each report and process would contain a long id.
    if not isinstance(val, str | bytes) or len(val) <= MAX_ID_CHARACTERS:
        return None
    data = val.encode(errors='surrogatepass') if isinstance(val, str) else val
    return f'{val[:20]!r}..{len(val)}..{zlib.crc32(data):08x}'


def pytest_itemcollected(item: pytest.Item) -> None:
    # xdist reads the groups before other hooks may change the items.
    group = _choose_group(item)
    if group:
        item.add_marker(pytest.mark.xdist_group(group))
    if item.nodeid.startswith('tests/unit/') and not item.get_closest_marker(LONG_MARKER):
        item.add_marker(pytest.mark.fast)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The slow tests are remembered before any are deselected.
    if parts := config.getoption('part'):
        others = [item for item in items if find_part(item.path) not in parts]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if find_part(item.path) in parts]
    items.sort(key=_rank_item)
    slow = [_remove_group(item.nodeid) for item in items if item.get_closest_marker('slow')]
    getattr(config, 'workeroutput', {})['slow'] = slow
    config.stash[SLOW_TESTS] = slow


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # The controller of xdist runs nothing itself.
    output, stash = getattr(node, 'workeroutput', {}), node.config.stash
    stash[SLOW_TESTS] = output.get('slow', [])
    stash[QEMU_STARTS] = stash.get(QEMU_STARTS, 0) + output.get('qemu_starts', 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    config.stash[QEMU_STARTS] = config.stash.get(QEMU_STARTS, 0) + len(STARTED_GUESTS)
    getattr(config, 'workeroutput', {})['qemu_starts'] = len(STARTED_GUESTS)
    if config.option.markexpr == 'not slow' and config.stash[QEMU_STARTS] > MAX_QEMU_STARTS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish(session: pytest.Session) -> None:
    if getattr(session.config.option, 'loadgroup', False):
        for item in session.items:
            mark = item.get_closest_marker('xdist_group')
            assert mark is None or item.nodeid.endswith(f'@{mark.args[0]}'), f'{item.nodeid} is in no group'


def find_part(path: Path) -> str:
    folder, _, name = path.relative_to(TESTS).as_posix().partition('/')
    return next((part for part, files in PARTS.items() if f'{folder}/{name}' in files), folder)


def _choose_group(item: pytest.Item) -> str | None:
    assert isinstance(item, pytest.Function)
    if item.get_closest_marker('xdist_group'):
        return None  # it names its own
    if 'hypervisors' in item.fixturenames:
        # The slow ones wait so long that a single lab for all of them would finish last.
        return LAB_GROUPS[1 + (item.path.stem > FIRST_LAB_END and 'not slow' not in item.config.option.markexpr)]
    if 'shared_lab' in item.fixturenames:
        return LAB_GROUPS[0]
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return item.path.stem if any(fixtures[-1].scope in ('module', 'class') for fixtures in definitions) else None


def _rank_item(item: pytest.Item) -> int:
    if item.get_closest_marker(LONG_MARKER):
        return 0
    group = item.get_closest_marker('xdist_group')
    if group:
        return 1 if group.args[0] in LAB_GROUPS else 2
    return 4 if 'unit' in item.path.parts else 3


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> object:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and collector.config.getoption('nothing_skipped'):
        report.outcome = 'failed'
        report.longrepr = f'skipped, where nothing may be: {report.longrepr}'


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    outcome = yield
    report = outcome.get_result()
    if report.when == 'setup' and report.failed and call.excinfo:
        # pytest raises the error of a shared fixture again for each test that needs it.
        first = item.config.stash.setdefault(FAILED_SETUPS, {}).setdefault(call.excinfo.value, report.nodeid)
        if first != report.nodeid:
            report.longrepr = f'what it shares with {first} could not be made: see there'
    # Who has no root, or not all its rights, sees the reasons of the fast tests that need it.
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ''
    is_limited = 'ECOMP_TESTS_WITHOUT_ROOT' in os.environ and 'root' in reason
    is_allowed = is_limited or hasattr(report, 'wasxfail')
    if report.skipped and not is_allowed and item.config.getoption('nothing_skipped'):
        report.outcome = 'failed'
        report.longrepr = f'skipped, where nothing may be: {report.longrepr}'
    # Output with surrogates from a hostile text cannot be sent to xdist's controller.
    report.sections = [(name, _escape_surrogates(text)) for name, text in report.sections]
    if report.failed and (failure := str(report.longrepr)) != _escape_surrogates(failure):
        report.longrepr = _escape_surrogates(failure)
    if report.passed and report.when == 'call':
        report.user_properties.append(('slow', item.get_closest_marker('slow') is not None))


class LastRuns:
    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.dates = {name: date for date, _, name in (line.partition(' ') for line in lines)}

    def find_oldest(self) -> str:
        return min((f'{date} {name}' for name, date in self.dates.items()), default='')

    def list_never_run(self, names: Iterable[str]) -> list[str]:
        return sorted(set(names) - self.dates.keys())

    def write(self, passed: list[str], today: str) -> None:
        self.dates.update(dict.fromkeys(passed, today))
        self._path.write_text(''.join(f'{date} {name}\n' for name, date in sorted(self.dates.items())))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the starts of QEMU and the slow test that passed longest ago."""
    starts = config.stash.get(QEMU_STARTS, 0)
    terminalreporter.write_line(f'starts of QEMU: {starts} (at most {MAX_QEMU_STARTS} in the usual run)')
    passed = terminalreporter.stats.get('passed', [])
    slow = [_remove_group(report.nodeid) for report in passed if ('slow', True) in report.user_properties]
    runs = LastRuns(LAST_RUN_PATH)
    if config.getoption('note_last_run') and slow:
        runs.write(slow, datetime.datetime.now(datetime.UTC).date().isoformat())
    oldest = runs.find_oldest() or 'none, no run of it is noted'
    terminalreporter.write_line(
        f'of --all alone, passed longest ago: {oldest} ({len(runs.dates)} in {LAST_RUN_PATH.name})'
    )
    never_passed = runs.list_never_run(config.stash.get(SLOW_TESTS, [])) if runs.dates else []
    for name in never_passed[:MAX_NAMED]:
        terminalreporter.write_line(f'of --all alone, never passed: {name}')
    if never_passed[MAX_NAMED:]:
        terminalreporter.write_line(f'of --all alone, never passed: {len(never_passed[MAX_NAMED:])} more')


def _remove_group(nodeid: str) -> str:
    # xdist appends @GROUP after the parameters.
    return nodeid[: nodeid.rfind('@')] if nodeid.rfind('@') > nodeid.rfind(']') else nodeid


def _escape_surrogates(text: str) -> str:
    return text.encode('utf-8', 'backslashreplace').decode()
