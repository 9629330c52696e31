"""What the lab asks of the machine: programs run to their end, processes that stay, and what is missing.

A process is remembered by its pid and its start time, so that a pid used again is never taken for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecomp import systemd
from ecomp.errors import EcompError, UsageError
from ecomp.files import search_path

# Every program the lab runs, and Debian's package of it.
CONTROL_PROGRAMS = {'etcd': 'etcd-server', 'setpriv': 'util-linux'}
SECURE_PROGRAMS = {'stunnel4': 'stunnel4'}
HOST_PROGRAMS = {
    'ip': 'iproute2',
    'unshare': 'util-linux',
    'mount': 'mount',
    'libvirtd': 'libvirt-daemon-system',
    'virtlogd': 'libvirt-daemon-system',
    'virsh': 'libvirt-clients',
    'qemu-system-x86_64': 'qemu-system-x86',
    'qemu-img': 'qemu-utils',
    'dnsmasq': 'dnsmasq-base',
    'iptables': 'iptables',
    'ebtables': 'iptables',
}


@dataclass(frozen=True)
class Process:
    """A process: `what` names it for people, `started` is when it started in clock ticks since the boot."""

    what: str
    pid: int
    started: int


Remember = Callable[[str, Process], None]
"""What writes down, whole or not at all, that a server is this process."""


def in_memory(_what: str, _process: Process) -> None:
    """Remember a server no longer than this process lives, for it ends with it."""


def python_path() -> str:
    """A PYTHONPATH with which a server in another directory imports the same ecomp and mdserver as this process."""
    specs = [importlib.util.find_spec(name) for name in ('ecomp', 'mdserver')]
    tops = [str(Path(spec.origin).parent.parent) for spec in specs if spec is not None and spec.origin]
    return os.pathsep.join([*dict.fromkeys(tops), *filter(None, [os.environ.get('PYTHONPATH')])])


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if it has ended, reaped or not. proc(5)"""
    try:
        # The command in parentheses may hold anything; after the last ) come the fields from the third on.
        fields = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8', errors='replace').rpartition(')')[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in 'ZX' else int(fields[19])


def alive(process: Process) -> bool:
    """Whether the process still runs; another one with its pid does not count."""
    return started_at(process.pid) == process.started


def end(processes: Iterable[Process], patience: float = 5.0) -> None:
    """Send SIGTERM to each process that still runs, and SIGKILL after `patience` seconds.

    EcompError names those that run 10 s later.
    """
    left = [process for process in processes if alive(process)]
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = [process for process in left if alive(process)]
    if left:
        raise EcompError('these do not end: ' + ', '.join(f'{process.what} (pid {process.pid})' for process in left))


# A program that is run once a line has come, and never where whoever was to send it has ended.
ONCE_TOLD = 'read -r _ && exec "$@" </dev/null'


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def start(
    what: str,
    command: Sequence[str],
    log: Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    *,
    remember: Remember = in_memory,
    umask: int = -1,
) -> Process:
    """Start a server in a session of its own, its output appended to `log`; it runs once `remember` has returned.

    So none runs that nobody has written down, whenever this process is killed. `umask` -1 is its own. EcompError.
    """
    words = ['sh', '-c', ONCE_TOLD, 'sh', *command]
    with open(log, 'ab', opener=_open_private) as output:
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env={**os.environ, 'PATH': search_path(), 'PYTHONPATH': python_path(), **(env or {})},
                start_new_session=True,
                umask=umask,
            )
        except OSError as error:
            raise EcompError(f'{what} cannot be started: {error}') from error
    assert child.stdin is not None
    with child.stdin as told:
        started = started_at(child.pid)
        if started is None:
            raise EcompError(f'{what} ended at once: {last_line(log)}')
        process = Process(what, child.pid, started)
        remember(what, process)
        told.write(b'\n')
    return process


def run(command: Sequence[str], text: str | None = None, seconds: float | None = None) -> str:
    """Run a program to its end with `text` on its stdin, None for nothing; what it wrote to stdout.

    EcompError with the last line of its stderr when it fails, and when it has not ended after `seconds`, None for ever.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            encoding='utf-8',
            errors='replace',
            env={**os.environ, 'PATH': search_path(), 'LC_ALL': 'C.UTF-8'},
            check=False,
            timeout=seconds,
        )
    except OSError as error:
        raise EcompError(f'{command[0]} cannot be run: {error}') from error
    except subprocess.TimeoutExpired as error:
        raise EcompError(f'{" ".join(command[-8:])} has not ended after {seconds:g} s') from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ['no word why']
        raise EcompError(f'{" ".join(command[:8])} failed ({done.returncode}): {said[-1]}')
    return done.stdout


def wait_for(what: str, ready: Callable[[], bool], process: Process, log: Path, seconds: float) -> None:
    """Call `ready` until it is true; EcompError with the log's last line if the process ends or `seconds` pass."""
    deadline = time.monotonic() + seconds
    while True:
        answered = ready()
        if not alive(process):  # also where it is answered: by whom, nobody has asked
            place = ', and another has its place (elab down ends that)' if answered else ''
            raise EcompError(f'{what} ended while starting{place}: {last_line(log)} (see {log})')
        if answered:
            return
        if time.monotonic() >= deadline:
            raise EcompError(f'{what} did not answer within {seconds:.0f} s: {last_line(log)} (see {log})')
        time.sleep(0.05)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    with contextlib.suppress(FileNotFoundError):
        lines = [line for line in log.read_text(encoding='utf-8', errors='replace').splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()[:300]
    return 'its log is empty'


def require_root(command: str) -> None:
    """UsageError, with what to type, unless this is root: namespaces and libvirtd need it."""
    if os.geteuid() != 0:
        # By its whole path: sudo looks in a PATH of its own, which has no virtual environment.
        words = ['sudo', *systemd.program(sys.argv[0], sys.executable, 'ecomp.lab.elab'), *sys.argv[1:]]
        raise UsageError(f'{command} needs root: {shlex.join(words)}')


def require(programs: Mapping[str, str], modules: Collection[str] = ()) -> None:
    """UsageError that names what is missing of `programs`, {program: Debian package}, and of Python `modules`."""
    absent = [program for program in programs if not shutil.which(program, path=search_path())]
    packages = sorted({programs[program] for program in absent})
    lacking = [module for module in modules if importlib.util.find_spec(module) is None]
    said = []
    if packages:
        said.append(f'missing: apt-get install --no-install-recommends {" ".join(packages)}')
    if lacking:
        extras = 'hypervisor,lab' if 'libvirt' in modules else 'lab'
        said.append(f"missing in {sys.executable}: {', '.join(lacking)}; pip install '.[{extras}]'")
    if said:
        raise UsageError('; '.join(said))
