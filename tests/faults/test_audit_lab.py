"""eschedule audit on real libvirt: what only a hypervisor can have is found, leftovers go, strangers stay."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import yaml

from ecomp.agent.images.cache import Scrubber
from ecomp.conf import load_schedule
from ecomp.model.guest import mac_address
from ecomp.placement.client import Placement
from ecomp.scheduler.operating.audit import audit, fix
from ecomp.store.client import Store
from tests.kit.audit import audit_clean
from tests.kit.hypervisor import SOON, Hypervisor
from tests.kit.servers import until

STRANGER = 'a-stranger'


@contextmanager
def backends(host: Hypervisor) -> Iterator[tuple[Store, Placement]]:
    """etcd and placement of the lab, as eschedule has them."""
    config = load_schedule(host.lab.directory / 'schedule.yaml')
    store, placement = Store(config.etcd), Placement(config.placement)
    try:
        yield store, placement
    finally:
        store.close()
        placement.close()


def finds(host: Hypervisor, *wanted: tuple[str, str]) -> None:
    """The audit soon finds just this: ecompute may write down first what it sees."""
    seen: list[object] = []

    def found() -> bool:
        with backends(host) as (store, placement):
            seen[:] = [(each.code, each.subject) for each in audit(store, placement, 0.5).findings]
        return sorted(map(str, seen)) == sorted(map(str, wanted))

    try:
        until(found, SOON, f'the audit finds {wanted}')
    except AssertionError as error:
        raise AssertionError(f'{error}; it found {seen}') from None


def base_of(host: Hypervisor, instance: str) -> Path:
    """What an instance's disk lies on."""
    command = ['qemu-img', 'info', '-U', '--output=json', str(host.disk(instance))]
    return Path(json.loads(subprocess.run(command, check=True, capture_output=True).stdout)['full-backing-filename'])


def make_disk(host: Hypervisor, instance: str, *options: str) -> None:
    """An overlay of our name."""
    subprocess.run(['qemu-img', 'create', '-q', '-f', 'qcow2', *options, str(host.disk(instance)), '1G'], check=True)


def define(host: Hypervisor, text: str) -> None:
    path = host.lab.directory / 'planted.xml'
    path.write_text(text)
    host.virsh('define', str(path))


@contextmanager
def base_gone(host: Hypervisor, instance: str) -> Iterator[str]:
    base = base_of(host, instance)
    base.rename(base.with_suffix('.away'))
    yield instance
    base.with_suffix('.away').rename(base)


@contextmanager
def disk_gone(host: Hypervisor, instance: str) -> Iterator[str]:
    away = host.lab.directory / 'away'
    shutil.move(host.disk(instance), away)
    yield instance
    shutil.move(away, host.disk(instance))


@contextmanager
def undefined(host: Hypervisor, instance: str) -> Iterator[str]:
    """A running domain without a definition: it becomes transient."""
    text = host.virsh('dumpxml', instance)
    host.virsh('undefine', instance)
    yield instance
    define(host, text)


@contextmanager
def domain_of_nobody(host: Hypervisor, instance: str) -> Iterator[str]:
    """A domain with our mark, and a disk."""
    nobody = str(uuid.uuid4())
    make_disk(host, nobody, '-F', 'raw', '-b', str(base_of(host, instance)))
    text = host.virsh('dumpxml', '--inactive', instance).replace(instance, nobody)
    define(host, re.sub(r"<mac address='[^']*'/>", '', text))
    yield nobody
    host.virsh('undefine', nobody)
    host.disk(nobody).unlink()


@contextmanager
def disk_of_nobody(host: Hypervisor, _: str) -> Iterator[str]:
    nobody = str(uuid.uuid4())
    make_disk(host, nobody)
    yield nobody
    host.disk(nobody).unlink()


