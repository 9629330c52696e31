"""etcd killed, frozen, full or without a quorum; presence keys that end."""

from __future__ import annotations

import json
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError
from ecomp.store.client import Put, Store
from tests.faults.etcd_away import LOST, frozen, is_refused, said, said_back, share_while_away
from tests.faults.etcds import EtcdCluster, EtcdControl, SavedSnapshot, fill, make_room
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, accept, guests, lapse, running, settled
from tests.kit.invariants import allocations
from tests.kit.proxy import Proxy
from tests.kit.servers import PATIENCE, Etcd, PlacementServer, until
from tests.kit.story import (
    SMALL,
    SOON,
    addressed,
    at_once,
    boot,
    boot_all,
    logged,
    logs,
    notified,
    one_line,
    place,
    reached,
    record,
    reserved,
)

# F7, F8, F11: one etcd killed, frozen, or compacted while a compute does not follow it.


def test_killed_and_started_again(own_control: Control, compute: Ecompute) -> None:
    """F7: etcd killed for a while: logged once, little CPU, guests stay, eschedule exits 7, work resumes (fake)."""
    etcd = own_control.etcd
    instance = boot(own_control)
    etcd.kill()
    until(lambda: said(compute, LOST), 15, 'the loss is logged')
    for words in ((SMALL,), ('destroy', instance), (instance,), ('list',)):
        is_refused(own_control, etcd, *words)
    assert own_control.placement.consumers(compute.uuid).keys() == {instance}
    share = share_while_away(compute)
    assert running(compute) == {instance}
    etcd.start()
    until(lambda: said_back(compute), 6, 'it follows etcd again')
    assert share < 0.05
    boot(own_control)
    assert (said(compute, LOST), said_back(compute)) == (1, 1)
    assert compute.stop() == 0
    assert reserved(own_control, compute.uuid) == 4


@pytest.mark.slow
def test_killed_again_and_again(own_control: Control) -> None:
    """F7: etcd in a restart loop while instances are created and destroyed: every request is answered (fake)."""
    etcd, compute = own_control.etcd, own_control.ecompute('VCPU:64,DISK_GB:99,MEMORY_MB:9999')
    instances = [str(uuid.uuid4()) for _ in range(8)]
    finished = threading.Event()

    def restart() -> None:
        # Longer each time: on a busy machine no command may finish in the first periods.
        uptime = 1.5
        while not finished.wait(uptime):
            etcd.kill()
            etcd.start()
            uptime *= 1.05

    # A server dies with the thread that started its process, so the clients run in threads and the restarts here.
    results: dict[str, int] = {}

    def ask() -> None:
        for instance in instances:
            words = (SMALL, '--uuid', instance)
            while (result := own_control.eschedule(*words)).code == 7:
                one_line(result, 7, 'etcd at ')
            results[instance] = result.code
            if instance in instances[:4]:
                while (result := own_control.eschedule('destroy', instance)).code == 7:
                    one_line(result, 7, 'etcd at ')
        finished.set()

    client = threading.Thread(target=ask)
    client.start()
    try:
        restart()
    finally:
        finished.set()
        client.join()
    etcd.wait_ready()
    assert set(results.values()) == {0}
    for instance in instances[4:]:
        reached(own_control, instance, 'active')
    for instance in instances[:4]:
        reached(own_control, instance, 'gone')
    settled(own_control, compute)


def test_frozen(own_control: Control, compute: Ecompute) -> None:
    """F8: etcd frozen: noticed within 15 s, little CPU, guests stay, eschedule exits 7, work resumes (fake)."""
    etcd = own_control.etcd
    instance = boot(own_control)
    etcd.pause()
    began = time.monotonic()
    until(lambda: said(compute, LOST), 16, 'it is noticed')
    detected = time.monotonic() - began
    assert detected <= 15
    is_refused(own_control, etcd, SMALL)
    is_refused(own_control, etcd, 'destroy', instance)
    share = share_while_away(compute)
    assert running(compute) == {instance}
    etcd.resume()
    until(lambda: said_back(compute), 15, 'it follows etcd again')
    # Frozen for longer than its lease lives: the presence key expired, and is put again soon.
    until(lambda: etcd.keys('/computes/'), 5, 'the compute says again that it is alive')
    assert share < 0.05
    boot(own_control)


