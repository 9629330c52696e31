"""A lab of its own for a benchmark: its script runs again on the lab's one host, and is measured there."""

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

from result import QUICK, Result, arguments, asked, signals_ignored, tell

ELAB = (sys.executable, '-m', 'ecomp.lab.elab')
LABS = Path('/var/lib/elab')
BLANK = b'\xfa\xf4\xeb\xfd'.ljust(510, b'\0') + b'\x55\xaa' + bytes(2**20 - 512)
"""A disk that boots nothing (cli; hlt; jmp): what is measured ends when QEMU runs."""


class Lab:
    """A lab called `name`, made and removed by run()."""

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
        """Make it, and remove it, also when it was only half made."""
        try:
            self._elab('up', '--name', self._name, '--hosts', '1', quiet=True)
            yield self
        finally:
            self.remove()

    def remove(self) -> None:
        """Remove it; no-op if it is not there."""
        if self.directory.exists():
            with signals_ignored():
                self._elab('down', '--name', self._name, quiet=True)

    def image(self, name: str) -> Path:
        """The file of an image that its web server has."""
        return self.directory / 'images' / name

    def add_blank(self) -> None:
        """Give its web server blank.raw."""
        self.image('blank.raw').write_bytes(BLANK)

    def overcommit(self) -> None:
        """Let its ecompute take far more guests than there are cores: they do nothing."""
        with self.compute_yaml.open('a') as file:
            file.write('allocation_ratios: {VCPU: 100}\n')
        pid = self.ecompute
        os.kill(pid, signal.SIGTERM)  # which is heard behind a shell's & too, where Ctrl-C is not
        while Path(f'/proc/{pid}').exists():
            time.sleep(0.05)
        self._elab('up', '--name', self._name, quiet=True)

    def run(self, words: list[str], prepare: Callable[[], object]) -> int:
        """Make the lab, prepare it, run Python with `words --inside IMAGES_URL` on its host, and remove it."""
        with self.up():
            prepare()
            images = json.loads((self.directory / 'lab.json').read_text())['images']
            again = [sys.executable, *words, '--inside', images]
            return self._elab('exec', '--name', self._name, 'hv1', *again)

    def _elab(self, *words: str, quiet: bool = False) -> int:
        out = subprocess.DEVNULL if quiet else None
        return subprocess.run([*ELAB, *words], check=quiet, stdout=out).returncode


Measure = Callable[[int, str], Iterator[Result]]
"""Gets the number of rounds and the URL of the images."""


def main(lab: Lab, measure: Measure, prepare: Callable[[], object], rounds: int, quick: int = QUICK) -> None:
    """The command line of such a script: it makes the lab, prepares it, and measures in there."""
    script = sys.modules['__main__']
    parser = arguments(script.__doc__, rounds, quick)
    parser.add_argument('--inside', metavar='IMAGES_URL', help=argparse.SUPPRESS)
    options = asked(parser)
    if options.inside is None:
        sys.exit(lab.run([str(Path(str(script.__file__)).resolve()), *sys.argv[1:]], prepare))
    for each in measure(options.rounds, options.inside):
        tell(each, options.json)
