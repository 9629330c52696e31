"""`ecompute --fake … --count N`: many fake computes in one process."""

from __future__ import annotations

import sys
from typing import Any

from tests.kit.commands import Control, write_config
from tests.kit.servers import Server

TOY_INVENTORY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


class ManyComputes(Server):
    """`ecompute --fake INVENTORY --count N`, with a compute.yaml in its directory.

    `placement` among the settings is another URL than the cluster's.
    """

    name = 'many'

    def __init__(self, cluster: Control, count: int, inventory: str = TOY_INVENTORY, **settings: Any) -> None:
        super().__init__(cluster.directory)
        self._inventory = inventory
        self.count = count
        self._etcd = cluster.etcd
        placement = settings.pop('placement', cluster.placement.url)
        write_config(self.directory / 'compute.yaml', cluster.etcd.endpoint, placement, **settings)
        cluster.at_exit.callback(self.close)

    def command(self) -> list[str]:
        """The command line; compute.yaml is found in the working directory."""
        return [sys.executable, '-m', 'ecomp.compute', '--fake', self._inventory, '--count', str(self.count)]

    def environment(self) -> dict[str, str]:
        """Keep its temporary state in the test's directory, which is removed even if it is killed."""
        return {**super().environment(), 'TMPDIR': str(self.directory)}

    def is_ready(self) -> bool:
        return f' {self.pid} ready computes: {self.count}' in self.tail_log()

    @property
    def computes(self) -> set[str]:
        return {key.rsplit('/', 1)[1] for key in self._etcd.list_keys('/computes/')}
