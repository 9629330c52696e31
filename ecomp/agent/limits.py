"""What ecompute needs of its process's limits. With less a library aborts, or a thread is missing: say so first."""

from __future__ import annotations

import resource

from ecomp.errors import UsageError

NEEDED = (
    (resource.RLIMIT_NOFILE, 256, 'file descriptors', 'ulimit -n, or LimitNOFILE= of its unit'),
    # Threads, which are reserved 8 MiB of it each and 64 MiB for what they allocate, and gRPC.
    (resource.RLIMIT_AS, 2 * 1024**3, 'bytes of address space', 'ulimit -v, or LimitAS= of its unit'),
)
EACH = {resource.RLIMIT_NOFILE: 8, resource.RLIMIT_AS: 8 * 8 * 1024**2}
"""What each of many pretended computes needs more: its lock and its waker's pipe; its threads."""


def check(computes: int = 1) -> None:
    """UsageError naming the limit that is too low for so many."""
    for limit, alone, what, where in NEEDED:
        least = alone + EACH[limit] * (computes - 1)
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < least:
            raise UsageError(f'limited to {soft} {what}, and {least} are needed: raise the limit ({where})')
