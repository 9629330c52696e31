"""A fixed cloud in this process: etcd, placement and eschedule's main().

etcd is a dictionary filled from scene.txt, placement the real application. The product's classes Store, Placement and
Follower are patched, so every module that uses them gets the scene, wherever the module is.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ecomp import schedule
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Entry, Exists, Put, Settlement, Snapshot, Store, Unchanged
from ecomp.store.watch import Follower
from tests.kit.in_process import InProcessPlacement, put_with_generation, remove_providers

HERE = Path(__file__).parent
HV1, HV2, DEAD = (f'c0000000-0000-4000-8000-00000000000{number}' for number in (1, 2, 3))
INVENTORY = {HV1: (8, 4096, 50), HV2: (4, 2048, 20), DEAD: (2, 1024, 10)}
SIZE = {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 1}
# {compute: numbers of the instances that have an allocation there}
ALLOCATED_INSTANCES = {HV1: (1, 3), HV2: (2, 4, 6)}
# The lease of presences, attempts and taker keys.
ALIVE_LEASE = 1
LEASED = ('/computes/', '/facts/', '/findings/', '/foreign/', '/requests/')
# The current time. All times in scene.txt are in 2021.
NOW = re.compile(r'20(?!21-)\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z')
FILES = {
    'schedule.yaml': 'image: http://images.invalid/default.img\nuser_id: me\nproject_id: web\nimages:\n'
    '  tiny: http://images.invalid/tiny.img\n',
    'a.pub': 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@laptop\n',
    'no.pub': 'not a key\n',
    'data.yaml': '#cloud-config\nhostname: x\n',
    'odd.txt': 'something else\n',
    'shop.yaml': 'stack: shop\ninstances:\n  web: {count: 2, flavor: here, image: tiny, weigh: first}\n',
}


def read_entries() -> dict[str, str]:
    """Read scene.txt, which has one key and its value on each line."""
    lines = (HERE / 'scene.txt').read_text().splitlines()
    return {key: value for key, _, value in (line.partition(' ') for line in lines)}


class Scene:
    """The contents of etcd. `writes` logs each write to etcd and placement."""

    def __init__(self) -> None:
        self.revision, self.leases, self.writes = 100, {ALIVE_LEASE: 60}, list[str]()
        self.entries: dict[str, Entry] = {}
        self.questions = 0
        for number, (key, value) in enumerate(read_entries().items()):
            is_alive = key.startswith(LEASED) or key.endswith('/taker')
            lease = ALIVE_LEASE if is_alive else 0
            self.entries[key] = Entry(key, value.encode(), number + 1, lease, create_revision=number + 1)

    def commit(self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete]) -> int | None:
        for check in conditions:
            entry = self.entries.get(check.key)
            if entry is None if isinstance(check, Exists) else (entry.revision if entry else 0) != check.revision:
                return None
        self.revision += 1
        for operation in sorted(operations, key=lambda each: each.key):
            before = self.entries.pop(operation.key, None)
            if isinstance(operation, Put):
                created = before.create_revision if before else self.revision
                value = operation.value.encode()
                self.entries[operation.key] = Entry(
                    operation.key, value, self.revision, operation.lease, create_revision=created
                )
                ttl = f' ({self.leases[operation.lease]} s)' if operation.lease else ''
                self.writes.append(f'+ {operation.key}{ttl} {operation.value}')
            elif before:
                self.writes.append(f'- {operation.key}')
        written = self.revision
        self._answer_audit(operations)
        return written

    def expire_lease(self, lease: int) -> None:
        gone = [key for key, entry in self.entries.items() if entry.lease == lease]
        if gone:
            self.commit([], [Delete(key) for key in gone])

    def _answer_audit(self, operations: Sequence[Put | Delete]) -> None:
        """Answer audits in place of the living computes, whose reports are in scene.txt."""
        for operation in operations:
            _, _, question = operation.key.removeprefix('/audit/').partition('/')
            if not isinstance(operation, Put) or not operation.key.startswith('/audit/'):
                continue
            if question == 'usage':
                self._answer_usage(operation)
                continue
            for compute in (HV1, HV2) if not question else (question,):
                report = json.loads(self.entries[f'/findings/{compute}'].value)
                answer = {**report, 'revision': self.entries[operation.key].revision}
                answer |= {'repairs': ['part-orphaned x.part: removed']} if question else {}
                self.commit([], [Put(f'/findings/{compute}', json.dumps(answer), ALIVE_LEASE)])

    def _answer_usage(self, question: Put) -> None:
        """Answer `eschedule top` with counters that grow with each question. hv2 cannot answer."""
        self.questions += 1
        sizes = {'memory_used_bytes': 2**30, 'memory_bytes': 2**32, 'disk_used_bytes': 2**31, 'disk_bytes': 2**36}
        host = {'seconds': 2.0 * self.questions, 'cpu_seconds_total': 3.0 * self.questions, 'cpus': 8, 'load': 1.25}
        guest = {'vcpu_seconds_total': 0.5 * self.questions, 'resident_memory_bytes': 2**27}
        guest |= {'disk_read_bytes_total': 8192 * self.questions, 'disk_written_bytes_total': 0}
        used = {'host': {**host, **sizes}, '1a5c0de0-0000-4000-8000-000000000001': guest}
        revision = self.entries[question.key].revision
        for compute, answer in ((HV1, {'used': used}), (HV2, {'error': 'libvirt does not answer'})):
            value = json.dumps({'version': 1, 'revision': revision, **answer})
            self.commit([], [Put(f'/usage/{compute}', value, question.lease)])


class SceneStore(Store):
    """The product's store, with requests answered by the class attribute `scene`."""

    scene: Scene

    def get(self, key: str) -> Entry | None:
        return self.scene.entries.get(key)

    def read(self, requested_keys: Sequence[str]) -> dict[str, Entry]:
        return {key: self.scene.entries[key] for key in requested_keys if key in self.scene.entries}

    def sample(self, prefix: str, start: str, limit: int) -> tuple[list[Entry], int]:
        entries_found = self.snapshot(prefix).entries
        order = sorted(entries_found, key=lambda key: key < start)
        return [entries_found[key] for key in order[:limit]], len(entries_found)

    def snapshot(
        self, prefix: str, keys_only: bool = False, transform: Callable[[Entry], Entry | None] = lambda entry: entry
    ) -> Snapshot:
        selected = {key: entry for key, entry in sorted(self.scene.entries.items()) if key.startswith(prefix)}
        if keys_only:
            selected = {key: replace(entry, value=b'') for key, entry in selected.items()}
        transformed = {key: new for key, entry in selected.items() if (new := transform(entry)) is not None}
        return Snapshot(self.scene.revision, transformed)

    def read_version(self) -> str:
        return '3.5.33'

    def count(self, prefix: str) -> int:
        return len(self.snapshot(prefix).entries)

    def commit(
        self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete], _: Settlement | None = None
    ) -> int | None:
        return self.scene.commit(conditions, operations)

    def grant(self, seconds: int) -> int:
        lease = len(self.scene.leases) + 1
        self.scene.leases[lease] = seconds
        return lease

    def keep_alive(self, lease: int) -> int:
        return self.scene.leases[lease]

    def revoke(self, lease: int) -> None:
        self.scene.expire_lease(lease)

    def close(self) -> None:
        """Do nothing: there is no connection."""


