"""ecompute and eschedule as users run them, on the real servers of tests and benchmarks."""

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
from tests.kit.journal import JOURNAL, parse_eschedule_arguments
from tests.kit.process import start_process
from tests.kit.servers import SLOWDOWN_FACTOR, Etcd, PlacementServer, Server, b64, make_environment, wait_until
from tests.kit.witness import Witness, is_working_here, require_clean


class Ecompute(Server):
    """`ecompute --fake`, or a real one if `inventory` is None."""

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
        JOURNAL.add_compute(self)

    def command(self) -> list[str]:
        fake = ['--fake', self.inventory] if self.inventory is not None else []
        return [sys.executable, '-m', 'ecomp.compute', '--config', str(self.config), *fake, *self.options]

    def is_ready(self) -> bool:
        # The log is needed because the presence may be left from an earlier process.
        body = {'key': b64(f'/computes/{self.uuid}')}
        request = urllib.request.Request(f'http://{self._etcd}/v3/kv/range', json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                has_presence = bool(json.load(answer).get('kvs'))
        except OSError:
            return False
        return has_presence and f' {self.pid} ready: ' in self.tail_log(1000)


class Result(NamedTuple):
    code: int
    stdout: str
    stderr: str


class Command:
    """A running command. `with` kills it."""

    def __init__(
        self, command: Sequence[str], cwd: Path, extra: Mapping[str, str] | None = None, inside: int = 0
    ) -> None:
        """Start the command, `inside` as a WarmProcess."""
        self._arguments, self._began = parse_eschedule_arguments(command), time.monotonic()
        self._stdout, self._stderr = os.memfd_create('stdout'), os.memfd_create('stderr')
        environment = {**make_environment(), **(extra or {})}
        self._process = start_process(command, cwd, environment, self._stdout, self._stderr, inside)
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._arguments is not None:
            output = self.stdout, self.stderr
            JOURNAL.add_run(self._arguments, self._process.returncode, output, self._began, self.pid)
        os.close(self._stdout)
        os.close(self._stderr)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def stdout(self) -> str:
        return _read_all(self._stdout)

    @property
    def stderr(self) -> str:
        return _read_all(self._stderr)

    def wait(self, seconds: float = 90.0) -> Result:
        """Return the result. A negative code is the number of a signal."""
        return Result(self._process.wait(SLOWDOWN_FACTOR * seconds), self.stdout, self.stderr)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)


def _read_all(file: int) -> str:
    # Not seek and read: the command shares this descriptor's position.
    return os.pread(file, os.fstat(file).st_size, 0).decode()


def run_eschedule_process(config: Path, *words: str, timeout: float = 120.0) -> Result:
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(config), *words]
    with Command(command, config.parent) as process:
        return process.wait(timeout)


def run_in_process(config: Path, *words: str) -> Result:
    """Run eschedule to its end in this process, only in the main thread."""
    # Thousands of runs are much cheaper than separate processes.
    out, err, started, code = StringIO(), StringIO(), time.monotonic(), None
    with redirect_stdout(out), redirect_stderr(err), chdir(config.parent):
        try:
            code = schedule.main(['--config', str(config), *words])
        finally:
            JOURNAL.add_run(words, code, (out.getvalue(), err.getvalue()), started, os.getpid())
    return Result(code, out.getvalue(), err.getvalue())


def run_eschedule(config: Path, *words: str, timeout: float = 120.0) -> Result:
    # A library in LD_PRELOAD, such as a fake clock, is not loaded into this process.
    if threading.current_thread() is threading.main_thread() and 'LD_PRELOAD' not in os.environ:
        return run_in_process(config, *words)
    return run_eschedule_process(config, *words, timeout=timeout)


def run_module(
    module: str, *words: str, directory: Path, without_stdout: bool = False, stdout: int = subprocess.PIPE
) -> Result:
    command = [sys.executable, '-m', module, *words]
    if not without_stdout and stdout == subprocess.PIPE:
        with Command(command, directory) as process:
            result = process.wait(60)
        assert not re.search('Traceback|Exception ignored', result.stderr), result
        return result
    if without_stdout:
        command = ['sh', '-c', 'exec "$@" >&-', 'sh', *command]
    started, arguments = time.monotonic(), parse_eschedule_arguments(command)
    completed = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
        cwd=directory,
        env=make_environment(),
    )
    if arguments is not None:
        JOURNAL.add_run(arguments, None, ('', completed.stderr), started, 0)  # its answer was not read
    assert not re.search('Traceback|Exception ignored', completed.stderr), completed
    return Result(completed.returncode, completed.stdout or '', completed.stderr)


def write_config(path: Path, etcd: str, placement: str, certs: Path | None = None, **settings: Any) -> Path:
    """Write a compute.yaml or schedule.yaml for these servers, and return its path.

    `certs` is a directory with a client's certificate and its token.
    """
    secure: dict[str, str | bool] = {}
    token: dict[str, str] = {}
    if certs is None:
        is_local = etcd.startswith('127.') and placement.startswith('http://127.')
        secure = {} if is_local else {'insecure': True}
    else:
        secure = {'ca_cert': f'{certs}/ca.crt', 'cert_cert': f'{certs}/client.crt', 'cert_key': f'{certs}/client.key'}
        token = {'token_file': f'{certs}/token'}
    sections = {'etcd': {'endpoints': [etcd], **secure}, 'placement': {'endpoint': placement, **secure, **token}}
    path.write_text(yaml.safe_dump({**sections, **settings}))
    return path


@dataclass
class Control:
    etcd: Etcd
    placement: PlacementServer
    directory: Path
    at_exit: ExitStack = field(default_factory=ExitStack)
    is_audited: bool = False
    # True if a test may kill or freeze the servers.
    is_mortal: bool = False

    def __post_init__(self) -> None:
        self.witness = Witness(self.etcd.ask, self.placement.database, is_working_here, self.etcd, self.placement)
        self.schedule_yaml = write_config(self.directory / 'schedule.yaml', self.etcd.endpoint, self.placement.url)
        state = str(self.directory / 'state')
        self.compute_yaml = write_config(
            self.directory / 'compute.yaml', self.etcd.endpoint, self.placement.url, state=state
        )
        JOURNAL.add_witness(self.witness)

    def eschedule(self, *words: str, timeout: float = 120.0) -> Result:
        return (run_eschedule_process if self.is_mortal else run_eschedule)(self.schedule_yaml, *words, timeout=timeout)

    def ecompute(self, inventory: str | None = 'VCPU:4,DISK_GB:10,MEMORY_MB:512', **settings: Any) -> Ecompute:
        """Start a fake ecompute, and wait until a refusal can explain what it has."""
        compute = Ecompute(self.etcd.endpoint, self.placement.url, inventory, **settings)
        self.at_exit.enter_context(compute)
        wait_until(lambda: bool(self.etcd.list_keys(f'/facts/{compute.uuid}')), 20, 'its facts are published')
        return compute

    def close(self) -> None:
        # If the running test created this Control and has not failed, its history is judged first.
        try:
            if JOURNAL.remove_witness(self.witness) and sys.exception() is None:
                require_clean(self.witness)
        finally:
            self.at_exit.close()
