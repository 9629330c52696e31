"""What tests make the first time, from other people's packages, and keep below ~/.cache/ecomp-tests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def kept(name: str, recipe: object, make: Callable[[Path], Path]) -> Path:
    """The file that make(an empty directory) made, named after what it is made from; made once by whoever is first."""
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'ecomp-tests'
    cache.mkdir(parents=True, exist_ok=True)
    stem, dot, suffix = name.partition('.')
    file = cache / f'{stem}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]}{dot}{suffix}'
    with file.with_suffix('.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            with tempfile.TemporaryDirectory(prefix=f'{stem}-', dir=cache) as work:
                make(Path(work)).rename(file)
    return file
