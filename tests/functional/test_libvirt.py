"""What only libvirt can break: real daemons, disks and domains.

Guests have a disk with a boot signature and nothing to boot: they run, which is all that is asked of them here.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from pwd import getpwnam
from uuid import uuid4

import pytest

from ecomp.errors import BuildFailed, Conflict, EcompError, Unreachable, UsageError
from ecomp.model.findings import CODES
from ecomp.model.guest import Address, Guest, GuestSpec, mac_address
from ecomp.model.network import DEFAULT_NETWORKS, Attachment
from tests.functional.guest import COMPUTE, MakeSpec, build
from tests.functional.libvirt_host import LibvirtHost
from tests.kit.servers import until

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt import filter_xml  # noqa: E402
from ecomp.virt.connection import Connection  # noqa: E402
from ecomp.virt.libvirt_host import NO_FILTERS, Libvirt  # noqa: E402
from ecomp.virt.volumes import Volumes  # noqa: E402

BRIDGED = (*DEFAULT_NETWORKS, Attachment('bridge', 'br0'))
DRIVERS = '/usr/lib/x86_64-linux-gnu/libvirt/connection-driver'
FOREIGN = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
<os><type>hvm</type></os></domain>"""


@pytest.fixture
def connection(host: LibvirtHost) -> Iterator[object]:
    """A connection of the test's own, to see and do what ecompute does not."""
    opened = libvirt.open(host.uri)
    yield opened
    opened.close()


