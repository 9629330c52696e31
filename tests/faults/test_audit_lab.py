"""eschedule check on libvirt: it finds defects, removes leftovers, keeps foreign domains."""

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
from ecomp.model.guest import make_mac_address
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.audit import audit, fix
from ecomp.store.client import Store
from tests.kit.audit import wait_audit_clean
from tests.kit.hypervisor import REACTION_SECONDS, Hypervisor
from tests.kit.servers import wait_until

FOREIGN_DOMAIN = 'a-stranger'


@contextmanager
def open_backends(host: Hypervisor) -> Iterator[tuple[Store, Placement]]:
    config = load_schedule(host.lab.directory / 'schedule.yaml')
    store, placement = Store(config.etcd), Placement(config.placement)
    try:
        yield store, placement
    finally:
        store.close()
        placement.close()


def check_findings(host: Hypervisor, *expected: tuple[str, str]) -> None:
    # ecompute may have to update its records first.
    findings: list[object] = []

    def has_expected() -> bool:
        with open_backends(host) as (store, placement):
            report = audit(store, placement, 0.5, is_now=True)
            findings[:] = [(finding.code, finding.subject) for finding in report.findings]
        return sorted(map(str, findings)) == sorted(map(str, expected))

    try:
        wait_until(has_expected, REACTION_SECONDS, f'the audit finds {expected}')
    except AssertionError as error:
        raise AssertionError(f'{error}; it found {findings}') from None


def find_base(host: Hypervisor, instance: str) -> Path:
    command = ['qemu-img', 'info', '-U', '--output=json', str(host.get_disk_path(instance))]
    return Path(json.loads(subprocess.run(command, check=True, capture_output=True).stdout)['full-backing-filename'])


def make_disk(host: Hypervisor, instance: str, *options: str) -> None:
    """Create an overlay under our file name."""
    subprocess.run(
        ['qemu-img', 'create', '-q', '-f', 'qcow2', *options, str(host.get_disk_path(instance)), '1G'], check=True
    )


def define(host: Hypervisor, text: str) -> None:
    path = host.lab.directory / 'planted.xml'
    path.write_text(text)
    host.virsh('define', str(path))


@contextmanager
def remove_base(host: Hypervisor, instance: str) -> Iterator[str]:
    base = find_base(host, instance)
    base.rename(base.with_suffix('.away'))
    yield instance
    base.with_suffix('.away').rename(base)


@contextmanager
def remove_disk(host: Hypervisor, instance: str) -> Iterator[str]:
    away = host.lab.directory / 'away'
    shutil.move(host.get_disk_path(instance), away)
    yield instance
    shutil.move(away, host.get_disk_path(instance))


@contextmanager
def undefine_domain(host: Hypervisor, instance: str) -> Iterator[str]:
    # This makes the running domain transient.
    text = host.virsh('dumpxml', instance)
    host.virsh('undefine', instance)
    yield instance
    define(host, text)


@contextmanager
def plant_domain(host: Hypervisor, instance: str) -> Iterator[str]:
    """Define a domain with our owner mark, and create its disk."""
    orphan = str(uuid.uuid4())
    make_disk(host, orphan, '-F', 'raw', '-b', str(find_base(host, instance)))
    text = host.virsh('dumpxml', '--inactive', instance).replace(instance, orphan)
    define(host, re.sub(r"<mac address='[^']*'/>", '', text))
    yield orphan
    host.virsh('undefine', orphan)
    host.get_disk_path(orphan).unlink()


def reserve(host: Hypervisor, command: str, instance: str, address: str) -> None:
    text = f"<host mac='{make_mac_address(instance, 0)}' name='{instance}' ip='{address}'/>"
    host.virsh('net-update', 'default', command, 'ip-dhcp-host', text, '--live', '--config')


def find_free_address(host: Hypervisor) -> str:
    text = host.virsh('net-dumpxml', 'default')
    first = re.search(r"range start='(\S+)\.2'", text)
    assert first, text
    return next(address for address in (f'{first[1]}.{last}' for last in range(2, 255)) if f"'{address}'" not in text)


@contextmanager
def remove_reservation(host: Hypervisor, instance: str) -> Iterator[str]:
    """Remove the reservation. The restart of ecompute recreates it."""
    expected = host.read_record(instance)['addresses'][0]['expected']
    reserve(host, 'delete', instance, expected)
    yield instance
    host.restart()
    message = f'address {expected} on network default was missing; reserved {expected}'
    assert len(host.find_log_lines(instance, message)) == 1


@contextmanager
def change_reservation(host: Hypervisor, instance: str) -> Iterator[str]:
    expected, other = host.read_record(instance)['addresses'][0]['expected'], find_free_address(host)
    reserve(host, 'delete', instance, expected)
    reserve(host, 'add', instance, other)
    yield instance
    reserve(host, 'delete', instance, other)
    host.restart()


