"""Inspect a downloaded file within limits: its tables may be forged.

A child process (main) inspects it, so that a destroy, a SIGTERM or a timeout can end it. Its limits are Nova's for
`qemu-img info` (nova/virt/images.py, QEMU_IMG_LIMITS): 30 s of processor time, 1 GiB. It then becomes a qemu-img.
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

# Processor time, and elapsed time, that an inspection may take; beyond that the image is refused.
MAX_SECONDS = 30
# Address space of the child; an image that needs more is refused.
MAX_ADDRESS_SPACE_BYTES = 2**30
# Data that QEMU may allocate to open a qcow2: 92 MiB were needed for the largest tables that it allows.
MAX_QEMU_DATA_BYTES = 160 * 2**20
CHECKPOINT_SECONDS = 0.1  # seconds between two calls of the checkpoint
PR_SET_PDEATHSIG = 1
EXIT_NO_QEMU_IMG = 127  # exit status of the child, as a shell's for a command that was not found


def inspect(path: Path, checkpoint: Callable[[], None]) -> BaseImage:
    """Return what virt.image.inspect() returns for the file at `path`, within the limits.

    Raises BuildFailed if the image is refused or exceeds a limit, and EcompError, maybe temporary, if the child could
    not work. An error of `checkpoint` ends the child and is raised.
    """
    limits = [str(os.getpid()), str(MAX_SECONDS), str(MAX_ADDRESS_SPACE_BYTES), str(MAX_QEMU_DATA_BYTES)]
    deadline = time.monotonic() + MAX_SECONDS
    try:
        # -P and / : no module is imported from the current directory.
        child = subprocess.Popen(
            [sys.executable, '-P', '-m', __name__, str(path.absolute()), *limits],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd='/', env=_make_environment(),
        )  # fmt: skip
    except OSError as error:
        raise EcompError(f'the image cannot be inspected: {error.strerror}') from error
    with child:
        try:
            answer = _read_answer(child, deadline, checkpoint)
        finally:
            child.kill()
    if child.returncode == -signal.SIGXCPU:
        raise _make_timeout_error()
    if child.returncode == EXIT_NO_QEMU_IMG:
        raise EcompError('the image cannot be inspected: qemu-img is not installed here. Fix: install qemu-utils')
    if child.returncode != 0 and not answer:
        raise EcompError(f'the image cannot be inspected: the inspection ended with exit code {child.returncode}')
    result = json.loads(answer)
    if 'reason' in result:
        raise BuildFailed('image', result['reason'])
    if child.returncode != 0:
        needs = f'needs more than {MAX_QEMU_DATA_BYTES // 2**20} MiB to open it'
        raise BuildFailed('image', f'QEMU cannot open the image, or {needs}. Fix: qemu-img convert -O qcow2 OLD NEW')
    return BaseImage(str(path), result['format'], result['virtual_size'])


def _read_answer(child: subprocess.Popen[bytes], deadline: float, checkpoint: Callable[[], None]) -> bytes:
    """Return the child's output at its end; BuildFailed after `deadline` (monotonic). Raises errors of `checkpoint`."""
    while True:
        checkpoint()
        try:
            return child.communicate(timeout=CHECKPOINT_SECONDS)[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise _make_timeout_error() from None


def _make_timeout_error() -> BuildFailed:
    return BuildFailed('image', f'the inspection of the image takes more than {MAX_SECONDS} s: the image is refused')


def _make_environment() -> dict[str, str]:
    """Return the environment with a PYTHONPATH in which the child finds the same ecomp."""
    package_parent = str(Path(ecomp.__file__).parents[1])
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, (package_parent, os.environ.get('PYTHONPATH'))))}


def main(arguments: Sequence[str]) -> None:
    """Run the child: print what the file is, within the limits in the arguments.

    Arguments: the file, the parent's pid, seconds of processor time, bytes of address space and of QEMU's data. It
    prints JSON: `format` and `virtual_size`, or the `reason` against it. For a qcow2 it exits as qemu-img does.
    """
    path, (parent, seconds, memory, qemu_memory) = arguments[0], map(int, arguments[1:])
    die_with_parent(parent)
    # The soft limit ends the child with SIGXCPU, which tells the parent the reason.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        base = image.inspect(Path(path))
        answer: dict[str, object] = {'format': base.format, 'virtual_size': base.virtual_size}
    except BuildFailed as error:
        answer = {'reason': error.reason}
    except MemoryError:
        answer = {'reason': f'the inspection of the image needs more than {memory // 2**20} MiB of memory'}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    if answer.get('format') == 'qcow2':
        _become_qemu_img(path, qemu_memory)


def _become_qemu_img(path: str, data_bytes: int) -> None:
    """Replace this process by a qemu-img that opens the whole file; exit EXIT_NO_QEMU_IMG without it.

    `qemu-img info` skips a part of it. The process keeps its parent, its used time and the signals that end it.
    """
    program = shutil.which('qemu-img')
    if program is None:
        os._exit(EXIT_NO_QEMU_IMG)
    # The output of qemu-img may quote the file.
    with open(os.devnull, 'wb') as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    # In addition to RLIMIT_AS, of which the libraries of QEMU alone take 220 MiB.
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    os.execvp(program, [program, 'measure', '-f', 'qcow2', '-O', 'raw', path])


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process (prctl(2)) when its starting thread ends; exit 1 if `parent_pid` has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before prctl() was called
        os._exit(1)


if __name__ == '__main__':
    main(sys.argv[1:])
