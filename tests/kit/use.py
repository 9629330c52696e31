"""The open resources and the memory of a process."""

from __future__ import annotations

from typing import NamedTuple

import psutil


class ResourceUse(NamedTuple):
    """The numbers of open resources of a process, and its memory in MiB."""

    descriptors: int
    threads: int
    processes: int
    connections: int
    memory: float

    @classmethod
    def measure(cls, pid: int) -> ResourceUse:
        # The memory of its children is included.
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        return cls(
            process.num_fds(),
            process.num_threads(),
            len(children),
            len([entry for entry in process.net_connections('tcp') if entry.status == psutil.CONN_ESTABLISHED]),
            sum(entry.memory_info().rss for entry in (process, *children)) / 2**20,
        )
