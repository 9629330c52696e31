"""Each daemon as systemd's service: it says when it is ready, that it lives and that it ends, and nobody else does."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ecomp.lab.control import etcd_healthy, placement_answers
from tests.kit.commands import Control, Ecompute
from tests.kit.ear import Ear
from tests.kit.servers import TOP, environment, free_port
from tests.kit.story import addressed, place, reserved

WATCHDOG = 1.0
BEAT = ['WATCHDOG=1']


class Served(Ecompute):
    """An ecompute that somebody listens to."""

    ear: Ear

    def environment(self) -> dict[str, str]:
        """With what systemd would tell it."""
        return {**super().environment(), **self.ear.environment(WATCHDOG)}


@pytest.fixture
def ear() -> Iterator[Ear]:
    with Ear() as made:
        yield made


def begun(control: Control, ear: Ear) -> Served:
    """A started fake ecompute."""
    compute = Served(control.etcd.endpoint, control.placement.url)
    compute.ear = ear
    return control.at_exit.enter_context(compute)


@pytest.mark.fast
def test_an_ecompute_is_ready_lives_and_ends(cluster: Control, ear: Ear) -> None:
    compute = begun(cluster, ear)
    ready = ear.heard()
    assert ready == (compute.pid, ['READY=1', ready[1][1]])
    assert ready[1][1].startswith('STATUS=pretended guests with VCPU 4 (0 reserved)')
    assert reserved(cluster, compute.uuid) == 0, 'by then requests may come'
    addressed(cluster, place(cluster)[1])
    assert [ear.heard() for _ in range(4)] == [(compute.pid, BEAT)] * 4, 'its workers say nothing'
    compute.pause()
    ear.forget()
    assert ear.is_silent(3 * WATCHDOG), 'the loop is frozen, so nothing says that it turns'
    compute.resume()
    assert ear.heard() == (compute.pid, BEAT)
    assert compute.stop() == 0
    assert ear.until('STOPPING=1')[0] == compute.pid
    assert ear.is_silent(0)


def test_an_ecompute_lives_while_etcd_and_placement_are_away(own_control: Control, ear: Ear) -> None:
    compute = begun(own_control, ear)
    assert ear.heard()[1][0] == 'READY=1'
    own_control.etcd.pause()
    own_control.placement.pause()
    ear.forget()
    assert [ear.heard(2 * WATCHDOG) for _ in range(12)] == [(compute.pid, BEAT)] * 12
    own_control.etcd.resume()
    own_control.placement.resume()


def test_an_ecompute_that_cannot_start_is_never_ready(tmp_path: Path, ear: Ear) -> None:
    port = free_port()
    compute = Served(f'127.0.0.1:{port}', f'http://127.0.0.1:{port}', directory=tmp_path)
    compute.ear = ear
    assert compute.launch()._process is not None
    assert compute._process.wait(60) == 7
    compute.close()
    assert ear.is_silent(0)


@contextmanager
def running(*words: str, ear: Ear, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of Python's, as a service."""
    env = environment() | ear.environment(WATCHDOG)
    with (cwd / 'log').open('wb') as log:
        process = subprocess.Popen([sys.executable, *words], cwd=cwd, env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_metadata_server_is_ready_when_it_listens(tmp_path: Path, ear: Ear) -> None:
    port = free_port()
    words = [str(TOP / 'md_server/mdserver/server.py'), '--listen', f'127.0.0.1:{port}', '--guests', str(tmp_path)]
    with running(*words, ear=ear, cwd=tmp_path) as process:
        assert ear.heard() == (process.pid, ['READY=1'])
        asked = http.client.HTTPConnection('127.0.0.1', port, timeout=10)
        asked.request('GET', '/')
        assert asked.getresponse().status == 200
        process.terminate()
        assert process.wait(20) == 0


def test_a_control_host_is_ready_when_both_answer(tmp_path: Path, ear: Ear) -> None:
    etcd, placement = free_port(), free_port()
    words = ['-m', 'ecomp.lab.elab', 'control', '--etcd-port', str(etcd), '--placement-port', str(placement)]
    with running(*words, ear=ear, cwd=tmp_path) as process:
        # etcd and stunnel know of NOTIFY_SOCKET, too: neither may speak for the whole.
        assert ear.heard(60) == (process.pid, ['READY=1', 'STATUS=etcd and placement answer at 127.0.0.1'])
        assert etcd_healthy(f'http://127.0.0.1:{etcd}')
        assert placement_answers(f'http://127.0.0.1:{placement}')
        assert [ear.heard() for _ in range(3)] == [(process.pid, BEAT)] * 3
        process.send_signal(signal.SIGTERM)
        assert ear.until('STOPPING=1')[0] == process.pid
        assert process.wait(20) == 0
