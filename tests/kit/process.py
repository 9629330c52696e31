"""A process that dies with the process that starts it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit.warm import WarmProcess, is_python

Process = WarmProcess | subprocess.Popen[bytes]


def is_stopped(pid: int) -> bool:
    # See proc(5).
    with contextlib.suppress(FileNotFoundError):
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] == 'T'
    return False


def start_process(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: int, stderr: int, inside: int = 0
) -> Process:
    """Start a process in its own session that dies with this one."""
    if is_python(command) and 'LD_PRELOAD' not in env:
        return WarmProcess(command, cwd, env, stdout, stderr, inside)
    assert not inside, 'only Python'
    # setpriv execs the command, so the pid is the command's. preexec_fn would run in a fork while gRPC threads are
    # alive.
    return subprocess.Popen(
        ['setpriv', '--pdeathsig', 'KILL', '--', *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
