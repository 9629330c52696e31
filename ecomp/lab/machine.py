"""Programs, processes and network namespaces of a lab on this machine, by iproute2."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecomp import systemd
from ecomp.errors import Conflict, EcompError, UsageError
from ecomp.files import get_search_path
from ecomp.lab.network import CONTROL, FENCE_CHAINS, Layout, render_fence_rules

# Every program the lab runs, with its Debian package.
CONTROL_PROGRAMS = {'etcd': 'etcd-server', 'setpriv': 'util-linux'}
SECURE_PROGRAMS = {'stunnel4': 'stunnel4'}
HOST_PROGRAMS = {
    **{'ip': 'iproute2', 'unshare': 'util-linux', 'mount': 'mount', 'libvirtd': 'libvirt-daemon-system'},
    **{'virtlogd': 'libvirt-daemon-system', 'virsh': 'libvirt-clients', 'qemu-system-x86_64': 'qemu-system-x86'},
    **{'qemu-img': 'qemu-utils', 'dnsmasq': 'dnsmasq-base', 'iptables': 'iptables', 'ebtables': 'iptables'},
}
# Runs the program when a line arrives, and never if the sender ends first. So no unrecorded server runs.
RUN_AFTER_LINE = 'read -r _ && exec "$@" </dev/null'
# Of a server's last lines these name the cause of its end; what follows may be a stack trace.
CURES = {
    'no space left|disk is full': 'free space on this disk',
    'address already in use': 'end the program that uses this port',
}
# The private directories of a host, and where they are mounted inside it.
MOUNTS = {'run': '/run/libvirt', 'lib': '/var/lib/libvirt', 'etc': '/etc/libvirt', 'cache': '/var/cache/libvirt'}
MOUNTS |= {'log': '/var/log/libvirt'}
# Run as `sh -c ENTER_SCRIPT name directory command…` in mount and UTS namespaces that no running process has to keep.
ENTER_SCRIPT = (
    'set -e; echo "$0" > /proc/sys/kernel/hostname; d=$1; shift; '
    + ''.join(f'mount --bind "$d/{name}" {target}; ' for name, target in MOUNTS.items())
    + 'if [ -e "$d/dev/kvm" ]; then mount --bind "$d/dev/kvm" /dev/kvm; fi; exec "$@"'
)


@dataclass(frozen=True)
class ServerProcess:
    """A process, identified by its pid and by its start, in clock ticks after the boot."""

    what: str
    pid: int
    started: int


# Records atomically that a process is the server of this label.
RecordProcess = Callable[[str, ServerProcess], None]


def make_python_path() -> str:
    """Make a PYTHONPATH that begins with the directories of this ecomp and mdserver."""
    specs = [importlib.util.find_spec(name) for name in ('ecomp', 'mdserver')]
    tops = [str(Path(spec.origin).parent.parent) for spec in specs if spec is not None and spec.origin]
    return os.pathsep.join([*dict.fromkeys(tops), *filter(None, [os.environ.get('PYTHONPATH')])])


def read_start_time(pid: int) -> int | None:
    """Read a process's start time (proc(5)), or return None if it has ended, even as a zombie."""
    try:
        # The command in parentheses may contain anything; the fields from the third on follow the last ).
        fields = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8', errors='replace').rpartition(')')[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in 'ZX' else int(fields[19])


def is_alive(process: ServerProcess) -> bool:
    return read_start_time(process.pid) == process.started


def terminate(processes: Iterable[ServerProcess], timeout_seconds: float = 5.0) -> None:
    """End processes by SIGTERM, after `timeout_seconds` by SIGKILL, or else raise EcompError."""
    running = [process for process in processes if is_alive(process)]
    for number, seconds in ((signal.SIGTERM, timeout_seconds), (signal.SIGKILL, 10.0)):
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        deadline = time.monotonic() + seconds
        while running and time.monotonic() < deadline:
            time.sleep(0.02)
            running = [process for process in running if is_alive(process)]
    if running:
        names = ', '.join(f'{process.what} (pid {process.pid})' for process in running)
        raise EcompError(f'still running 10 s after SIGKILL: {names}')


