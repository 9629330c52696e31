"""PURE: what is known of an etcd by its version.

https://etcd.io/docs/v3.6/op-guide/versioning/ says which releases are still mended; each release's advisories are at
https://github.com/etcd-io/etcd/security/advisories.
"""

from __future__ import annotations

import re

MENDED = {(3, 5): 33, (3, 6): 14, (3, 7): 1}
"""The first release of each minor version without a hole that is known."""


def holes(version: str) -> str | None:
    """One line for the log about an etcd of this version (`3.4.23`); None: nothing is known of it."""
    parts = re.match(r'(\d+)\.(\d+)\.(\d+)', version)
    if parts is None:
        return None
    major, minor, patch = (int(each) for each in parts.groups())
    cure = f'{", ".join(f"{m}.{n}.{least}" for (m, n), least in MENDED.items())} and newer have none that is known'
    if (major, minor) < min(MENDED):
        return f'etcd {version} is end-of-life, and its roles are no boundary: {cure}'
    if patch < MENDED.get((major, minor), 0):
        return f'etcd {version} has holes that are known: {cure}'
    return None
