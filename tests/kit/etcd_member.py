"""An etcd that is a member of a cluster or uses TLS."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit.servers import Etcd


class Tls(NamedTuple):
    certificate: Path
    key: Path
    authority: Path
    client: tuple[Path, Path]


class Member(Etcd):
    """An etcd of a cluster, or one with TLS. `host` is its name in client configurations."""

    def __init__(self, directory: Path, name: str, tls: Tls | None = None, host: str = '127.0.0.1') -> None:
        super().__init__(directory)
        self.member = name
        self.initial = f'{name}={self.peer}'
        self.state = 'new'
        self._tls = tls
        self.client = f'{"https" if tls else "http"}://{host if host[0].isdigit() else "127.0.0.1"}:{self.port}'
        self.endpoint = f'{host}:{self.port}'

    def command(self) -> list[str]:
        tls = self._tls
        secure = [f'--cert-file={tls.certificate}', f'--key-file={tls.key}'] if tls else []
        secure += [f'--trusted-ca-file={tls.authority}', '--client-cert-auth'] if tls else []
        return [*super().command(), f'--name={self.member}', f'--initial-cluster-state={self.state}', *secure]

    def is_ready(self) -> bool:
        try:
            return self.get('/nothing') is None
        except OSError:
            return False

    def ask(self, path: str, body: Mapping[str, Any], timeout: float = 10.0) -> HTTPResponse:
        context = None
        if self._tls:
            context = ssl.create_default_context(cafile=str(self._tls.authority))
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # this call is not under test
            context.load_cert_chain(*map(str, self._tls.client))
        request = urllib.request.Request(f'{self.client}/v3/{path}', json.dumps(body).encode())
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=timeout, context=context)
        return answer
