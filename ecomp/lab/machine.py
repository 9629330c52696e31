"""What the lab asks of the machine: programs run to their end, processes that stay, and what is missing.

A process is remembered by its pid and its start time, so that a pid used again is never taken for it.

The lab's network namespaces, what joins them, and how a command gets into one. Asks iproute2 for everything.

The bridge of the lab's LAN is in the control namespace, not on the machine: there, Docker's FORWARD rules would
decide about the lab's traffic, and only one interface and one route are ever to be seen outside.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecomp import systemd
from ecomp.errors import Conflict, EcompError, UsageError
from ecomp.files import search_path
from ecomp.lab.network import CONTROL, FENCED, Layout, fence

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


def start(
    what: str,
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    *,
    remember: Remember | None = None,
    umask: int = -1,
) -> Process:
    """Start a server in a session of its own, its output appended to `log`; it runs once `remember` has returned.

    So none runs that nobody has written down, whenever this process is killed; None for one that ends with it. It runs
    in the directory of `log`. `umask` -1 is its own. EcompError.
    """
    words = ['sh', '-c', ONCE_TOLD, 'sh', *command]
    with open(log, 'ab', opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=log.parent,
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
        if remember is not None:
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


# The private directories of a host, and what they are mounted over inside it.
MOUNTS = {
    'run': '/run/libvirt',
    'lib': '/var/lib/libvirt',
    'etc': '/etc/libvirt',
    'cache': '/var/cache/libvirt',
    'log': '/var/log/libvirt',
}

# As `sh -c ENTER name directory command…`: a mount and UTS namespace was just made by unshare, private by itself.
# Every command makes the same mounts anew, so that none depends on another process to be alive.
ENTER = (
    'set -e; echo "$0" > /proc/sys/kernel/hostname; d=$1; shift; '
    + ''.join(f'mount --bind "$d/{name}" {target}; ' for name, target in MOUNTS.items())
    + 'if [ -e "$d/dev/kvm" ]; then mount --bind "$d/dev/kvm" /dev/kvm; fi; exec "$@"'
)


def inside(layout: Layout, directory: Path, place: str) -> list[str]:
    """The words before a command that have it run in a host or in `control`; `directory` is the lab's."""
    prefix = ['ip', 'netns', 'exec', layout.namespace(place)]
    if place == CONTROL:
        return prefix
    return [*prefix, 'unshare', '--mount', '--uts', 'sh', '-c', ENTER, place, str(directory / place)]


def ensure_control(layout: Layout) -> None:
    """Make the control namespace with the LAN's bridge, and the machine's link and route to it, if missing.

    Conflict, with nothing made, if the machine has another route to the lab's network by now.
    """
    for route in json.loads(run(['ip', '-json', '-4', 'route', 'show', 'exact', str(layout.network)]) or '[]'):
        if route.get('dev') != layout.link:
            why = f'{layout.network} is routed by {route.get("dev", route.get("type"))}, and was free for the lab'
            raise Conflict(f'{why}: take that route away, or elab down --name {layout.name}, and elab up anew')
    _ensure_namespace(layout, CONTROL)
    space = layout.namespace(CONTROL)
    _ensure_bridge(layout, CONTROL, str(layout.control))
    if not has_interface(layout, CONTROL, 'machine'):
        _forget_link(layout)
        run(['ip', 'link', 'add', layout.link, 'type', 'veth', 'peer', 'name', 'machine', 'netns', space])
    run(['ip', '-n', space, 'link', 'set', 'machine', 'master', 'br0', 'up'])
    run(['ip', 'address', 'replace', f'{layout.machine}/24', 'dev', layout.link])
    run(['ip', 'link', 'set', layout.link, 'up'])
    run(['ip', 'route', 'replace', str(layout.network), 'via', str(layout.control), 'dev', layout.link])


