"""The program that downloads images, forked from this process with what a test has patched."""

from __future__ import annotations

import importlib
import os
import subprocess
import traceback

from ecomp.agent.images import child

FORKED_MODULE = 'ecomp.agent.images.fetch'
START_PROGRAM = child.start_program


def start_program(module: str) -> subprocess.Popen[bytes]:
    """Stand in for child.start_program()."""
    if module != FORKED_MODULE:
        return START_PROGRAM(module)
    program = importlib.import_module(module)

    def run_main() -> None:
        # Closes the pipe by which Popen awaits exec(), and those of programs that other threads start.
        os.closerange(3, os.sysconf('SC_OPEN_MAX'))
        try:
            program.main()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)

    return subprocess.Popen(['a fork'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=run_main)
