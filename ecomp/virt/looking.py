"""What libvirt and the networks of this host are like, for `ecompute --check`: nothing is made, started or defined."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ecomp.errors import EcompError
from ecomp.model.guest import Attachment
from ecomp.model.health import MISSING, OFF, THERE, Libvirt
from ecomp.virt import xml
from ecomp.virt.connection import KVM, Connection, blocked, libvirt, look_for_kvm, no_kvm
from ecomp.virt.connection import user as qemu_user
from ecomp.virt.domains import Domains
from ecomp.virt.filters import Filters
from ecomp.virt.networks import INTERFACES, Networks
from ecomp.virt.volumes import POOL


def look(state: Path, attachments: Sequence[Attachment], uri: str = 'qemu:///system') -> Libvirt:
    """What there is. Errors: Unreachable where libvirt does not answer, EcompError."""
    with _connected(uri) as connection:
        with connection.use('asking for its version') as open_one:
            version, capabilities = open_one.getLibVersion(), xml.capabilities(open_one.getCapabilities())
        qemu = qemu_user(capabilities.qemu_uid, capabilities.qemu_gid)
        kvm = look_for_kvm(qemu, capabilities.domain_types)
        device = KVM.exists()
        states = {each: _state(connection, each) for each in attachments}
        filters = Filters(connection, ()).missing()
        unfit = [Networks(connection).explain_unfit(each, not filters) for each in attachments]
        closed = blocked(state.absolute() / 'images', qemu)
        return Libvirt(
            version=version,
            library=libvirt.getVersion(),
            qemu='qemu' in capabilities.domain_types,
            qemu_user=qemu.name,
            kvm_device=device,
            kvm_closed=device and not kvm['device'],
            kvm='; '.join(no_kvm(**kvm)),
            blocked='' if closed is None else str(closed),
            pool=_others_pool(connection, state.absolute() / 'images'),
            networks=states,
            has_bridge=any(_has_bridge(connection, each) for each, found in states.items() if found != MISSING),
            filters=filters,
            unfit=tuple(why for each in unfit for why in each if why),
            computes=frozenset(each.mark.compute for each in Domains(connection).ours().values()),
        )


@contextmanager
def _connected(uri: str) -> Iterator[Connection]:
    connection = Connection(uri)
    try:
        yield connection
    finally:
        connection.close()


def _state(connection: Connection, attachment: Attachment) -> str:
    kind, name = attachment
    if kind == 'bridge':
        return THERE if (INTERFACES / name / 'bridge').is_dir() else MISSING
    with connection.use(f'looking for the network {name}') as open_one:
        found = [each for each in open_one.listAllNetworks() if each.name() == name]
        return MISSING if not found else THERE if found[0].isActive() else OFF


def _has_bridge(connection: Connection, attachment: Attachment) -> bool:
    try:
        return attachment.kind == 'network' and Networks(connection).own_bridge(attachment.name) is not None
    except EcompError:
        return False  # one without a bridge


def _others_pool(connection: Connection, directory: Path) -> str:
    with connection.use(f'looking for the storage pool {POOL}') as open_one:
        targets = [xml.pool_target(each.XMLDesc()) for each in open_one.listAllStoragePools() if each.name() == POOL]
    return next((str(each) for each in targets if os.path.realpath(each) != os.path.realpath(directory)), '')
