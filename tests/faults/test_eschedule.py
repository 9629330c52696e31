"""eschedule killed or frozen at every step, or without etcd."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute, Result, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.hands import Eschedule, lapse, lapse_requests, look_twice, revision, settled
from tests.kit.invariants import check, everything
from tests.kit.proxy import Proxy
from tests.kit.servers import PATIENCE, until
from tests.kit.story import NOTIFIED, SMALL, addressed, boot, boot_all, known, logs, notified, one_line, reached, record

# F1: eschedule killed or frozen at every step. The computes undo the rest, or the same command resumes it.
#
# The attempt's key of a dead eschedule lives 60 s on its lease. A claim without a request or attempt is released after
# two checks 60 s apart. Here the lease is revoked through etcd and the checks use the test's own clock; the slow test
# waits for the real ones.


EARLY_FAILPOINTS = ('announced', 'claimed')
SET_FAILPOINTS = ('claimed-some',)
SET_ROOM = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'
LATE_FAILPOINTS = DELIVERED, UNDONE, TOMBSTONED = 'delivered', 'undone', 'tombstoned'


def create_words(instance: str) -> tuple[str, ...]:
    """Return the arguments of a create that can be repeated."""
    return SMALL, '--uuid', instance


def nothing_is_left(control: Control, instance: str) -> None:
    """Check that no key and no claim of the instance exists."""
    assert [key for key in everything(control) if instance in key] == []
    assert control.placement.allocations(instance) == {}


def steal(control: Control, eschedule: Eschedule, instance: str) -> None:
    """Make a frozen eschedule with a claim too late to deliver, so that it undoes the claim."""
    eschedule.stopped_at('claimed')
    lapse(control, f'/requests/{instance}')
    eschedule.go_on()


@pytest.mark.parametrize('step', EARLY_FAILPOINTS)
@pytest.mark.parametrize('then', ['resumed', 'left'])
def test_killed_before_it_delivers(cluster: Control, compute: Ecompute, instance: str, step: str, then: str) -> None:
    """F1: kill -9 of eschedule between its attempt's key and its delivery (fake)."""
    with Eschedule(cluster, *create_words(instance), failpoint=f'{step}:kill') as eschedule:
        eschedule.killed_at(step)
        check(cluster, compute, dead=[eschedule.pid])  # datable: the attempt's key proves that an attempt was in flight
    assert cluster.etcd.keys('/requests/') == [f'/requests/{instance}']
    assert bool(cluster.placement.allocations(instance)) == (step == 'claimed')
    if then == 'resumed':
        repeated = cluster.eschedule(*create_words(instance))
        assert notified(repeated)[1] == instance
        one_line(repeated, 0, instance, 'taking over')
        addressed(cluster, instance)
        assert len(logs(compute, 'INSTANTIATE')) == 1
    else:
        look_twice(cluster, compute)
        assert bool(cluster.placement.allocations(instance)) == (step == 'claimed'), 'not while its lease lives'
        lapse(cluster, f'/requests/{instance}')
        look_twice(cluster, compute)
        nothing_is_left(cluster, instance)


