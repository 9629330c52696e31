"""A metadata server that root starts on this machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ecomp.agent.host.metadata import SERVER_UID
from tests.kit.servers import TOP, wait_until

UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
OTHER_UUID = 'e9bedb97-917a-4f4e-9a69-8ad21840267f'
MAC = '52:54:00:aa:00:01'
MAC_2 = '52:54:00:bb:00:02'
LOOPBACK = '127.0.0.1'
COMMAND = [sys.executable, '-P', '-m', 'mdserver.server']
ENVIRONMENT = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(TOP), str(TOP / 'md_server')])}


def write_files(directory: Path, guests: dict[str, tuple[str, str]]) -> Path:
    """Write leases, guest files and user-data for root only, and return the mdserver.conf."""
    directory.chmod(0o700)
    leases = [{'ip-address': ip, 'mac-address': mac, 'expiry-time': 0} for ip, (mac, _) in guests.items()]
    (directory / 'metadata').mkdir(0o700)
    for mac, instance in guests.values():
        (directory / f'metadata/{mac}.json').write_text(json.dumps({'instance': instance, 'mac': mac}))
    (directory / 'virbr0.status').write_text(json.dumps(leases))
    (directory / 'user-data').write_text('#!one\n')
    lines = ('[mdserver]', 'guests = metadata', 'leases = *.status', 'user-data = user-data', '')
    (directory / 'mdserver.conf').write_text('\n'.join(lines))
    for path in filter(Path.is_file, directory.rglob('*')):
        path.chmod(0o600)
    return directory / 'mdserver.conf'


class MetadataServer:
    def __init__(self, directory: Path, *options: str, command: list[str] | None = None) -> None:
        self.log = directory / 'log'
        with self.log.open('wb') as stderr:
            self.process = subprocess.Popen(
                [*(command or COMMAND), str(directory / 'mdserver.conf'), '--listen', f'{LOOPBACK}:0', *options],
                cwd=directory,
                env=ENVIRONMENT,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.pid = self.process.pid
        wait_until(lambda: 'LISTENING ON' in self.log.read_text() or self.process.poll() is not None, 30, 'it listens')
        listening = re.search(r'LISTENING ON http://[\d.]+:(\d+)/', self.log.read_text())
        assert listening, self.log.read_text()
        self.port = int(listening[1])

    def request(self, path: str, method: str = 'GET', source: str = LOOPBACK) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=20, source_address=(source, 0))
        with contextlib.closing(connection):
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def find_monitor(self) -> psutil.Process:
        [child] = psutil.Process(self.pid).children(recursive=True)
        return child

    def close(self) -> int:
        self.process.terminate()
        return self.process.wait(20)


@pytest.fixture
def running_server(tmp_path: Path) -> Iterator[MetadataServer]:
    write_files(tmp_path, {LOOPBACK: (MAC, UUID)})
    with contextlib.closing(MetadataServer(tmp_path, '--user', SERVER_UID)) as server:
        yield server
