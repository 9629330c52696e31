"""What keeps a machine from being a hypervisor, and what mends it: the checks of `ecompute --check`. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ecomp.model.guest import Attachment
from ecomp.model.health import LEAST_DISK, OLDEST_LIBVIRT, Ailment, Found

THERE, OFF, MISSING = 'there', 'off', 'missing'
"""What a network or a bridge can be."""


@dataclass(frozen=True, kw_only=True)
class Libvirt:
    """What libvirt says. `version` is the daemon's and `library` ours, as libvirt counts; `qemu_user` runs QEMU.

    `kvm` is why guests cannot have it, in words, '' if they can. `blocked` is the directory on the way to the disks
    that QEMU cannot enter, `pool` the directory of a pool of our name that is not ours; '' for none. `filters` is why
    there can be none, '' if there can. `unfit` is why guests cannot be made or addressed on a network, with the fix.
    `computes` are those that guests here belong to.
    """

    version: int
    library: int
    qemu: bool
    qemu_user: str = ''
    kvm_device: bool = False
    kvm_closed: bool = False
    kvm: str = ''
    blocked: str = ''
    pool: str = ''
    networks: Mapping[Attachment, str] = field(default_factory=dict)
    has_bridge: bool = True
    filters: str = ''
    unfit: tuple[str, ...] = ()
    computes: frozenset[str] = frozenset()


class StateDirectory(NamedTuple):
    """The state directory: its owner and who asks, as numbers, the uuid kept in it, and the bytes that are free there.

    `owner` is None where it is not there yet; `uuid` is '' where none is kept, and may be no uuid at all.
    """

    path: str
    caller: int
    owner: int | None
    uuid: str
    uuid_is_right: bool
    free: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All that is looked at. `no_libvirt` says why there is no libvirt, '' if there is one.

    `no_library` says that libvirt-python is missing, a colon, and what mends that; '' where it is there. `has_libvirtd`
    says whether its program is installed.
    `configured` is `uuid:`, `wanted` is `virt_type:`, `metadata` is `metadata:`. `proxies` are the environment's, by
    variable; `image_proxy` says that compute.yaml has one. `is_taken` says that a server of another kind listens where
    the metadata server would. `refused` is what of compute.yaml a start would refuse, a sentence each; `no_images` is
    the directory of `images:` where that is none, '' otherwise.
    """

    state: StateDirectory
    libvirt: Libvirt | None
    no_libvirt: str = ''
    no_library: str = ''
    has_libvirtd: bool = True
    configured: str | None = None
    wanted: str = 'auto'
    metadata: str = 'network'
    proxies: tuple[str, ...] = ()
    image_proxy: bool = False
    is_taken: bool = False
    refused: tuple[str, ...] = ()
    no_images: str = ''


def _root(facts: Machine) -> Iterator[Found]:
    if facts.state.caller != 0:
        yield 'ecompute needs root', 'sudo ecompute --check'


def _directory(facts: Machine) -> Iterator[Found]:
    state = facts.state
    if state.owner not in (None, state.caller):
        what = f'state directory {state.path} belongs to user {state.owner}, and ecompute runs as user {state.caller}'
        yield what, f'chown {state.caller} {shlex.quote(state.path)}'


def _disk(facts: Machine) -> Iterator[Found]:
    if facts.state.free < LEAST_DISK:
        free = f'{facts.state.free // 1024**2} MiB free'
        yield f'the disk of {facts.state.path} is full ({free})', 'make room there, or set another `state:`'


def _uuid(facts: Machine) -> Iterator[Found]:
    state = facts.state
    if state.uuid and not state.uuid_is_right and facts.configured is None:
        yield f'{state.path}/uuid holds no uuid', f'put the right one there, or rm {shlex.quote(state.path)}/uuid'
        return
    ours = facts.configured or state.uuid
    for other in sorted((facts.libvirt.computes if facts.libvirt else frozenset()) - {ours}):
        what = f'guests of compute {other} are on this host, and this is compute {ours or "of no uuid yet"}'
        yield what, f'put `uuid: {other}` into compute.yaml to go on as that one, or remove its domains'


def _proxy(facts: Machine) -> Iterator[Found]:
    if facts.proxies and not facts.image_proxy:
        names = ', '.join(facts.proxies)
        what = f'{names} is in the environment, and ecompute asks nobody by it, not even for images'
        yield what, f'`image_proxy: http://…` in compute.yaml has images fetched by it; else: unset {names}'


def _refused(facts: Machine) -> Iterator[Found]:
    for each in facts.refused:
        yield f'ecompute would not start: {each}', 'correct it in compute.yaml'


def _images(facts: Machine) -> Iterator[Found]:
    if facts.no_images:
        what = f'`images:` {facts.no_images} is no directory: whatever is asked for by file:// fails'
        yield what, f'mkdir -p {shlex.quote(facts.no_images)}, or correct it in compute.yaml'


