"""Files made once from third-party packages, and cached below ~/.cache/ecomp-tests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_file(name: str, recipe: object, make: Callable[[Path], Path]) -> Path:
    # The first process makes the file while others wait.
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
