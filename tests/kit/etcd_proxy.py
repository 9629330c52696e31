"""An `etcd grpc-proxy` in front of an etcd, as used to save a cluster connections."""

from __future__ import annotations

from tests.kit.servers import Server, free_port, is_healthy


class GrpcProxy(Server):
    """The proxy; `endpoint` is where it listens."""

    name = 'grpc-proxy'

    def __init__(self, etcd: str) -> None:
        super().__init__()
        self._etcd = etcd
        self.endpoint = f'127.0.0.1:{free_port()}'

    def command(self) -> list[str]:
        return ['etcd', 'grpc-proxy', 'start', f'--endpoints={self._etcd}', f'--listen-addr={self.endpoint}']

    def is_ready(self) -> bool:
        return is_healthy(f'http://{self.endpoint}')