@pytest.mark.parametrize('then', ['resumed', 'left'])
def test_killed_with_a_part_of_the_set_claimed(cluster: Control, then: str) -> None:
    """F1: kill -9 of eschedule with a part of a set claimed, after one compute became full (fake)."""
    first, other = cluster.ecompute(SET_ROOM), cluster.ecompute(SET_ROOM)
    set_uuid = str(uuid.uuid4())
    words = SMALL, '--count', '6', '--uuid', set_uuid
    with Eschedule(cluster, *words, failpoint=f'announced:stop,{SET_FAILPOINTS[0]}:kill') as eschedule:
        eschedule.stopped_at('announced')
        # This makes the candidates that it has already read stale.
        filler = cluster.eschedule(SMALL.replace('VCPU:1', 'VCPU:8'), '--on', first.uuid)
        assert filler.code == 0, filler
        eschedule.go_on()
        eschedule.killed_at(SET_FAILPOINTS[0])
    claimed = cluster.placement.consumers(other.uuid).keys()
    assert 0 < len(claimed) < 6
    assert cluster.etcd.keys('/requests/') == [f'/requests/{set_uuid}']
    if then == 'resumed':
        repeated = cluster.eschedule(*words)
        assert repeated.code == 0, repeated
        assert {compute for compute, _ in NOTIFIED.findall(repeated.stdout)} == {other.uuid}
        assert claimed < cluster.placement.consumers(other.uuid).keys()
        for _, instance in NOTIFIED.findall(repeated.stdout):
            addressed(cluster, instance)
    else:
        look_twice(cluster, other)
        assert cluster.placement.consumers(other.uuid).keys() == claimed, 'not while its attempt lives'
        lapse(cluster, f'/requests/{set_uuid}')
        look_twice(cluster, other)
        assert cluster.placement.consumers(other.uuid) == {}
        assert not [record(cluster, instance) for instance in claimed if record(cluster, instance)]
    settled(cluster, first, other)


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGINT])
def test_ended_while_two_calls_claim_for_a_large_set(cluster: Control, number: signal.Signals) -> None:
    """F1: kill -9 of eschedule, and Ctrl-C, while a slow placement claims: it ends soon and holds nothing (fake)."""
    computes = [cluster.ecompute('VCPU:60,DISK_GB:600,MEMORY_MB:7680') for _ in range(2)]

    def count_claims() -> int:
        return sum(len(cluster.placement.consumers(compute.uuid)) for compute in computes)

    with FaultyPlacement(cluster.placement.port) as placement:
        config = write_config(cluster.directory / 'slow.yaml', cluster.etcd.endpoint, placement.url)
        placement.fail('slow', which=lambda method, _: method == 'POST', seconds=600)
        with Eschedule(cluster, SMALL, '--count', '60', config=config) as eschedule:
            until(lambda: placement.hits == 2, 20, 'both calls are under way')
            began = time.monotonic()
            os.kill(eschedule.pid, number)
            result = eschedule.end()
            assert time.monotonic() - began < 25, 'less than placement has for an answer'
    if number == signal.SIGINT:
        assert (result.code, result.stdout) == (1, '')
        assert 'eschedule: interrupted' in result.stderr
    until(lambda: count_claims() == 60, 30, 'both calls are carried out all the same')
    lapse_requests(cluster)
    for compute in computes:
        look_twice(cluster, compute)
    assert count_claims() == 0
    settled(cluster, *computes)


@pytest.mark.parametrize('step', ['claimed', DELIVERED])
def test_killed_with_the_whole_set_claimed_or_delivered(cluster: Control, step: str) -> None:
    """F1: kill -9 around the delivery of a set: a repeat delivers it, or reports it, exactly once (fake)."""
    compute, set_uuid = cluster.ecompute(SET_ROOM), str(uuid.uuid4())
    words = SMALL, '--count', '3', '--uuid', set_uuid
    with Eschedule(cluster, *words, failpoint=f'{step}:kill') as eschedule:
        eschedule.killed_at(step)
    claimed = cluster.placement.consumers(compute.uuid).keys()
    assert len(claimed) == 3
    repeated = cluster.eschedule(*words)
    assert repeated.code == 0, repeated
    assert {instance for _, instance in NOTIFIED.findall(repeated.stdout)} == claimed
    assert repeated.stderr.count('requested before') == (3 if step == DELIVERED else 0)
    for instance in claimed:
        addressed(cluster, instance)
    assert cluster.placement.consumers(compute.uuid).keys() == claimed
    settled(cluster, compute)


