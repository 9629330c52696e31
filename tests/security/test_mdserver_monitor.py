"""The monitor of a metadata server that is nobody: it opens what its five requests ask for, and nothing else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from mdserver import conf
from mdserver.monitor import Monitor

from tests.kit.servers import until
from tests.security.rights import HERE, MAC, MAC_2, OTHER, UUID, Server, describe

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason='who is not root has nothing to give up')


def test_what_a_monitor_does_when_the_other_is_gone(running: Server) -> None:
    monitor = running.monitor()
    assert (monitor.uids().effective, monitor.name()) == (0, psutil.Process(running.pid).name())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        monitor.send_signal(number)  # a Ctrl-C goes to both: mdserver is the one that ends
    assert running.ask('/latest/meta-data/instance-id') == (200, UUID.encode())
    running.process.kill()
    running.process.wait()
    until(lambda: not monitor.is_running() or monitor.status() == psutil.STATUS_ZOMBIE, 10, 'it ends with mdserver')


def test_it_ends_as_it_did_and_leaves_nobody(running: Server) -> None:
    monitor = running.monitor()
    assert running.close() == 0
    assert not monitor.is_running()
    assert 'ENDED' in running.log.read_text()


def test_without_its_monitor_it_ends(running: Server) -> None:
    """ecompute sees that, and starts another."""
    running.monitor().kill()
    assert running.process.wait(20) == 1
    assert 'ENDED: its monitor, which opened its files for it, is gone' in running.log.read_text()


def asked(monitor: Monitor, request: str) -> list[str]:
    """The answers, as the reasons why there is no file; a file's is its text."""
    found = []
    for _, opened in monitor.ask(request):
        if isinstance(opened, OSError):
            found.append(str(opened.strerror))
        else:
            with open(opened) as file:
                found.append(file.read())
    return found


def test_its_monitor_opens_nothing_else(tmp_path: Path) -> None:
    """Whatever mdserver would say once a guest had taken it over."""
    describe(tmp_path, {HERE: (MAC, UUID)})
    (tmp_path / 'token').write_text('canary')
    guests = tmp_path / 'metadata'
    monitor = Monitor(conf.load(tmp_path / 'mdserver.conf'))
    try:
        assert asked(monitor, 'user-data') == ['#!one\n']
        for request in (
            ' ', 'guest', 'guest ', 'guest ../token', 'guest ../../etc/shadow', f'guest  {MAC}', f'guest {MAC} x',
            f'guest {MAC}\n', f'guest {MAC.upper()}', f'guest {MAC}/../../token', f'guest {MAC}\0',
            'user-data ../token', 'user-data /etc/shadow', 'leases /etc/*', '/etc/shadow', 'open /etc/shadow',
            f'ready {MAC}', f'ready {MAC} ../../x', f'ready ../{MAC} {UUID}', f'ready {MAC} {UUID.upper()}',
            f'ready {MAC} {UUID}', 'refused', 'refused ../token x', f'refused {MAC}/../../token x',
            'guest ' + 300 * 'x', '\xff',
        ):
            assert asked(monitor, request) == ['Invalid argument'], request
        # A word is of a guest that is there, or nobody's: otherwise they would fill the directory.
        assert asked(monitor, f'ready {MAC} {OTHER} {{}}') == asked(monitor, f'ready {MAC_2} {UUID} {{}}') == [
            'No such file or directory'
        ]
        assert sorted(path.name for path in guests.iterdir()) == [f'{MAC}.json']
        # Links are followed nowhere, though only root could have put them there.
        (guests / f'{MAC_2}.json').symlink_to(tmp_path / 'token')
        (tmp_path / 'z.status').symlink_to(tmp_path / 'token')
        (guests / f'{UUID}.said').symlink_to(tmp_path / 'made')
        link = 'Too many levels of symbolic links'
        assert asked(monitor, f'guest {MAC_2}') == [link]
        assert asked(monitor, 'leases')[1:] == [link]
        (guests / f'{MAC_2}.refused').symlink_to(tmp_path / 'token')
        assert asked(monitor, f'refused {MAC_2} no lease') == []
        assert (tmp_path / 'token').read_text() == 'canary'
        assert (guests / f'{MAC_2}.refused').read_text() == 'no lease'
        assert asked(monitor, f'refused {MAC_2} ') == []
        assert not (guests / f'{MAC_2}.refused').exists()
        # One in the place of a word that is being left goes, as whatever is left there.
        assert asked(monitor, f'ready {MAC} {UUID} {{}}') == []
        told = guests / f'{UUID}.ready'
        assert told.read_text() == '{}'
        assert not told.is_symlink()
        told.unlink()
        told.symlink_to(tmp_path / 'made')
        assert asked(monitor, f'ready {MAC} {UUID} {{}}') == []
        assert not (tmp_path / 'made').exists()
    finally:
        monitor.close()