def test_disk_and_domain_as_asked(real: Libvirt, spec: GuestSpec, host: LibvirtHost, connection: object) -> None:
    host.inside(['ip', 'link', 'add', 'br0', 'type', 'bridge'])
    try:
        build(real, replace(spec, networks=BRIDGED, vcpus=2))
        domain = connection.lookupByUUIDString(spec.instance)
        description = ET.fromstring(domain.XMLDesc())
        macs = [element.get('address') for element in description.findall('devices/interface/mac')]
        assert macs == list(replace(spec, networks=BRIDGED).macs)
        assert domain.info()[1:4] == [32 * 1024, 32 * 1024, 2]
        assert domain.blockInfo('vda')[0] == 2**30
        # What many guests are on is nothing that one of them can write to, if it breaks out of QEMU.
        overlay = real.image_directory() / f'{spec.instance}.qcow2'
        assert (Path(spec.base.path).stat().st_uid, overlay.stat().st_uid) == (0, getpwnam('libvirt-qemu').pw_uid)
        # The schema knows all that we write.
        connection.defineXMLFlags(domain.XMLDesc(), libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
    finally:
        host.inside(['ip', 'link', 'del', 'br0'])
    disk = real.image_directory() / f'{spec.instance}.qcow2'
    console = host.root / 'state' / 'console' / f'{spec.instance}.log'
    assert (disk.stat().st_mode & 0o777, console.stat().st_mode & 0o777) == (0o600, 0o600)
    volume = ET.fromstring(connection.storageVolLookupByPath(str(disk)).XMLDesc())
    assert (volume.findtext('backingStore/path'), volume.find('backingStore/format').get('type')) == (
        spec.base.path,
        'raw',
    )
    real.destroy(spec.instance, COMPUTE)
    real.delete_disk(spec.instance)
    assert not disk.exists()
    assert not console.exists()


def test_a_seed_is_a_second_disk_that_qemu_alone_reads(
    real: Libvirt, spec: GuestSpec, host: LibvirtHost, connection: object
) -> None:
    told = replace(spec, seed={'meta-data': b'{}', 'user-data': b'secret'})
    real.create_disk(told)
    real.create_seed(spec.instance, told.seed)
    seed = host.root / 'state' / 'seeds' / f'{spec.instance}.iso'
    assert (seed.stat().st_mode & 0o777, seed.stat().st_uid) == (0o600, 0)
    real.start(told)
    assert (seed.stat().st_mode & 0o777, seed.stat().st_uid) == (0o600, getpwnam('libvirt-qemu').pw_uid)
    domain = connection.lookupByUUIDString(spec.instance)
    connection.defineXMLFlags(domain.XMLDesc(), libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
    assert domain.blockInfo('vdb')[0] == seed.stat().st_size
    assert domain.blockInfo('vda')[0] == 2**30
    with pytest.raises(libvirt.libvirtError, match='read-only|readonly'):
        domain.blockResize('vdb', 2**20, libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES)
    real.destroy(spec.instance, COMPUTE)
    real.delete_disk(spec.instance)
    assert not seed.exists()


def rules(host: LibvirtHost) -> str:
    """All that filters frames on the host, as ebtables of Debian 12 prints it; that of Debian 13 puts the ! first."""
    return host.inside(['ebtables', '-t', 'nat', '-L']).stdout.replace('! -s ', '-s ! ')


def test_what_a_guest_may_send(real: Libvirt, spec: GuestSpec, host: LibvirtHost, connection: object) -> None:
    host.inside(['ip', 'link', 'add', 'br0', 'type', 'bridge'])
    control = [('10.88.0.9', 2379), ('10.88.0.9', 8080), ('10.88.0.10', 2379), ('fd00:88::9', 8080)]
    real = Libvirt(host.root / 'state', uri=host.uri, control=control)
    for_all = [
        '-p IPv4 --ip-proto udp --ip-sport 67 -j DROP',
        '-p IPv6 --ip6-proto udp --ip6-sport 547 -j DROP',
        '-p IPv6 --ip6-proto ipv6-icmp --ip6-icmp-type router-advertisement -j DROP',
        '-p IPv6 --ip6-proto ipv6-icmp --ip6-icmp-type redirect -j DROP',
        '-p IPv4 --ip-dst 10.88.0.9 --ip-proto tcp --ip-dport 2379 -j DROP',
        '-p IPv4 --ip-dst 10.88.0.9 --ip-proto tcp --ip-dport 8080 -j DROP',
        '-p IPv4 --ip-dst 10.88.0.10 --ip-proto tcp --ip-dport 2379 -j DROP',
        '-p IPv6 --ip6-dst fd00:88::9 --ip6-proto tcp --ip6-dport 8080 -j DROP',
    ]
    try:
        build(real, replace(spec, networks=BRIDGED, reserved=('10.77.0.50', None)))
        for _ in range(2):
            bindings = {each.portDev(): each.filterName() for each in connection.listAllNWFilterBindings()}
            assert sorted(bindings.values()) == [filter_xml.GUEST_ADDRESS, filter_xml.GUEST_MAC]
            known, bridged = sorted(bindings, key=bindings.__getitem__)
            first, second = replace(spec, networks=BRIDGED).macs
            chains = {text.split(',')[0]: text.splitlines()[1:] for text in rules(host).split('Bridge chain: ')}
            assert [line.strip() for line in chains[f'libvirt-I-{known}'] if line.strip()] == [
                *for_all,
                f'-p IPv4 -s {first} --ip-src 10.77.0.50 -j ACCEPT',
                f'-p IPv4 -s {first} --ip-dst 255.255.255.255 -j ACCEPT',
                f'-p ARP -s {first} --arp-ip-src 10.77.0.50 --arp-mac-src {first} -j ACCEPT',
                f'-p IPv6 -s {first} -j ACCEPT',
                '-j DROP',
            ]
            assert [line.strip() for line in chains[f'libvirt-I-{bridged}'] if line.strip()] == [
                *for_all,
                '-p 802_1Q -j DROP',
                '-p S-TAG -j DROP',
                f'-p ARP -s {second} --arp-mac-src {second} -j ACCEPT',
                '-p ARP -j DROP',
                f'-s ! {second} -j DROP',
            ]
            real.switch_off(spec.instance, COMPUTE)
            assert 'libvirt-I' not in rules(host)
            # Nobody has them now, so somebody can remove them; and they are there again when they are needed.
            for name in filter_xml.FILTERS:
                connection.nwfilterLookupByName(name).undefine()
            real.resume(spec.instance, COMPUTE)
    finally:
        real.destroy(spec.instance, COMPUTE)
        host.inside(['ip', 'link', 'del', 'br0'])
    assert 'libvirt-I' not in rules(host)


def test_filters_that_are_there_stay(real: Libvirt, connection: object) -> None:
    before = {name: connection.nwfilterLookupByName(name).UUIDString() for name in filter_xml.FILTERS}
    for name, number in before.items():
        theirs = connection.nwfilterLookupByName(name)
        theirs.undefine()
        connection.nwfilterDefineXML(f"<filter name='{name}' chain='root'/>")
        own = connection.nwfilterLookupByName(name).UUIDString()
        real.prepare()
        assert connection.nwfilterLookupByName(name).UUIDString() == own != number
        connection.nwfilterLookupByName(name).undefine()
    real.prepare()
    assert {name: connection.nwfilterLookupByName(name).UUIDString() for name in filter_xml.FILTERS} == before


def unfiltered(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of filters."""
    return [record.getMessage() for record in caplog.records if 'filter' in record.getMessage()]


def test_without_ebtables(
    real: Libvirt,
    spec: GuestSpec,
    connection: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr('ecomp.virt.filters.search_path', lambda: '/nowhere')
    real.prepare()
    build(real, replace(spec, reserved=('10.77.0.50',)))
    assert unfiltered(caplog) == [NO_FILTERS.format(why='ebtables is not installed')]
    assert 'filterref' not in connection.lookupByUUIDString(spec.instance).XMLDesc()


def test_a_libvirtd_without_the_driver(
    host: LibvirtHost, real: Libvirt, spec: GuestSpec, caplog: pytest.LogCaptureFixture
) -> None:
    drivers = host.root / 'drivers'
    shutil.copytree(DRIVERS, drivers, ignore=shutil.ignore_patterns('*nwfilter*'))
    host.kill_libvirtd()
    start = f'mount --bind {drivers} {DRIVERS}; libvirtd -d --pid-file {host.root}/libvirtd.pid'
    host.inside(['unshare', '-m', 'sh', '-e', '-c', start])
    try:
        real.prepare()
        build(real, replace(spec, reserved=('10.77.0.50',)))
    finally:
        host.kill_libvirtd()
        host.start_libvirtd()
    why = 'this function is not supported by the connection driver: virNWFilterLookupByName'
    assert unfiltered(caplog) == [NO_FILTERS.format(why=why)]
    again = libvirt.open(host.uri)
    assert 'filterref' not in again.lookupByUUIDString(spec.instance).XMLDesc()
    again.close()


def test_the_images_own_size(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    build(real, replace(spec, disk_gb=None))
    assert connection.lookupByUUIDString(spec.instance).blockInfo('vda')[0] == spec.base.virtual_size


def test_a_missing_bridge(real: Libvirt, spec: GuestSpec) -> None:
    real.create_disk(spec)
    with pytest.raises(BuildFailed, match=r'started: .*br-none'):
        real.start(replace(spec, networks=(Attachment('bridge', 'br-none'),)))
    assert not real.guests()[spec.instance].running


def test_a_missing_base(real: Libvirt, spec: GuestSpec) -> None:
    with pytest.raises(BuildFailed, match='disk: the base volume /gone is gone'):
        real.create_disk(replace(spec, base=replace(spec.base, path='/gone')))
    assert real.guests() == {}


def test_a_base_that_went_away(real: Libvirt, spec: GuestSpec, make_spec: MakeSpec) -> None:
    other, gone = make_spec(), Path(spec.base.path).with_name('other.raw')
    gone.write_bytes(Path(spec.base.path).read_bytes())
    real.create_disk(spec)
    real.create_disk(replace(other, base=replace(other.base, path=str(gone))))
    assert real.without_base() == {}
    gone.unlink()
    assert real.without_base() == {other.instance: str(gone)}


def test_a_stranger_that_has_a_disk_of_ours(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    real.create_disk(spec)
    path = real.image_directory() / f'{spec.instance}.qcow2'
    device = f"<disk type='file' device='disk'><source file='{path}'/><target dev='vda'/></disk>"
    text = FOREIGN.format(name='stranger', uuid=uuid4()).replace('</domain>', f'<devices>{device}</devices></domain>')
    stranger = connection.defineXML(text)
    try:
        assert real.users(spec.instance) == {'stranger'}
    finally:
        stranger.undefine()
    assert real.users(spec.instance) == set()


def test_a_half_made_build_is_made_anew(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    """The domain defined with a bridge that is not there, the file not libvirt's work and not in its list."""
    real.create_disk(spec)
    with pytest.raises(BuildFailed):
        real.start(replace(spec, networks=(Attachment('bridge', 'br-none'),)))
    assert real.guests()[spec.instance].defined
    disk = real.image_directory() / f'{spec.instance}.qcow2'
    disk.unlink()
    connection.storagePoolLookupByName('ecompute').refresh()
    disk.write_bytes(b'half')
    build(real, spec)
    assert real.guests()[spec.instance].running
    assert disk.stat().st_size > 1000


def test_a_disk_removed_by_hand(real: Libvirt, spec: GuestSpec) -> None:
    disk = real.image_directory() / f'{spec.instance}.qcow2'
    real.create_disk(spec)
    disk.unlink()
    assert real.guests() == {}
    real.create_disk(spec)
    assert disk.exists()
    disk.unlink()
    real.delete_disk(spec.instance)
    real.create_disk(spec)


def test_a_pool_that_somebody_stopped_is_started(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    pool = connection.storagePoolLookupByName('ecompute')
    pool.destroy()
    real.create_disk(spec)
    assert real.guests().keys() == {spec.instance}
    pool.destroy()
    real.delete_disk(spec.instance)
    assert real.guests() == {}
    assert pool.isActive()


def test_a_pool_that_another_worker_starts_is_used(
    host: LibvirtHost, real: Libvirt, spec: GuestSpec, connection: object
) -> None:
    pool, tries = connection.storagePoolLookupByName('ecompute'), []
    pool.destroy()

    def find(each: libvirt.virStoragePool) -> None:
        tries.append(each)
        try:
            each.storageVolLookupByName(f'{spec.instance}.qcow2')
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID:
                pool.create()  # the other one, before we look whether it is active
            raise

    with pytest.raises(libvirt.libvirtError) as caught:
        Volumes(Connection(host.uri), real.image_directory())._in_pool(connection, find)
    assert caught.value.get_error_code() == libvirt.VIR_ERR_NO_STORAGE_VOL
    assert len(tries) == 2


def test_strangers_are_not_seen_and_not_touched(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    other_name = connection.defineXML(FOREIGN.format(name='other', uuid=spec.instance))
    other_uuid = connection.defineXML(FOREIGN.format(name=str(uuid4()), uuid=uuid4()))
    try:
        other_uuid.create()
        assert real.guests() == {}
        for instance in (spec.instance, other_uuid.name()):
            theirs = replace(spec, instance=instance)
            assert not any(map(real.runs, (instance, other_uuid.UUIDString())))
            with pytest.raises(Conflict, match='not made by ecompute'):
                real.start(theirs)
            with pytest.raises(Conflict, match='not made by ecompute'):
                real.switch_off(instance, COMPUTE)
            # Nothing of ours is in it, so a destroy, which a build that fails is too, has an end.
            real.destroy(instance, COMPUTE)
            real.create_disk(replace(theirs, base=spec.base))
            real.delete_disk(instance)
            assert real.guests() == {}
        assert other_uuid.isActive()
        assert other_name.isPersistent()
    finally:
        other_uuid.destroy()
        other_uuid.undefine()
        other_name.undefine()


@pytest.mark.parametrize('runs', [False, True])
def test_a_disk_that_a_stranger_has_stays(real: Libvirt, spec: GuestSpec, connection: object, runs: bool) -> None:
    real.create_disk(spec)
    path = real.image_directory() / f'{spec.instance}.qcow2'
    disk = f"<disk type='file'><driver name='qemu' type='qcow2'/><source file='{path}'/><target dev='vda'/></disk>"
    definition = FOREIGN.format(name='theirs', uuid=spec.instance)
    theirs = connection.defineXML(definition.replace('</os>', f'</os><devices>{disk}</devices>'))
    try:
        if runs:
            theirs.create()
        real.destroy(spec.instance, COMPUTE)
        with pytest.raises(Conflict, match=r'domain theirs \(.*\), not made by ecompute, has .*: that is not removed'):
            real.delete_disk(spec.instance)
        assert path.exists()
        assert theirs.isActive() == runs
    finally:
        if runs:
            theirs.destroy()
        theirs.undefine()
    real.delete_disk(spec.instance)
    assert not path.exists()


def test_only_uuids_are_overlays(real: Libvirt) -> None:
    uuid = 'abcdef00-0000-4000-8000-00000000abcd'
    names = ['base-1.qcow2', 'x.qcow2', f'{uuid}.raw', f'{uuid.upper()}.qcow2', f'{{{uuid}}}.qcow2', f'{uuid}.part']
    files = [real.image_directory() / name for name in names]
    for file in files:
        file.touch()
    try:
        assert real.guests() == {}
    finally:
        for file in files:
            file.unlink()


def test_a_directory_that_is_away_is_not_empty(real: Libvirt) -> None:
    images = real.image_directory()
    images.rename(images.with_name('away'))
    try:
        with pytest.raises(Unreachable, match='mounted'):
            real.guests()
    finally:
        images.with_name('away').rename(images)


def test_undefined_while_it_runs(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    build(real, spec)
    connection.lookupByUUIDString(spec.instance).undefine()
    assert real.guests()[spec.instance] == Guest(spec.instance, COMPUTE, defined=False, running=True, disk=True)
    real.destroy(spec.instance, COMPUTE)
    assert not real.guests()[spec.instance].running


def test_managed_save_and_snapshot_do_not_keep_a_domain(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    build(real, spec)
    domain = connection.lookupByUUIDString(spec.instance)
    domain.snapshotCreateXML('<domainsnapshot><name>s</name></domainsnapshot>')
    domain.managedSave()
    assert real.guests()[spec.instance] == Guest(spec.instance, COMPUTE, defined=True, running=False, disk=True)
    real.destroy(spec.instance, COMPUTE)
    assert not real.guests()[spec.instance].defined


def test_libvirtd_killed_and_back(host: LibvirtHost, real: Libvirt, spec: GuestSpec) -> None:
    told: queue.Queue[str] = queue.Queue()
    real.on_change(told.put)
    build(real, spec)
    sockets = len(unix_sockets())
    for _ in range(3):
        host.kill_libvirtd()
        until(lambda: 'lost' in told.get(timeout=60), 60, 'the loss is told')
        with pytest.raises(Unreachable, match='libvirt'):
            real.guests()
        host.start_libvirtd()
        until(lambda: 'back' in told.get(timeout=60), 60, 'the return is told')
        assert real.guests()[spec.instance] == Guest(spec.instance, COMPUTE, defined=True, running=True, disk=True)
    # One more may be held by the last error; one for each connection would be a leak.
    assert len(unix_sockets()) < sockets + 3
    while not told.empty():
        told.get()
    real.destroy(spec.instance, COMPUTE)
    until(lambda: spec.instance in told.get(timeout=60), 60, 'events come over the new connection')


def test_libvirtd_frozen(host: LibvirtHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call waits for ever, not even the one that opens a connection; and all is well when it goes on."""
    from ecomp.virt import connection

    for name, value in (('KEEPALIVE_INTERVAL', 1), ('KEEPALIVE_COUNT', 1), ('OPEN_TIMEOUT', 1.0)):
        monkeypatch.setattr(connection, name, value)
    frozen = Libvirt(host.root / 'state', uri=host.uri)
    frozen.guests()
    os.kill(host.pid(), signal.SIGSTOP)
    try:
        for words in ('while listing domains', 'does not answer', 'does not answer'):
            with pytest.raises(Unreachable, match=words):
                frozen.guests()
    finally:
        os.kill(host.pid(), signal.SIGCONT)

    def answers() -> bool:
        try:
            return frozen.guests() == {}
        except Unreachable:
            return False

    until(answers, 60, 'libvirtd answers again')
    frozen.close()
    with pytest.raises(EcompError, match='closed'):
        frozen.guests()


@pytest.mark.usefixtures('real')
@pytest.mark.parametrize('step', ['registerCloseCallback', 'domainEventRegisterAny', 'networkEventRegisterAny'])
def test_a_connection_that_breaks_while_it_is_made_leaves_no_socket(
    host: LibvirtHost, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """libvirt holds a connection for as long as a callback of ours is on it."""

    def breaks(*_: object) -> None:
        error = libvirt.libvirtError('')
        error.err = (libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_FROM_RPC, 'it broke', 2, None, None, None, -1, -1)
        raise error

    broken = Libvirt(host.root / 'state', uri=host.uri)
    broken.on_change(lambda _: None)
    opened = broken._connection
    first = opened._get()
    works = getattr(libvirt.virConnect, step)
    monkeypatch.setattr(libvirt.virConnect, step, breaks)
    # Not before: once it is dropped, a thread opens the next one, without anybody asking.
    opened._drop(first)
    for _ in range(3):
        with pytest.raises(Unreachable):
            broken.guests()
    sockets = len(unix_sockets())
    for _ in range(20):
        with pytest.raises(Unreachable):
            broken.guests()
    until(lambda: len(unix_sockets()) <= sockets, 5, 'what was opened is closed')
    monkeypatch.setattr(libvirt.virConnect, step, works)
    assert broken.guests() == {}
    broken.close()


@pytest.mark.usefixtures('real')
def test_a_connection_without_a_thread_to_open_it_is_opened_later(
    host: LibvirtHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the limit on processes is reached for a moment; whoever hears of events hears that it is back."""
    told, failures = queue.SimpleQueue[str](), [RuntimeError("can't start new thread") for _ in range(2)]
    real_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == 'libvirt-open' and failures:
            raise failures.pop()
        real_start(thread)

    opened = Libvirt(host.root / 'state', uri=host.uri)
    opened.on_change(told.put)
    first = opened._connection._get()
    monkeypatch.setattr(threading.Thread, 'start', start)
    opened._connection._drop(first)
    until(lambda: 'connection is back' in told.get(timeout=60), 60, 'it is opened without anybody asking')
    assert not failures
    assert opened.guests() == {}
    opened.close()
    failures.append(RuntimeError("can't start new thread"))
    another = Libvirt(host.root / 'state', uri=host.uri)
    with pytest.raises(Unreachable, match='no thread can be started to open it'):
        another.guests()
    assert another.guests() == {}
    another.close()


def unix_sockets() -> list[str]:
    """Those of this process: what else it has open is not libvirt's."""
    there = {line.split()[6] for line in Path('/proc/self/net/unix').read_text().splitlines()[1:]}
    links: list[str] = []
    for each in Path('/proc/self/fd').iterdir():
        with suppress(OSError):
            links.append(os.readlink(each))
    return [each for each in links if each.startswith('socket:[') and each[8:-1] in there]


def in_a_worker(state: Path, uri: str, spec: GuestSpec) -> None:
    hypervisor = Libvirt(state, uri=uri)
    build(hypervisor, spec)
    assert hypervisor.guests()[spec.instance].running
    hypervisor.close()


def test_a_spawned_worker(host: LibvirtHost, real: Libvirt, spec: GuestSpec) -> None:
    context = multiprocessing.get_context('spawn')
    worker = context.Process(target=in_a_worker, args=(host.root / 'state', host.uri, spec))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert real.guests()[spec.instance].running


def test_prepare(host: LibvirtHost, real: Libvirt, connection: object) -> None:
    elsewhere = Libvirt(host.root / 'elsewhere', uri=host.uri)
    with pytest.raises(Conflict, match=f'{host.root}/state/images, not {host.root}/elsewhere/images'):
        elsewhere.prepare()
    elsewhere.close()
    closed = host.root / 'closed'
    closed.mkdir(mode=0o700)
    unreachable = Libvirt(closed / 'state', uri=host.uri)
    with pytest.raises(UsageError, match=f'setfacl -m u:libvirt-qemu:x {closed} '):
        unreachable.prepare()
    unreachable.close()
    for plug, words in ((('network', 'none'), "no network 'none'"), (('bridge', 'br-none'), 'no bridge br-none')):
        with pytest.raises(UsageError, match=words):
            Libvirt(host.root / 'state', [Attachment(*plug)], uri=host.uri).prepare()
    network, pool = connection.networkLookupByName('default'), connection.storagePoolLookupByName('ecompute')
    network.destroy()
    pool.destroy()
    real.prepare()
    assert network.isActive()
    assert (pool.isActive(), pool.autostart()) == (1, 1)


def fill(file: Path) -> None:
    with file.open('wb', buffering=0) as filler, suppress(OSError):
        while filler.write(b'x' * 4096):
            pass


def test_disk_full(host: LibvirtHost, real: Libvirt, spec: GuestSpec, connection: object) -> None:
    pool = connection.storagePoolLookupByName('ecompute')
    pool.destroy()
    pool.undefine()
    small = Libvirt(host.root / 'small', uri=host.uri)
    try:
        small.prepare()
        fill(host.root / 'small' / 'filler')
        with pytest.raises(BuildFailed, match=r'disk: the file system of .*/images is full: \d+ KiB'):
            small.create_disk(spec)
        assert small.guests() == {}
        assert list(small.image_directory().iterdir()) == []
        (host.root / 'small' / 'filler').unlink()
        build(small, spec)
        small.destroy(spec.instance, COMPUTE)
        small.delete_disk(spec.instance)
    finally:
        small.close()
        pool = connection.storagePoolLookupByName('ecompute')
        pool.destroy()
        pool.undefine()
        real.prepare()


def inside_the_host(state: str, instance: str) -> None:
    """What ecompute's parent does on its own host: the metadata address, and leases as they are given."""
    hypervisor = Libvirt(Path(state))
    told: queue.Queue[str] = queue.Queue()
    hypervisor.on_change(told.put)
    assert not hypervisor.metadata_address_present()
    assert [hypervisor.ensure_metadata_address(), hypervisor.ensure_metadata_address()] == [True, False]
    assert hypervisor.metadata_address_present()
    for _ in range(2):
        hypervisor.remove_metadata_address()
        assert not hypervisor.metadata_address_present()

    # The guest itself has nothing to boot: somebody with its MAC asks for its address.
    leased, bridged = mac_address(instance, 0), mac_address(instance, 1)
    add = ['ip', 'link', 'add', 'evt0', 'address', leased, 'type', 'veth', 'peer', 'name', 'evt1']
    up = [['ip', 'link', 'set', 'evt1', 'master', 'virbr0', 'up'], ['ip', 'link', 'set', 'evt0', 'up']]
    client = ['busybox', 'udhcpc', '-i', 'evt0', '-f', '-q', '-n', '-t', '20', '-T', '1', '-s', '/bin/true']
    for command in (add, *up):
        subprocess.run(command, check=True)
    assert hypervisor.addresses(instance) == {}
    # Offered and not leased yet, which dnsmasq writes there, or one the guest gave itself.
    for known, seen in (('10.77.0.50', {}), ('10.77.0.200', {leased: Address('10.77.0.200', 'arp')})):
        entry = [known, 'lladdr', leased, 'dev', 'virbr0']
        subprocess.run(['ip', 'neigh', 'add', *entry, 'nud', 'stale'], check=True)
        assert hypervisor.addresses(instance) == seen
        subprocess.run(['ip', 'neigh', 'del', *entry], check=True)
    asked = threading.Thread(target=subprocess.run, args=(client,), kwargs={'capture_output': True})
    asked.start()
    until(lambda: 'leases: virbr0.status' in told.get(timeout=60), 60, 'the lease is told')
    until(lambda: hypervisor.addresses(instance), 60, 'the lease is seen')
    address = hypervisor.addresses(instance)[leased]
    assert address.source == 'lease'
    assert address.address.startswith('10.77.0.')
    asked.join()
    subprocess.run(['ip', 'link', 'del', 'evt0'], check=True)

    for known in ('10.88.0.5', '169.254.7.7'):
        subprocess.run(['ip', 'neigh', 'add', known, 'lladdr', bridged, 'dev', 'br0', 'nud', 'stale'], check=True)
    subprocess.run(['ip', 'neigh', 'add', '10.88.0.6', 'dev', 'br0', 'nud', 'failed'], check=True)
    # Somebody on another network, and then a second one on its own, who says that it is he.
    for dev, seen in (('virbr0', {bridged: Address('10.88.0.5', 'arp')}), ('br0', {})):
        subprocess.run(['ip', 'neigh', 'add', '10.88.0.7', 'lladdr', bridged, 'dev', dev, 'nud', 'stale'], check=True)
        assert hypervisor.addresses(instance) == {leased: address, **seen}
    assert hypervisor.addresses(str(uuid4())) == {}
    hypervisor.close()


def test_leases_and_the_metadata_address(host: LibvirtHost, real: Libvirt, spec: GuestSpec) -> None:
    host.inside(['ip', 'link', 'add', 'br0', 'up', 'type', 'bridge'])
    build(real, replace(spec, networks=BRIDGED))
    arguments = (str(host.root / 'state'), spec.instance)
    script = f'import tests.functional.test_libvirt as test; test.inside_the_host{arguments}'
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    done = host.inside([sys.executable, '-c', script], env={**os.environ, 'PYTHONPATH': path}, check=False)
    host.inside(['ip', 'link', 'del', 'br0'])
    assert done.returncode == 0, done.stderr


SHUT = """<network xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'><name>shut</name>
<forward mode='open'/><bridge name='virbr8'/>
<ip address='10.78.0.1' netmask='255.255.255.0'><dhcp><range start='10.78.0.2' end='10.78.0.9'/></dhcp></ip>
<dnsmasq:options><dnsmasq:option value='dhcp-ignore=tag:!known'/></dnsmasq:options></network>"""


@pytest.mark.usefixtures('real')
def test_networks_whose_dhcp_answers_anybody(host: LibvirtHost) -> None:
    """On libvirt's own a guest took all addresses; with the line that the audit says it gets none (ENEMY 3)."""
    (host.root / 'shut.xml').write_text(SHUT)
    host.inside(['virsh', '-q', 'net-define', str(host.root / 'shut.xml')])
    networks = [Attachment('network', name) for name in ('default', 'shut', 'nowhere')]
    some = Libvirt(host.root / 'state', [*networks, Attachment('bridge', 'br0')], host.uri)
    try:
        assert some.open_dhcp() == {'default'}
    finally:
        some.close()
        host.inside(['virsh', '-q', 'net-undefine', 'shut'])
    assert "<dnsmasq:option value='dhcp-ignore=tag:!known'/>" in CODES['dhcp-open'].how


def test_what_the_processor_of_a_guest_can_do(real: Libvirt, caplog: pytest.LogCaptureFixture) -> None:
    emulated = real.cpu_features('qemu')
    assert {'sse2', 'pni', 'cx16'} <= emulated
    assert 'avx2' not in emulated, 'the host may have it, and an emulated guest has not'
    assert caplog.text == ''
    # This host has no kvm: nothing is claimed of what nobody can run on.
    assert real.cpu_features('kvm') == frozenset()
    assert 'no traits of the processor: libvirt:' in caplog.text
