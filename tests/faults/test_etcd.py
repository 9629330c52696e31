"""etcd killed, frozen, full or without a quorum, and presence keys that end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError
from ecomp.store.client import Put, Store
from tests.faults.etcds import EtcdCluster, EtcdControl, clear_space_alarm, fill
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import (
    Eschedule,
    assert_idle,
    check_settled,
    expire_key,
    list_running_guests,
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
    wait_address,
    wait_log_lines,
    wait_state,
)

LOST_MESSAGE = 'trying again until it is back'


def count_logged(compute: Ecompute, *words: str) -> int:
    return len(find_log_lines(compute, *words))


def count_etcd_back(compute: Ecompute) -> int:
    return count_logged(compute, ' INFO ', 'etcd at ', 'is back')


def assert_refused(control: Control, etcd: Etcd, *words: str, within: float = 20.0) -> None:
    began = time.monotonic()
    assert_one_line(control.eschedule(*words), 7, 'etcd at ')
    assert time.monotonic() - began < SLOWDOWN_FACTOR * within
    assert etcd


def run_while_frozen(compute: Ecompute, action: Callable[[], object]) -> None:
    """Do something that a compute notices only afterwards."""
    compute.pause()
    try:
        action()
    finally:
        compute.resume()


# F7, F8, F11: one etcd killed, frozen, or compacted while a compute does not follow it.


def test_etcd_killed_and_restarted(own_control: Control, compute: Ecompute) -> None:
    """F7: etcd killed: logged once, little CPU, guests stay, exit 7, work resumes (fake)."""
    etcd = own_control.etcd
    instance = boot(own_control)
    etcd.kill()
    wait_until(lambda: count_logged(compute, LOST_MESSAGE), 15, 'the loss is logged')
    for words in ((SMALL_QUERY,), ('destroy', instance), (instance,), ('list',)):
        assert_refused(own_control, etcd, *words)
    assert own_control.placement.read_consumers(compute.uuid).keys() == {instance}
    with assert_idle(compute.pid):
        time.sleep(10.0)  # the measuring period
    assert list_running_guests(compute) == {instance}
    etcd.start()
    wait_until(lambda: count_etcd_back(compute), 6, 'it follows etcd again')
    boot(own_control)
    assert (count_logged(compute, LOST_MESSAGE), count_etcd_back(compute)) == (1, 1)
    assert compute.stop() == 0
    assert read_reserved(own_control, compute.uuid) == 4


def test_etcd_frozen(own_control: Control, compute: Ecompute) -> None:
    """F8: etcd frozen: noticed in 15 s, little CPU, guests stay, exit 7, work resumes (fake)."""
    etcd = own_control.etcd
    instance = boot(own_control)
    etcd.pause()
    began = time.monotonic()
    wait_until(lambda: count_logged(compute, LOST_MESSAGE), 16, 'it is noticed')
    detected = time.monotonic() - began
    assert detected <= 15
    assert_refused(own_control, etcd, SMALL_QUERY)
    assert_refused(own_control, etcd, 'destroy', instance)
    with assert_idle(compute.pid):
        time.sleep(10.0)  # the measuring period
    assert list_running_guests(compute) == {instance}
    etcd.resume()
    wait_until(lambda: count_etcd_back(compute), 15, 'it follows etcd again')
    # Frozen for longer than its lease lives: the presence key expired, and is put again soon.
    wait_until(lambda: etcd.list_keys('/computes/'), 5, 'the compute says again that it is alive')
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
    with (
        Etcd(tmp_path / 'etcd', '--quota-backend-bytes=8388608') as etcd,
        closing(Control(etcd, own_placement, tmp_path, is_mortal=True)) as control,
    ):
        yield control


def test_full_etcd_completes_destroys_and_refuses_creates(small_etcd_control: Control, compute: Ecompute) -> None:
    """F12: etcd full: accepted destroys complete, requests are refused, no build begins (fake)."""
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
    """F12: etcd full, and a compute frozen beyond its lease: a destroy completes (fake)."""
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


# F9, F10: an etcd of three without a member, with another leader, or without a quorum.


@pytest.fixture
def members(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / 'etcd', ['localhost'] * 3) as cluster:
        yield cluster


@pytest.fixture
def cluster_control(members: EtcdCluster, own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """A control whose clients are configured with all members. The checks query the last one."""
    with closing(EtcdControl(members.members[2], own_placement, tmp_path, {'endpoints': members.endpoints})) as control:
        yield control


def measure_write_outage(cluster: EtcdCluster, inject: Callable[[], None]) -> float:
    """Inject a fault. Return the seconds until a write succeeds again.

    A write with an unknown outcome counts as failed.
    """
    with closing(Store(EtcdConfig(tuple(cluster.endpoints)))) as store:
        assert store.commit([], [Put('/probe', 'before')])
        inject()
        began = time.monotonic()

        def can_write() -> bool:
            with suppress(EcompError):
                return store.commit([], [Put('/probe', 'after')]) is not None
            return False

        wait_until(can_write, 30, 'writes resume')
        return time.monotonic() - began


@pytest.mark.parametrize(
    ('who', 'how'),
    [
        ('leader', 'killed'),
        pytest.param('first', 'frozen', marks=pytest.mark.slow),
        pytest.param('leader', 'frozen', marks=pytest.mark.slow),
        pytest.param('first', 'killed', marks=pytest.mark.slow),
    ],
)
def test_lost_member_does_not_stop_writes(
    cluster_control: Control, compute: Ecompute, members: EtcdCluster, who: str, how: str
) -> None:
    """F9: the leader or the connected member killed or frozen: writes resume, no alarm (fake)."""
    before = boot(cluster_control)
    members.move_leader(members.members[1])
    member = members.members[1 if who == 'leader' else 0]
    resumed = measure_write_outage(members, member.kill if how == 'killed' else member.pause)
    boot(cluster_control)
    assert resumed < SLOWDOWN_FACTOR * 8
    member.start() if how == 'killed' else member.resume()
    wait_until(member.is_ready, 20, 'the member is back')
    assert cluster_control.eschedule('destroy', '--wait', before).code == 0
    assert count_logged(compute, 'is not the one that this compute used before') == 0


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
    assert count_logged(compute, 'is not the one that this compute used before') == 0


@pytest.mark.slow
def test_lagging_member_is_not_mistaken_for_another_etcd(
    cluster_control: Control, compute: Ecompute, members: EtcdCluster
) -> None:
    """F13: a member that returns far behind is listed and watched: no false alarm (fake)."""
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
    assert count_logged(compute, 'is not the one that this compute used before') == 0


@pytest.mark.slow
def test_quorum_lost_and_restored(cluster_control: Control, compute: Ecompute, members: EtcdCluster) -> None:
    """F10: two of three members away: guests stay, exit 7 in time, work resumes (fake)."""
    instance = boot(cluster_control)
    claims = read_allocations(cluster_control)
    lost_members = members.members[1:]
    for member in lost_members:
        member.kill()
    for words in ((SMALL_QUERY,), ('destroy', instance), ('list',)):
        assert_refused(cluster_control, members.members[0], *words)
    wait_until(lambda: count_logged(compute, LOST_MESSAGE), 30, 'the loss is logged')
    with assert_idle(compute.pid):
        time.sleep(10.0)  # the measuring period
    assert list_running_guests(compute) == {instance}
    assert read_allocations(cluster_control) == claims
    for member in lost_members:
        member.launch()
    for member in lost_members:
        member.wait_ready()
    boot(cluster_control)
