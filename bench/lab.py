"""A lab for one benchmark, whose script runs again and measures on the only host."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from result import QUICK_ROUNDS, Result, arguments, asked, signals_ignored, tell

ELAB = (sys.executable, '-m', 'ecomp.lab.elab')
LABS = Path('/var/lib/elab')
# A disk that boots nothing (cli; hlt; jmp): the measurements end when QEMU runs.
BLANK_DISK = b'\xfa\xf4\xeb\xfd'.ljust(510, b'\0') + b'\x55\xaa' + bytes(2**20 - 512)


class Lab:
    """A lab called `name`, which run() makes and removes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.directory = LABS / name
        self.compute_yaml = self.directory / 'hv1/compute.yaml'

    @property
    def ecompute(self) -> int:
        """The pid of its ecompute."""
        return int(json.loads((self.directory / 'lab.json').read_text())['processes']['hv1 ecompute']['pid'])

    @contextmanager
    def up(self) -> Iterator[Self]:
        """Make the lab, and remove it at the end, even if it was only half made."""
        try:
            self._run_elab('up', '--name', self._name, '--hosts', '1', quiet=True)
            yield self
        finally:
            self.remove()

    def remove(self) -> None:
        if self.directory.exists():
            with signals_ignored():
                self._run_elab('down', '--name', self._name, quiet=True)

    def get_image(self, name: str) -> Path:
        """Return the path of an image of the lab's web server."""
        return self.directory / 'images' / name

    def add_blank(self) -> None:
        """Write blank.raw for the lab's web server."""
        self.get_image('blank.raw').write_bytes(BLANK_DISK)

    def allow_overcommit(self) -> None:
        """Allow far more guests than cores, since they are idle, and restart ecompute."""
        with self.compute_yaml.open('a') as file:
            file.write('allocation_ratios: {VCPU: 100}\n')
        pid = self.ecompute
        os.kill(pid, signal.SIGTERM)  # unlike SIGINT, not ignored in a shell's background job
        while Path(f'/proc/{pid}').exists():
            time.sleep(0.05)
        self._run_elab('up', '--name', self._name, quiet=True)

    def run(self, words: list[str], prepare: Callable[[], object]) -> int:
        """Make the lab, run Python with `words --inside IMAGES_URL` on its host, and remove it.

        Returns the exit code; `prepare` is called before.
        """
        with self.up():
            prepare()
            images = json.loads((self.directory / 'lab.json').read_text())['images']
            again = [sys.executable, *words, '--inside', images]
            return self._run_elab('exec', '--name', self._name, 'hv1', *again)

    def _run_elab(self, *words: str, quiet: bool = False) -> int:
        out = subprocess.DEVNULL if quiet else None
        return subprocess.run([*ELAB, *words], check=quiet, stdout=out).returncode


# Measures, given the number of rounds and the URL of the images.
Measure = Callable[[int, str], Iterator[Result]]


def main(lab: Lab, measure: Measure, prepare: Callable[[], object], rounds: int, quick: int = QUICK_ROUNDS) -> None:
    """Run such a script: make and prepare the lab, and measure inside it."""
    script = sys.modules['__main__']
    parser = arguments(script.__doc__, rounds, quick)
    parser.add_argument('--inside', metavar='IMAGES_URL', help=argparse.SUPPRESS)
    options = asked(parser)
    if options.inside is None:
        sys.exit(lab.run([str(Path(str(script.__file__)).resolve()), *sys.argv[1:]], prepare))
    for result in measure(options.rounds, options.inside):
        tell(result, options.json)
