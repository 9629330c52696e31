"""What libvirt learned about QEMU, kept for the next host of the tests.

A new libvirtd takes seconds to learn it. It checks that what is in /var/cache/libvirt is still true, so a copy is safe.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

KEPT = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'ecomp-tests/capabilities'
CAPABILITIES = 'qemu/capabilities'


def provide_capabilities(cache: Path, kind: str) -> None:
    if (KEPT / kind).exists():
        shutil.copytree(KEPT / kind, cache / CAPABILITIES, dirs_exist_ok=True)


def keep_capabilities(cache: Path, kind: str) -> None:
    # Files of an older libvirt or QEMU are replaced.
    (KEPT / kind).mkdir(parents=True, exist_ok=True)
    for learned in (cache / CAPABILITIES).glob('*.xml'):
        kept = KEPT / kind / learned.name
        if kept.exists() and kept.read_bytes() == learned.read_bytes():
            continue
        handle, name = tempfile.mkstemp(dir=KEPT)
        os.close(handle)
        shutil.copy2(learned, name)
        Path(name).rename(kept)