def patch_product(scene: Scene, application: InProcessPlacement, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, random = itertools.count(1), uuid.uuid4
    SceneStore.scene = scene

    def make_uuid() -> uuid.UUID:
        return uuid.UUID(int=(0xF0 << 120) + next(numbers), version=4)

    def uuid4() -> uuid.UUID:
        is_ours = sys._getframe(1).f_globals['__name__'].startswith('ecomp')  # placement makes a uuid for each request
        return make_uuid() if is_ours else random()

    def connect(self: Placement, *_: object, **__: object) -> None:
        self.__dict__ |= vars(application)

    def send(self: Placement, method: str, path: str, body: dict[str, Any] | None, *rest: object) -> object:
        if method != 'GET':
            scene.writes.append(f'> {method} {path} {json.dumps(body)}')
        return InProcessPlacement._send(self, method, path, body, *rest)  # type: ignore[arg-type]

    def start(self: Follower) -> None:
        for followed in self._watches:
            state = {key: entry for key, entry in scene.entries.items() if key.startswith(followed.prefix)}
            followed.on_state(state)

    def submit(_: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(work(*arguments))
        return future

    # Placement's database is in memory and usable by one thread only.
    monkeypatch.setattr(threading.Thread, 'start', lambda thread: thread.run())
    monkeypatch.setattr(ThreadPoolExecutor, 'submit', submit)
    monkeypatch.setattr(Store, '__init__', lambda *_, **__: None)
    monkeypatch.setattr(Store, 'scene', scene, raising=False)
    monkeypatch.setattr(Store, 'writer', 'me@here')
    for name, method in vars(SceneStore).items():
        if callable(method):
            monkeypatch.setattr(Store, name, method)
    monkeypatch.setattr(Placement, '__init__', connect)
    monkeypatch.setattr(Placement, '_send', send)
    monkeypatch.setattr(Placement, '_answer', type(application)._answer, raising=False)
    monkeypatch.setattr(Placement, 'close', lambda _: None)
    monkeypatch.setattr(Follower, 'start', start)
    monkeypatch.setattr(Follower, 'stop', lambda _: None)
    monkeypatch.setattr(uuid, 'uuid4', uuid4)
    for module in ('cli.create', 'cli.change', 'cli.apply', 'model.keys'):
        monkeypatch.setattr(f'ecomp.{module}.make_uuid', lambda _: str(make_uuid()))
    monkeypatch.setattr(socket, 'gethostname', lambda: 'laptop')
    monkeypatch.setenv('USER', 'me')
    monkeypatch.setattr(time, 'sleep', lambda _: None)


# The database of the scene, after it was filled once: restoring it takes a hundredth of the time.
FILLED: list[bytes] = []


def fill_placement(application: InProcessPlacement) -> None:
    if FILLED:
        application.restore(FILLED[0])
        return
    remove_providers(application)
    for host, sizes in INVENTORY.items():
        application.write('POST', '/resource_providers', {'uuid': host, 'name': host})
        inventories = {name: {'total': total, 'max_unit': total} for name, total in zip(SIZE, sizes, strict=True)}
        put_with_generation(application, f'/resource_providers/{host}/inventories', inventories=inventories)
        for number in ALLOCATED_INSTANCES.get(host, ()):
            owner = {'user_id': 'me', 'project_id': 'db' if number == 3 else 'web', 'consumer_type': 'INSTANCE'}
            allocation = {'allocations': {host: {'resources': SIZE}}, 'consumer_generation': None, **owner}
            application.write('PUT', f'/allocations/{number}a5c0de0-0000-4000-8000-00000000000{number}', allocation)
    application.write('PUT', '/traits/CUSTOM_ECOMP_DISABLED', None)  # placement keeps traits that no provider has
    FILLED.append(application.save())


def run_eschedule(words: Sequence[str], stdin: str = '') -> Iterator[str]:
    """Run a command and yield its output: `|` stdout, `!` stderr, `=` the exit code."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as change, redirect_stdout(out), redirect_stderr(err):
        change.setattr('sys.stdin', StringIO(stdin))
        code = schedule.main(words)
    yield from (f'| {line}'.rstrip() for line in out.getvalue().splitlines())
    yield from (f'! {line}' for line in err.getvalue().splitlines())
    yield f'= {code}'


def make_transcript(words: Sequence[str], scene: Scene, directory: Path) -> list[str]:
    """Return a command's output and writes: `+` and `-` to etcd, `>` to placement."""
    for name, text in FILES.items():
        (directory / name).write_text(text)
    with chdir(directory):
        lines = list(run_eschedule(words))
    own = f'"pid": {os.getpid()}'
    return [
        normalize_line(NOW.sub('<now>', line).replace(own, '"pid": <pid>'))
        for line in [*lines[:-1], *scene.writes, lines[-1]]
    ]


def normalize_line(line: str) -> str:
    line = re.sub(r'("changed"|"number"|"rebuild"): \d{10}', r'\1: <now>', line)
    # From Python 3.12 on, argparse does not quote choices.
    return re.sub(r'\(choose from .*?\)', lambda found: found[0].replace("'", ''), line)
