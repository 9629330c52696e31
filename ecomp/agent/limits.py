"""What ecompute needs of its process's limits. With less a library aborts, or a thread is missing: say so first."""

from __future__ import annotations

import resource

from ecomp.errors import UsageError

NEEDED = (
    (resource.RLIMIT_NOFILE, 256, 'file descriptors', 'ulimit -n, or LimitNOFILE= of its unit'),
    # Threads, which are reserved 8 MiB of it each and 64 MiB for what they allocate, and gRPC.
    (resource.RLIMIT_AS, 2 * 1024**3, 'bytes of address space', 'ulimit -v, or LimitAS= of its unit'),
)


def check() -> None:
    """UsageError naming the limit that is too low."""
    for limit, least, what, where in NEEDED:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < least:
            raise UsageError(f'limited to {soft} {what}, and {least} are needed: raise the limit ({where})')