def test_compacted_while_away(own_control: Control) -> None:
    """F11: changes that a compute missed were compacted: it lists everything again (fake)."""
    with Proxy(own_control.etcd.port) as proxy:
        compute = own_control.at_exit.enter_context(Ecompute(proxy.address, own_control.placement.url))
        before = boot(own_control)
        proxy.go_away()
        until(lambda: said(compute, LOST), 15, 'the loss is logged')
        _, missed = place(own_control)
        assert own_control.eschedule('destroy', before).code == 0
        own_control.etcd.compact()
        proxy.come_back()
        addressed(own_control, missed)
        reached(own_control, before, 'gone')
        settled(own_control, compute)


# F12: an etcd that is out of space.


@pytest.fixture
def small(own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """A control with an etcd that has a small quota."""
    with Etcd(tmp_path / 'etcd', '--quota-backend-bytes=8388608') as etcd:
        control = Control(etcd, own_placement, tmp_path, mortal=True)
        try:
            yield control
        finally:
            control.close()


def test_no_space(small: Control, compute: Ecompute) -> None:
    """F12: etcd full: accepted destroys complete, new requests are refused, no build begins (fake)."""
    surviving, destroyed = boot_all(small, 2)
    waiting = str(uuid.uuid4())

    def accept_and_fill() -> None:
        assert small.eschedule('destroy', destroyed).code == 0
        notified(small.eschedule(SMALL, '--uuid', waiting))
        fill(small.etcd)

    frozen(compute, accept_and_fill)
    until(lambda: running(compute) == {surviving}, SOON, 'the destroy is carried out')
    until(lambda: small.etcd.get(f'/hosts/{compute.uuid}/{destroyed}') is None, SOON, 'its request is gone')
    assert small.placement.allocations(destroyed) == {}
    assert record(small, destroyed) is None
    one_line(small.eschedule(destroyed), 4, destroyed)
    assert logs(compute, destroyed, 'is gone')
    assert logs(compute, 'no record of its end is kept', 'defragment')
    before = allocations(small)
    keys = small.etcd.keys('/')
    for words in ((SMALL,), ('destroy', surviving)):
        one_line(small.eschedule(*words), 7, 'takes no writes', 'compact and defragment it, and disarm its alarm')
    assert allocations(small) == before
    assert small.etcd.keys('/') == keys
    assert running(compute) == {surviving}
    assert not logged(compute, 'INSTANTIATE', waiting)
    assert said(compute, 'takes no writes', 'trying again') == 1
    make_room(small.etcd)
    addressed(small, waiting)
    assert small.eschedule('destroy', '--wait', surviving).code == 0


def test_no_space_and_frozen_past_the_lease(small: Control, compute: Ecompute) -> None:
    """F12: etcd full, and a compute frozen for longer than its lease: an accepted destroy completes (fake)."""
    surviving, destroyed = boot_all(small, 2)

    def accept_and_fill() -> None:
        assert small.eschedule('destroy', destroyed).code == 0
        fill(small.etcd)
        lapse(small, f'/computes/{compute.uuid}')

    frozen(compute, accept_and_fill)
    until(lambda: small.etcd.get(f'/hosts/{compute.uuid}/{destroyed}') is None, SOON, 'its request is gone')
    assert running(compute) == {surviving}
    assert small.placement.allocations(destroyed) == {}
    assert small.etcd.get(f'/computes/{compute.uuid}') is None
    make_room(small.etcd)
    until(lambda: small.etcd.get(f'/computes/{compute.uuid}'), SOON, 'it says again that it is alive')
    assert small.eschedule('destroy', '--wait', surviving).code == 0


@pytest.mark.usefixtures('compute')
def test_full_between_claim_and_delivery(small: Control, instance: str) -> None:
    """F12: etcd is full at the delivery of a request: exit 7, and the claim is released (fake)."""
    with Eschedule(small, SMALL, '--uuid', instance, failpoint='claimed:stop') as eschedule:
        eschedule.stopped_at('claimed')
        assert small.placement.allocations(instance)
        fill(small.etcd)
        eschedule.go_on()
        one_line(eschedule.end(), 7, 'takes no writes')
    assert small.placement.allocations(instance) == {}
    assert small.etcd.keys('/requests/') == []
    make_room(small.etcd)
    notified(small.eschedule(SMALL, '--uuid', instance))
    addressed(small, instance)


@pytest.mark.slow
def test_full_while_a_guest_is_destroyed(small: Control) -> None:
    """F12: etcd full between the record `destroying` and the end, several destroys: they complete (fake)."""
    compute = small.ecompute()
    instances = boot_all(small, 4)

    def destroy_all() -> None:
        assert {result.code for result in at_once(small, [('destroy', instance) for instance in instances], 2)} == {0}
        fill(small.etcd)

    frozen(compute, destroy_all)
    until(lambda: running(compute) == set(), SOON, 'all are destroyed')
    until(lambda: small.etcd.keys('/hosts/') == [], SOON, 'no request is left')
    assert allocations(small) == {}
    assert small.etcd.keys('/instances/') == []
    make_room(small.etcd)
    assert compute.stop(signal.SIGTERM) == 0
    settled(small)


# F9, F10: an etcd of three without a member, with another leader, or without a quorum.


@pytest.fixture
def members(tmp_path: Path) -> Iterator[EtcdCluster]:
    """A cluster of three members, addressed by name."""
    with EtcdCluster(tmp_path / 'etcd', ['localhost'] * 3) as cluster:
        yield cluster


@pytest.fixture
def several(members: EtcdCluster, own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """A control whose clients are configured with all members; the checks query the last one."""
    control = EtcdControl(members.members[2], own_placement, tmp_path, {'endpoints': members.endpoints})
    try:
        yield control
    finally:
        control.close()


def writes_resume(cluster: EtcdCluster, inject: Callable[[], None]) -> float:
    """Inject a fault; return the seconds until a write succeeds again.

    A write with an unknown outcome counts as failed.
    """
    store = Store(EtcdConfig(tuple(cluster.endpoints)))
    try:
        assert store.commit([], [Put('/probe', 'before')])
        inject()
        began = time.monotonic()

        def can_write() -> bool:
            with suppress(EcompError):
                return store.commit([], [Put('/probe', 'after')]) is not None
            return False

        until(can_write, 30, 'writes resume')
        return time.monotonic() - began
    finally:
        store.close()


@pytest.mark.parametrize(
    ('who', 'how'),
    [
        ('leader', 'killed'),
        ('first', 'frozen'),
        pytest.param('leader', 'frozen', marks=pytest.mark.slow),
        pytest.param('first', 'killed', marks=pytest.mark.slow),
    ],
)
def test_a_member_is_lost(several: Control, compute: Ecompute, members: EtcdCluster, who: str, how: str) -> None:
    """F9: the leader, or the connected member, killed or frozen: writes resume, no false alarm (fake)."""
    before = boot(several)
    members.move_leader(members.members[1])
    member = members.members[1 if who == 'leader' else 0]
    resumed = writes_resume(members, member.kill if how == 'killed' else member.pause)
    boot(several)
    assert resumed < PATIENCE * 8
    member.start() if how == 'killed' else member.resume()
    until(member.is_ready, 20, 'the member is back')
    assert several.eschedule('destroy', '--wait', before).code == 0
    assert said(compute, 'is not the one this compute knew') == 0


@pytest.mark.slow
def test_the_leader_changes(several: Control, members: EtcdCluster) -> None:
    """F9: leadership moved several times by an operator: only requests that can be repeated fail (fake)."""
    compute = several.ecompute('VCPU:64,DISK_GB:99,MEMORY_MB:9999')
    for number in (1, 2, 0, 1):
        target = members.members[number]
        writes_resume(members, lambda: members.move_leader(target))  # noqa: B023
        boot(several)
    assert said(compute, 'is not the one this compute knew') == 0
    settled(several, compute)


def test_a_member_is_replaced(several: Control, compute: Ecompute, members: EtcdCluster) -> None:
    """F9: a member replaced by one without data: it is not mistaken for another etcd (fake)."""
    before = boot(several)
    for number in range(500):
        members.members[1].put('/elsewhere', str(number))
    members.replace(0)
    boot(several)
    compute.restart()  # its first connection is to the new member
    assert several.eschedule('destroy', '--wait', before).code == 0
    assert said(compute, 'is not the one this compute knew') == 0


@pytest.mark.slow
def test_a_member_that_lags_is_not_another_etcd(several: Control, compute: Ecompute, members: EtcdCluster) -> None:
    """F13: a member that returns far behind is listed and watched immediately: no false alarm (fake)."""
    lagging = members.members[0]
    for _ in range(3):
        lagging.pause()
        until(lambda: members.leader() is not lagging, 20, 'another one leads')
        for number in range(300):
            members.members[1].put('/elsewhere', str(number))
        boot(several)
        # Every client has to connect to it, because both other members are away for a moment.
        lagging.resume()
        for member in members.members[1:]:
            member.kill()
        for member in members.members[1:]:
            member.start()
    assert said(compute, 'is not the one this compute knew') == 0


@pytest.mark.slow
def test_no_quorum(several: Control, compute: Ecompute, members: EtcdCluster) -> None:
    """F10: two of three members away: guests stay, eschedule exits 7 in time, then work resumes (fake)."""
    instance = boot(several)
    claims = allocations(several)
    lost_members = members.members[1:]
    for member in lost_members:
        member.kill()
    for words in ((SMALL,), ('destroy', instance), ('list',)):
        is_refused(several, members.members[0], *words)
    until(lambda: said(compute, LOST), 30, 'the loss is logged')
    share = share_while_away(compute)
    assert share < 0.05
    assert running(compute) == {instance}
    assert allocations(several) == claims
    for member in lost_members:
        member.launch()
    for member in lost_members:
        member.wait_ready()
    boot(several)


@pytest.mark.usefixtures('compute')
def test_quorum_lost_while_an_eschedule_is_at_it(several: Control, instance: str, members: EtcdCluster) -> None:
    """F10: quorum lost between claim and delivery: exit 7 in time; a repeat completes it (fake)."""
    with Eschedule(several, SMALL, '--uuid', instance, failpoint='claimed:stop') as eschedule:
        eschedule.stopped_at('claimed')
        for member in members.members[:2]:
            member.kill()
        began = time.monotonic()
        eschedule.go_on()
        one_line(eschedule.end(), 7, 'etcd at ')
        assert time.monotonic() - began < PATIENCE * 30
    for member in members.members[:2]:
        member.launch()
    for member in members.members:
        member.wait_ready()
    notified(several.eschedule(SMALL, '--uuid', instance))
    addressed(several, instance)


# S5, F1, R1: the presence key of a compute ends, is overwritten, and is restored, in one run of the process.


@pytest.mark.history_broken('etcd is restored from an older copy')
def test_a_presence_key_that_ends_is_overwritten_and_is_restored(own_control: Control, compute: Ecompute) -> None:
    """S5: read-only while another holds the key, and in a restored etcd; working otherwise (fake)."""
    etcd = own_control.etcd
    key = f'/computes/{compute.uuid}'
    lapse(own_control, key)
    until(lambda: etcd.get(key), 30, 'the key is put again')
    boot(own_control)
    older = SavedSnapshot(etcd)

    lease = etcd.grant()
    etcd.put(key, json.dumps({'token': 'theirs', 'hostname': 'elsewhere', 'since': 'now'}), lease)
    logs(compute, 'is held by another ecompute, on elsewhere', 'only watches')
    _, waiting = place(own_control)
    etcd.call('lease/revoke', {'ID': lease})
    logs(compute, 'is held by this ecompute again')
    addressed(own_control, waiting)
    addressed(own_control, place(own_control)[1])
    presence = json.loads(etcd.get(key) or b'{}')
    assert presence['pid'] == str(compute.pid)
    assert len(logged(compute, 'only watches')) == 1

    older.restore()
    logs(compute, 'is not the one this compute knew', 'only watches')
    assert compute.is_running
    assert len(guests(compute)) == 3
    accept(compute)
    reached(own_control, waiting, 'active')
