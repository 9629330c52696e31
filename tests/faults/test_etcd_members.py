"""F9, F10: an etcd of three without a member, with another leader, without a quorum."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError
from ecomp.store.client import Put, Store
from tests.faults.etcd_away import LOST, is_refused, said, share_while_away
from tests.faults.etcds import EtcdCluster, EtcdControl
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, running, settled
from tests.kit.invariants import allocations
from tests.kit.servers import PATIENCE, PlacementServer, until
from tests.kit.story import SMALL, addressed, boot, notified, one_line


@pytest.fixture
def members(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three of them, by name."""
    with EtcdCluster(tmp_path / 'etcd', ['localhost'] * 3) as cluster:
        yield cluster


@pytest.fixture
def several(members: EtcdCluster, own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """eschedule and ecomputes that know all members; the checks ask the last one."""
    control = EtcdControl(members.members[2], own_placement, tmp_path, {'endpoints': members.endpoints})
    try:
        yield control
    finally:
        control.close()


def writes_resume(cluster: EtcdCluster, inject: Callable[[], None]) -> float:
    """Seconds from the fault until a write has worked again; one that may have been lost counts as failed."""
    store = Store(EtcdConfig(tuple(cluster.endpoints)))
    try:
        assert store.commit([], [Put('/probe', 'before')])
        inject()
        began = time.monotonic()

        def works() -> bool:
            with suppress(EcompError):
                return store.commit([], [Put('/probe', 'after')]) is not None
            return False

        until(works, 30, 'writes resume')
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
    """F9: the leader, or the member all are connected to, killed or frozen: writes resume, nothing is noticed (fake)"""
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
    """F9: leader change, time and again, by hand: nothing fails that cannot be asked again (fake)"""
    compute = several.ecompute('VCPU:64,DISK_GB:99,MEMORY_MB:9999')
    for number in (1, 2, 0, 1):
        target = members.members[number]
        writes_resume(members, lambda: members.move_leader(target))  # noqa: B023
        boot(several)
    assert said(compute, 'is not the one this compute knew') == 0
    settled(several, compute)


def test_a_member_is_replaced(several: Control, compute: Ecompute, members: EtcdCluster) -> None:
    """F9: a member exchanged for one without data: it is not taken for another etcd (fake)"""
    before = boot(several)
    for number in range(500):
        members.members[1].put('/elsewhere', str(number))
    members.replace(0)
    boot(several)
    compute.restart()  # and meets the new member first
    assert several.eschedule('destroy', '--wait', before).code == 0
    assert said(compute, 'is not the one this compute knew') == 0


@pytest.mark.slow
def test_a_member_that_lags_is_not_another_etcd(several: Control, compute: Ecompute, members: EtcdCluster) -> None:
    """F13: a member that comes back far behind is listed and watched at once: no false alarm (fake)"""
    lagging = members.members[0]
    for _ in range(3):
        lagging.pause()
        until(lambda: members.leader() is not lagging, 20, 'another one leads')
        for number in range(300):
            members.members[1].put('/elsewhere', str(number))
        boot(several)
        # Everybody is thrown back to it: both the others are gone for a moment.
        lagging.resume()
        for each in members.members[1:]:
            each.kill()
        for each in members.members[1:]:
            each.start()
    assert said(compute, 'is not the one this compute knew') == 0


@pytest.mark.slow
def test_no_quorum(several: Control, compute: Ecompute, members: EtcdCluster) -> None:
    """F10: two of three members gone: guests stay, eschedule exits 7 in time, nothing half done, all goes on (fake)"""
    instance = boot(several)
    held = allocations(several)
    gone = members.members[1:]
    for each in gone:
        each.kill()
    for words in ((SMALL,), ('destroy', instance), ('list',)):
        is_refused(several, members.members[0], *words)
    until(lambda: said(compute, LOST), 30, 'the loss is logged')
    share = share_while_away(compute)
    assert share < 0.05
    assert running(compute) == {instance}
    assert allocations(several) == held
    for each in gone:
        each.launch()
    for each in gone:
        each.wait_ready()
    boot(several)


@pytest.mark.usefixtures('compute')
def test_quorum_lost_while_an_eschedule_is_at_it(several: Control, instance: str, members: EtcdCluster) -> None:
    """F10: quorum lost between claim and delivery: exit 7 in time; the same command again ends it (fake)"""
    with Eschedule(several, SMALL, '--uuid', instance, failpoint='claimed:stop') as eschedule:
        eschedule.stopped_at('claimed')
        for each in members.members[:2]:
            each.kill()
        began = time.monotonic()
        eschedule.go_on()
        one_line(eschedule.end(), 7, 'etcd at ')
        assert time.monotonic() - began < PATIENCE * 30
    for each in members.members[:2]:
        each.launch()
    for each in members.members:
        each.wait_ready()
    notified(several.eschedule(SMALL, '--uuid', instance))
    addressed(several, instance)
