"""A lab of its own for a benchmark: its script runs again on the lab's one host, and is measured there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

BLANK = b'\xfa\xf4\xeb\xfd'.ljust(510, b'\0') + b'\x55\xaa' + bytes(2**20 - 512)
"""A disk that boots nothing (cli; hlt; jmp): what is measured ends when QEMU runs."""


class Lab:
    """A lab called `name`, made and removed by run()."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.directory = Path('/var/lib/elab') / name
        self.compute_yaml = self.directory / 'hv1/compute.yaml'

    def image(self, name: str) -> Path:
        """The file of an image that its web server has."""
        return self.directory / 'images' / name

    def run(self, script: str, rounds: int, prepare: Callable[[], object]) -> None:
        """Make the lab, prepare it, run `script --inside ROUNDS IMAGES_URL` on its host, and remove it."""
        self._elab('up', '--name', self._name, '--hosts', '1', quiet=True)
        try:
            prepare()
            images = json.loads((self.directory / 'lab.json').read_text())['images']
            again = [sys.executable, str(Path(script).resolve()), '--inside', str(rounds), images]
            self._elab('exec', '--name', self._name, 'hv1', *again)
        finally:
            self._elab('down', '--name', self._name, quiet=True)

    def _elab(self, *words: str, quiet: bool = False) -> None:
        out = subprocess.DEVNULL if quiet else None
        subprocess.run([sys.executable, '-m', 'ecomp.lab.elab', *words], check=True, stdout=out)


def main(measure: Callable[[int, str], None], make: Callable[[int], None], rounds: int) -> None:
    """The command line of such a script: [ROUNDS] makes the lab, --inside measures."""
    if sys.argv[1:2] == ['--inside']:
        measure(int(sys.argv[2]), sys.argv[3])
    else:
        make(int(sys.argv[1]) if len(sys.argv) > 1 else rounds)
