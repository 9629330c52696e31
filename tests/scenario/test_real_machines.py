"""The page 'real machines', typed on machines that boot: systemd as process 1, units as they are printed, reboots.

A control host and two hypervisors of Debian 12, then the same of Debian 13. Guests run under emulation in them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.booted import GATEWAY, Booted, Lan, lacking, lan
from tests.kit.servers import TOP, Server, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PAGE = TOP / 'docs/howto/real-machines.md'
BLOCK = re.compile(r'<!-- typed on: (\w+) -->\n```sh\n(.*?)```', re.DOTALL)
HOSTS = {'control': '10.0.0.5', 'hv1': '10.0.0.11', 'hv2': '10.0.0.12'}
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
NOTIFIED = re.compile(r'NOTIFIED TARGET, (\S+), OF INSTANCE (\S+)')
BIN = '/opt/ecomp/bin'


class Images(Server):
    """The web server of images beside the machines."""

    name = 'images'

    def __init__(self, machines: Lan, directory: Path) -> None:
        super().__init__(directory)
        self._machines = machines
        self.served = directory / 'served'
        self.served.mkdir()
        self.go = directory / 'go'

    def command(self) -> list[str]:
        """On the bridge."""
        program = ['-m', 'tests.kit.slow_images', GATEWAY, '80', str(self.served), str(self.go)]
        return self._machines.outside.inside([sys.executable, *program], TOP)

    def is_ready(self) -> bool:
        """It says so."""
        return 'ready' in self.last_words()


@dataclass
class Cluster:
    """The machines as the page left them."""

    control: Booted
    hypervisors: dict[str, Booted]
    images: Images

    def eschedule(self, *words: str) -> str:
        """What root's eschedule prints on the control host; AssertionError with all it said if it fails."""
        return self.control.run(f'{BIN}/eschedule', *words)

    def place(self, name: str, host: str, *words: str, image: str = 'guest.qcow2') -> str:
        """Have a guest of this name made on this host; its uuid."""
        said = self.eschedule(QUERY, f'http://{GATEWAY}/{image}', '--name', name, '--on', host, *words)
        found = NOTIFIED.match(said)
        assert found, said
        return found[2]

    def record(self, name: str) -> dict[str, Any]:
        """What `show` says of it."""
        return dict(json.loads(self.eschedule('show', name, '-f', 'json')))


def blocks(where: str) -> list[str]:
    """What the page has typed there."""
    return [text for place, text in BLOCK.findall(PAGE.read_text()) if place == where]


def packages() -> list[str]:
    """What the page has apt-get install, wherever."""
    lines = PAGE.read_text().replace('\\\n', ' ').splitlines()
    return [word for line in lines for word in line.partition('sudo apt-get install ')[2].split()]


@pytest.fixture(scope='module', params=['bookworm', 'trixie'])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, guest_image: Path
) -> Iterator[Cluster]:
    """All three, with what the page has typed on them but for the metadata server of its own."""
    assert not lacking(), lacking()
    with ExitStack() as undo:
        machines = undo.enter_context(lan(HOSTS))
        images = Images(machines, tmp_path_factory.mktemp('images'))
        (images.served / 'guest.qcow2').write_bytes(guest_image.read_bytes())
        images.go.touch()
        undo.enter_context(images)
        control, *others = (machines.boot(name, request.param, packages()) for name in HOSTS)
        *first, last = blocks('control')
        for block in first:
            control.type(block)
        with ThreadPoolExecutor(len(others)) as threads:
            list(threads.map(set_up, others))
        control.type(last)
        yield Cluster(control, {each.name: each for each in others}, images)


def set_up(hypervisor: Booted) -> None:
    """Type what the page has for a hypervisor."""
    for block in blocks('hypervisor'):
        hypervisor.type(block)


def test_it_is_set_up_as_the_page_says(cluster: Cluster) -> None:
    for each in (cluster.control, *cluster.hypervisors.values()):
        print(each.name, each.run('systemctl', '--failed'))
