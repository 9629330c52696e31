"""What a process has open and in memory."""

from __future__ import annotations

from typing import NamedTuple

import psutil


class Use(NamedTuple):
    """What a process has open, and what it has in memory (MiB)."""

    descriptors: int
    threads: int
    processes: int
    connections: int
    memory: float

    @classmethod
    def of(cls, pid: int) -> Use:
        """Of this process now; the memory of its children counts, too."""
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        return cls(
            process.num_fds(),
            process.num_threads(),
            len(children),
            len([each for each in process.net_connections('tcp') if each.status == psutil.CONN_ESTABLISHED]),
            sum(each.memory_info().rss for each in (process, *children)) / 2**20,
        )
