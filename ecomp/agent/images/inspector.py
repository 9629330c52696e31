"""What a downloaded file is, found out by a process of its own: `python -m ecomp.agent.images.inspector …`.

Arguments: the file, the process that waits for the answer, and the limits: seconds of processor, bytes of address
space, and bytes of data for QEMU. The answer is a JSON object on stdout: `format` and `virtual_size`, or the `reason`
against it. For a qcow2 the exit status is then that of a qemu-img that opens it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ecomp.agent.images.inspection import NO_QEMU_IMG
from ecomp.agent.parent import die_with
from ecomp.errors import BuildFailed
from ecomp.virt.image import inspect


def main(arguments: Sequence[str]) -> None:
    """Print what the file is, within the limits that the arguments name."""
    path, (parent, seconds, memory, qemu_memory) = arguments[0], map(int, arguments[1:])
    die_with(parent)
    # The soft limit ends it with SIGXCPU, by which whoever waits knows the reason.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found = inspect(Path(path))
        answer: dict[str, object] = {'format': found.format, 'virtual_size': found.virtual_size}
    except BuildFailed as error:
        answer = {'reason': error.reason}
    except MemoryError:
        answer = {'reason': f'the image takes more than {memory // 2**20} MiB of memory to be looked at'}
    print(json.dumps(answer), flush=True)
    if answer.get('format') == 'qcow2':
        _become_qemu_img(path, qemu_memory)


def _become_qemu_img(path: str, memory: int) -> None:
    """Replace this process by a qemu-img that opens the file read-only, without `info`'s flags that skip a part of it.

    The process stays the same, so its parent, its time and the signals that end it do.
    """
    program = shutil.which('qemu-img')
    if program is None:
        sys.exit(NO_QEMU_IMG)
    # What qemu-img prints may quote the file.
    with open(os.devnull, 'wb') as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    # Beside RLIMIT_AS, of which QEMU's libraries alone take 220 MiB.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    os.execvp(program, [program, 'measure', '-f', 'qcow2', '-O', 'raw', path])


if __name__ == '__main__':
    main(sys.argv[1:])
