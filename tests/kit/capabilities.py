"""What libvirt learned about QEMU, kept for the next host of the tests.

A new libvirtd starts QEMU several times to learn what it can, which takes seconds. It keeps the result
in /var/cache/libvirt and checks that it is still true of this QEMU and this machine, so a copy is safe.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

KEPT = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'ecomp-tests/capabilities'
CAPABILITIES = 'qemu/capabilities'


def provide_capabilities(cache: Path, kind: str) -> None:
    """Copy what a host of this kind has learned, if anything, into the cache directory of a new host."""
    if (KEPT / kind).exists():
        shutil.copytree(KEPT / kind, cache / CAPABILITIES, dirs_exist_ok=True)


def keep_capabilities(cache: Path, kind: str) -> None:
    """Keep what a host has learned; files of an older libvirt or QEMU are replaced."""
    (KEPT / kind).mkdir(parents=True, exist_ok=True)
    for learned in (cache / CAPABILITIES).glob('*.xml'):
        kept = KEPT / kind / learned.name
        if kept.exists() and kept.read_bytes() == learned.read_bytes():
            continue
        handle, name = tempfile.mkstemp(dir=KEPT)
        os.close(handle)
        shutil.copy2(learned, name)
        Path(name).rename(kept)