@contextmanager
def seed_of_nobody(host: Hypervisor, _: str) -> Iterator[str]:
    nobody, path = str(uuid.uuid4()), host.state / 'metadata' / '52:54:00:00:00:01.json'
    path.write_text(json.dumps({'version': 1, 'instance': nobody, 'mac': path.stem}))
    yield nobody
    path.unlink()


@contextmanager
def iso_of_nobody(host: Hypervisor, _: str) -> Iterator[str]:
    nobody = str(uuid.uuid4())
    path = host.state / f'seeds/{nobody}.iso'
    path.touch()
    try:
        yield nobody
    finally:
        path.unlink()


def reserve(host: Hypervisor, command: str, instance: str, address: str) -> None:
    text = f"<host mac='{mac_address(instance, 0)}' name='{instance}' ip='{address}'/>"
    host.virsh('net-update', 'default', command, 'ip-dhcp-host', text, '--live', '--config')


def free_address(host: Hypervisor) -> str:
    """One of the network's that nobody has."""
    text = host.virsh('net-dumpxml', 'default')
    first = re.search(r"range start='(\S+)\.2'", text)
    assert first, text
    return next(each for each in (f'{first[1]}.{last}' for last in range(2, 255)) if f"'{each}'" not in text)


@contextmanager
def reservation_of_nobody(host: Hypervisor, _: str) -> Iterator[str]:
    nobody, address = str(uuid.uuid4()), free_address(host)
    reserve(host, 'add', nobody, address)
    yield nobody
    reserve(host, 'delete', nobody, address)


@contextmanager
def unreserved(host: Hypervisor, instance: str) -> Iterator[str]:
    """The reservation is gone; with a restart of ecompute it is there again."""
    expected = host.record(instance)['addresses'][0]['expected']
    reserve(host, 'delete', instance, expected)
    yield instance
    host.restart()
    assert len(host.lines(instance, f'{expected} was not reserved on default, {expected} is')) == 1


@contextmanager
def reserved_otherwise(host: Hypervisor, instance: str) -> Iterator[str]:
    expected, other = host.record(instance)['addresses'][0]['expected'], free_address(host)
    reserve(host, 'delete', instance, expected)
    reserve(host, 'add', instance, other)
    yield instance
    reserve(host, 'delete', instance, other)
    host.restart()


@contextmanager
def download_of_nobody(host: Hypervisor, _: str) -> Iterator[str]:
    path = host.state / 'images' / 'base-0123.part'
    path.write_bytes(b'half')
    yield host.compute
    path.unlink()


@contextmanager
def changed_base(host: Hypervisor, _: str) -> Iterator[str]:
    """A base volume that is not what its name says, when it is read again."""
    digest = uuid.uuid4().hex * 2
    path = host.state / 'images' / f'base-{digest}.raw'
    path.write_bytes(b'something else')
    Scrubber(path.parent).scrub(time.time())
    yield host.compute
    for each in (path, *path.parent.glob(f'.*-{digest}')):
        each.unlink()


OPEN = """<network><name>open</name><forward mode='open'/><bridge name='virbr7'/>
<ip address='10.79.0.1' netmask='255.255.255.0'><dhcp><range start='10.79.0.2' end='10.79.0.9'/></dhcp></ip>
</network>"""


@contextmanager
def open_network(host: Hypervisor, _: str) -> Iterator[str]:
    """Guests are plugged into a network as libvirt makes them."""
    definition, config = host.lab.directory / 'open.xml', host.directory / 'compute.yaml'
    definition.write_text(OPEN)
    host.virsh('net-define', str(definition))
    before = config.read_text()
    networks = [{'network': 'default'}, {'network': 'open'}]
    config.write_text(yaml.safe_dump({**yaml.safe_load(before), 'networks': networks}))
    host.restart()
    yield host.compute
    config.write_text(before)
    host.restart()
    host.virsh('net-destroy', 'open')
    host.virsh('net-undefine', 'open')


