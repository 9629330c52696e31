"""`eschedule top` of a cluster with fake guests."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import suppress

import pytest

from ecomp.cli.terminal import CLEAR_SCREEN
from tests.kit.commands import Control
from tests.kit.servers import make_environment, wait_until
from tests.kit.story import SMALL_QUERY, boot


def test_each_host_and_guest_is_shown_and_a_frozen_host_is_unknown(own_control: Control) -> None:
    first, second = own_control.ecompute(), own_control.ecompute()
    web = boot(own_control, '--name', 'web', '--on', first.uuid, SMALL_QUERY)
    db = boot(own_control, '--name', 'db', '--on', second.uuid, SMALL_QUERY)
    result = own_control.eschedule('top', '-f', 'json')
    assert (result.code, result.stderr) == (0, '')
    shown = json.loads(result.stdout)
    for host in shown['hosts']:
        assert host['guests'] == 1
        assert [name for name, value in host.items() if value is None] == []
        assert 0 <= host['cpu_percent'] <= 110 * host['cpus']  # the kernel counts in steps of 10 ms
    assert {guest['instance']: guest['compute'] for guest in shown['guests']} == {web: first.uuid, db: second.uuid}
    for guest in shown['guests']:
        assert guest['memory_used_bytes'] == guest['memory_bytes'] == 128 * 2**20
        assert guest['cpu_percent'] == guest['disk_read_bytes_per_second'] == 0

    second.pause()
    result = own_control.eschedule('top')
    second.resume()
    assert result.code == 0
    assert 'its ecompute does not answer' in result.stderr
    assert result.stderr.count('\n') == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:3] == ['HOST', 'CPU', '%']
    assert lines[2][1:] == [f'({second.uuid})', *['-'] * 6]  # both have the name of this machine
    assert [line[:3] for line in lines[-2:]] == [['web', '0.0', '128/128'], ['db', '-', '-']]

    result = own_control.eschedule('top', first.uuid, '-f', 'csv', '-c', 'NAME,INSTANCE')
    assert (result.code, result.stdout, result.stderr) == (0, f'NAME,INSTANCE\nweb,{web}\n', '')
    second.stop()
    result = own_control.eschedule('top', '--name', 'd*', '-f', 'value', '-c', 'NAME,CPU %')
    assert (result.code, result.stdout) == (0, 'db\t-\n')
    assert result.stderr.endswith('its ecompute is not alive. Try: eschedule hosts\n')
    assert own_control.eschedule('top', 'nobody').code == 4


def test_terminal_is_redrawn_until_ctrl_c(control: Control) -> None:
    control.ecompute()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
    words = ['--config', str(control.schedule_yaml), 'top']
    process = subprocess.Popen(
        [sys.executable, '-m', 'ecomp.schedule', *words],
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, env=make_environment(),
    )  # fmt: skip
    os.close(theirs)
    output: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # EIO: the other end is closed
            while chunk := os.read(ours, 4096):
                output.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: b''.join(output).count(CLEAR_SCREEN.encode()) > 2, 15, 'it is drawn three times')
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (None, b'')
    finally:
        process.kill()
        reader.join()
        os.close(ours)
    assert process.returncode == 0
    assert control.etcd.list_keys('/audit/') + control.etcd.list_keys('/digests/') == []


@pytest.mark.parametrize('form', ['table', 'json'])
def test_cluster_without_hosts_is_empty(own_control: Control, form: str) -> None:
    result = own_control.eschedule('top', '-f', form)
    assert (result.code, result.stderr) == (0, '')
    if form == 'json':
        assert json.loads(result.stdout) == {'hosts': [], 'guests': []}
