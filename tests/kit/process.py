"""A process of a test's own, which dies with the one that starts it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit.warm import Warm, is_python

Process = Warm | subprocess.Popen[bytes]


def is_stopped(pid: int) -> bool:
    """Whether the process is frozen by a signal. proc(5)"""
    with contextlib.suppress(FileNotFoundError):
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] == 'T'
    return False


def begin(command: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: int, stderr: int) -> Process:
    """Start a process that dies with this one, in a session of its own; a Python program warm (see warm)."""
    if is_python(command) and 'LD_PRELOAD' not in env:
        return Warm(command, cwd, env, stdout, stderr)
    # setpriv becomes the command, so the pid is the process's. Not preexec_fn: that would be a fork with gRPC alive.
    return subprocess.Popen(
        ['setpriv', '--pdeathsig', 'KILL', '--', *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