PLANTS: dict[str, Callable[[Hypervisor, str], AbstractContextManager[str]]] = {
    'base-missing': base_gone,
    'disk-missing': disk_gone,
    'domain-undefined': undefined,
    'domain-orphaned': domain_of_nobody,
    'disk-orphaned': disk_of_nobody,
    'seed-orphaned': seed_of_nobody,
    'iso-orphaned': iso_of_nobody,
    'part-orphaned': download_of_nobody,
    'base-differs': changed_base,
    'reservation-orphaned': reservation_of_nobody,
    # Last, for they end with a new ecompute, whose workers sweep such files as they start.
    'reservation-missing': unreserved,
    'reservation-differs': reserved_otherwise,
    'dhcp-open': open_network,
}


@pytest.fixture
def stranger(host: Hypervisor) -> Iterator[str]:
    """A domain somebody else defined, over an overlay volume of ours that nobody asks for: its instance's name."""
    nobody = str(uuid.uuid4())
    make_disk(host, nobody)
    device = f"<disk type='file'><source file='{host.disk(nobody)}'/><target dev='vda' bus='virtio'/></disk>"
    system = "<os><type arch='x86_64' machine='pc'>hvm</type></os>"
    head = f"<domain type='qemu'><name>{STRANGER}</name><memory unit='MiB'>32</memory>"
    define(host, f'{head}{system}<devices>{device}</devices></domain>')
    yield nobody
    host.virsh('undefine', STRANGER)
    host.disk(nobody).unlink()


@pytest.mark.slow
def test_each_defect_on_libvirt_is_found_as_itself_and_nothing_else(host: Hypervisor) -> None:
    instance = host.running()
    audit_clean(host.lab, SOON)
    for code, plant in PLANTS.items():
        with plant(host, instance) as subject:
            finds(host, (code, subject))
        finds(host)
    assert host.qemu(instance)
    assert host.virsh('domstate', instance).strip() == 'running'


def test_leftovers_go_and_strangers_stay(host: Hypervisor, stranger: str) -> None:
    instance = host.running()
    pid = host.qemu(instance)
    image = host.state / 'images' / 'base-0123.part'
    nobody = str(uuid.uuid4())
    seed = host.state / 'metadata' / '52:54:00:00:00:01.json'
    iso = host.state / f'seeds/{uuid.uuid4()}.iso'
    with domain_of_nobody(host, instance) as domain:
        make_disk(host, nobody)
        seed.write_text(json.dumps({'version': 1, 'instance': nobody, 'mac': seed.stem}))
        image.write_bytes(b'half')
        iso.touch()
        unnamed = str(uuid.uuid4())
        reserve(host, 'add', unnamed, free_address(host))
        before = {name: host.virsh('dumpxml', name) for name in (instance, domain, STRANGER)}
        finds(
            host,
            *(('disk-orphaned', nobody), ('disk-orphaned', stranger), ('seed-orphaned', nobody)),
            *(('reservation-orphaned', unnamed), ('iso-orphaned', iso.stem)),
            *(('domain-orphaned', domain), ('part-orphaned', host.compute)),
        )
        told: list[str] = []
        with backends(host) as (store, placement):
            report = fix(store, placement, told.append, apart=0.5)
        left = {(each.code, each.subject) for each in report.findings}
        assert left == {('disk-orphaned', stranger), ('domain-orphaned', domain)}, told
        assert any(f'disk {stranger}: not removed: domain {STRANGER} has it' in line for line in told), told
        assert not any(path.exists() for path in (host.disk(nobody), seed, image, iso))
        assert unnamed not in host.virsh('net-dumpxml', 'default') + host.virsh('net-dumpxml', 'default', '--inactive')
        assert instance in host.virsh('net-dumpxml', 'default')
        assert all(host.disk(each).exists() for each in (instance, domain, stranger))
        assert {name: host.virsh('dumpxml', name) for name in before} == before
        assert host.qemu(instance) == pid