def test_killed_after_it_delivered(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F1: kill -9 of eschedule after its delivery: the request is carried out, and a repeat reports it (fake)."""
    with Eschedule(cluster, *create_words(instance), failpoint=f'{DELIVERED}:kill') as eschedule:
        eschedule.killed_at(DELIVERED)
    repeated = cluster.eschedule(*create_words(instance))
    assert notified(repeated) == (compute.uuid, instance)
    one_line(repeated, 0, 'requested before', 'nothing is changed')
    addressed(cluster, instance)


@pytest.mark.usefixtures('compute')
def test_killed_after_it_undid(cluster: Control, instance: str) -> None:
    """F1: kill -9 of eschedule after it released a claim that it could not deliver (fake)."""
    with Eschedule(cluster, *create_words(instance), failpoint='claimed:stop,undone:kill') as eschedule:
        steal(cluster, eschedule, instance)
        eschedule.killed_at(UNDONE)
    nothing_is_left(cluster, instance)
    assert notified(cluster.eschedule(*create_words(instance)))[1] == instance
    addressed(cluster, instance)


@pytest.mark.usefixtures('compute')
def test_killed_after_the_tombstone(cluster: Control) -> None:
    """F1: kill -9 of eschedule destroy after its acceptance: it is carried out (fake)."""
    instance = boot(cluster)
    with Eschedule(cluster, 'destroy', instance, failpoint=f'{TOMBSTONED}:kill') as eschedule:
        eschedule.killed_at(TOMBSTONED)
    reached(cluster, instance, 'gone')
    one_line(cluster.eschedule('destroy', instance), 4, 'gone since')


@pytest.mark.parametrize('step', EARLY_FAILPOINTS)
def test_frozen_until_another_took_over(cluster: Control, step: str) -> None:
    """F1: SIGSTOP of eschedule; another one takes over its --uuid: late writes fail, no claim is moved (fake)."""
    first, second, instance = cluster.ecompute(), cluster.ecompute(), str(uuid.uuid4())
    with Eschedule(cluster, *create_words(instance), failpoint=f'{step}:stop') as eschedule:
        eschedule.stopped_at(step)
        # Its first choice has no more room, so the second eschedule has to choose the other compute.
        claimed = cluster.placement.allocations(instance)
        holder = next(iter(claimed), first.uuid)
        cluster.placement.call('PUT', f'/resource_providers/{holder}/traits', disabled(cluster, holder))
        words = f'{SMALL}&required=!COMPUTE_STATUS_DISABLED', '--uuid', instance
        if claimed:
            refused = cluster.eschedule(*words)
            assert refused.code == 5, refused
            assert 'by another attempt. Fix: wait two minutes' in refused.stderr, refused
            eschedule.go_on()
            result = eschedule.end()
            assert (result.code, result.stdout) == (5, ''), result
            assert 'took it over' in result.stderr, result
            assert cluster.placement.allocations(instance) == {}
        taken_over = cluster.eschedule(*words)
        other = notified(taken_over)[0]
        assert {other, holder} == {first.uuid, second.uuid}
        before = addressed(cluster, instance)
        if not claimed:
            eschedule.go_on()
            result = eschedule.end()
            assert (result.code, result.stdout) == (5, ''), result
            assert 'took it over' in result.stderr, result
    assert cluster.placement.allocations(instance).keys() == {other}
    status = known(cluster, instance)
    assert (status['state'], status['compute'], status['addresses'][0]['address']) == ('active', other, before)
    settled(cluster, first, second)


def disabled(control: Control, provider: str) -> dict[str, object]:
    """Return the traits of a provider that is disabled for queries that exclude this trait."""
    generation = control.placement.call('GET', f'/resource_providers/{provider}')['generation']
    return {'resource_provider_generation': generation, 'traits': ['COMPUTE_STATUS_DISABLED']}


@pytest.mark.parametrize('step', EARLY_FAILPOINTS)
def test_frozen_until_its_time_is_up(cluster: Control, compute: Ecompute, instance: str, step: str) -> None:
    """F1: SIGSTOP of eschedule beyond its lease, and its claim is released: it ends and leaves nothing (fake)."""
    with Eschedule(cluster, *create_words(instance), failpoint=f'{step}:stop') as eschedule:
        eschedule.stopped_at(step)
        lapse(cluster, f'/requests/{instance}')
        look_twice(cluster, compute)
        assert cluster.placement.allocations(instance) == {}
        eschedule.go_on()
        one_line(eschedule.end(), 5, instance, 'not delivered', 'too slow')
    nothing_is_left(cluster, instance)


def test_frozen_after_it_delivered(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F1: SIGSTOP of eschedule after its delivery, while the instance is destroyed: it changes nothing (fake)."""
    with Eschedule(cluster, *create_words(instance), failpoint=f'{DELIVERED}:stop') as eschedule:
        eschedule.stopped_at(DELIVERED)
        assert cluster.eschedule('destroy', '--wait', instance).code == 0
        settled(cluster, compute)
        before = revision(cluster)
        eschedule.go_on()
        assert notified(eschedule.end()) == (compute.uuid, instance)
    assert revision(cluster) == before


@pytest.mark.usefixtures('compute')
def test_frozen_after_it_undid(cluster: Control, instance: str) -> None:
    """F1: SIGSTOP after eschedule undid its claim, while another places its --uuid: that one stays (fake)."""
    with Eschedule(cluster, *create_words(instance), failpoint='claimed:stop,undone:stop') as eschedule:
        steal(cluster, eschedule, instance)
        eschedule.stopped_at(UNDONE)
        assert notified(cluster.eschedule(*create_words(instance)))[1] == instance
        addressed(cluster, instance)
        eschedule.go_on()
        one_line(eschedule.end(), 5, instance, 'not delivered')
    reached(cluster, instance, 'active')


@pytest.mark.usefixtures('compute')
def test_frozen_after_the_tombstone(cluster: Control) -> None:
    """F1: SIGSTOP of eschedule destroy after its acceptance, until it is carried out (fake)."""
    instance = boot(cluster)
    with Eschedule(cluster, 'destroy', instance, failpoint=f'{TOMBSTONED}:stop') as eschedule:
        eschedule.stopped_at(TOMBSTONED)
        reached(cluster, instance, 'gone')
        before = revision(cluster)
        eschedule.go_on()
        one_line(eschedule.end(), 0, instance, 'destroy accepted')
    assert revision(cluster) == before


@pytest.mark.slow
def test_killed_with_its_claim_and_left_alone(cluster: Control, tmp_path: Path) -> None:
    """F1: kill -9 of eschedule with its claim: its lease expires, and two checks later the claim is released (fake)."""
    compute: Ecompute = cluster.ecompute(directory=tmp_path / 'compute')
    instance = str(uuid.uuid4())
    with Eschedule(cluster, *create_words(instance), failpoint='claimed:kill') as eschedule:
        eschedule.killed_at('claimed')
    until(lambda: not cluster.etcd.keys('/requests/'), 90, 'the lease of the dead eschedule ends')
    lapsed = time.monotonic()
    assert cluster.placement.allocations(instance)
    until(lambda: not cluster.placement.allocations(instance), 260, 'its claim is released')
    assert time.monotonic() - lapsed >= 55, 'not before two looks'
    nothing_is_left(cluster, instance)
    settled(cluster, compute)


# F1: host forget killed between its steps: a repeat of the command continues.


# {failpoint: how many of two instances and a provider the repeat removes}; the name goes with the provider.
FORGET_FAILPOINTS = {'host-released': 3, 'host-emptied': 1, 'host-unregistered': 1}


@pytest.mark.parametrize(('step', 'left'), FORGET_FAILPOINTS.items())
def test_killed_in_the_middle_it_is_run_again(cluster: Control, step: str, left: int) -> None:
    """F1: kill -9 of host forget with a claim released, or with only the provider or its name left (fake)."""
    compute = cluster.ecompute()
    instances = boot_all(cluster, 2)
    compute.kill()
    lapse(cluster, f'/computes/{compute.uuid}')
    assert cluster.eschedule('destroy', *instances).code == 0
    with Eschedule(cluster, 'host', 'forget', '--fenced', compute.uuid, failpoint=f'{step}:kill') as killed:
        killed.killed_at(step)
    assert (compute.uuid in cluster.eschedule('hosts').stdout) == (step != 'host-unregistered')
    repeated = cluster.eschedule('host', 'forget', '--fenced', socket.gethostname())
    assert repeated.code == 0, repeated
    assert len(repeated.stderr.splitlines()) == left, repeated
    for instance in instances:
        reached(cluster, instance, 'gone')
    record_keys = {f'/instances/{compute.uuid}/{instance}' for instance in instances}
    assert set(everything(cluster)) - {'/cluster'} == record_keys
    one_line(cluster.eschedule('host', 'forget', '--fenced', compute.uuid), 4, 'no such compute')
    settled(cluster)


# F15: eschedule has its claim and loses etcd. No claim stays forever, and the message tells how to continue.


IN_TIME = 40.0


@pytest.fixture
def etcd_proxy(cluster: Control) -> Iterator[Proxy]:
    """A proxy in front of the cluster's etcd."""
    with Proxy(cluster.etcd.port) as proxy:
        yield proxy


def cut_off(control: Control, proxy: Proxy, directory: Path, instance: str, back: bool = False) -> Result:
    """Run an eschedule that loses etcd after its claim; return its result.

    With `back` etcd is away only for a moment.
    """
    config = write_config(directory / 'cut.yaml', proxy.address, control.placement.url)
    words = (SMALL, '--uuid', instance)
    with Eschedule(control, *words, failpoint='claimed:stop', config=config) as eschedule:
        eschedule.stopped_at('claimed')
        assert len(control.placement.allocations(instance)) == 1
        proxy.go_away()
        if back:
            proxy.come_back()
        began = time.monotonic()
        eschedule.go_on()
        result = eschedule.end()
        assert time.monotonic() - began < PATIENCE * IN_TIME
        return result


@pytest.mark.parametrize('then', ['the same again', 'nobody comes back'])
def test_it_loses_etcd_for_good(cluster: Control, etcd_proxy: Proxy, tmp_path: Path, then: str) -> None:
    """F15: eschedule loses etcd after its claim: exit 7 with its uuid; resumed, or released by a compute (fake)."""
    compute, instance = cluster.ecompute(), str(uuid.uuid4())
    result = cut_off(cluster, etcd_proxy, tmp_path, instance)
    assert result.stdout == ''
    one_line(result, 7, 'etcd', etcd_proxy.address, f'--uuid {instance}')
    assert cluster.etcd.get(f'/requests/{instance}') is not None, 'somebody is at it, for as long as the lease lives'
    if then == 'the same again':
        assert notified(cluster.eschedule(SMALL, '--uuid', instance)) == (compute.uuid, instance)
        addressed(cluster, instance)
    else:
        look_twice(cluster, compute)
        assert len(cluster.placement.allocations(instance)) == 1
        lapse(cluster, f'/requests/{instance}')
        look_twice(cluster, compute)
        assert cluster.placement.allocations(instance) == {}
        assert [key for key in everything(cluster) if instance in key] == []
    settled(cluster, compute)


def test_it_loses_etcd_for_a_moment(cluster: Control, etcd_proxy: Proxy, tmp_path: Path) -> None:
    """F15: eschedule's connection to etcd breaks after its claim, etcd stays: placed, or undone completely (fake)."""
    compute, instance = cluster.ecompute(), str(uuid.uuid4())
    result = cut_off(cluster, etcd_proxy, tmp_path, instance, back=True)
    if result.code == 0:
        assert notified(result) == (compute.uuid, instance)
        addressed(cluster, instance)
    else:
        assert result.code == 5, result
        assert 'undone' in result.stderr
        assert cluster.placement.allocations(instance) == {}
        assert [key for key in everything(cluster) if instance in key] == []
    settled(cluster, compute)
