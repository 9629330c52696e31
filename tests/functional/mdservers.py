"""Start a metadata server with files of two guests, or run one that refuses to start."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecomp.model.order import Request

TREE = Path(__file__).parents[2]
SCRIPT = TREE / 'md_server/mdserver/server.py'
AS_SCRIPT = [sys.executable, str(SCRIPT)]
AS_MODULE = [sys.executable, '-m', 'mdserver.server']
UUID_A = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
UUID_B = 'e9bedb97-917a-4f4e-9a69-8ad21840267f'
MAC_A = '52:54:00:aa:00:01'
MAC_B = '52:54:00:bb:00:02'
KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA me: 100%'
USER_DATA = gzip.compress(b'#cloud-config\n', mtime=0)
SECRET = 'canary-of-the-user-data'


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    address: str
    port: int

    def get(self, path: str, method: str = 'GET', headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=20)
        connection.request(method, path, headers=headers or {})
        return connection.getresponse()


@contextlib.contextmanager
def start_server(
    root: Path,
    *arguments: str,
    command: list[str] = AS_SCRIPT,
    prefix: tuple[str, ...] = (),
    stdin: int = subprocess.DEVNULL,
) -> Iterator[Server]:
    """Run a metadata server, and yield it when it has logged its address."""
    log = root / 'log'
    environment = os.environ | ({'PYTHONPATH': str(SCRIPT.parents[1])} if command is AS_MODULE else {})
    with log.open('wb') as stderr:
        process = subprocess.Popen(
            [*prefix, *command, *arguments],
            cwd=root,
            env=environment,
            stdin=stdin,
            stderr=stderr,
        )
    try:
        deadline = time.monotonic() + 30
        while not (match := re.search(r'LISTENING ON http://([\d.]+):(\d+)/', log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield Server(process, log, match[1], int(match[2]))
    finally:
        if process.stdin:
            process.stdin.close()
        process.terminate()
        process.wait(20)


def make_request(instance: str, **fields: Any) -> Request:
    return Request(instance, {}, **fields)


def write_host_files(root: Path, leases: dict[str, str]) -> Path:
    """Write leases, guest files and an mdserver.conf as on a host, and return the conf's path."""
    (root / 'metadata').mkdir()
    (root / 'virbr0.status').write_text(
        json.dumps(
            [
                {'ip-address': address, 'mac-address': mac, 'expiry-time': int(time.time()) + 3600}
                for address, mac in leases.items()
            ]
        )
    )
    (root / 'default-user-data').write_bytes(USER_DATA)
    for mac, instance, name, keys, text in (
        (MAC_A, UUID_A, 'web1', None, None),
        (MAC_B, UUID_B, 'web2', ['ssh-rsa B1', 'ssh-rsa B2'], f'#!/bin/sh\necho {SECRET}\n'),
    ):
        file = root / 'metadata' / f'{mac}.json'
        file.touch(0o600)
        file.write_text(
            json.dumps(
                {
                    'version': 1,
                    'instance': instance,
                    'mac': mac,
                    'hostname': name,
                    'public_keys': keys,
                    'user_data': text,
                }
            )
        )
    conf = root / 'mdserver.conf'
    conf.write_text(
        f'[mdserver]\nguests = metadata\nleases = *.status\nuser-data = default-user-data\n'
        f'[public-keys]\ndefault = {KEY}\n'
    )
    return conf


def run_refused(*arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    result = subprocess.run([*prefix, *AS_SCRIPT, *arguments], capture_output=True, text=True, timeout=60)
    assert result.stdout == ''
    return result.returncode, result.stderr
