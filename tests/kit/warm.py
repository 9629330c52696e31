"""Python programs that begin with their imports done: forked from a server that has imported everything once.

A start of Python with h2, PyYAML and placement is half a second of processor, and the tests start some thousand of
them. A fork of one that has imported them and done nothing else yet is a process like any other (its own pid, files,
environment and end; it can be killed, frozen and armed) for a twentieth of that. The server is the standard library's:
https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods

What is about starting itself (an installed command, the first 0.2 s, limits, clocks, other namespaces) is started cold.
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

PRELOAD = [
    *('ecomp.schedule', 'ecomp.scheduler.placing.create', 'ecomp.scheduler.operating.audit', 'ecomp.placement.client'),
    *('ecomp.store.by_h2', 'ecomp.store.watch', 'ecomp.placement.by_http'),
    *('ecomp.cli.inspect', 'yaml'),
    *('ecomp.compute', 'ecomp.agent.process', 'ecomp.virt.fake', 'encodings.utf_8_sig'),
    *('placement.deploy', 'ecomp.lab.placement_server', 'ecomp.lab.elab', 'tests.kit.warm'),
    'tests.kit.warmed',
]
PROBE = 'h2'
"""What is there in a warm process: the server passes over what it cannot import, without a word."""
PR_SET_PDEATHSIG, PR_SET_NAME, CLONE_NEWNS = 1, 15, 0x20000

_CONTEXT = multiprocessing.get_context('forkserver')
_CONTEXT.set_forkserver_preload(PRELOAD)
# A start looks which children have ended, and only one look at each is told how: so there is one at a time.
_LOCK = threading.Lock()


@atexit.register
def _end_all() -> None:
    # Else they would be waited for, frozen ones too.
    for each in multiprocessing.active_children():
        each.kill()


def is_python(command: Sequence[str]) -> bool:
    """Whether the command is `python -m MODULE …` or `python -c PROGRAM …`, of this Python."""
    return len(command) > 2 and command[0] == sys.executable and command[1] in ('-m', '-c')


class Warm:
    """A command as subprocess.Popen runs it, as far as tests ask; is_python(command) has to hold.

    `stdout` and `stderr` are descriptors, stdin is /dev/null; it has a session of its own and dies with this process.
    """

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: int, stderr: int, inside: int = 0
    ) -> None:
        """`inside` is a process whose network, host name and mounts it gets; 0 is this one."""
        child = _Child(list(command), str(cwd), dict(env), stdout, stderr, inside)
        with _LOCK:
            self._process = _CONTEXT.Process(target=child)
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
    """What the forked process does: it becomes the command."""

    def __init__(
        self, command: list[str], cwd: str, env: dict[str, str], stdout: int, stderr: int, inside: int
    ) -> None:
        self._told = command, cwd, env, inside
        self._streams = stdout, stderr

    def __getstate__(self) -> dict[str, Any]:
        # Descriptors can be handed on only while the process is being started, which is when this is pickled.
        return {'_told': self._told, '_streams': tuple(DupFd(each) for each in self._streams)}

    def __call__(self) -> None:
        assert PROBE in sys.modules, f'cold: {PROBE} could not be imported where the server was started'
        command, cwd, env, inside = self._told
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # What top and ps show: its command line is the server's.
        libc.prctl(PR_SET_NAME, command[2].rpartition('.')[2].encode()[:15])
        # Else the server would outlive this test run for as long as one of its children lives.
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
        os.setsid()
        for number, stream in enumerate(self._streams, 1):
            descriptor = stream.detach()  # type: ignore[attr-defined]
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if inside:
            for each in [os.open(f'/proc/{inside}/ns/{name}', os.O_RDONLY) for name in ('uts', 'net', 'mnt')]:
                assert libc.setns(each, 0) == 0, os.strerror(ctypes.get_errno())
            # What is mounted for it alone is nobody else's.
            assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        sys.stdout = io.TextIOWrapper(os.fdopen(1, 'wb', closefd=False), 'utf-8')
        errors = os.fdopen(2, 'wb', closefd=False)
        sys.stderr = io.TextIOWrapper(errors, 'utf-8', 'backslashreplace', line_buffering=True)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ['-c', *command[3:]]
        if command[1] == '-m':
            sys.modules.pop(command[2], None)  # as __main__ it is loaded anew
            runpy.run_module(command[2], run_name='__main__', alter_sys=True)
        else:
            exec(compile(command[2], '<string>', 'exec'), {'__name__': '__main__'})  # what -c does
