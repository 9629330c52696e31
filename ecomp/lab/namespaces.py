"""The lab's network namespaces, what joins them, and how a command gets into one. Asks iproute2 for everything.

The bridge of the lab's LAN is in the control namespace, not on the machine: there, Docker's FORWARD rules would
decide about the lab's traffic, and only one interface and one route are ever to be seen outside.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ecomp.errors import Conflict, EcompError
from ecomp.lab.machine import Process, end, run, started_at
from ecomp.lab.network import CONTROL, FENCED, Layout, fence

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
    try:
        run(['ip', '-n', layout.namespace(place), 'link', 'show', 'lo'])
    except EcompError:
        return False
    return True


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
