"""Run programs of this package as child processes of a worker, which may kill them."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import ecomp
from ecomp.errors import EcompError

CHECKPOINT_SECONDS = 0.1  # seconds between two calls of the checkpoint
PR_SET_PDEATHSIG = 1
_ANSWERING = threading.Lock()


def run_program(
    module: str, job: object, checkpoint: Callable[[], None], handle_answer: Callable[[dict[str, Any]], None]
) -> int:
    """Run a module as a program, and return its exit code.

    `handle_answer` gets each answer. `checkpoint` is called every CHECKPOINT_SECONDS, and its error kills the program.
    """
    try:
        child = start_program(module)
    except OSError as error:
        raise EcompError(f'{sys.executable} cannot be started: {error.strerror}') from error
    with child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            with suppress(BrokenPipeError), child.stdin as stdin:  # it may have ended already
                stdin.write(pickle.dumps((os.getpid(), job)))
            unread = b''
            while True:
                checkpoint()
                if wait([child.stdout.fileno()], CHECKPOINT_SECONDS):
                    if not (data := os.read(child.stdout.fileno(), 65536)):
                        break
                    *lines, unread = (unread + data).split(b'\n')
                    for line in lines:
                        # JSON, because the program reads strangers' data, and a pickle could run code.
                        handle_answer(json.loads(line))
            while child.poll() is None:
                checkpoint()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(CHECKPOINT_SECONDS)
        finally:
            child.kill()
    return child.returncode


def start_program(module: str) -> subprocess.Popen[bytes]:
    package_parent = str(Path(ecomp.__file__).parents[1])
    python_path = os.pathsep.join(filter(None, (package_parent, os.environ.get('PYTHONPATH'))))
    # -P and / : no module is imported from the current directory.
    command, variables = [sys.executable, '-P', '-m', module], {**os.environ, 'PYTHONPATH': python_path}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd='/', env=variables)


def read_job() -> Any:
    """Read this program's job, and let the program end with its parent from now on."""
    with open(0, 'rb', closefd=False) as stdin:
        parent_pid, job = pickle.load(stdin)  # noqa: RUF100, S301  (our parent wrote it)
    die_with_parent(parent_pid)
    return job


def answer(**fields: Any) -> None:
    with _ANSWERING:  # a long line is not written atomically
        os.write(1, json.dumps(fields).encode() + b'\n')


def answer_finally(**fields: Any) -> NoReturn:
    """Print an answer and end the program, whatever its other threads wait for."""
    answer(**fields)
    os._exit(1)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before prctl() was called
        os._exit(1)