def ensure_host(layout: Layout, host: str) -> bool:
    """Make a host's namespace, on the LAN by a bridge of its own (for `bridge: br0`), and the route to its guests.

    True if the namespace was missing.
    """
    made = _ensure_namespace(layout, host)
    space, control = layout.namespace(host), layout.namespace(CONTROL)
    _ensure_bridge(layout, host, str(layout.address(host)))
    if not has_interface(layout, host, 'eth0'):
        run(['ip', '-n', control, 'link', 'add', host, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', space])
    run(['ip', '-n', control, 'link', 'set', host, 'master', 'br0', 'up'])
    run(['ip', '-n', space, 'link', 'set', 'eth0', 'master', 'br0', 'up'])
    # To the machine and the other hosts' guests. There is no default route: nothing gets out.
    run(['ip', '-n', space, 'route', 'replace', str(layout.network), 'via', str(layout.control)])
    run(['ip', '-n', control, 'route', 'replace', str(layout.guests(host)), 'via', str(layout.address(host))])
    _ensure_fence(layout, space)
    return made


def exists(layout: Layout, place: str) -> bool:
    """Whether the namespace of a host or of `control` is there and can be entered."""
    with contextlib.suppress(EcompError):
        run(['ip', '-n', layout.namespace(place), 'link', 'show', 'lo'])
        return True
    return False


def has_interface(layout: Layout, place: str, name: str) -> bool:
    """Whether there is an interface of that name in a host or in `control`."""
    links = json.loads(run(['ip', '-n', layout.namespace(place), '-json', 'link', 'show']))
    return any(each['ifname'] == name for each in links)


def of_lab(name: str) -> list[str]:
    """The namespaces on this machine whose names begin with this lab's, also those that lab.json does not have."""
    lines = run(['ip', 'netns', 'list']).splitlines()
    found = (line.split()[0] for line in lines if line.strip())
    return sorted(space for space in found if re.fullmatch(f'elab-{re.escape(name)}-({CONTROL}|hv[0-9]+)', space))


def end_processes(spaces: list[str], recorded: list[Process]) -> None:
    """End every process in these namespaces, and each that was recorded and still runs. EcompError."""
    for _ in range(10):  # what is ended may just have started something
        found = {process.pid: process for process in recorded if started_at(process.pid) == process.started}
        for space in spaces:
            found |= {process.pid: process for process in _processes(space)}
        if not found:
            return
        end(found.values(), patience=3.0)
    raise EcompError('processes in the lab are started faster than they can be ended')


def remove(spaces: list[str], layout: Layout | None) -> None:
    """Remove these namespaces with the interfaces in them, and the link of `layout`, None for no link."""
    if layout is not None:
        _forget_link(layout)
    for space in spaces:
        run(['ip', 'netns', 'delete', space])


def _processes(space: str) -> list[Process]:
    try:
        pids = run(['ip', 'netns', 'pids', space]).split()
    except EcompError:
        return []  # half made: nothing can have been started in it
    found = ((int(pid), started_at(int(pid))) for pid in pids)
    return [Process(space, pid, started) for pid, started in found if started is not None]


def _ensure_namespace(layout: Layout, place: str) -> bool:
    space = layout.namespace(place)
    missing = not exists(layout, place)
    if missing:
        if space in of_lab(layout.name):
            run(['ip', 'netns', 'delete', space])  # a file without a namespace: killed while making it, or a reboot
        run(['ip', 'netns', 'add', space])
    run(['ip', '-n', space, 'link', 'set', 'lo', 'up'])
    settings = ('net/ipv4/ip_forward=1', 'net/ipv4/conf/all/send_redirects=0', 'net/ipv4/conf/default/send_redirects=0')
    script = 'for each; do echo "${each#*=}" > "/proc/sys/${each%%=*}"; done'
    run(['ip', 'netns', 'exec', space, 'sh', '-c', script, 'sh', *settings])
    return missing


def _ensure_fence(layout: Layout, space: str) -> None:
    within = ['ip', 'netns', 'exec', space]
    run([*within, 'iptables-restore', '--noflush', '--wait'], fence(layout))
    for hook, chain in FENCED.items():
        rule = [hook, '-i', 'virbr0', '-j', chain]
        try:
            run([*within, 'iptables', '--wait', '--check', *rule])
        except EcompError:
            run([*within, 'iptables', '--wait', '--insert', *rule])


def _ensure_bridge(layout: Layout, place: str, address: str) -> None:
    space = layout.namespace(place)
    if not has_interface(layout, place, 'br0'):
        run(['ip', '-n', space, 'link', 'add', 'br0', 'address', layout.mac(place), 'type', 'bridge'])
    run(['ip', '-n', space, 'address', 'replace', f'{address}/24', 'dev', 'br0'])
    run(['ip', '-n', space, 'link', 'set', 'br0', 'up'])


def _forget_link(layout: Layout) -> None:
    if Path('/sys/class/net', layout.link).exists():
        run(['ip', 'link', 'delete', layout.link])