def start(
    label: str,
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    *,
    record_process: RecordProcess | None = None,
    umask: int = -1,
) -> ServerProcess:
    """Start a server in a new session, with the directory of `log` as its working directory.

    It runs its program once `record_process` has returned. Only wait_for() notices that the program is missing.
    """
    words = ['sh', '-c', RUN_AFTER_LINE, 'sh', *command]
    with open(log, 'ab', opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=log.parent,
                env={**os.environ, 'PATH': get_search_path(), 'PYTHONPATH': make_python_path(), **(env or {})},
                start_new_session=True,
                umask=umask,
            )
        except OSError as error:
            raise EcompError(f'{label} cannot be started: {error}') from error
    assert child.stdin is not None
    with child.stdin as release_pipe:
        if (started := read_start_time(child.pid)) is None:
            raise EcompError(f'{label} ended immediately: {read_last_line(log)}')
        process = ServerProcess(label, child.pid, started)
        if record_process is not None:
            record_process(label, process)
        release_pipe.write(b'\n')
    return process


def run(command: Sequence[str], stdin_text: str | None = None, timeout_seconds: float | None = None) -> str:
    """Return the stdout of a program, or raise EcompError if it fails or takes too long."""
    try:
        result = subprocess.run(
            command,
            input=stdin_text,
            stdin=subprocess.DEVNULL if stdin_text is None else None,
            capture_output=True,
            encoding='utf-8',
            errors='replace',
            env={**os.environ, 'PATH': get_search_path(), 'LC_ALL': 'C.UTF-8'},
            check=False,
            timeout=timeout_seconds,
        )
    except OSError as error:
        raise EcompError(f'{command[0]} cannot be run: {error}') from error
    except subprocess.TimeoutExpired as error:
        raise EcompError(f'{" ".join(command[-8:])} has not ended after {timeout_seconds:g} s') from error
    if result.returncode:
        error_lines = result.stderr.strip().splitlines() or ['no reason given']
        raise EcompError(f'{" ".join(command[:8])} failed with exit code {result.returncode}: {error_lines[-1]}')
    return result.stdout


def wait_for(label: str, is_ready: Callable[[], bool], process: ServerProcess, log: Path, seconds: float) -> None:
    """Wait until `is_ready()`, or raise EcompError if the process ends or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        was_ready = is_ready()
        if not is_alive(process):  # even if ready: another process may have answered
            occupied, fix = (', but another server answers in its place', '. Try: elab down') if was_ready else ('', '')
            raise EcompError(f'{label} ended while starting{occupied}: {read_last_line(log)} (see {log}){fix}')
        if was_ready:
            return
        if time.monotonic() >= deadline:
            raise EcompError(f'{label} did not answer within {seconds:.0f} s: {read_last_line(log)} (see {log})')
        time.sleep(0.05)


def read_last_line(log: Path) -> str:
    """Read the line of a log that names a known cause, with its fix, or else the last line."""
    with contextlib.suppress(FileNotFoundError):
        lines = [line for line in log.read_text(encoding='utf-8', errors='replace').splitlines() if line.strip()]
        for line in lines[:-100:-1]:
            for pattern, cure in CURES.items():
                if re.search(pattern, line, re.IGNORECASE):
                    return f'{line.strip()[:300]}. Fix: {cure}'
        if lines:
            return lines[-1].strip()[:300]
    return 'its log is empty'


@contextlib.contextmanager
def hold_lock(directory: Path, on_busy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lock a directory, which is made if it is missing.

    If another process has the lock, `on_busy` is called, and this one waits without a limit. The lock is not reentrant.
    """
    directory = directory.resolve()  # for a dangling link its target is made
    while True:
        # It may have been removed before mkdir checked it. A path that is not a directory fails in os.open().
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            try:
                # The kernel releases this lock when the process ends, even by a kill.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_busy()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The previous holder may have removed the directory: then this lock protects nothing.
            is_current = False
            with contextlib.suppress(FileNotFoundError):
                is_current = os.path.samestat(os.stat(directory), os.fstat(descriptor))
            if is_current:
                yield
                return
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def undo_on_error(undo: Callable[[], None] | None) -> Iterator[None]:
    """Call `undo`, unless it is None, if the block raises, and raise its error as EcompError."""
    try:
        yield
    except (EcompError, OSError) as error:
        if undo is None:
            raise
        undo()
        full = '. Fix: free space on this disk' if isinstance(error, OSError) and error.errno == errno.ENOSPC else ''
        # `undo` has removed the log that the message names.
        raise EcompError(re.sub(r' \(see [^)]*\)', '', str(error)) + full) from error


