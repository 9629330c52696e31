"""Failures that only libvirt has, with real daemons: libvirtd killed, frozen or lost.

The guests' disks have a boot signature and no system: the guests run, which is all that these tests need.
Guests that vanish are simulated on libvirt's test driver.
"""

from __future__ import annotations

import math
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from pwd import getpwnam
from shutil import which
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest

from ecomp.agent.instance.build import Build, carry_out
from ecomp.errors import BuildFailed, Conflict, EcompError, Unreachable, UsageError
from ecomp.model.guest import DEFAULT_NETWORKS, PAUSED, Attachment, Guest, GuestSpec
from tests.functional.guest import COMPUTE, FOREIGN_DOMAIN_XML, MakeSpec, build
from tests.functional.libvirt_host import LibvirtHost
from tests.kit.servers import wait_until

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
libvirtmod = pytest.importorskip('libvirtmod')
from ecomp.virt import domains, libvirt_host  # noqa: E402
from ecomp.virt.connection import Connection  # noqa: E402
from ecomp.virt.domains import Domains  # noqa: E402
from ecomp.virt.libvirt_host import Libvirt, probe_libvirt  # noqa: E402
from ecomp.virt.xml import MARK_NAMESPACE, parse_interfaces  # noqa: E402

BRIDGED_NETWORKS = (*DEFAULT_NETWORKS, Attachment('bridge', 'br0'))


def test_foreign_domains_are_ignored_and_not_changed(
    real_libvirt: Libvirt, spec: GuestSpec, connection: object
) -> None:
    other_name = connection.defineXML(FOREIGN_DOMAIN_XML.format(name='other', uuid=spec.instance))
    other_uuid = connection.defineXML(FOREIGN_DOMAIN_XML.format(name=str(uuid4()), uuid=uuid4()))
    try:
        other_uuid.create()
        assert real_libvirt.list_guests() == {}
        for instance in (spec.instance, other_uuid.name()):
            foreign_spec = replace(spec, instance=instance)
            assert not any(map(real_libvirt.is_running, (instance, other_uuid.UUIDString())))
            with pytest.raises(Conflict, match='not created by ecompute'):
                real_libvirt.start(foreign_spec)
            with pytest.raises(Conflict, match='not created by ecompute'):
                real_libvirt.switch_off(instance, COMPUTE)
            # A destroy, which also ends a failed build, succeeds: no part of the domain is ecompute's.
            real_libvirt.destroy(instance, COMPUTE)
            real_libvirt.create_disk(replace(foreign_spec, base=spec.base))
            real_libvirt.delete_disk(instance)
            assert real_libvirt.list_guests() == {}
        assert other_uuid.isActive()
        assert other_name.isPersistent()
    finally:
        other_uuid.destroy()
        other_uuid.undefine()
        other_name.undefine()


