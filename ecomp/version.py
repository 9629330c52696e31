"""The version that commands, computes and `eschedule check` report."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from ecomp import __version__


@cache
def read_version() -> str:
    """Return the version, with the commit in a git checkout: `1.1.0+g0123abcd` (PEP 440)."""
    top = Path(__file__).resolve().parent.parent
    if not (top / '.git').exists():  # installed from a wheel
        return __version__
    # git refuses another user's checkout, as in `sudo eschedule`, unless the command line names it.
    command = ['git', '-c', f'safe.directory={top}', '-C', str(top), 'rev-parse', '--short=8', 'HEAD']
    settings = {name: value for name, value in os.environ.items() if not name.startswith('GIT_')}
    try:
        commit = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no git, or no commit yet
        return __version__
    return f'{__version__}+g{commit.strip()}'