def require_root(command: str, alternative: str = '') -> None:
    if os.geteuid() != 0:
        # The full path: sudo's own PATH has no virtual environment.
        words = ['sudo', *systemd.make_command(sys.argv[0], sys.executable, 'ecomp.lab.elab'), *sys.argv[1:]]
        raise UsageError(f'{command} needs root. Fix: {shlex.join(words)}{alternative}')


def require(programs: Mapping[str, str], modules: Collection[str] = ()) -> None:
    """Raise UsageError if a module, or a program of {program: Debian package}, is missing."""
    missing_programs = [program for program in programs if not shutil.which(program, path=get_search_path())]
    packages = sorted({programs[program] for program in missing_programs})
    missing_modules = [module for module in modules if importlib.util.find_spec(module) is None]
    problems, fixes = [], []
    if packages:
        problems.append(f'missing programs: {", ".join(missing_programs)}')
        fixes.append(f'apt-get install --no-install-recommends {" ".join(packages)}')
    if missing_modules:
        extras = 'hypervisor,lab' if 'libvirt' in modules else 'lab'
        problems.append(f'missing modules in {sys.executable}: {", ".join(missing_modules)}')
        fixes.append(f"pip install '.[{extras}]'")
    if problems:
        raise UsageError(f'{"; ".join(problems)}. Fix: {" && ".join(fixes)}')


def ensure_control(layout: Layout) -> None:
    """Make missing parts of the control namespace, its link and its route, or raise Conflict."""
    for route in json.loads(run(['ip', '-json', '-4', 'route', 'show', 'exact', str(layout.network)]) or '[]'):
        if route.get('dev') != layout.link:
            by, name, target = route.get('dev', route.get('type')), layout.name, layout.network
            fix = f'remove that route, or run `elab down --name {name}`; then run `elab up --name {name}` again'
            raise Conflict(f"this machine has another route, by {by}, to the lab's network {target}. Fix: {fix}")
    _ensure_namespace(layout, CONTROL)
    space = layout.get_namespace(CONTROL)
    # The bridge of the lab's LAN is in this namespace. On the machine Docker's FORWARD rules would apply to it.
    _ensure_bridge(layout, CONTROL, str(layout.control))
    if not has_interface(layout, CONTROL, 'machine'):
        _delete_link(layout)
        run(['ip', 'link', 'add', layout.link, 'type', 'veth', 'peer', 'name', 'machine', 'netns', space])
    run(['ip', '-n', space, 'link', 'set', 'machine', 'master', 'br0', 'up'])
    run(['ip', 'address', 'replace', f'{layout.machine}/24', 'dev', layout.link])
    run(['ip', 'link', 'set', layout.link, 'up'])
    run(['ip', 'route', 'replace', str(layout.network), 'via', str(layout.control), 'dev', layout.link])


