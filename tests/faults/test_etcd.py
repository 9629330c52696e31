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
from tests.faults.etcd_away import (
    LOST_MESSAGE,
    assert_refused,
    count_etcd_back,
    count_logged,
    measure_cpu_share,
    run_while_frozen,
)
from tests.faults.etcds import EtcdCluster, EtcdControl, SavedSnapshot, clear_space_alarm, fill
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import (
    Eschedule,
    check_settled,
    expire_key,
    list_running_guests,
    read_guests,
    restart_accepting_etcd,
)
from tests.kit.invariants import read_allocations
from tests.kit.proxy import Proxy
from tests.kit.servers import SLOWDOWN_FACTOR, Etcd, PlacementServer, wait_until
from tests.kit.story import (
    REACTION_SECONDS,
    SMALL_QUERY,
    assert_one_line,
    boot,
    boot_all,
    find_log_lines,
    parse_notice,
    place,
    read_record,
    read_reserved,
    run_concurrently,
    wait_address,
    wait_log_lines,
    wait_state,
)

# F7, F8, F11: one etcd killed, frozen, or compacted while a compute does not follow it.


def test_etcd_killed_and_restarted(own_control: Control, compute: Ecompute) -> None:
    """F7: etcd killed for a while: logged once, little CPU, guests stay, eschedule exits 7, work resumes (fake)."""
    etcd = own_control.etcd
    instance = boot(own_control)
    etcd.kill()
    wait_until(lambda: count_logged(compute, LOST_MESSAGE), 15, 'the loss is logged')
    for words in ((SMALL_QUERY,), ('destroy', instance), (instance,), ('list',)):
        assert_refused(own_control, etcd, *words)
    assert own_control.placement.read_consumers(compute.uuid).keys() == {instance}
    share = measure_cpu_share(compute)
    assert list_running_guests(compute) == {instance}
    etcd.start()
    wait_until(lambda: count_etcd_back(compute), 6, 'it follows etcd again')
    assert share < 0.05
    boot(own_control)
    assert (count_logged(compute, LOST_MESSAGE), count_etcd_back(compute)) == (1, 1)
    assert compute.stop() == 0
    assert read_reserved(own_control, compute.uuid) == 4


@pytest.mark.slow
def test_etcd_in_a_restart_loop(own_control: Control) -> None:
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
            words = (SMALL_QUERY, '--uuid', instance)
            while (result := own_control.eschedule(*words)).code == 7:
                assert_one_line(result, 7, 'etcd at ')
            results[instance] = result.code
            if instance in instances[:4]:
                while (result := own_control.eschedule('destroy', instance)).code == 7:
                    assert_one_line(result, 7, 'etcd at ')
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
        wait_state(own_control, instance, 'active')
    for instance in instances[:4]:
        wait_state(own_control, instance, 'gone')
    check_settled(own_control, compute)


def test_etcd_frozen(own_control: Control, compute: Ecompute) -> None:
    """F8: etcd frozen: noticed within 15 s, little CPU, guests stay, eschedule exits 7, work resumes (fake)."""
    etcd = own_control.etcd
    instance = boot(own_control)
    etcd.pause()
    began = time.monotonic()
    wait_until(lambda: count_logged(compute, LOST_MESSAGE), 16, 'it is noticed')
    detected = time.monotonic() - began
    assert detected <= 15
    assert_refused(own_control, etcd, SMALL_QUERY)
    assert_refused(own_control, etcd, 'destroy', instance)
    share = measure_cpu_share(compute)
    assert list_running_guests(compute) == {instance}
    etcd.resume()
    wait_until(lambda: count_etcd_back(compute), 15, 'it follows etcd again')
    # Frozen for longer than its lease lives: the presence key expired, and is put again soon.
    wait_until(lambda: etcd.list_keys('/computes/'), 5, 'the compute says again that it is alive')
    assert share < 0.05
    boot(own_control)


def test_etcd_compacted_while_a_compute_is_away(own_control: Control) -> None:
    """F11: changes that a compute missed were compacted: it lists everything again (fake)."""
    with Proxy(own_control.etcd.port) as proxy:
        compute = own_control.at_exit.enter_context(Ecompute(proxy.address, own_control.placement.url))
        before = boot(own_control)
        proxy.go_away()
        wait_until(lambda: count_logged(compute, LOST_MESSAGE), 15, 'the loss is logged')
        _, missed = place(own_control)
        assert own_control.eschedule('destroy', before).code == 0
        own_control.etcd.compact()
        proxy.come_back()
        wait_address(own_control, missed)
        wait_state(own_control, before, 'gone')
        check_settled(own_control, compute)