def test_domain_changed_by_virsh(
    real_libvirt: Libvirt, make_spec: MakeSpec, connection: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The definition, disk and snapshots of a guest are changed until it is destroyed."""
    spec, neighbour = make_spec(), make_spec()
    build(real_libvirt, spec)
    real_libvirt.create_disk(neighbour)
    domain = connection.lookupByUUIDString(spec.instance)
    images = real_libvirt.get_image_directory()
    assert images is not None
    disk, before = images / f'{spec.instance}.qcow2', {path.name for path in images.iterdir()}
    description = FOREIGN_DOMAIN_XML.format(name='foreign', uuid=uuid4())
    drive = f"<disk type='file'><source file='{images / 'used'}'/><target dev='vda'/></disk>"
    foreign = connection.defineXML(description.replace('</domain>', f'<devices>{drive}</devices></domain>'))

    def read_guest() -> tuple[str, dict[str, int]]:
        guest = real_libvirt.list_guests()[spec.instance]
        assert guest.running is bool(domain.isActive())
        return ''.join(map(''.join, guest.troubles)), dict(guest.size)

    # Libvirt would start the guest at a boot before ecompute has read whether it was destroyed or evacuated.
    for each in (domain, foreign):
        each.setAutostart(True)
    for _ in range(2):
        real_libvirt.disable_autostart()
    assert (domain.autostart(), foreign.autostart(), domain.isActive()) == (0, 1, 1)
    assert caplog.text.count(f'instance {spec.instance}: removed the autostart of its domain') == 1

    size = {'VCPU': 1, 'MEMORY_MB': 32, 'MEMORY_MB now': 32, 'DISK_GB': 1}
    assert read_guest() == ('', size)
    domain.suspend()
    assert read_guest() == (PAUSED, size)
    domain.resume()
    assert read_guest() == ('', size)
    domain.blockResize('vda', 3 * 2**30 + 1, libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES)
    assert read_guest() == ('', {**size, 'DISK_GB': 4})
    config, maximum = libvirt.VIR_DOMAIN_AFFECT_CONFIG, libvirt.VIR_DOMAIN_VCPU_MAXIMUM
    for flags in (config | maximum, config):
        domain.setVcpusFlags(2, flags)
    domain.setMemoryFlags(128 * 1024, config | libvirt.VIR_DOMAIN_MEM_MAXIMUM)
    domain.destroy()
    larger = {'VCPU': 2, 'MEMORY_MB': 128, 'MEMORY_MB now': 32, 'DISK_GB': 4}
    assert read_guest() == ('', larger)
    real_libvirt.resize(replace(spec, memory_mb=64, disk_gb=5))
    domain.create()
    size = {'VCPU': 1, 'MEMORY_MB': 64, 'MEMORY_MB now': 64, 'DISK_GB': 5}
    assert read_guest() == ('', size)  # without a system, the guest's balloon stays empty

    # `virsh snapshot-create-as --disk-only` makes an overlay of the disk, with what the guest writes from then on.
    domain.snapshotCreateXML('<domainsnapshot><name>s</name></domainsnapshot>')
    for name in ('one', 'two'):
        xml = f'<domainsnapshot><name>{name}</name></domainsnapshot>'
        domain.snapshotCreateXML(xml, libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY)
    names = {path.name for path in images.iterdir()} - before
    assert names == {f'{spec.instance}.one', f'{spec.instance}.two'}
    # Left alone: an overlay elsewhere, a link to one, a copy of the disk, a snapshot of another instance, and the
    # overlay of a domain that was not made by ecompute.
    others = {f'{neighbour.instance}.three': images / f'{neighbour.instance}.qcow2', 'used': disk}
    overlays = {tmp_path / 'overlay': disk, **{images / name: base for name, base in others.items()}}
    for path, base in overlays.items():
        subprocess.run(['qemu-img', 'create', '-q', '-f', 'qcow2', '-F', 'qcow2', '-b', base, path], check=True)
    (images / 'link').symlink_to(tmp_path / 'overlay')
    shutil.copy(disk, images / f'{spec.instance}.copy')
    kept = {*others, 'link', f'{spec.instance}.copy'}
    domain.managedSave()
    saved_guest = Guest(spec.instance, COMPUTE, defined=True, running=False, disk=True)
    assert real_libvirt.list_guests()[spec.instance] == saved_guest
    real_libvirt.destroy(spec.instance, COMPUTE)
    assert not real_libvirt.list_guests()[spec.instance].defined
    real_libvirt.delete_disk(spec.instance)
    assert {path.name for path in images.iterdir()} == before - {disk.name} | kept
    assert (tmp_path / 'overlay').exists()
    foreign.undefine()
    for name in kept:
        (images / name).unlink()


@pytest.mark.slow
def test_rebuilt_guest_has_a_new_disk_and_the_number_in_its_mark(
    real_libvirt: Libvirt, connection: libvirt.virConnect, spec: GuestSpec
) -> None:
    """A guest with snapshots, which virsh made, gets a new disk; uuid, name and interfaces stay."""
    build(real_libvirt, spec)
    images = real_libvirt.get_image_directory()
    assert images is not None
    before, disk = {path.name for path in images.iterdir()}, images / f'{spec.instance}.qcow2'
    old_disk, old_definition = disk.stat().st_ino, connection.lookupByUUIDString(spec.instance).XMLDesc()
    for flags in (0, libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY):
        xml = f'<domainsnapshot><name>s{flags}</name></domainsnapshot>'
        connection.lookupByUUIDString(spec.instance).snapshotCreateXML(xml, flags)
    assert {path.name for path in images.iterdir()} > before

    job = Build(replace(spec, rebuilt=1606754775), 'http://h/i', is_rebuild=True)
    cache = Mock(hold=lambda *_: nullcontext(spec.base))
    carry_out(job, real_libvirt, cache, lambda _: None, lambda: None)
    expected = Guest(spec.instance, COMPUTE, defined=True, running=True, disk=True, rebuilt=1606754775)
    assert real_libvirt.list_guests() == {spec.instance: expected}
    domain = connection.lookupByName(spec.instance)
    assert domain.UUIDString() == spec.instance
    assert list(parse_interfaces(domain.XMLDesc())) == list(parse_interfaces(old_definition))
    assert domain.listAllSnapshots() == []
    assert {path.name for path in images.iterdir()} == before
    assert disk.stat().st_ino != old_disk


@pytest.mark.slow
@pytest.mark.parametrize('restarts', [False, True])
def test_guest_is_resized_up_and_down(real_libvirt: Libvirt, spec: GuestSpec, connection: Any, restarts: bool) -> None:
    build(real_libvirt, spec)
    domain, inactive = connection.lookupByUUIDString(spec.instance), libvirt.VIR_DOMAIN_XML_INACTIVE
    # As `virsh edit` and `virsh setvcpus --maximum` do it.
    text = domain.XMLDesc(inactive).replace('<os>', '<cputune><shares>512</shares></cputune><os>', 1)
    connection.defineXML(text).setVcpusFlags(4, libvirt.VIR_DOMAIN_AFFECT_CONFIG | libvirt.VIR_DOMAIN_VCPU_MAXIMUM)

    def resize(vcpus: int, memory_mb: int, disk_gb: int) -> Mapping[str, int]:
        real_libvirt.resize(replace(spec, vcpus=vcpus, memory_mb=memory_mb, disk_gb=disk_gb))
        root = ET.fromstring(domain.XMLDesc(inactive))
        assert (root.findtext('cputune/shares'), domain.blockInfo('vda')[0]) == ('512', disk_gb * 2**30)
        assert root.findtext('memory') == root.findtext('currentMemory') == str(memory_mb * 1024)
        assert (root.findtext('vcpu'), root.find('vcpu[@current]')) == (str(vcpus), None)
        if restarts:
            real_libvirt.switch_off(spec.instance, COMPUTE)
            real_libvirt.start_existing(spec.instance, COMPUTE)
        return real_libvirt.list_guests()[spec.instance].size

    for size in ((2, 64, 2), (1, 48, 2), (3, 40, 3)):
        vcpus, memory_mb = size[:2] if restarts else (1, 32)
        now = {'VCPU': vcpus, 'MEMORY_MB': memory_mb, 'MEMORY_MB now': memory_mb, 'DISK_GB': size[2]}
        assert resize(*size) == now
    restarts = False
    real_libvirt.switch_off(spec.instance, COMPUTE)
    resize(1, 32, 4)
    text = '<domainsnapshot><name>s</name></domainsnapshot>'
    domain.snapshotCreateXML(text, libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY)
    with pytest.raises(BuildFailed, match=f'its disk has a snapshot, .*{spec.instance}.s, and cannot grow'):
        resize(1, 32, 5)
    real_libvirt.resize(replace(spec, vcpus=2, disk_gb=4))
    assert real_libvirt.list_guests()[spec.instance].size['VCPU'] == 2


def test_driver_reconnects_after_libvirtd_was_killed(host: LibvirtHost, real_libvirt: Libvirt, spec: GuestSpec) -> None:
    events: queue.Queue[str] = queue.Queue()
    real_libvirt.watch_changes(events.put)
    build(real_libvirt, spec)
    sockets = len(list_unix_sockets())
    for _ in range(3):
        host.kill_libvirtd()
        wait_until(lambda: 'lost' in events.get(timeout=60), 60, 'the loss is told')
        with pytest.raises(Unreachable, match='libvirt'):
            real_libvirt.list_guests()
        host.start_libvirtd()
        wait_until(lambda: 'back' in events.get(timeout=60), 60, 'the return is told')
        assert real_libvirt.list_guests()[spec.instance] == Guest(
            spec.instance, COMPUTE, defined=True, running=True, disk=True
        )
    # The last error may hold one more socket; one for each connection would be a leak.
    assert len(list_unix_sockets()) < sockets + 3
    while not events.empty():
        events.get()
    # A running guest that was undefined can be destroyed.
    with closing(libvirt.open(host.uri)) as connection:
        connection.lookupByUUIDString(spec.instance).undefine()
    undefined_guest = Guest(spec.instance, COMPUTE, defined=False, running=True, disk=True)
    assert real_libvirt.list_guests()[spec.instance] == undefined_guest
    real_libvirt.destroy(spec.instance, COMPUTE)
    assert not real_libvirt.list_guests()[spec.instance].running
    wait_until(lambda: spec.instance in events.get(timeout=60), 60, 'events come over the new connection')


def test_calls_to_a_frozen_libvirtd_time_out(host: LibvirtHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call blocks for ever, not even one that opens a connection."""
    from ecomp.virt import connection

    for name, value in (('KEEPALIVE_INTERVAL', 1), ('KEEPALIVE_COUNT', 1), ('OPEN_TIMEOUT', 1.0)):
        monkeypatch.setattr(connection, name, value)
    with closing(Libvirt(host.root / 'state', uri=host.uri)) as frozen:
        frozen.list_guests()
        os.kill(host.read_pid(), signal.SIGSTOP)
        try:
            for words in ('while listing domains', 'does not answer', 'does not answer'):
                with pytest.raises(Unreachable, match=words):
                    frozen.list_guests()
        finally:
            os.kill(host.read_pid(), signal.SIGCONT)

        def answers() -> bool:
            try:
                return frozen.list_guests() == {}
            except Unreachable:
                return False

        wait_until(answers, 60, 'libvirtd answers again')
    with pytest.raises(EcompError, match='closed'):
        frozen.list_guests()


def test_silence_of_long_ago_shortens_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker does not reopen a lost connection before it needs one."""
    from ecomp.virt import connection

    def open_slowly(_: str) -> Mock:
        time.sleep(0.3)
        return Mock()

    monkeypatch.setattr(connection, 'MIN_OPEN_TIMEOUT', 0.01)
    monkeypatch.setattr(connection.libvirt, 'open', open_slowly)
    idle = Connection('test:///default')
    idle._on_close(None, libvirt.VIR_CONNECT_CLOSE_REASON_KEEPALIVE, None)
    now = time.monotonic
    monkeypatch.setattr(connection, 'time', SimpleNamespace(monotonic=lambda: now() + 60))
    with closing(idle), idle.use('listing domains'):
        pass


@pytest.mark.usefixtures('real_libvirt')
@pytest.mark.parametrize('step', ['registerCloseCallback', 'domainEventRegisterAny', 'networkEventRegisterAny'])
def test_connection_that_fails_while_it_is_opened_leaves_no_socket(
    host: LibvirtHost, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A connection stays open as long as one of our callbacks is registered on it."""

    def fail(*_: object) -> None:
        error = libvirt.libvirtError('')
        error.err = (libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_FROM_RPC, 'it broke', 2, None, None, None, -1, -1)
        raise error

    with closing(Libvirt(host.root / 'state', uri=host.uri)) as broken:
        broken.watch_changes(lambda _: None)
        manager = broken._connection
        first = manager._get_connection()
        real_step = getattr(libvirt.virConnect, step)
        monkeypatch.setattr(libvirt.virConnect, step, fail)
        # Drop it only now: after that, a thread opens the next connection by itself.
        manager._discard(first)
        for _ in range(3):
            with pytest.raises(Unreachable):
                broken.list_guests()
        sockets = len(list_unix_sockets())
        for _ in range(20):
            with pytest.raises(Unreachable):
                broken.list_guests()
        wait_until(lambda: len(list_unix_sockets()) <= sockets, 5, 'what was opened is closed')
        monkeypatch.setattr(libvirt.virConnect, step, real_step)
        assert broken.list_guests() == {}


@pytest.mark.usefixtures('real_libvirt')
def test_connection_is_opened_later_if_no_thread_can_start(host: LibvirtHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on processes may be reached for a moment."""
    events, failures = queue.SimpleQueue[str](), [RuntimeError("can't start new thread") for _ in range(2)]
    real_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == 'libvirt-open' and failures:
            raise failures.pop()
        real_start(thread)

    with closing(Libvirt(host.root / 'state', uri=host.uri)) as driver:
        driver.watch_changes(events.put)
        first = driver._connection._get_connection()
        monkeypatch.setattr(threading.Thread, 'start', start)
        driver._connection._discard(first)
        wait_until(lambda: 'connection is back' in events.get(timeout=60), 60, 'it is opened without anybody asking')
        assert not failures
        assert driver.list_guests() == {}
    failures.append(RuntimeError("can't start new thread"))
    with closing(Libvirt(host.root / 'state', uri=host.uri)) as other_driver:
        with pytest.raises(Unreachable, match='cannot start a thread to connect'):
            other_driver.list_guests()
        assert other_driver.list_guests() == {}


def list_unix_sockets() -> list[str]:
    inodes = {line.split()[6] for line in Path('/proc/self/net/unix').read_text().splitlines()[1:]}
    links: list[str] = []
    for link_ in Path('/proc/self/fd').iterdir():
        with suppress(OSError):
            links.append(os.readlink(link_))
    return [link_ for link_ in links if link_.startswith('socket:[') and link_[8:-1] in inodes]


def test_prepare_checks_the_host_and_starts_network_and_pool(
    host: LibvirtHost, real_libvirt: Libvirt, connection: object
) -> None:
    with (
        closing(Libvirt(host.root / 'elsewhere', uri=host.uri)) as elsewhere,
        pytest.raises(Conflict, match=f'{host.root}/state/images, not {host.root}/elsewhere/images'),
    ):
        elsewhere.prepare()
    closed = host.root / 'closed'
    closed.mkdir(mode=0o700)
    with (
        closing(Libvirt(closed / 'state', uri=host.uri)) as closed_driver,
        pytest.raises(UsageError, match=f'setfacl -m u:libvirt-qemu:x {closed} '),
    ):
        closed_driver.prepare()
    for plug, words in ((('network', 'none'), 'no network named none'), (('bridge', 'br-none'), 'no bridge br-none')):
        with pytest.raises(UsageError, match=words):
            Libvirt(host.root / 'state', [Attachment(*plug)], uri=host.uri).prepare()
    network, pool = connection.networkLookupByName('default'), connection.storagePoolLookupByName('ecompute')
    network.destroy()
    pool.destroy()
    real_libvirt.prepare()
    assert network.isActive()
    assert (pool.isActive(), pool.autostart()) == (1, 1)


@pytest.fixture
def revived(host: LibvirtHost) -> Iterator[Path]:
    """A file without which QEMU is killed at each start, so that libvirt's probe of it fails."""
    emulator, killer = which(libvirt_host.EMULATOR), host.root / 'killer'
    # QEMU finds its modules only from /usr/bin. No test needs qemu-img in the meantime.
    real = which('qemu-img')
    assert emulator is not None
    assert real is not None
    killer.write_text(f'#!/bin/sh\n[ -e {host.root}/revived ] || kill -KILL $$\nexec {real} "$@"\n')
    killer.chmod(0o755)
    host.run_inside(['mount', '--bind', emulator, real])
    host.run_inside(['mount', '--bind', str(killer), emulator])
    yield host.root / 'revived'
    host.run_inside(['umount', emulator, real])
    (host.root / 'revived').unlink(missing_ok=True)


def test_failed_probe_of_qemu_is_repeated_until_it_succeeds(
    host: LibvirtHost, revived: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libvirt_host, 'PROBE_PAUSE_SECONDS', 0.1)
    with closing(Libvirt(host.root / 'state', uri=host.uri)) as driver, ThreadPoolExecutor() as threads:
        checking = threads.submit(driver.check)
        try:
            wait_until(lambda: checking.done() or 'asking it again' in caplog.text, 60, 'the failed probe is reported')
            assert not checking.done()
        finally:
            revived.touch()
        checking.result()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert 'unexpected fatal signal 9; asking it again' in warnings[0]


@pytest.mark.usefixtures('revived')
def test_probe_that_keeps_failing_is_reported_with_the_reason_of_libvirt(
    host: LibvirtHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libvirt_host, 'PROBE_SECONDS', 0.0)
    with closing(Libvirt(host.root / 'state', uri=host.uri)) as driver:
        with pytest.raises(UsageError, match='unexpected fatal signal 9. Fix: systemctl restart libvirtd$'):
            driver.check()
        assert 'unexpected fatal signal 9' in str(probe_libvirt(host.root / 'state', (), host.uri).problems['qemu'])
        # A QEMU that is not installed is not waited for.
        monkeypatch.setattr(libvirt_host, 'PROBE_SECONDS', math.inf)
        monkeypatch.setattr(libvirt_host, 'EMULATOR', 'qemu-system-none')
        with pytest.raises(UsageError, match='Fix: apt-get install qemu-system-x86'):
            driver.check()
    facts = probe_libvirt(host.root / 'state', (), host.uri)
    assert facts.problems['qemu'] == [libvirt_host.NO_QEMU]


def test_cpu_features_of_a_guest(real_libvirt: Libvirt, caplog: pytest.LogCaptureFixture) -> None:
    emulated = real_libvirt.read_cpu_features('qemu')
    # x86-64-v2, which EL 9 is built for.
    assert {'cx16', 'lahf_lm', 'popcnt', 'pni', 'ssse3', 'sse4.1', 'sse4.2'} <= emulated
    assert 'avx512f' not in emulated, 'the host may have it, and an emulated guest has not'
    assert caplog.text == ''
    # This host has no kvm, so no features are reported for it.
    assert real_libvirt.read_cpu_features('kvm') == frozenset()
    assert 'no CPU traits are published to placement: libvirt failed while' in caplog.text


# The exact calls to libvirtd for a guest's start and end. They start no process here.


# Calls that libvirt's client answers without libvirtd.
LOCAL_CALLS = ('Free', 'IsAlive', 'GetUUIDString', 'GetName', 'GetLastError', 'GetConnect')


@pytest.fixture
def call_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls to libvirtd by this thread, and of started processes (`process`)."""
    counts: Counter[str] = Counter()
    here = threading.get_ident()  # the event loop has a thread of its own

    def count_calls(owner: Any, name: str, label: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                counts[label] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in dir(libvirtmod):
        if name.startswith('vir') and callable(getattr(libvirtmod, name)) and not name.endswith(LOCAL_CALLS):
            count_calls(libvirtmod, name, name.removeprefix('vir'))
    for owner, name in ((os, 'fork'), (os, 'posix_spawn'), (subprocess.Popen, '__init__')):
        count_calls(owner, name, 'process')
    return counts


def test_guest_is_as_specified_and_needs_these_calls(
    real_libvirt: Libvirt, spec: GuestSpec, host: LibvirtHost, connection: Any, call_counts: Counter[str]
) -> None:
    def count(action: Callable[[], object]) -> Counter[str]:
        call_counts.clear()
        action()
        return Counter(call_counts)

    lookups = {'DomainLookupByName': 1, 'DomainLookupByUUIDString': 1}
    pool = {'StoragePoolLookupByName': 1}
    seed_data = {'meta-data': b'{}', 'user-data': b'secret'}
    spec = replace(spec, networks=BRIDGED_NETWORKS, vcpus=2, seed=seed_data)
    seed, console = (
        host.root / f'state/{name}' for name in (f'seeds/{spec.instance}.iso', f'console/{spec.instance}.log')
    )
    images = real_libvirt.get_image_directory()
    assert images is not None
    disk = images / f'{spec.instance}.qcow2'
    host.run_inside(['ip', 'link', 'add', 'br0', 'type', 'bridge'])
    try:
        assert count(lambda: real_libvirt.create_disk(spec)) == {**pool, 'StorageVolCreateXML': 1}
        real_libvirt.create_seed(spec.instance, seed_data)
        assert (seed.stat().st_mode & 0o777, seed.stat().st_uid) == (0o600, 0)
        assert count(lambda: real_libvirt.start(spec)) == {
            **lookups,
            **{'NWFilterLookupByName': 2, 'DomainDefineXML': 1, 'DomainCreate': 1},
            **{'NetworkLookupByName': 1, 'NetworkGetXMLDesc': 1},  # find out if its network has IPv6 to filter
        }
    finally:
        host.run_inside(['ip', 'link', 'del', 'br0'])
    domain = connection.lookupByUUIDString(spec.instance)
    # The domain's XML is valid by libvirt's schema.
    connection.defineXMLFlags(domain.XMLDesc(), libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
    macs = ET.fromstring(domain.XMLDesc()).findall('devices/interface/mac')
    assert [element.get('address') for element in macs] == list(spec.macs)
    assert domain.info()[1:4] == [32 * 1024, 32 * 1024, 2]
    assert (domain.blockInfo('vda')[0], domain.blockInfo('vdb')[0]) == (2**30, seed.stat().st_size)
    with pytest.raises(libvirt.libvirtError, match='read-only|readonly'):
        domain.blockResize('vdb', 2**20, libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES)
    # A guest that breaks out of QEMU must not be able to write to a base volume that other guests use.
    qemu = getpwnam('libvirt-qemu').pw_uid
    assert [path.stat().st_uid for path in (Path(spec.base.path), disk, seed)] == [0, qemu, qemu]
    assert [path.stat().st_mode & 0o777 for path in (disk, console, seed)] == [0o600] * 3
    volume = ET.fromstring(connection.storageVolLookupByPath(str(disk)).XMLDesc())
    backing = volume.findtext('backingStore/path'), volume.find('backingStore/format').get('type')
    assert backing == (spec.base.path, 'raw')
    assert count(lambda: real_libvirt.destroy(spec.instance, COMPUTE)) == {
        **{'DomainLookupByName': 2, 'DomainLookupByUUIDString': 2, 'DomainGetMetadata': 1, 'DomainIsActive': 1},
        **{'DomainDestroy': 1, 'DomainIsPersistent': 1, 'DomainUndefineFlags': 1},
    }
    assert count(lambda: real_libvirt.delete_disk(spec.instance)) == {
        **lookups,
        **pool,
        **{'StorageVolLookupByName': 1, 'StorageVolDelete': 1},
    }
    assert not any(path.exists() for path in (disk, console, seed))


# Domains without a definition, which vanish when they end, on libvirt's test driver.


DOMAIN_XML = f"""<domain type='test'><name>{{0}}</name><uuid>{{0}}</uuid><memory>65536</memory><os><type>hvm</type></os>
<metadata><ecomp:instance xmlns:ecomp='{MARK_NAMESPACE}' uuid='{{0}}' compute='{COMPUTE}'/></metadata></domain>"""


@pytest.fixture
def driver() -> Iterator[Any]:
    with closing(libvirt.open('test:///default')) as opened:
        yield opened


@pytest.mark.parametrize(
    'ask',
    [
        partial(Domains.force_off, undefine=True),
        partial(Domains.force_off, undefine=False),
        lambda on, instance, _: on.is_domain_running(instance),
    ],
)
def test_domain_that_ends_between_two_calls(
    driver: Any, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Domains, str, str], object]
) -> None:
    instance, connection = str(uuid4()), Connection('test:///default')
    connection._current = driver  # the usual opening sets a keepalive, which this driver does not support
    domain = driver.createXML(DOMAIN_XML.format(instance))
    find = domains._find_domains

    def find_and_destroy(*args: Any) -> list[Any]:
        domains_found = find(*args)
        if domains_found:
            domain.destroy()
        return domains_found

    monkeypatch.setattr(domains, '_find_domains', find_and_destroy)
    assert not ask(Domains(connection), instance, COMPUTE)
    assert find(driver, instance) == []
