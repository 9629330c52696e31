"""Whether a cluster was large when it was seen last: then a create asks about a few computes, and else about all.

~/.cache/ecomp/large-<etcd's endpoints> is there or not. Either question has the same answer: what is remembered
wrongly costs time once, and what cannot be remembered is no error.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ecomp.conf import EtcdConfig

LARGE = 256
"""Computes: of more a few are asked about first. About a hundred placement answers nearly as fast as about one,
and what so few hint is soon stale: with eight requesters a create took 1.4 questions, and they were spread worse."""


def is_large(etcd: EtcdConfig) -> bool:
    """Whether there were more than LARGE computes when that was seen last."""
    with suppress(OSError, RuntimeError):
        return _path(etcd).exists()
    return False


def remember(etcd: EtcdConfig, computes: int) -> None:
    """Remember that there are so many computes."""
    with suppress(OSError, RuntimeError):
        path, large = _path(etcd), computes > LARGE
        if path.exists() == large:
            return
        if large:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch()
        else:
            path.unlink()


def _path(etcd: EtcdConfig) -> Path:
    name = 'large-' + ','.join(etcd.endpoints).replace('/', '_')
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'ecomp' / name