def _no_libvirt(facts: Machine) -> Iterator[Found]:
    if facts.no_library:
        what, _, cure = facts.no_library.partition(': ')
        yield what, cure
    elif facts.no_libvirt:
        cure = 'systemctl start libvirtd' if facts.has_libvirtd else 'apt install libvirt-daemon-system'
        yield facts.no_libvirt, cure


OF_MACHINE: Mapping[str, Callable[[Machine], Iterable[Found]]] = {
    'root': _root,
    'state': _directory,
    'disk': _disk,
    'uuid': _uuid,
    'proxy': _proxy,
    'configuration': _refused,
    'images': _images,
    'libvirt': _no_libvirt,
}


def _version(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.version < OLDEST_LIBVIRT:
        what = f'libvirt {_as_text(there.version)} is older than any that ecomp was tried with'
        yield what, f'install {_as_text(OLDEST_LIBVIRT)} or a newer one'
    elif there.version < there.library:
        what = f'libvirtd is {_as_text(there.version)} still, and {_as_text(there.library)} is installed'
        yield what, 'systemctl restart libvirtd'


def _as_text(version: int) -> str:
    return f'{version // 10**6}.{version // 1000 % 1000}.{version % 1000}'


def _qemu(there: Libvirt, _: Machine) -> Iterator[Found]:
    if not there.qemu:
        yield 'libvirt knows no QEMU for x86_64 guests', 'apt install qemu-system-x86; systemctl restart libvirtd'


def _kvm(there: Libvirt, facts: Machine) -> Iterator[Found]:
    if there.kvm_device and there.kvm_closed:
        what = (
            f'/dev/kvm cannot be opened by {there.qemu_user}: guests are emulated, and every start of one, and of '
            'ecompute, takes up to a minute longer'
        )
        yield what, 'chgrp kvm /dev/kvm; chmod 660 /dev/kvm'
    elif there.kvm and facts.wanted == 'kvm':
        yield f'virt_type kvm cannot be had: {there.kvm}', 'say `virt_type: auto` in compute.yaml'


def _way(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.blocked:
        what = f'QEMU runs as {there.qemu_user}, who cannot enter {there.blocked}, on the way to the disks'
        yield what, f'chmod o+x {shlex.quote(there.blocked)}'


def _pool(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.pool:
        what = f"the storage pool ecompute is over {there.pool}: another ecompute's, or `state:` was changed"
        yield what, 'virsh pool-destroy ecompute; virsh pool-undefine ecompute'


def _networks(there: Libvirt, _facts: Machine) -> Iterator[Found]:
    for (kind, name), state in there.networks.items():
        if kind == 'bridge' and state == MISSING:
            yield f'this host has no bridge {name}', f'ip link add {name} type bridge; ip link set {name} up'
        elif state == MISSING and name == 'default':
            usual = 'virsh net-define /usr/share/libvirt/networks/default.xml; virsh net-autostart default'
            yield 'libvirt has no network default', f'{usual}; virsh net-start default'
        elif state == MISSING:
            yield f'libvirt has no network {name}', 'virsh net-list --all has those there are: correct `networks:`'
        elif state == OFF:
            yield f'the network {name} is not active', f'virsh net-start {name}; virsh net-autostart {name}'
    for why in there.unfit:
        what, _, cure = why.partition('. Fix: ')
        yield what, cure


def _metadata(there: Libvirt, facts: Machine) -> Iterator[Found]:
    if facts.metadata == 'network' and facts.is_taken and there.has_bridge:
        what = 'what listens on port 80 is no metadata server, and takes 169.254.169.254 too'
        yield what, "bind it to an address of its own (ss -ltnp 'sport = :80' has its name), or `metadata: iso`"
    if facts.metadata == 'network' and not there.has_bridge:
        what = 'none of `networks:` is one whose bridge libvirt made: no metadata can be served at 169.254.169.254'
        yield what, 'say `metadata: iso` in compute.yaml'


def _filters(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.filters:
        what = f'libvirt cannot filter what guests send ({there.filters}): each can take the address of another one'
        yield what, 'apt install iptables libvirt-daemon-system; systemctl restart libvirtd'


OF_LIBVIRT: Mapping[str, Callable[[Libvirt, Machine], Iterable[Found]]] = {
    'libvirt-version': _version,
    'qemu': _qemu,
    'kvm': _kvm,
    'way': _way,
    'pool': _pool,
    'network': _networks,
    'metadata': _metadata,
    'filters': _filters,
}


def of_machine(facts: Machine) -> list[Ailment]:
    """What is wrong with this machine."""
    found = [Ailment(name, *each) for name, look in OF_MACHINE.items() for each in look(facts)]
    there = facts.libvirt
    if there is not None:
        found += [Ailment(name, *each) for name, look in OF_LIBVIRT.items() for each in look(there, facts)]
    return found
