"""Python programs forked from a server that has already imported everything.

Starting Python with h2 and PyYAML takes half a second of processor time, and a fork a twentieth of that. The server is
https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
Tests of the start itself (an installed command, the first 0.2 s, limits, clocks, other namespaces) start it cold.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

PRELOADED_MODULES = [
    *('ecomp.schedule', 'ecomp.scheduler.placing.create', 'ecomp.scheduler.operations.audit', 'ecomp.placement.client'),
    *('ecomp.store.http2_client', 'ecomp.store.watch', 'ecomp.placement.http_client'),
    *('ecomp.cli.inspect', 'ecomp.cli.apply', 'ecomp.scheduler.placing.stack', 'yaml'),
    *('ecomp.compute', 'ecomp.agent.process', 'ecomp.virt.fake', 'encodings.utf_8_sig'),
    *('ecomp.agent.images.inspection', 'tests.kit.images'),
    *('waitress', 'os_traits', 'os_resource_classes', 'tests.kit.memory_placement', 'ecomp.lab.elab', 'tests.kit.warm'),
    'tests.kit.warmed',
]
# A module that every warm process must have: the server silently skips what it cannot import.
PROBE_MODULE = 'h2'
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
CLONE_NEWNS = 0x20000

# The context of all warm processes.
CONTEXT = multiprocessing.get_context('forkserver')
CONTEXT.set_forkserver_preload(PRELOADED_MODULES)
# Starting a process polls all children, and only one poll of each gets its exit code: so one start at a time.
_LOCK = threading.Lock()


def get_server_pid() -> int:
    """Return the pid of the server, which is the parent of the processes of CONTEXT."""
    forkserver.ensure_running()
    return int(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


@atexit.register
def _kill_all() -> None:
    # Otherwise the exit of this process would wait for them, even for frozen ones.
    for process in multiprocessing.active_children():
        process.kill()


def is_python(command: Sequence[str]) -> bool:
    return len(command) > 2 and command[0] == sys.executable and command[1] in ('-m', '-c')


class WarmProcess:
    """Runs a command warm, like subprocess.Popen, in its own session until this process dies.

    is_python(command) must be true. `stdout` and `stderr` are descriptors, and stdin is /dev/null.
    """

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: int, stderr: int, inside: int = 0
    ) -> None:
        """Start the command in the network, host name and mounts of the process `inside`."""
        child = _Child(list(command), str(cwd), dict(env), stdout, stderr, inside)
        with _LOCK:
            self._process = CONTEXT.Process(target=child)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        with _LOCK:
            return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not multiprocessing.connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(f'process {self.pid}', timeout or 0.0)
        code = self.returncode
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Child:
    def __init__(
        self, command: list[str], cwd: str, env: dict[str, str], stdout: int, stderr: int, inside: int
    ) -> None:
        self._told = command, cwd, env, inside
        self._streams = stdout, stderr

    def __getstate__(self) -> dict[str, Any]:
        # Descriptors can be passed only while the process starts, which is when this is pickled.
        return {'_told': self._told, '_streams': tuple(DupFd(descriptor) for descriptor in self._streams)}

    def __call__(self) -> None:
        assert PROBE_MODULE in sys.modules, f'cold: {PROBE_MODULE} could not be imported where the server was started'
        command, cwd, env, inside = self._told
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The name in top and ps; the command line is the server's.
        libc.prctl(PR_SET_NAME, command[2].rpartition('.')[2].encode()[:15])
        # Otherwise the server would outlive this test run while one of its children lives.
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
        os.setsid()
        for number, stream in enumerate(self._streams, 1):
            descriptor = stream.detach()  # type: ignore[attr-defined]
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if inside:
            for namespace in [os.open(f'/proc/{inside}/ns/{name}', os.O_RDONLY) for name in ('uts', 'net', 'mnt')]:
                assert libc.setns(namespace, 0) == 0, os.strerror(ctypes.get_errno())
            # Its own mounts must not be visible to other processes.
            assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        sys.stdout = io.TextIOWrapper(os.fdopen(1, 'wb', closefd=False), 'utf-8')
        errors = os.fdopen(2, 'wb', closefd=False)
        sys.stderr = io.TextIOWrapper(errors, 'utf-8', 'backslashreplace', line_buffering=True)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ['-c', *command[3:]]
        if command[1] == '-m':
            sys.modules.pop(command[2], None)  # it is loaded again as __main__
            runpy.run_module(command[2], run_name='__main__', alter_sys=True)
        else:
            exec(compile(command[2], '<string>', 'exec'), {'__name__': '__main__'})  # as -c does
