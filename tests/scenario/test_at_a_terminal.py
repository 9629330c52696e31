"""What a person sees on a terminal of 80 columns: nothing is wrapped, states have colours, --watch draws anew."""

from __future__ import annotations

import fcntl
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
from ecomp.cli.near import FAMILY_WORDS
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule
from tests.kit.invariants import check
from tests.kit.journal import JOURNAL
from tests.kit.servers import environment, until
from tests.kit.story import IMAGE, SMALL, called, place

COLOUR = re.compile('\x1b\\[[0-9]*m')


class Screen:
    """An eschedule whose stdout is a terminal of so many columns; `said` is what it has written there so far.

    `whole`: its stderr is that terminal, too.
    """

    def __init__(
        self, control: Control, *words: str, columns: int = 80, height: int = 24, whole: bool = False, **more: str
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', height, columns, 0, 0))
        command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(control.schedule_yaml), *words]
        there = {key: value for key, value in environment().items() if key not in ('COLUMNS', 'LINES', 'NO_COLOR')}
        there = {**there, 'TERM': 'xterm', **more}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs if whole else subprocess.PIPE, env=there
        )
        os.close(theirs)
        self.said = ''
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        with suppress(OSError):  # EIO: nobody has the other end any more
            while more := os.read(self._ours, 4096):
                self.said += more.decode()
        os.close(self._ours)

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it said on stderr."""
        _, err = self.process.communicate(timeout=120)
        self._reading.join()
        return self.process.returncode, (err or b'').decode()


@contextmanager
def screen(control: Control, *words: str, height: int = 24) -> Iterator[Screen]:
    shown = Screen(control, *words, height=height)
    try:
        yield shown
    finally:
        shown.process.kill()
        shown.end()


def lines(control: Control, *words: str, columns: int = 80, **more: str) -> list[str]:
    """What a command that succeeds writes on a terminal, line by line."""
    began, shown = time.monotonic(), Screen(control, *words, columns=columns, **more)
    code, err = shown.end()
    # As it would be without a terminal: in one line.
    JOURNAL.ended(words, code, (' '.join(shown.said.split('\r\n')).strip() + '\n', err), began, shown.process.pid)
    assert code == 0, (words, shown.said, err)
    return shown.said.replace('\r\n', '\n').removesuffix('\n').split('\n')


@pytest.fixture
def guests(cluster: Control) -> Iterator[Control]:
    """Three computes, a set of three in a group, one that failed, and a flavor and a quota."""
    computes = [cluster.ecompute('VCPU:16,DISK_GB:100,MEMORY_MB:64000') for _ in range(3)]
    for words in (
        [SMALL, IMAGE, '--name', 'web', '--count', '3', '--group', 'web', '--policy', 'anti-affinity', '--wait'],
        ['flavor', 'set', 'small', 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1&required=HW_CPU_X86_VMX'],
        ['quota', 'set', 'shop', 'VCPU=10', 'MEMORY_MB=100000', 'DISK_GB=1000', 'instances=100'],
    ):
        assert called(cluster, *words).code == 0
    yield cluster
    assert called(cluster, 'destroy', '--wait', 'web-1', 'web-2', 'web-3').code == 0
    check(cluster, *computes)


COMMANDS = (
    *(['list'], ['list', '--all'], ['show', 'web-1'], ['show', 'web-1', 'web-2'], ['hosts'], ['plan', SMALL]),
    *(['plan', SMALL, '--count', '3', '--project', 'shop'], ['timeline', 'web-1'], ['timeline', 'web-1', 'web-2']),
    *(['group', 'list'], ['group', 'show', 'web'], ['flavor', 'list'], ['quota', 'list'], ['quota', 'show', 'shop']),
    *(['why', 'web-1'], ['wait', 'web-1'], ['web-2'], ['audit'], ['list', '--sort', 'address', '-c', 'image,instance']),
)


def test_no_line_is_wrapped_at_80_columns(guests: Control) -> None:
    """B4: whatever is printed fits a standard terminal, and has its uuids short (fake)"""
    for words in COMMANDS:
        for line in lines(guests, *words):
            assert len(COLOUR.sub('', line)) <= 80, (words, line)
            assert words[0] not in ('list', 'hosts', 'plan') or not re.search('[0-9a-f-]{36}', line), (words, line)
    made = lines(guests, SMALL, '--name', 'new')
    assert max(map(len, made)) <= 80
    assert re.fullmatch('NOTIFIED TARGET, [0-9a-f-]{36}, OF INSTANCE [0-9a-f-]{36}', ' '.join(made))
    assert len(lines(guests, SMALL, '--name', 'wider', columns=120)) == 1
    assert called(guests, 'destroy', '--wait', 'new', 'wider').code == 0


REFUSED = (
    *([f'{SMALL}&required=HW_CPU_X86_AVX2', '--count', '2'], ['resources=VCPU:99,DISK_GB:1,MEMORY_MB:256'], ['lst']),
    *(['host', 'drain', 'nosuch'], ['show', 'nosuch', 'no', 'such'], ['--frobnicate'], ['list', '--sort', 'nosuch']),
)


def test_no_refusal_and_no_help_is_wrapped_at_80_columns(guests: Control) -> None:
    """B4: what is said beside the data fits too: it is broken at spaces, and nothing of it is lost (fake)"""
    for words in REFUSED:
        shown = Screen(guests, *words, whole=True)
        code, _ = shown.end()
        assert code, words
        assert max(map(len, shown.said.split('\r\n'))) <= 80, (words, shown.said)
        plain = called(guests, *words)
        assert sorted(shown.said.split()) == sorted((plain.stdout + plain.stderr).split())
    for words in (['help'], *(['help', name] for name in EVERY), *(['help', first] for first in FAMILY_WORDS)):
        assert max(len(line) for line in lines(guests, *words)) <= 80, words
        assert max(len(line) for line in called(guests, *words).stdout.splitlines()) <= 80, words


@pytest.mark.parametrize('words', [['plan', SMALL], ['hosts']])
@pytest.mark.usefixtures('compute')
def test_a_placement_that_does_not_answer_is_named_meanwhile(own_control: Control, words: list[str]) -> None:
    """B14: half a minute of silence looks like a command that hangs (fake)"""
    own_control.placement.pause()
    shown = Screen(own_control, *words, whole=True)
    try:
        until(lambda: 'waiting for placement at' in shown.said, 20, 'what it waits for is said')
    finally:
        own_control.placement.resume()
    code, _ = shown.end()
    assert code == 0, shown.said


def test_what_is_waited_for_stands_on_the_terminal(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    _, instance = place(cluster)
    shown = Screen(cluster, 'wait', instance, '--timeout', '1.5', columns=200, whole=True)
    shown.end()
    assert re.search(r'waiting for: its compute to take it, [01] s', shown.said), shown.said
    compute.resume()


def test_colours_are_for_terminals_and_for_who_wants_them(guests: Control) -> None:
    green = '\x1b[32mactive\x1b[0m'
    assert sum(green in line for line in lines(guests, 'list')) == 3
    for more in ({'NO_COLOR': '1'}, {'TERM': 'dumb'}):
        assert '\x1b' not in '\n'.join(lines(guests, 'list', **more)), more
    piped = called(guests, 'list').stdout
    assert '\x1b' not in piped
    assert len(re.findall('[0-9a-f-]{36}', piped)) == 6
    assert max(map(len, lines(guests, 'list', COLUMNS='60'))) - len(green) + len('active') <= 60
    wide = COLOUR.sub('', '\n'.join(lines(guests, 'list', '--wide')))
    assert len(re.findall('[0-9a-f-]{36}', wide)) == 12  # the compute's alone, and the project's, too


def test_what_is_listed_can_be_chosen(guests: Control) -> None:
    def names(*words: str) -> list[str]:
        return called(guests, 'list', *words, '-f', 'value', '-c', 'name').stdout.split()

    assert names() == names('--name', 'web-*') == names('--group', 'web') == ['web-1', 'web-2', 'web-3']
    assert names('--state', 'active,error') == names('--state', 'active', '--state', 'error') == names()
    assert names('--state', 'stopped') == names('--project', 'shop') == names('--name', 'WEB*') == []
    (on,) = called(guests, 'list', '--name', 'web-2', '-f', 'value', '-c', 'compute').stdout.split()
    assert names('--host', on) == ['web-2']


def test_a_list_is_drawn_anew_as_things_change(guests: Control) -> None:
    """--watch: told by etcd, not asked again and again; Ctrl-C ends it well (fake)"""
    with screen(guests, 'list', '--watch') as shown:
        until(lambda: shown.said.count('web-3') >= 1, 30, 'it is drawn')
        assert called(guests, 'stop', 'web-3', '--wait').code == 0
        until(lambda: 'stopped' in shown.said.rpartition('\x1b[H\x1b[2J')[2], 30, 'it is drawn anew')
        shown.process.send_signal(signal.SIGINT)
        assert shown.end() == (0, '')
    with Eschedule(guests, 'list', '--watch', '--name', 'web-3') as piped:
        until(lambda: piped.stdout, 30, 'it is drawn')
        assert called(guests, 'start', 'web-3', '--wait').code == 0
        until(lambda: 'active' in piped.stdout.strip().rpartition('\n\n')[2], 30, 'it is drawn anew, below')
        piped.send(signal.SIGINT)
        ended = piped.end(30)
    assert (ended.code, ended.stderr) == (0, '')
    assert '\x1b' not in ended.stdout


def test_a_watch_that_nobody_reads_any_more_has_ended_well(guests: Control) -> None:
    """As of `list --watch | head -1`: it is noticed at the next drawing (fake)"""
    watch = ['list', '--watch', '--name', 'web-3']
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(guests.schedule_yaml), *watch]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline().startswith(b'INSTANCE')
        child.stdout.close()
        for action in ('stop', 'start'):
            assert called(guests, action, 'web-3', '--wait').code == 0
        assert (child.wait(30), child.stderr.read()) == (0, b'')


def test_a_screen_is_no_longer_than_the_terminal(guests: Control) -> None:
    with screen(guests, 'list', '--watch', height=4) as shown:
        until(lambda: '2 more' in shown.said, 30, 'it is drawn')
        shown.process.send_signal(signal.SIGINT)
        assert shown.end() == (0, '')


def test_what_is_said_of_a_list_stands_below_it_while_it_is_drawn(guests: Control) -> None:
    """--watch says what `list` says on stderr, also where the table has no room (fake)"""
    nobody = 'waits in a queue, and no compute takes'
    assert called(guests, '--queue', '--flavor', 'small', '--name', 'waits').code == 0
    key = f'/instances/{uuid.uuid4()}/{uuid.uuid4()}'
    guests.etcd.put(key, '{')
    try:
        assert all(said in called(guests, 'list').stderr for said in (nobody, key))
        with Eschedule(guests, 'list', '--watch') as piped:
            until(lambda: nobody in piped.stdout and key in piped.stdout, 30, 'it is drawn')
            piped.send(signal.SIGINT)
            assert piped.end(30).code == 0
        with screen(guests, 'list', '--watch', height=10) as shown:
            until(lambda: nobody in ' '.join(shown.said.split()), 30, 'it is drawn')
            drawn = shown.said.rpartition('\x1b[H\x1b[2J')[2].removesuffix('\r\n').split('\r\n')
            assert len(drawn) < 10
            assert any(each.endswith(' more') for each in drawn)
            assert all(len(each) <= 80 for each in drawn)
            shown.process.send_signal(signal.SIGINT)
            assert shown.end() == (0, '')
    finally:
        guests.etcd.delete(key)
        assert called(guests, 'destroy', 'waits').code == 0


def test_what_is_over_is_cleared(cluster: Control, compute: Ecompute) -> None:
    """`clear` removes the records of what is gone and in error, those alone, and says how many (fake)"""
    assert called(cluster, SMALL, '--name', 'here', '--wait').code == 0
    assert called(cluster, SMALL, '--name', 'gone', '--wait').code == 0
    assert called(cluster, 'destroy', 'gone', '--wait').code == 0
    compute.pause()
    assert called(cluster, SMALL, '--name', 'broken').code == 0
    (broken,) = called(cluster, 'list', '--name', 'broken', '-f', 'value', '-c', 'instance').stdout.split()
    cluster.placement.call('DELETE', f'/allocations/{broken}')
    compute.resume()
    assert called(cluster, 'wait', 'broken').code == 1
    (reason,) = called(cluster, 'list', '--state', 'error', '-f', 'value', '-c', 'reason').stdout.splitlines()
    assert 'placement holds no allocation' in reason
    assert called(cluster, 'list').stdout.splitlines()[0].split()[-1] == 'REASON'
    done = called(cluster, 'clear')
    assert (done.code, done.stdout, done.stderr) == (0, '', 'eschedule: 2 records removed: 1 gone, 1 in error\n')
    assert called(cluster, 'list', '--all', '-f', 'value', '-c', 'name').stdout == 'here\n'
    assert called(cluster, 'clear').stderr == 'eschedule: no records removed: 0 gone, 0 in error\n'
    assert called(cluster, SMALL, '--name', 'broken', '--wait').code == 0  # its name is free
    assert called(cluster, 'destroy', 'here', 'broken', '--wait').code == 0
