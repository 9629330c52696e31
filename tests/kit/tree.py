"""A copy of the working tree, as a fresh clone would have it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.kit.servers import TOP


def copy_tree(directory: Path) -> None:
    command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
    listed = subprocess.run(command, cwd=TOP, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split('\0')):
        if (TOP / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / name, directory / name)
