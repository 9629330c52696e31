"""The program that downloads images, forked from this process: it starts at once, and has what a test has patched."""

from __future__ import annotations

import importlib
import os
import subprocess
import traceback
from types import TracebackType
from typing import IO, Any

from ecomp.agent.images import child

FORKED_MODULES = {'ecomp.agent.images.fetch'}
START_PROGRAM = child.start_program


class ForkedProgram:
    """A fork that runs a module's main(), with the part of subprocess.Popen's interface that child.py uses."""

    def __init__(self, module: Any) -> None:
        job_end, job_begin = os.pipe()
        answers_end, answers_begin = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(module, job_end, answers_begin)
        os.close(job_end)
        os.close(answers_begin)
        self.stdin: IO[bytes] = open(job_begin, 'wb')  # noqa: SIM115
        self.stdout: IO[bytes] = open(answers_end, 'rb')  # noqa: SIM115

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()

    def poll(self) -> int | None:
        return self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait, without a limit: the program has closed its stdout, or was killed."""
        del timeout
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, 9)


def _become(module: Any, stdin: int, stdout: int) -> None:
    """Run main() with these descriptors and no others, and exit."""
    code = 1
    try:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        # Others may be the pipes of a program that another thread starts.
        os.closerange(3, os.sysconf('SC_OPEN_MAX'))
        module.main()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def start_program(module: str) -> subprocess.Popen[bytes] | ForkedProgram:
    """Stand in for child.start_program()."""
    return ForkedProgram(importlib.import_module(module)) if module in FORKED_MODULES else START_PROGRAM(module)