def ensure_host(layout: Layout, host: str) -> bool:
    """Make what a host's network lacks, and return True if it lacked the namespace."""
    was_missing = _ensure_namespace(layout, host)
    space, control = layout.get_namespace(host), layout.get_namespace(CONTROL)
    address, guests = str(layout.get_address(host)), str(layout.get_guest_network(host))
    _ensure_bridge(layout, host, address)
    if not has_interface(layout, host, 'eth0'):
        run(['ip', '-n', control, 'link', 'add', host, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', space])
    run(['ip', '-n', control, 'link', 'set', host, 'master', 'br0', 'up'])
    run(['ip', '-n', space, 'link', 'set', 'eth0', 'master', 'br0', 'up'])
    # This route leads to the machine and to guests of other hosts. Without a default route nothing leaves the lab.
    run(['ip', '-n', space, 'route', 'replace', str(layout.network), 'via', str(layout.control)])
    run(['ip', '-n', control, 'route', 'replace', guests, 'via', address])
    _ensure_fence(layout, space)
    return was_missing


def has_interface(layout: Layout, place: str, name: str = 'lo') -> bool:
    """Return True if the namespace of a host or `control` is usable and has this interface."""
    with contextlib.suppress(EcompError):
        run(['ip', '-n', layout.get_namespace(place), 'link', 'show', 'dev', name])
        return True
    return False


def list_namespaces(name: str) -> list[str]:
    namespaces = (line.split()[0] for line in run(['ip', 'netns', 'list']).splitlines() if line.strip())
    return sorted(space for space in namespaces if re.fullmatch(f'elab-{re.escape(name)}-({CONTROL}|hv[0-9]+)', space))


def end_processes(spaces: list[str], processes: list[ServerProcess]) -> None:
    """End all processes in the namespaces and these others, or raise EcompError."""
    for _ in range(10):  # a process may have started another before its end
        running = {process.pid: process for process in processes if read_start_time(process.pid) == process.started}
        for space in spaces:
            running |= {process.pid: process for process in _list_processes(space)}
        if not running:
            return
        terminate(running.values(), timeout_seconds=3.0)
    raise EcompError('processes in the lab start faster than elab can end them')


def remove_namespaces(spaces: list[str], layout: Layout | None) -> None:
    """Delete the link of `layout`, if given, and the namespaces, all of which must exist."""
    if layout is not None:
        _delete_link(layout)
    for space in spaces:
        run(['ip', 'netns', 'delete', space])


def _list_processes(space: str) -> list[ServerProcess]:
    try:
        pids = run(['ip', 'netns', 'pids', space]).split()
    except EcompError:
        return []  # incomplete: no process can have been started in it
    start_times = ((int(pid), read_start_time(int(pid))) for pid in pids)
    return [ServerProcess(space, pid, started) for pid, started in start_times if started is not None]


def _ensure_namespace(layout: Layout, place: str) -> bool:
    """Make a namespace unless it is usable, set it up, and return True if it was made."""
    space = layout.get_namespace(place)
    if was_missing := not has_interface(layout, place):
        if space in list_namespaces(layout.name):
            run(['ip', 'netns', 'delete', space])  # a file alone: elab was killed, or a reboot
        run(['ip', 'netns', 'add', space])
    run(['ip', '-n', space, 'link', 'set', 'lo', 'up'])
    settings = ('net/ipv4/ip_forward=1', 'net/ipv4/conf/all/send_redirects=0', 'net/ipv4/conf/default/send_redirects=0')
    script = 'for each; do echo "${each#*=}" > "/proc/sys/${each%%=*}"; done'
    run(['ip', 'netns', 'exec', space, 'sh', '-c', script, 'sh', *settings])
    return was_missing


def _ensure_fence(layout: Layout, space: str) -> None:
    prefix = ['ip', 'netns', 'exec', space]
    run([*prefix, 'iptables-restore', '--noflush', '--wait'], render_fence_rules(layout))
    for hook, chain in FENCE_CHAINS.items():
        rule = [hook, '-i', 'virbr0', '-j', chain]
        try:
            run([*prefix, 'iptables', '--wait', '--check', *rule])
        except EcompError:
            run([*prefix, 'iptables', '--wait', '--insert', *rule])


def _ensure_bridge(layout: Layout, place: str, address: str) -> None:
    space = layout.get_namespace(place)
    if not has_interface(layout, place, 'br0'):
        run(['ip', '-n', space, 'link', 'add', 'br0', 'address', layout.get_mac(place), 'type', 'bridge'])
    run(['ip', '-n', space, 'address', 'replace', f'{address}/24', 'dev', 'br0'])
    run(['ip', '-n', space, 'link', 'set', 'br0', 'up'])


def _delete_link(layout: Layout) -> None:
    if Path('/sys/class/net', layout.link).exists():
        run(['ip', 'link', 'delete', layout.link])
