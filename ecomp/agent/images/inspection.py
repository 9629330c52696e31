"""What a downloaded file is, found out within limits: its tables are made up by whoever may name an image.

A child does the looking (main), so that a destroy, a SIGTERM or the time-out ends it in the middle of it.
Limits as Nova has them for `qemu-img info` (nova/virt/images.py, QEMU_IMG_LIMITS): 30 s of processor, 1 GiB. At the end
the child becomes a qemu-img that opens the image as a guest's QEMU does, so that the limits hold for that as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ecomp
from ecomp.errors import BuildFailed, EcompError
from ecomp.model.guest import BaseImage
from ecomp.virt import image

SECONDS = 30
"""Seconds of processor time, and as many on the clock, that a look may take; a longer one is refused."""
MEMORY = 2**30
"""Bytes of address space of the child; an image that takes more is refused."""
QEMU_MEMORY = 160 * 2**20
"""Bytes of data that QEMU may allocate to open a qcow2; with the largest tables it allows it took 92 MiB."""
TICK = 0.1  # seconds between two calls of the checkpoint
PR_SET_PDEATHSIG = 1
NO_QEMU_IMG = 127  # exit status of the child, as a shell's for a command that was not found


def inspect(path: Path, checkpoint: Callable[[], None]) -> BaseImage:
    """What virt.image.inspect says of the file at `path`; BuildFailed also if it takes more than SECONDS or MEMORY.

    What the checkpoint raises ends the child at once. EcompError if no child could look, which may pass.
    """
    limits = [str(os.getpid()), str(SECONDS), str(MEMORY), str(QEMU_MEMORY)]
    end = time.monotonic() + SECONDS
    try:
        # -P and / : nothing is imported from a directory that happens to be the current one.
        child = subprocess.Popen(
            [sys.executable, '-P', '-m', __name__, str(path.absolute()), *limits],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd='/', env=_environment(),
        )  # fmt: skip
    except OSError as error:
        raise EcompError(f'the image cannot be looked at: {error.strerror}') from error
    with child:
        try:
            answer = _answer(child, end, checkpoint)
        finally:
            child.kill()
    if child.returncode == -signal.SIGXCPU:
        raise _too_long()
    if child.returncode == NO_QEMU_IMG:
        raise EcompError('the image was not looked at: qemu-img was not found on this host. Fix: install qemu-utils')
    if child.returncode != 0 and not answer:
        raise EcompError(f'the image was not looked at: the process that does it ended with {child.returncode}')
    found = json.loads(answer)
    if 'reason' in found:
        raise BuildFailed('image', found['reason'])
    if child.returncode != 0:
        needs = f'needs more than {QEMU_MEMORY // 2**20} MiB for it'
        raise BuildFailed('image', f'QEMU cannot open the image, or {needs}. Fix: qemu-img convert -O qcow2 OLD NEW')
    return BaseImage(str(path), found['format'], found['virtual_size'])


def _answer(child: subprocess.Popen[bytes], end: float, checkpoint: Callable[[], None]) -> bytes:
    while True:
        checkpoint()
        try:
            return child.communicate(timeout=TICK)[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() > end:
                raise _too_long() from None


def _too_long() -> BuildFailed:
    return BuildFailed('image', f'the image takes more than {SECONDS} s to be looked at: it is not taken')


def _environment() -> dict[str, str]:
    """The environment of this process, with a PYTHONPATH in which the child finds the same ecomp."""
    ours = str(Path(ecomp.__file__).parents[1])
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, (ours, os.environ.get('PYTHONPATH'))))}


def main(arguments: Sequence[str]) -> None:
    """The child: print what the file is, within the limits that the arguments name.

    Arguments: the file, the process that waits for the answer, and the limits: seconds of processor, bytes of address
    space, and bytes of data for QEMU. The answer is a JSON object on stdout: `format` and `virtual_size`, or the
    `reason` against it. For a qcow2 the exit status is then that of a qemu-img that opens it.
    """
    path, (parent, seconds, memory, qemu_memory) = arguments[0], map(int, arguments[1:])
    die_with(parent)
    # The soft limit ends it with SIGXCPU, by which whoever waits knows the reason.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found = image.inspect(Path(path))
        answer: dict[str, object] = {'format': found.format, 'virtual_size': found.virtual_size}
    except BuildFailed as error:
        answer = {'reason': error.reason}
    except MemoryError:
        answer = {'reason': f'the image takes more than {memory // 2**20} MiB of memory to be looked at'}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    if answer.get('format') == 'qcow2':
        _become_qemu_img(path, qemu_memory)


def _become_qemu_img(path: str, memory: int) -> None:
    """Replace this process by a qemu-img that opens the file read-only, without `info`'s flags that skip a part of it.

    The process stays the same, so its parent, its time and the signals that end it do.
    """
    program = shutil.which('qemu-img')
    if program is None:
        os._exit(NO_QEMU_IMG)
    # What qemu-img prints may quote the file.
    with open(os.devnull, 'wb') as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    # Beside RLIMIT_AS, of which QEMU's libraries alone take 220 MiB.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    os.execvp(program, [program, 'measure', '-f', 'qcow2', '-O', 'raw', path])


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    `parent` is the process that started it: where that has ended already, this one ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == '__main__':
    main(sys.argv[1:])
