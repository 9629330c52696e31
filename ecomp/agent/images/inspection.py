"""Inspect a downloaded file within limits, because its tables may be forged."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ecomp.agent.images.child import answer, read_job, run_program
from ecomp.errors import BuildFailed, EcompError
from ecomp.model.guest import BaseImage
from ecomp.virt import image

# A child process (main) inspects the file, so that a destroy, a SIGTERM or a timeout can end it. Its limits are Nova's
# for `qemu-img info` (nova/virt/images.py, QEMU_IMG_LIMITS): 30 s of processor time, 1 GiB.

# Processor time, and elapsed time, that an inspection may take; beyond that the image is refused.
MAX_SECONDS = 30
# Address space of the child; an image that needs more is refused.
MAX_ADDRESS_SPACE_BYTES = 2**30
# Data that QEMU may allocate to open a qcow2: 92 MiB were needed for the largest tables that it allows.
MAX_QEMU_DATA_BYTES = 160 * 2**20
EXIT_NO_QEMU_IMG = 127  # exit status of the child, as a shell's for a command that was not found


def inspect(path: Path, checkpoint: Callable[[], None]) -> BaseImage:
    """Return the path, format and virtual size of an image, found within the limits.

    Raises:
        BuildFailed: the image is refused, or exceeds a limit.
        EcompError: the child could not work, which may be temporary.
    """
    deadline = time.monotonic() + MAX_SECONDS
    job = path.absolute(), MAX_SECONDS, MAX_ADDRESS_SPACE_BYTES, MAX_QEMU_DATA_BYTES
    result: dict[str, Any] = {}

    def require_time() -> None:
        checkpoint()
        if time.monotonic() > deadline:
            raise _make_timeout_error()

    code = run_program(__name__, job, require_time, result.update)
    if code == -signal.SIGXCPU:
        raise _make_timeout_error()
    if code == EXIT_NO_QEMU_IMG:
        raise EcompError('the image cannot be inspected: qemu-img is not installed here. Fix: install qemu-utils')
    if code != 0 and not result:
        raise EcompError(f'the image cannot be inspected: the inspection ended with exit code {code}')
    if 'reason' in result:
        raise BuildFailed('image', result['reason'])
    if code != 0:
        needs = f'needs more than {MAX_QEMU_DATA_BYTES // 2**20} MiB to open it'
        raise BuildFailed('image', f'QEMU cannot open the image, or {needs}. Fix: qemu-img convert -O qcow2 OLD NEW')
    return BaseImage(str(path), result['format'], result['virtual_size'])


def _make_timeout_error() -> BuildFailed:
    return BuildFailed('image', f'the inspection of the image takes more than {MAX_SECONDS} s: the image is refused')


def main() -> None:
    """Answer with the `format` and `virtual_size` of a file, or the `reason` against it."""
    path, seconds, memory_bytes, qemu_bytes = read_job()
    # The soft limit ends the child with SIGXCPU, which tells the parent the reason.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        base = image.inspect(path)
    except BuildFailed as error:
        answer(reason=error.reason)
    except MemoryError:
        answer(reason=f'the inspection of the image needs more than {memory_bytes // 2**20} MiB of memory')
    else:
        answer(format=base.format, virtual_size=base.virtual_size)
        if base.format == 'qcow2':
            _become_qemu_img(path, qemu_bytes)


def _become_qemu_img(path: Path, data_bytes: int) -> None:
    """Replace this process by a qemu-img that opens the whole file."""
    if (program := shutil.which('qemu-img')) is None:
        os._exit(EXIT_NO_QEMU_IMG)
    # The output of qemu-img may quote the file.
    with open(os.devnull, 'wb') as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    # In addition to RLIMIT_AS, of which the libraries of QEMU alone take 220 MiB.
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    # No child: this process keeps its parent, its used time and the signals that end it.
    # Not `qemu-img info`, which skips a part of the file.
    os.execvp(program, [program, 'measure', '-f', 'qcow2', '-O', 'raw', str(path)])


if __name__ == '__main__':
    main()
