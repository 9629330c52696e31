"""ecompute and eschedule as their users run them, on the real servers of tests and benchmarks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml

from ecomp import schedule
from tests.kit.journal import JOURNAL, own
from tests.kit.process import begin
from tests.kit.servers import PATIENCE, Etcd, PlacementServer, Server, b64, environment
from tests.kit.witness import Watched, judged, started_here


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
        JOURNAL.runs(self)

    def command(self) -> list[str]:
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
    code: int
    stdout: str
    stderr: str


class Command:
    """A command under way; `with` ends it, whatever it is doing."""

    def __init__(self, command: Sequence[str], cwd: Path, extra: Mapping[str, str] | None = None) -> None:
        self._words, self._began = own(command), time.monotonic()
        self._stdout, self._stderr = os.memfd_create('stdout'), os.memfd_create('stderr')
        self._process = begin(command, cwd, {**environment(), **(extra or {})}, self._stdout, self._stderr)
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._words is not None:
            said = self.stdout, self.stderr
            JOURNAL.ended(self._words, self._process.returncode, said, self._began, self.pid)
        os.close(self._stdout)
        os.close(self._stderr)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def stdout(self) -> str:
        return _read(self._stdout)

    @property
    def stderr(self) -> str:
        return _read(self._stderr)

    def end(self, seconds: float = 90.0) -> Result:
        """How it ended; a negative code is a signal's number. subprocess.TimeoutExpired."""
        return Result(self._process.wait(PATIENCE * seconds), self.stdout, self.stderr)

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def go_on(self) -> None:
        self.send(signal.SIGCONT)


def _read(file: int) -> str:
    # Not seek and read: the command's own place in the file is the same one.
    return os.pread(file, os.fstat(file).st_size, 0).decode()


def eschedule(config: Path, *words: str, timeout: float = 120.0) -> Result:
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(config), *words]
    with Command(command, config.parent) as under_way:
        return under_way.end(timeout)


def called(config: Path, *words: str) -> Result:
    """eschedule to its end in this process, in the directory of its configuration; of the main thread alone.

    What it prints is what a process of it would: a process for each of thousands of commands would show no more.
    """
    out, err, began, code = StringIO(), StringIO(), time.monotonic(), None
    with redirect_stdout(out), redirect_stderr(err), chdir(config.parent):
        try:
            code = schedule.main(['--config', str(config), *words])
        finally:
            JOURNAL.ended(words, code, (out.getvalue(), err.getvalue()), began, os.getpid())
    return Result(code, out.getvalue(), err.getvalue())


def asked(config: Path, *words: str, timeout: float = 120.0) -> Result:
    """eschedule to its end: called(), or a process of it where several ask at once."""
    # What is loaded before all else, a clock that is wrong, is not loaded here.
    if threading.current_thread() is threading.main_thread() and 'LD_PRELOAD' not in os.environ:
        return called(config, *words)
    return eschedule(config, *words, timeout=timeout)


def run(module: str, *words: str, directory: Path, closed: bool = False, stdout: int = subprocess.PIPE) -> Result:
    """A command in a directory, as a person would; `closed`: with no stdout at all."""
    command = [sys.executable, '-m', module, *words]
    if not closed and stdout == subprocess.PIPE:
        with Command(command, directory) as under_way:
            ended = under_way.end(60)
        assert not re.search('Traceback|Exception ignored', ended.stderr), ended
        return ended
    if closed:
        command = ['sh', '-c', 'exec "$@" >&-', 'sh', *command]
    began, words_of_ours = time.monotonic(), own(command)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
        cwd=directory,
        env=environment(),
    )
    if words_of_ours is not None:
        JOURNAL.ended(words_of_ours, None, ('', done.stderr), began, 0)  # nobody has heard its answer
    assert not re.search('Traceback|Exception ignored', done.stderr), done
    return Result(done.returncode, done.stdout or '', done.stderr)


def write_config(path: Path, etcd: str, placement: str, certs: Path | None = None, **settings: Any) -> Path:
    """A compute.yaml or schedule.yaml that points at these servers, with more settings if given; the path.

    `certs`, if given, is a directory with a client's certificate and its token.
    """
    secure: dict[str, str | bool] = {}
    token: dict[str, str] = {}
    if certs is None:
        own = etcd.startswith('127.') and placement.startswith('http://127.')
        secure = {} if own else {'insecure': True}
    else:
        secure = {'ca_cert': f'{certs}/ca.crt', 'cert_cert': f'{certs}/client.crt', 'cert_key': f'{certs}/client.key'}
        token = {'token_file': f'{certs}/token'}
    sections = {'etcd': {'endpoints': [etcd], **secure}, 'placement': {'endpoint': placement, **secure, **token}}
    path.write_text(yaml.safe_dump({**sections, **settings}))
    return path


@dataclass
class Control:
    """etcd and placement, and a directory with a schedule.yaml and a compute.yaml that point at them."""

    etcd: Etcd
    placement: PlacementServer
    directory: Path
    at_exit: ExitStack = field(default_factory=ExitStack)
    audited: bool = False
    mortal: bool = False
    """Whether a test may kill or freeze the servers."""

    def __post_init__(self) -> None:
        self.watched = Watched(self.etcd.ask, self.placement.database, started_here, self.etcd, self.placement)
        self.schedule_yaml = write_config(self.directory / 'schedule.yaml', self.etcd.endpoint, self.placement.url)
        state = str(self.directory / 'state')
        self.compute_yaml = write_config(
            self.directory / 'compute.yaml', self.etcd.endpoint, self.placement.url, state=state
        )
        JOURNAL.made(self.watched)

    def eschedule(self, *words: str, timeout: float = 120.0) -> Result:
        return (eschedule if self.mortal else asked)(self.schedule_yaml, *words, timeout=timeout)

    def ecompute(self, inventory: str | None = 'VCPU:4,DISK_GB:10,MEMORY_MB:512', **settings: Any) -> Ecompute:
        """A started fake ecompute, ended with this."""
        return self.at_exit.enter_context(Ecompute(self.etcd.endpoint, self.placement.url, inventory, **settings))

    def close(self) -> None:
        """End the ecomputes that were started here; judge first, where that is the test's own doing and it is well."""
        try:
            if JOURNAL.leave(self.watched) and sys.exception() is None:
                judged(self.watched)
        finally:
            self.at_exit.close()
