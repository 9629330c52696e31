"""A shell in which eschedule asks a lab, and one command with the same environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ecomp.errors import EcompError
from ecomp.lab.state import Lab

RCFILE = """\
[ -r ~/.bashrc ] && . ~/.bashrc
PS1="({name}) ${{PS1-}}"
"""
"""What bash reads first: the user's own, which sets PS1, and then which lab this is."""


def run(lab: Lab, words: Sequence[str]) -> int:
    """Run a command, or bash where `words` is empty, with ECOMP_CONFIG at the lab's schedule.yaml; its exit code.

    The directory of the Python that runs this comes first in PATH, for eschedule is beside it. EcompError.
    """
    config = lab.directory / 'schedule.yaml'
    if not os.access(config, os.R_OK):
        raise EcompError(f'{config} cannot be read: elab up --name {lab.layout.name} writes it')
    beside = str(Path(sys.executable).parent)
    paths = [beside, *(each for each in os.environ.get('PATH', os.defpath).split(os.pathsep) if each != beside)]
    env = {**os.environ, 'ECOMP_CONFIG': str(lab.directory), 'PATH': os.pathsep.join(paths)}
    # A file that is nowhere: nothing is left of it, and whoever may not write to the lab's directory has one, too.
    with open(os.memfd_create('bashrc', 0), 'w', encoding='utf-8') as rcfile:
        rcfile.write(RCFILE.format(name=lab.layout.name))
        rcfile.flush()
        command = list(words) or ['bash', '--rcfile', f'/dev/fd/{rcfile.fileno()}', '-i']
        os.lseek(rcfile.fileno(), 0, os.SEEK_SET)
        try:
            child = subprocess.Popen(command, env=env, pass_fds=() if words else (rcfile.fileno(),))
        except OSError as error:
            raise EcompError(f'{command[0]}: {error.strerror}') from error
        return waited(child)


def waited(child: subprocess.Popen[bytes]) -> int:
    """The exit code of a command that has the terminal, as a shell has it."""
    while True:
        # Ctrl-C reaches the command too; what that means is the command's to decide.
        with contextlib.suppress(KeyboardInterrupt):
            code = child.wait()
            return code if code >= 0 else 128 - code
