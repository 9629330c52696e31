"""ecompute and eschedule as their users run them, on the real servers of tests and benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.servers import Etcd, PlacementServer, Server, b64, environment


class Ecompute(Server):
    """`ecompute --fake` (or a real one, with `inventory` None) with a state of its own that outlives a restart."""

    name = 'ecompute'

    def __init__(
        self,
        etcd: str,
        placement: str,
        inventory: str | None = 'VCPU:4,DISK_GB:10,MEMORY_MB:512',
        directory: Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(directory)
        self.uuid = str(settings.setdefault('uuid', str(uuid.uuid4())))
        self.config = self.directory / 'compute.yaml'
        self.inventory = inventory
        self.options: list[str] = []
        self._etcd = etcd
        write_config(self.config, etcd, placement, **{'state': str(self.directory / 'state'), **settings})

    def command(self) -> list[str]:
        """python -m ecomp.compute."""
        fake = ['--fake', self.inventory] if self.inventory is not None else []
        return [sys.executable, '-m', 'ecomp.compute', '--config', str(self.config), *fake, *self.options]

    def is_ready(self) -> bool:
        """Its /computes key is there, and says that this very process put it: an earlier one's may still be."""
        body = {'key': b64(f'/computes/{self.uuid}')}
        request = urllib.request.Request(f'http://{self._etcd}/v3/kv/range', json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                there = bool(json.load(answer).get('kvs'))
        except OSError:
            return False
        return there and f' {self.pid} ready: ' in self.last_words(1000)


class Result(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def eschedule(config: Path, *words: str, timeout: float = 120.0) -> Result:
    """Run `python -m ecomp.schedule --config …` to its end."""
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(config), *words]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=environment(),
        cwd=config.parent,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def write_config(path: Path, etcd: str, placement: str, **settings: Any) -> Path:
    """A compute.yaml or schedule.yaml that points at these servers, with more settings if given; the path."""
    path.write_text(yaml.safe_dump({'etcd': {'endpoints': [etcd]}, 'placement': {'endpoint': placement}, **settings}))
    return path


@dataclass
class Control:
    """etcd and placement, and a directory with a schedule.yaml and a compute.yaml that point at them."""

    etcd: Etcd
    placement: PlacementServer
    directory: Path
    at_exit: ExitStack = field(default_factory=ExitStack)
    audited: bool = False

    def __post_init__(self) -> None:
        self.schedule_yaml = write_config(self.directory / 'schedule.yaml', self.etcd.endpoint, self.placement.url)
        state = str(self.directory / 'state')
        self.compute_yaml = write_config(
            self.directory / 'compute.yaml', self.etcd.endpoint, self.placement.url, state=state
        )

    def eschedule(self, *words: str, timeout: float = 120.0) -> Result:
        """eschedule with our schedule.yaml."""
        return eschedule(self.schedule_yaml, *words, timeout=timeout)

    def ecompute(self, inventory: str | None = 'VCPU:4,DISK_GB:10,MEMORY_MB:512', **settings: Any) -> Ecompute:
        """A started fake ecompute, ended with this."""
        return self.at_exit.enter_context(Ecompute(self.etcd.endpoint, self.placement.url, inventory, **settings))

    def close(self) -> None:
        """End the ecomputes that were started here."""
        self.at_exit.close()