# F12: an etcd that is out of space.


@pytest.fixture
def small_etcd_control(own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """A control with an etcd that has a small quota."""
    with Etcd(tmp_path / 'etcd', '--quota-backend-bytes=8388608') as etcd:
        control = Control(etcd, own_placement, tmp_path, is_mortal=True)
        try:
            yield control
        finally:
            control.close()


def test_full_etcd_completes_destroys_and_refuses_creates(small_etcd_control: Control, compute: Ecompute) -> None:
    """F12: etcd full: accepted destroys complete, new requests are refused, no build begins (fake)."""
    surviving, destroyed = boot_all(small_etcd_control, 2)
    waiting = str(uuid.uuid4())

    def accept_and_fill() -> None:
        assert small_etcd_control.eschedule('destroy', destroyed).code == 0
        parse_notice(small_etcd_control.eschedule(SMALL_QUERY, '--uuid', waiting))
        fill(small_etcd_control.etcd)

    run_while_frozen(compute, accept_and_fill)
    wait_until(lambda: list_running_guests(compute) == {surviving}, REACTION_SECONDS, 'the destroy is carried out')
    wait_until(
        lambda: small_etcd_control.etcd.get(f'/hosts/{compute.uuid}/{destroyed}') is None,
        REACTION_SECONDS,
        'its request is gone',
    )
    assert small_etcd_control.placement.read_allocations(destroyed) == {}
    assert read_record(small_etcd_control, destroyed) is None
    assert_one_line(small_etcd_control.eschedule(destroyed), 4, destroyed)
    assert wait_log_lines(compute, destroyed, 'is gone')
    assert wait_log_lines(compute, 'has finished, but without a record of its end', 'defragment')
    before = read_allocations(small_etcd_control)
    keys = small_etcd_control.etcd.list_keys('/')
    for words in ((SMALL_QUERY,), ('destroy', surviving)):
        assert_one_line(
            small_etcd_control.eschedule(*words),
            7,
            'accepts no writes',
            'compact and defragment etcd, and disarm its alarm',
        )
    assert read_allocations(small_etcd_control) == before
    assert small_etcd_control.etcd.list_keys('/') == keys
    assert list_running_guests(compute) == {surviving}
    assert not find_log_lines(compute, 'INSTANTIATE', waiting)
    assert count_logged(compute, 'accepts no writes', 'trying again') == 1
    clear_space_alarm(small_etcd_control.etcd)
    wait_address(small_etcd_control, waiting)
    assert small_etcd_control.eschedule('destroy', '--wait', surviving).code == 0


def test_full_etcd_and_expired_lease_complete_a_destroy(small_etcd_control: Control, compute: Ecompute) -> None:
    """F12: etcd full, and a compute frozen for longer than its lease: an accepted destroy completes (fake)."""
    surviving, destroyed = boot_all(small_etcd_control, 2)

    def accept_and_fill() -> None:
        assert small_etcd_control.eschedule('destroy', destroyed).code == 0
        fill(small_etcd_control.etcd)
        expire_key(small_etcd_control, f'/computes/{compute.uuid}')

    run_while_frozen(compute, accept_and_fill)
    wait_until(
        lambda: small_etcd_control.etcd.get(f'/hosts/{compute.uuid}/{destroyed}') is None,
        REACTION_SECONDS,
        'its request is gone',
    )
    assert list_running_guests(compute) == {surviving}
    assert small_etcd_control.placement.read_allocations(destroyed) == {}
    assert small_etcd_control.etcd.get(f'/computes/{compute.uuid}') is None
    clear_space_alarm(small_etcd_control.etcd)
    wait_until(
        lambda: small_etcd_control.etcd.get(f'/computes/{compute.uuid}'),
        REACTION_SECONDS,
        'it says again that it is alive',
    )
    assert small_etcd_control.eschedule('destroy', '--wait', surviving).code == 0


@pytest.mark.usefixtures('compute')
def test_etcd_full_between_claim_and_delivery(small_etcd_control: Control, instance: str) -> None:
    """F12: etcd is full at the delivery of a request: exit 7, and the claim is released (fake)."""
    with Eschedule(small_etcd_control, SMALL_QUERY, '--uuid', instance, failpoint='claimed:stop') as eschedule:
        eschedule.wait_frozen_at('claimed')
        assert small_etcd_control.placement.read_allocations(instance)
        fill(small_etcd_control.etcd)
        eschedule.resume()
        assert_one_line(eschedule.wait(), 7, 'accepts no writes')
    assert small_etcd_control.placement.read_allocations(instance) == {}
    assert small_etcd_control.etcd.list_keys('/requests/') == []
    clear_space_alarm(small_etcd_control.etcd)
    parse_notice(small_etcd_control.eschedule(SMALL_QUERY, '--uuid', instance))
    wait_address(small_etcd_control, instance)


@pytest.mark.slow
def test_etcd_full_during_destroys(small_etcd_control: Control) -> None:
    """F12: etcd full between the record `destroying` and the end, several destroys: they complete (fake)."""
    compute = small_etcd_control.ecompute()
    instances = boot_all(small_etcd_control, 4)

    def destroy_all() -> None:
        assert {
            result.code
            for result in run_concurrently(small_etcd_control, [('destroy', instance) for instance in instances], 2)
        } == {0}
        fill(small_etcd_control.etcd)

    run_while_frozen(compute, destroy_all)
    wait_until(lambda: list_running_guests(compute) == set(), REACTION_SECONDS, 'all are destroyed')
    wait_until(lambda: small_etcd_control.etcd.list_keys('/hosts/') == [], REACTION_SECONDS, 'no request is left')
    assert read_allocations(small_etcd_control) == {}
    assert small_etcd_control.etcd.list_keys('/instances/') == []
    clear_space_alarm(small_etcd_control.etcd)
    assert compute.stop(signal.SIGTERM) == 0
    check_settled(small_etcd_control)


# F9, F10: an etcd of three without a member, with another leader, or without a quorum.


@pytest.fixture
def members(tmp_path: Path) -> Iterator[EtcdCluster]:
    """A cluster of three members, addressed by name."""
    with EtcdCluster(tmp_path / 'etcd', ['localhost'] * 3) as cluster:
        yield cluster


@pytest.fixture
def cluster_control(members: EtcdCluster, own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """A control whose clients are configured with all members; the checks query the last one."""
    control = EtcdControl(members.members[2], own_placement, tmp_path, {'endpoints': members.endpoints})
    try:
        yield control
    finally:
        control.close()


def measure_write_outage(cluster: EtcdCluster, inject: Callable[[], None]) -> float:
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

        wait_until(can_write, 30, 'writes resume')
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
def test_lost_member_does_not_stop_writes(
    cluster_control: Control, compute: Ecompute, members: EtcdCluster, who: str, how: str
) -> None:
    """F9: the leader, or the connected member, killed or frozen: writes resume, no false alarm (fake)."""
    before = boot(cluster_control)
    members.move_leader(members.members[1])
    member = members.members[1 if who == 'leader' else 0]
    resumed = measure_write_outage(members, member.kill if how == 'killed' else member.pause)
    boot(cluster_control)
    assert resumed < SLOWDOWN_FACTOR * 8
    member.start() if how == 'killed' else member.resume()
    wait_until(member.is_ready, 20, 'the member is back')
    assert cluster_control.eschedule('destroy', '--wait', before).code == 0
    assert count_logged(compute, 'is not the one this compute knew') == 0


@pytest.mark.slow
def test_leader_changes_cause_no_false_alarm(cluster_control: Control, members: EtcdCluster) -> None:
    """F9: leadership moved several times by an operator: only requests that can be repeated fail (fake)."""
    compute = cluster_control.ecompute('VCPU:64,DISK_GB:99,MEMORY_MB:9999')
    for number in (1, 2, 0, 1):
        target = members.members[number]
        measure_write_outage(members, lambda: members.move_leader(target))  # noqa: B023
        boot(cluster_control)
    assert count_logged(compute, 'is not the one this compute knew') == 0
    check_settled(cluster_control, compute)


def test_replaced_member_is_not_mistaken_for_another_etcd(
    cluster_control: Control, compute: Ecompute, members: EtcdCluster
) -> None:
    """F9: a member replaced by one without data: it is not mistaken for another etcd (fake)."""
    before = boot(cluster_control)
    for number in range(500):
        members.members[1].put('/elsewhere', str(number))
    members.replace(0)
    boot(cluster_control)
    compute.restart()  # its first connection is to the new member
    assert cluster_control.eschedule('destroy', '--wait', before).code == 0
    assert count_logged(compute, 'is not the one this compute knew') == 0


@pytest.mark.slow
def test_lagging_member_is_not_mistaken_for_another_etcd(
    cluster_control: Control, compute: Ecompute, members: EtcdCluster
) -> None:
    """F13: a member that returns far behind is listed and watched immediately: no false alarm (fake)."""
    lagging = members.members[0]
    for _ in range(3):
        lagging.pause()
        wait_until(lambda: members.find_leader() is not lagging, 20, 'another one leads')
        for number in range(300):
            members.members[1].put('/elsewhere', str(number))
        boot(cluster_control)
        # Every client has to connect to it, because both other members are away for a moment.
        lagging.resume()
        for member in members.members[1:]:
            member.kill()
        for member in members.members[1:]:
            member.start()
    assert count_logged(compute, 'is not the one this compute knew') == 0


@pytest.mark.slow
def test_quorum_lost_and_restored(cluster_control: Control, compute: Ecompute, members: EtcdCluster) -> None:
    """F10: two of three members away: guests stay, eschedule exits 7 in time, then work resumes (fake)."""
    instance = boot(cluster_control)
    claims = read_allocations(cluster_control)
    lost_members = members.members[1:]
    for member in lost_members:
        member.kill()
    for words in ((SMALL_QUERY,), ('destroy', instance), ('list',)):
        assert_refused(cluster_control, members.members[0], *words)
    wait_until(lambda: count_logged(compute, LOST_MESSAGE), 30, 'the loss is logged')
    share = measure_cpu_share(compute)
    assert share < 0.05
    assert list_running_guests(compute) == {instance}
    assert read_allocations(cluster_control) == claims
    for member in lost_members:
        member.launch()
    for member in lost_members:
        member.wait_ready()
    boot(cluster_control)


@pytest.mark.usefixtures('compute')
def test_quorum_lost_between_claim_and_delivery(cluster_control: Control, instance: str, members: EtcdCluster) -> None:
    """F10: quorum lost between claim and delivery: exit 7 in time; a repeat completes it (fake)."""
    with Eschedule(cluster_control, SMALL_QUERY, '--uuid', instance, failpoint='claimed:stop') as eschedule:
        eschedule.wait_frozen_at('claimed')
        for member in members.members[:2]:
            member.kill()
        began = time.monotonic()
        eschedule.resume()
        assert_one_line(eschedule.wait(), 7, 'etcd at ')
        assert time.monotonic() - began < SLOWDOWN_FACTOR * 30
    for member in members.members[:2]:
        member.launch()
    for member in members.members:
        member.wait_ready()
    parse_notice(cluster_control.eschedule(SMALL_QUERY, '--uuid', instance))
    wait_address(cluster_control, instance)


# S5, F1, R1: the presence key of a compute ends, is overwritten, and is restored, in one run of the process.


@pytest.mark.history_broken('etcd is restored from an older copy')
def test_presence_key_ends_is_overwritten_and_restored(own_control: Control, compute: Ecompute) -> None:
    """S5: read-only while another holds the key, and in a restored etcd; working otherwise (fake)."""
    etcd = own_control.etcd
    key = f'/computes/{compute.uuid}'
    expire_key(own_control, key)
    wait_until(lambda: etcd.get(key), 30, 'the key is put again')
    boot(own_control)
    older = SavedSnapshot(etcd)

    lease = etcd.grant()
    etcd.put(key, json.dumps({'token': 'theirs', 'hostname': 'elsewhere', 'since': 'now'}), lease)
    wait_log_lines(compute, 'is held by another ecompute, on elsewhere', 'this compute is read-only from now on')
    _, waiting = place(own_control)
    etcd.call('lease/revoke', {'ID': lease})
    wait_log_lines(compute, 'this compute is no longer read-only: its ecompute holds the presence key again')
    wait_address(own_control, waiting)
    wait_address(own_control, place(own_control)[1])
    presence = json.loads(etcd.get(key) or b'{}')
    assert presence['pid'] == str(compute.pid)
    assert len(find_log_lines(compute, 'this compute is read-only from now on')) == 1

    older.restore()
    wait_log_lines(compute, 'is not the one this compute knew', 'this compute is read-only from now on')
    assert compute.is_running
    assert len(read_guests(compute)) == 3
    restart_accepting_etcd(compute)
    wait_state(own_control, waiting, 'active')
