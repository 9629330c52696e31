"""What a downloaded file is, found out within limits: its tables are made up by whoever may name an image.

A child does the looking (inspector.py), so that a destroy, a SIGTERM or the time-out ends it in the middle of it.
Limits as Nova has them for `qemu-img info` (nova/virt/images.py, QEMU_IMG_LIMITS): 30 s of processor, 1 GiB. At the end
the child becomes a qemu-img that opens the image as a guest's QEMU does, so that the limits hold for that as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ecomp
from ecomp.errors import BuildFailed, EcompError
from ecomp.model.guest import BaseImage

SECONDS = 30
"""Seconds of processor time, and as many on the clock, that a look may take; a longer one is refused."""
MEMORY = 2**30
"""Bytes of address space of the child; an image that takes more is refused."""
QEMU_MEMORY = 160 * 2**20
"""Bytes of data that QEMU may allocate to open a qcow2; with the largest tables it allows it took 92 MiB."""
TICK = 0.1  # seconds between two calls of the checkpoint
INSPECTOR = 'ecomp.agent.images.inspector'
NO_QEMU_IMG = 127  # exit status of the inspector, as a shell's for a command that was not found


def inspect(path: Path, checkpoint: Callable[[], None]) -> BaseImage:
    """What virt.image.inspect says of the file at `path`; BuildFailed also if it takes more than SECONDS or MEMORY.

    What the checkpoint raises ends the child at once. EcompError if no child could look, which may pass.
    """
    limits = [str(os.getpid()), str(SECONDS), str(MEMORY), str(QEMU_MEMORY)]
    end = time.monotonic() + SECONDS
    try:
        # -P and / : nothing is imported from a directory that happens to be the current one.
        child = subprocess.Popen(
            [sys.executable, '-P', '-m', INSPECTOR, str(path.absolute()), *limits],
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
