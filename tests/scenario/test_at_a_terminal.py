"""Commands on a terminal of 80 columns: wrapping, colours and --watch."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from ecomp.cli.commands import COMMANDS as EVERY
from ecomp.cli.suggestions import FAMILY_WORDS
from ecomp.cli.terminal import LiveLine
from ecomp.schedule import make_terminal
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule
from tests.kit.invariants import check_invariants
from tests.kit.journal import JOURNAL
from tests.kit.servers import make_environment, wait_until
from tests.kit.stacks import write_stack
from tests.kit.story import IMAGE, SMALL_QUERY, place, run_in_process

_SEQUENCE = re.compile(r'\x1b\[([0-9;]*)([A-Za-z])|(.)', re.DOTALL)


def render_screen(output: str, columns: int, height: int = 24) -> list[str]:
    """Return the lines on a terminal and in its scrollback, without blanks at their ends.

    It wraps as xterm does: a character in the last column leaves the cursor there, and the next one begins a line.
    The cursor cannot move up into the scrollback.
    """
    lines, row, column = [''], 0, 0
    for match in _SEQUENCE.finditer(output):
        argument, command, character = match.groups()
        top = max(len(lines) - height, 0)
        if command == 'A':
            row = max(row - int(argument or 1), top)
        elif command == 'H':
            row, column = top, 0
        elif command == 'J':
            row = top if argument == '2' else row
            lines[row:] = ['' if argument == '2' else lines[row][:column]]
            lines += [''] * (row - len(lines) + 1)
        elif command == 'K':
            lines[row] = lines[row][:column]
        elif command:
            assert command == 'm', f'unknown sequence {match[0]!r}'
        elif character == '\r':
            column = 0
        else:
            if character == '\n' or column == columns:
                row, column = row + 1, 0 if column == columns and character != '\n' else column
                lines += [''] * (row - len(lines) + 1)
            if character != '\n':
                lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
                column += 1
    return [line.rstrip() for line in lines]


COLOUR = re.compile('\x1b\\[[0-9]*m')


class Screen:
    """An eschedule whose stdout is a terminal, with what it has written there in `output`."""

    def __init__(
        self,
        control: Control,
        *words: str,
        columns: int = 80,
        height: int = 24,
        with_stderr: bool = False,
        with_keyboard: bool = False,
        **more: str,
    ) -> None:
        self.words, self.started_at = words, time.monotonic()
        self._columns, self._height = columns, height
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', height, columns, 0, 0))
        command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(control.schedule_yaml), *words]
        inherited = {
            key: value for key, value in make_environment().items() if key not in ('COLUMNS', 'LINES', 'NO_COLOR')
        }
        inherited = {**inherited, 'TERM': 'xterm', **more}
        self.process = subprocess.Popen(
            command,
            stdin=theirs if with_keyboard else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs if with_stderr else subprocess.PIPE,
            env=inherited,
            start_new_session=with_keyboard,
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if with_keyboard else None,
        )
        os.close(theirs)
        self.output = ''
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # EIO: the other end is closed
            while chunk := os.read(self._terminal, 4096):
                self.output += chunk.decode()
        os.close(self._terminal)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    @property
    def lines(self) -> list[str]:
        return render_screen(self.output, self._columns, self._height)

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=120)
        self._reader.join()
        return self.process.returncode, (err or b'').decode()


@contextmanager
def start_screen(control: Control, *words: str, height: int = 24) -> Iterator[Screen]:
    terminal = Screen(control, *words, height=height)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.end()


def read_terminal_lines(
    control: Control, *words: str, columns: int = 80, with_stderr: bool = False, **more: str
) -> list[str]:
    started_at = time.monotonic()
    terminal = Screen(control, *words, columns=columns, with_stderr=with_stderr, **more)
    code, err = terminal.end()
    # The journal gets the output as it would be without a terminal: in one line.
    output = [line for line in terminal.output.split('\r\n') if not line.startswith('eschedule: ')]
    JOURNAL.add_run(words, code, (' '.join(output).strip() + '\n', err), started_at, terminal.process.pid)
    assert code == 0, (words, terminal.output, err)
    return terminal.output.replace('\r\n', '\n').removesuffix('\n').split('\n')


@pytest.fixture
def guests(cluster: Control) -> Iterator[Control]:
    computes = [cluster.ecompute('VCPU:16,DISK_GB:100,MEMORY_MB:64000') for _ in range(3)]
    for words in (
        [SMALL_QUERY, IMAGE, '--name', 'web', '--count', '3', '--group', 'web', '--policy', 'anti-affinity', '--wait'],
        ['flavor', 'set', 'small', 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1&required=HW_CPU_X86_VMX'],
        ['quota', 'set', 'shop', 'VCPU=10', 'MEMORY_MB=100000', 'DISK_GB=1000', 'instances=100'],
    ):
        assert run_in_process(cluster, *words).code == 0
    yield cluster
    assert run_in_process(cluster, 'destroy', '--wait', 'web-1', 'web-2', 'web-3').code == 0
    check_invariants(cluster, *computes)


FITTING_COMMANDS = (
    *(['list', '--all'], ['show', 'web-1', 'web-2'], ['hosts'], ['create', '--dry-run', SMALL_QUERY, '--count', '3']),
    *(['show', '--timeline', 'web-1'], ['group', 'web'], ['flavor'], ['quota', 'shop']),
    *(['why', 'web-1'], ['check'], ['help', 'create']),
)
REFUSED_COMMANDS = (
    [f'{SMALL_QUERY}&required=HW_CPU_X86_AVX2', '--count', '2'],
    ['lst'],
    ['host', 'drain', 'nosuch'],
    ['show', 'nosuch', 'no', 'such'],
    ['list', '--sort', 'nosuch'],
)


def test_no_line_is_wrapped_at_80_columns_and_only_terminals_have_colours(guests: Control) -> None:
    for words in FITTING_COMMANDS:
        for line in read_terminal_lines(guests, *words):
            assert len(COLOUR.sub('', line)) <= 80, (words, line)
            assert words[0] not in ('list', 'hosts', 'create') or not re.search('[0-9a-f-]{36}', line), (words, line)
    notice = read_terminal_lines(guests, SMALL_QUERY, '--name', 'new')
    assert max(map(len, notice)) <= 80
    assert re.fullmatch('NOTIFIED TARGET, [0-9a-f-]{36}, OF INSTANCE [0-9a-f-]{36}', ' '.join(notice))
    _, host = read_terminal_lines(guests, SMALL_QUERY, '--name', 'wider', columns=120, with_stderr=True)
    assert host.startswith('eschedule: wider is on ')
    assert run_in_process(guests, 'destroy', '--wait', 'new', 'wider').code == 0
    # Refusals are broken at spaces and complete.
    for words in REFUSED_COMMANDS:
        terminal = Screen(guests, *words, with_stderr=True)
        code, _ = terminal.end()
        assert code, words
        assert max(map(len, terminal.output.split('\r\n'))) <= 80, (words, terminal.output)
        piped_result = run_in_process(guests, *words)
        assert sorted(terminal.output.split()) == sorted((piped_result.stdout + piped_result.stderr).split())
    for words in (['help'], *(['help', name] for name in EVERY), *(['help', first] for first in FAMILY_WORDS)):
        assert max(len(line) for line in run_in_process(guests, *words).stdout.splitlines()) <= 80, words

    green = '\x1b[32mactive\x1b[0m'
    assert sum(green in line for line in read_terminal_lines(guests, 'list')) == 3
    for variables in ({'NO_COLOR': '1'}, {'TERM': 'dumb'}):
        assert '\x1b' not in '\n'.join(read_terminal_lines(guests, 'list', **variables)), variables
    piped = run_in_process(guests, 'list').stdout
    assert '\x1b' not in piped
    assert len(re.findall('[0-9a-f-]{36}', piped)) == 6
    assert max(map(len, read_terminal_lines(guests, 'list', COLUMNS='60'))) - len(green) + len('active') <= 60
    wide = COLOUR.sub('', '\n'.join(read_terminal_lines(guests, 'list', '--wide')))
    assert len(re.findall('[0-9a-f-]{36}', wide)) == 12  # the compute's and the project's are shown, too


def test_watched_list_is_redrawn_and_cut_to_the_terminal_height(guests: Control) -> None:
    with start_screen(guests, 'list', '--watch') as terminal:
        wait_until(lambda: terminal.output.count('web-3') >= 1, 30, 'it is drawn')
        assert run_in_process(guests, 'stop', 'web-3', '--wait').code == 0
        wait_until(lambda: 'stopped' in terminal.output.rpartition('\x1b[H\x1b[2J')[2], 30, 'it is drawn anew')
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == (0, '')
    with Eschedule(guests, 'list', '--watch', '--name', 'web-3') as piped:
        wait_until(lambda: piped.stdout, 30, 'it is drawn')
        assert run_in_process(guests, 'start', 'web-3', '--wait').code == 0
        wait_until(lambda: 'active' in piped.stdout.strip().rpartition('\n\n')[2], 30, 'it is drawn anew, below')
        piped.send_signal(signal.SIGINT)
        result = piped.wait(30)
    assert (result.code, result.stderr) == (0, '')
    assert '\x1b' not in result.stdout
    with start_screen(guests, 'list', '--watch', height=4) as terminal:
        wait_until(lambda: '2 more lines' in terminal.output, 30, 'it is drawn')
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == (0, '')
    # As with `list --watch | head -1`: the next drawing fails and ends it.
    watch = ['list', '--watch', '--name', 'web-3']
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(guests.schedule_yaml), *watch]
    with subprocess.Popen(command, env=make_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline().startswith(b'INSTANCE')
        child.stdout.close()
        for action in ('stop', 'start'):
            assert run_in_process(guests, action, 'web-3', '--wait').code == 0
        assert (child.wait(30), child.stderr.read()) == (0, b'')

    # Warnings are shown even if the table does not fit.
    no_taker = 'waits in a queue, but no compute takes'
    assert run_in_process(guests, '--queue', '--flavor', 'small', '--name', 'waits').code == 0
    key = f'/instances/{uuid.uuid4()}/{uuid.uuid4()}'
    guests.etcd.put(key, '{')
    try:
        with start_screen(guests, 'list', '--watch', height=10) as terminal:
            wait_until(lambda: no_taker in ' '.join(terminal.output.split()), 30, 'it is drawn')
            rows = terminal.output.rpartition('\x1b[H\x1b[2J')[2].removesuffix('\r\n').split('\r\n')
            assert len(rows) < 10
            assert any(row.endswith(' more lines') for row in rows)
            assert all(len(row) <= 80 for row in rows)
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.end() == (0, '')
    finally:
        guests.etcd.delete(key)
        assert run_in_process(guests, 'destroy', 'waits').code == 0


@pytest.mark.usefixtures('compute')
def test_terminal_shows_that_placement_does_not_answer(own_control: Control) -> None:
    """Without the note, half a minute of silence looks like a command that hangs."""
    own_control.placement.pause()
    terminal = Screen(own_control, 'hosts', with_stderr=True)
    try:
        wait_until(lambda: 'waiting for placement at' in terminal.output, 20, 'what it waits for is said')
    finally:
        own_control.placement.resume()
    code, _ = terminal.end()
    assert code == 0, terminal.output


def test_wait_shows_its_condition_on_the_terminal(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    _, instance = place(cluster)
    terminal = Screen(cluster, 'wait', instance, columns=200, with_stderr=True)
    wait_until(lambda: re.search(r'for its compute to accept the request, \d+ s', terminal.output), 30, 'it says so')
    compute.resume()
    assert terminal.end()[0] == 0, terminal.output


STACK = {'db': {}, 'web': {'count': 3}}
# test_every_message_stands_above_the_status tries the other widths without a cluster.
OTHER_WIDTHS_ARE_SLOW = pytest.mark.parametrize(
    'columns', [pytest.param(70, marks=pytest.mark.slow), 80, pytest.param(100, marks=pytest.mark.slow)]
)


def remove_blanks(text: str) -> str:
    """Return a text that can be compared with one that was folded."""
    return ''.join(text.split())


def end_apply(terminal: Screen) -> int:
    code, _ = terminal.end()
    # The journal needs whole uuids. It knows that a command which never ended reports nothing.
    JOURNAL.add_run(terminal.words, None, ('', ''), terminal.started_at, terminal.process.pid)
    return code


def split_at_table(terminal: Screen) -> tuple[str, list[str], str]:
    """Return what a user sees: the messages before a table, its lines, and those after it."""
    lines = terminal.lines
    first = next(at for at, line in enumerate(lines) if line.startswith('NAME'))
    last = next(at for at, line in enumerate(lines) if line.startswith('eschedule: stack') and at > first)
    return remove_blanks(''.join(lines[:first])), lines[first:last], remove_blanks(''.join(lines[last:]))


@OTHER_WIDTHS_ARE_SLOW
def test_failed_member_is_on_the_screen_with_its_reason(cluster: Control, compute: Ecompute, columns: int) -> None:
    shop = write_stack(cluster, STACK)
    compute.pause()
    terminal = Screen(cluster, 'apply', shop, '--wait', columns=columns, with_stderr=True)
    wait_until(lambda: 'waiting for its compute' in terminal.output, 60, 'it waits')
    (instance,) = [
        record['instance']
        for record in json.loads(run_in_process(cluster, 'list', '-f', 'json').stdout)
        if record['name'] == 'shop-db'
    ]
    cluster.placement.call('DELETE', f'/allocations/{instance}')
    compute.resume()
    assert end_apply(terminal) == 1, terminal.output
    before, table, after = split_at_table(terminal)
    reason = 'failed at stage scheduled: placement holds no allocation for it'
    cleaned = '(nothing remains: no domain, disk or allocation)'
    assert before == remove_blanks(f'eschedule: stack shop is new eschedule: shop-db: {reason} {cleaned}')
    assert after == remove_blanks('eschedule: stack shop: 3 new, 1 failed')
    assert all(len(line) <= columns for line in terminal.lines)
    of_db = table[1 : next(at for at, line in enumerate(table) if 'shop-web-1' in line)]
    shown = ' '.join(line[table[0].index('REASON') :].strip() for line in of_db)
    assert shown == f'{reason} {cleaned}', table
    # It is the same in a pipe, where nothing is cut, and the next time.
    again = run_in_process(cluster, 'apply', shop, '--wait')
    assert (again.code, f'  {shown}\n' in again.stdout) == (5, True), again
    assert run_in_process(cluster, 'destroy', '--stack', 'shop', '--yes', '--wait').code == 0


@OTHER_WIDTHS_ARE_SLOW
def test_messages_of_a_wait_that_ends_early_are_whole(cluster: Control, compute: Ecompute, columns: int) -> None:
    # The status fills the line, so that a terminal wraps the ^C that it adds at its end.
    shop = write_stack(cluster, {'a' * 50: {'name': 'one'}, 'web': {'count': 3}})
    compute.pause()
    interrupted = Screen(cluster, 'apply', shop, '--wait', columns=columns, with_stderr=True, with_keyboard=True)
    wait_until(lambda: 'waiting for its compute' in interrupted.output, 60, 'it waits')
    time.sleep(1.0)  # the first wait has begun by then
    interrupted.type('\x03')
    assert end_apply(interrupted) == 6, interrupted.output
    unfinished = 'eschedule: stack shop: not all instances have reached the stage. Try: the same command'
    before, table, after = split_at_table(interrupted)
    hint = f'Try: eschedule --config {cluster.schedule_yaml} wait one shop-web-1 shop-web-2 shop-web-3'
    new = 'eschedule: stack shop is new'
    assert before == remove_blanks(f'{new} eschedule: interrupted; the operation continues. {hint} {unfinished}')
    assert (len(table), after) == (5, remove_blanks('eschedule: stack shop: 4 new'))

    late = Screen(cluster, 'apply', shop, '--wait', '--timeout', '1', columns=columns, with_stderr=True)
    assert end_apply(late) == 6, late.output
    before, table, after = split_at_table(late)
    doing = 'timed out after 1 s (the operation continues), still waiting for its compute to accept the request'
    names = ('one', 'shop-web-1', 'shop-web-2', 'shop-web-3')
    assert before == remove_blanks(''.join([*(f'eschedule: {name}: {doing}' for name in names), unfinished]))
    assert (len(table), after) == (5, remove_blanks('eschedule: stack shop: 4 as the file asks'))
    compute.resume()
    assert run_in_process(cluster, 'destroy', '--stack', 'shop', '--yes', '--wait').code == 0


def test_what_differs_is_said_once_for_a_member(cluster: Control) -> None:
    cluster.ecompute('VCPU:16,DISK_GB:100,MEMORY_MB:64000')
    shop = write_stack(cluster, {'db': {}, 'web': {'count': 2}})
    assert run_in_process(cluster, 'apply', shop, '--wait').code == 0
    changed = {'count': 2, 'query': 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:65'}
    more = write_stack(cluster, {'db': {'image': f'{IMAGE}x'}, 'web': changed})
    for words, code in (('apply', more), 5), (('apply', more, '--replace-all', '--yes', '--wait'), 0):
        terminal = Screen(cluster, *words, columns=80, with_stderr=True)
        assert end_apply(terminal) == code, terminal.output
        text = '\n'.join(terminal.lines)
        assert text.count('MEMORY_MB 64') == text.count('eschedule: web (2): MEMORY_MB 64 → 65\n') == 1, text
        assert 'image: ' in text
    assert run_in_process(cluster, 'destroy', '--stack', 'shop', '--yes', '--wait').code == 0


@pytest.mark.parametrize('columns', [70, 80, 100])
def test_every_message_stands_above_the_status(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    written = io.StringIO()
    monkeypatch.setattr(written, 'isatty', lambda: True)
    monkeypatch.setattr(sys, 'stderr', written)
    monkeypatch.setattr(sys, 'stdout', written)
    monkeypatch.setenv('COLUMNS', str(columns))
    out, long = make_terminal(), 'word ' * 30

    def see() -> list[str]:
        return render_screen(written.getvalue().replace('\n', '\r\n'), columns)

    with LiveLine() as show:
        show('x' * 200)
        (status,) = see()
        assert len(status) == columns - 1
        out.say(long)
        out.put('an address')
        with LiveLine():  # shows nothing, so its end erases nothing
            pass
        assert see()[-2:] == ['an address', status]
        assert ' '.join(see()[:-2]) == f'eschedule: {long.strip()}'
        show('other')
        assert see()[-2:] == ['an address', 'other']
        written.write('^C')
    assert see()[-2:] == ['an address', '']