@contextmanager
def plant_changed_base(host: Hypervisor, _: str) -> Iterator[str]:
    """Add a base volume whose digest differs from its name and let the scrubber read it."""
    digest = uuid.uuid4().hex * 2
    path = host.state / 'images' / f'base-{digest}.raw'
    path.write_bytes(b'something else')
    Scrubber(path.parent).scrub(time.time())
    yield host.compute
    for file in (path, *path.parent.glob(f'.*-{digest}')):
        file.unlink()


OPEN_NETWORK = """<network><name>open</name><forward mode='open'/><bridge name='virbr7'/>
<ip address='10.79.0.1' netmask='255.255.255.0'><dhcp><range start='10.79.0.2' end='10.79.0.9'/></dhcp></ip>
</network>"""


@contextmanager
def plug_into_open_network(host: Hypervisor, _: str) -> Iterator[str]:
    """Plug guests into a network with libvirt's default settings."""
    definition, config = host.lab.directory / 'open.xml', host.directory / 'compute.yaml'
    definition.write_text(OPEN_NETWORK)
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


# Defects of what is in use. The test of --fix plants leftovers.
PLANTS: dict[str, Callable[[Hypervisor, str], AbstractContextManager[str]]] = {
    'base-missing': remove_base,
    'disk-missing': remove_disk,
    'domain-undefined': undefine_domain,
    'base-differs': plant_changed_base,
    # These restart ecompute.
    'reservation-missing': remove_reservation,
    'reservation-differs': change_reservation,
    'dhcp-open': plug_into_open_network,
}


@pytest.fixture
def foreign_disk(host: Hypervisor) -> Iterator[str]:
    """The instance of an overlay without a request, used by a domain defined outside ecomp."""
    orphan = str(uuid.uuid4())
    make_disk(host, orphan)
    device = f"<disk type='file'><source file='{host.get_disk_path(orphan)}'/><target dev='vda' bus='virtio'/></disk>"
    system = "<os><type arch='x86_64' machine='pc'>hvm</type></os>"
    head = f"<domain type='qemu'><name>{FOREIGN_DOMAIN}</name><memory unit='MiB'>32</memory>"
    define(host, f'{head}{system}<devices>{device}</devices></domain>')
    yield orphan
    host.virsh('undefine', FOREIGN_DOMAIN)
    host.get_disk_path(orphan).unlink()


@pytest.mark.slow
def test_audit_finds_each_libvirt_defect_and_no_other(host: Hypervisor) -> None:
    instance = host.start_instance()
    wait_audit_clean(host.lab, REACTION_SECONDS)
    for code, plant in PLANTS.items():
        with plant(host, instance) as subject:
            check_findings(host, (code, subject))
        check_findings(host)
    assert host.find_qemu(instance)
    assert host.virsh('domstate', instance).strip() == 'running'


@pytest.mark.slow
def test_audit_fix_removes_leftovers_and_keeps_foreign_disks(host: Hypervisor, foreign_disk: str) -> None:
    instance = host.start_instance()
    pid = host.find_qemu(instance)
    image = host.state / 'images' / 'base-0123.part'
    orphan = str(uuid.uuid4())
    seed = host.state / 'metadata' / '52:54:00:00:00:01.json'
    iso = host.state / f'seeds/{uuid.uuid4()}.iso'
    with plant_domain(host, instance) as domain:
        make_disk(host, orphan)
        seed.write_text(json.dumps({'version': 1, 'instance': orphan, 'mac': seed.stem}))
        image.write_bytes(b'half')
        iso.touch()
        unnamed = str(uuid.uuid4())
        reserve(host, 'add', unnamed, find_free_address(host))
        before = {name: host.virsh('dumpxml', name) for name in (instance, domain, FOREIGN_DOMAIN)}
        check_findings(
            host,
            *(('disk-orphaned', orphan), ('disk-orphaned', foreign_disk), ('seed-orphaned', orphan)),
            *(('reservation-orphaned', unnamed), ('iso-orphaned', iso.stem)),
            *(('domain-orphaned', domain), ('part-orphaned', host.compute)),
        )
        messages: list[str] = []
        with open_backends(host) as (store, placement):
            report = fix(store, placement, messages.append, interval_seconds=62)
        remaining = {(finding.code, finding.subject) for finding in report.findings}
        assert remaining == {('disk-orphaned', foreign_disk), ('domain-orphaned', domain)}, messages
        assert any(
            f'disk-orphaned {foreign_disk}: not removed: in use by domain {FOREIGN_DOMAIN}' in line for line in messages
        ), messages
        assert not any(path.exists() for path in (host.get_disk_path(orphan), seed, image, iso))
        assert unnamed not in host.virsh('net-dumpxml', 'default') + host.virsh('net-dumpxml', 'default', '--inactive')
        assert instance in host.virsh('net-dumpxml', 'default')
        assert all(host.get_disk_path(owner).exists() for owner in (instance, domain, foreign_disk))
        assert {name: host.virsh('dumpxml', name) for name in before} == before
        assert host.find_qemu(instance) == pid
