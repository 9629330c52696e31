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
from tests.kit.hands import Eschedule, check_claims_twice, check_settled, expire_attempts, expire_key, read_revision
from tests.kit.invariants import check_invariants, read_lasting_keys
from tests.kit.proxy import Proxy
from tests.kit.servers import SLOWDOWN_FACTOR, wait_until
from tests.kit.story import (
    NOTIFIED_PATTERN,
    SMALL_QUERY,
    assert_one_line,
    boot,
    boot_all,
    parse_notice,
    read_record,
    require_record,
    wait_address,
    wait_log_lines,
    wait_state,
)

# F1: eschedule killed or frozen at every step. The computes undo the rest, or the same command resumes it.
#
# The attempt's key of a dead eschedule lives 60 s on its lease. A claim without a request or attempt is released after
# two checks 60 s apart. Here the lease is revoked through etcd and the checks use the test's own clock; the slow test
# waits for the real ones.


EARLY_FAILPOINTS = ('announced', 'claimed')
SET_FAILPOINTS = ('claimed-some',)
SET_ROOM = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'
LATE_FAILPOINTS = DELIVERED_STEP, UNDONE_STEP, TOMBSTONED_STEP = 'delivered', 'undone', 'tombstoned'


def make_create_arguments(instance: str) -> tuple[str, ...]:
    """Return the arguments of a create that can be repeated."""
    return SMALL_QUERY, '--uuid', instance


def check_nothing_left(control: Control, instance: str) -> None:
    """Check that no key and no claim of the instance exists."""
    assert [key for key in read_lasting_keys(control) if instance in key] == []
    assert control.placement.read_allocations(instance) == {}


def make_too_late(control: Control, eschedule: Eschedule, instance: str) -> None:
    """Make a frozen eschedule with a claim too late to deliver, so that it undoes the claim."""
    eschedule.wait_frozen_at('claimed')
    expire_key(control, f'/requests/{instance}')
    eschedule.resume()


@pytest.mark.parametrize('step', EARLY_FAILPOINTS)
@pytest.mark.parametrize('then', ['resumed', 'left'])
def test_killed_before_delivery(cluster: Control, compute: Ecompute, instance: str, step: str, then: str) -> None:
    """F1: kill -9 of eschedule between its attempt's key and its delivery (fake)."""
    with Eschedule(cluster, *make_create_arguments(instance), failpoint=f'{step}:kill') as eschedule:
        eschedule.assert_killed_at(step)
        check_invariants(
            cluster, compute, dead=[eschedule.pid]
        )  # datable: the attempt's key proves that an attempt was in flight
    assert cluster.etcd.list_keys('/requests/') == [f'/requests/{instance}']
    assert bool(cluster.placement.read_allocations(instance)) == (step == 'claimed')
    if then == 'resumed':
        repeated = cluster.eschedule(*make_create_arguments(instance))
        assert parse_notice(repeated)[1] == instance
        assert_one_line(repeated, 0, instance, 'taking over')
        wait_address(cluster, instance)
        assert len(wait_log_lines(compute, 'INSTANTIATE')) == 1
    else:
        check_claims_twice(cluster, compute)
        assert bool(cluster.placement.read_allocations(instance)) == (step == 'claimed'), 'not while its lease lives'
        expire_key(cluster, f'/requests/{instance}')
        check_claims_twice(cluster, compute)
        check_nothing_left(cluster, instance)


@pytest.mark.parametrize('then', ['resumed', 'left'])
def test_killed_with_part_of_a_set_claimed(cluster: Control, then: str) -> None:
    """F1: kill -9 of eschedule with a part of a set claimed, after one compute became full (fake)."""
    first, other = cluster.ecompute(SET_ROOM), cluster.ecompute(SET_ROOM)
    set_uuid = str(uuid.uuid4())
    words = SMALL_QUERY, '--count', '6', '--uuid', set_uuid
    with Eschedule(cluster, *words, failpoint=f'announced:stop,{SET_FAILPOINTS[0]}:kill') as eschedule:
        eschedule.wait_frozen_at('announced')
        # This makes the candidates that it has already read stale.
        filler = cluster.eschedule(SMALL_QUERY.replace('VCPU:1', 'VCPU:8'), '--on', first.uuid)
        assert filler.code == 0, filler
        eschedule.resume()
        eschedule.assert_killed_at(SET_FAILPOINTS[0])
    claimed = cluster.placement.read_consumers(other.uuid).keys()
    assert 0 < len(claimed) < 6
    assert cluster.etcd.list_keys('/requests/') == [f'/requests/{set_uuid}']
    if then == 'resumed':
        repeated = cluster.eschedule(*words)
        assert repeated.code == 0, repeated
        assert {compute for compute, _ in NOTIFIED_PATTERN.findall(repeated.stdout)} == {other.uuid}
        assert claimed < cluster.placement.read_consumers(other.uuid).keys()
        for _, instance in NOTIFIED_PATTERN.findall(repeated.stdout):
            wait_address(cluster, instance)
    else:
        check_claims_twice(cluster, other)
        assert cluster.placement.read_consumers(other.uuid).keys() == claimed, 'not while its attempt lives'
        expire_key(cluster, f'/requests/{set_uuid}')
        check_claims_twice(cluster, other)
        assert cluster.placement.read_consumers(other.uuid) == {}
        assert not [read_record(cluster, instance) for instance in claimed if read_record(cluster, instance)]
    check_settled(cluster, first, other)


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGINT])
def test_ended_while_placement_claims_a_large_set(cluster: Control, number: signal.Signals) -> None:
    """F1: kill -9 of eschedule, and Ctrl-C, while a slow placement claims: it ends soon and holds nothing (fake)."""
    computes = [cluster.ecompute('VCPU:60,DISK_GB:600,MEMORY_MB:7680') for _ in range(2)]

    def count_claims() -> int:
        return sum(len(cluster.placement.read_consumers(compute.uuid)) for compute in computes)

    with FaultyPlacement(cluster.placement.port) as placement:
        config = write_config(cluster.directory / 'slow.yaml', cluster.etcd.endpoint, placement.url)
        placement.fail('slow', matches=lambda method, _: method == 'POST', seconds=600)
        with Eschedule(cluster, SMALL_QUERY, '--count', '60', config=config) as eschedule:
            wait_until(lambda: placement.hits == 2, 20, 'both calls are under way')
            began = time.monotonic()
            os.kill(eschedule.pid, number)
            result = eschedule.wait()
            assert time.monotonic() - began < 25, 'less than placement has for an answer'
    if number == signal.SIGINT:
        assert (result.code, result.stdout) == (1, '')
        assert 'eschedule: interrupted' in result.stderr
    wait_until(lambda: count_claims() == 60, 30, 'both calls are carried out all the same')
    expire_attempts(cluster)
    for compute in computes:
        check_claims_twice(cluster, compute)
    assert count_claims() == 0
    check_settled(cluster, *computes)


@pytest.mark.parametrize('step', ['claimed', DELIVERED_STEP])
def test_killed_with_a_whole_set_claimed_or_delivered(cluster: Control, step: str) -> None:
    """F1: kill -9 around the delivery of a set: a repeat delivers it, or reports it, exactly once (fake)."""
    compute, set_uuid = cluster.ecompute(SET_ROOM), str(uuid.uuid4())
    words = SMALL_QUERY, '--count', '3', '--uuid', set_uuid
    with Eschedule(cluster, *words, failpoint=f'{step}:kill') as eschedule:
        eschedule.assert_killed_at(step)
    claimed = cluster.placement.read_consumers(compute.uuid).keys()
    assert len(claimed) == 3
    repeated = cluster.eschedule(*words)
    assert repeated.code == 0, repeated
    assert {instance for _, instance in NOTIFIED_PATTERN.findall(repeated.stdout)} == claimed
    assert repeated.stderr.count('requested before') == (3 if step == DELIVERED_STEP else 0)
    for instance in claimed:
        wait_address(cluster, instance)
    assert cluster.placement.read_consumers(compute.uuid).keys() == claimed
    check_settled(cluster, compute)


def test_killed_after_delivery(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F1: kill -9 of eschedule after its delivery: the request is carried out, and a repeat reports it (fake)."""
    with Eschedule(cluster, *make_create_arguments(instance), failpoint=f'{DELIVERED_STEP}:kill') as eschedule:
        eschedule.assert_killed_at(DELIVERED_STEP)
    repeated = cluster.eschedule(*make_create_arguments(instance))
    assert parse_notice(repeated) == (compute.uuid, instance)
    assert_one_line(repeated, 0, 'requested before', 'this command changed nothing')
    wait_address(cluster, instance)


@pytest.mark.usefixtures('compute')
def test_killed_after_it_undid_its_claim(cluster: Control, instance: str) -> None:
    """F1: kill -9 of eschedule after it released a claim that it could not deliver (fake)."""
    with Eschedule(cluster, *make_create_arguments(instance), failpoint='claimed:stop,undone:kill') as eschedule:
        make_too_late(cluster, eschedule, instance)
        eschedule.assert_killed_at(UNDONE_STEP)
    check_nothing_left(cluster, instance)
    assert parse_notice(cluster.eschedule(*make_create_arguments(instance)))[1] == instance
    wait_address(cluster, instance)


@pytest.mark.usefixtures('compute')
def test_killed_after_the_tombstone(cluster: Control) -> None:
    """F1: kill -9 of eschedule destroy after its acceptance: it is carried out (fake)."""
    instance = boot(cluster)
    with Eschedule(cluster, 'destroy', instance, failpoint=f'{TOMBSTONED_STEP}:kill') as eschedule:
        eschedule.assert_killed_at(TOMBSTONED_STEP)
    wait_state(cluster, instance, 'gone')
    assert_one_line(cluster.eschedule('destroy', instance), 4, 'gone since')


@pytest.mark.parametrize('step', EARLY_FAILPOINTS)
def test_frozen_until_another_attempt_took_over(cluster: Control, step: str) -> None:
    """F1: SIGSTOP of eschedule; another one takes over its --uuid: late writes fail, no claim is moved (fake)."""
    first, second, instance = cluster.ecompute(), cluster.ecompute(), str(uuid.uuid4())
    with Eschedule(cluster, *make_create_arguments(instance), failpoint=f'{step}:stop') as eschedule:
        eschedule.wait_frozen_at(step)
        # Its first choice has no more room, so the second eschedule has to choose the other compute.
        claimed = cluster.placement.read_allocations(instance)
        holder = next(iter(claimed), first.uuid)
        cluster.placement.call('PUT', f'/resource_providers/{holder}/traits', make_disabled_traits(cluster, holder))
        words = f'{SMALL_QUERY}&required=!COMPUTE_STATUS_DISABLED', '--uuid', instance
        if claimed:
            refused = cluster.eschedule(*words)
            assert refused.code == 5, refused
            assert 'by another attempt. Fix: wait two minutes' in refused.stderr, refused
            eschedule.resume()
            result = eschedule.wait()
            assert (result.code, result.stdout) == (5, ''), result
            assert 'took over this uuid' in result.stderr, result
            assert cluster.placement.read_allocations(instance) == {}
        taken_over = cluster.eschedule(*words)
        other = parse_notice(taken_over)[0]
        assert {other, holder} == {first.uuid, second.uuid}
        before = wait_address(cluster, instance)
        if not claimed:
            eschedule.resume()
            result = eschedule.wait()
            assert (result.code, result.stdout) == (5, ''), result
            assert 'took over this uuid' in result.stderr, result
    assert cluster.placement.read_allocations(instance).keys() == {other}
    status = require_record(cluster, instance)
    assert (status['state'], status['compute'], status['addresses'][0]['address']) == ('active', other, before)
    check_settled(cluster, first, second)


def make_disabled_traits(control: Control, provider: str) -> dict[str, object]:
    """Return the traits of a provider that is disabled for queries that exclude this trait."""
    generation = control.placement.call('GET', f'/resource_providers/{provider}')['generation']
    return {'resource_provider_generation': generation, 'traits': ['COMPUTE_STATUS_DISABLED']}


@pytest.mark.parametrize('step', EARLY_FAILPOINTS)
def test_frozen_beyond_its_lease(cluster: Control, compute: Ecompute, instance: str, step: str) -> None:
    """F1: SIGSTOP of eschedule beyond its lease, and its claim is released: it ends and leaves nothing (fake)."""
    with Eschedule(cluster, *make_create_arguments(instance), failpoint=f'{step}:stop') as eschedule:
        eschedule.wait_frozen_at(step)
        expire_key(cluster, f'/requests/{instance}')
        check_claims_twice(cluster, compute)
        assert cluster.placement.read_allocations(instance) == {}
        eschedule.resume()
        assert_one_line(eschedule.wait(), 5, instance, 'not delivered', 'too slow')
    check_nothing_left(cluster, instance)


def test_frozen_after_delivery(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F1: SIGSTOP of eschedule after its delivery, while the instance is destroyed: it changes nothing (fake)."""
    with Eschedule(cluster, *make_create_arguments(instance), failpoint=f'{DELIVERED_STEP}:stop') as eschedule:
        eschedule.wait_frozen_at(DELIVERED_STEP)
        assert cluster.eschedule('destroy', '--wait', instance).code == 0
        check_settled(cluster, compute)
        before = read_revision(cluster)
        eschedule.resume()
        assert parse_notice(eschedule.wait()) == (compute.uuid, instance)
    assert read_revision(cluster) == before


@pytest.mark.usefixtures('compute')
def test_frozen_after_it_undid_its_claim(cluster: Control, instance: str) -> None:
    """F1: SIGSTOP after eschedule undid its claim, while another places its --uuid: that one stays (fake)."""
    with Eschedule(cluster, *make_create_arguments(instance), failpoint='claimed:stop,undone:stop') as eschedule:
        make_too_late(cluster, eschedule, instance)
        eschedule.wait_frozen_at(UNDONE_STEP)
        assert parse_notice(cluster.eschedule(*make_create_arguments(instance)))[1] == instance
        wait_address(cluster, instance)
        eschedule.resume()
        assert_one_line(eschedule.wait(), 5, instance, 'not delivered')
    wait_state(cluster, instance, 'active')


@pytest.mark.usefixtures('compute')
def test_frozen_after_the_tombstone(cluster: Control) -> None:
    """F1: SIGSTOP of eschedule destroy after its acceptance, until it is carried out (fake)."""
    instance = boot(cluster)
    with Eschedule(cluster, 'destroy', instance, failpoint=f'{TOMBSTONED_STEP}:stop') as eschedule:
        eschedule.wait_frozen_at(TOMBSTONED_STEP)
        wait_state(cluster, instance, 'gone')
        before = read_revision(cluster)
        eschedule.resume()
        assert_one_line(eschedule.wait(), 0, instance, 'destroy accepted')
    assert read_revision(cluster) == before


@pytest.mark.slow
def test_claim_of_a_killed_eschedule_is_released(cluster: Control, tmp_path: Path) -> None:
    """F1: kill -9 of eschedule with its claim: its lease expires, and two checks later the claim is released (fake)."""
    compute: Ecompute = cluster.ecompute(directory=tmp_path / 'compute')
    instance = str(uuid.uuid4())
    with Eschedule(cluster, *make_create_arguments(instance), failpoint='claimed:kill') as eschedule:
        eschedule.assert_killed_at('claimed')
    wait_until(lambda: not cluster.etcd.list_keys('/requests/'), 90, 'the lease of the dead eschedule ends')
    lapsed = time.monotonic()
    assert cluster.placement.read_allocations(instance)
    wait_until(lambda: not cluster.placement.read_allocations(instance), 260, 'its claim is released')
    assert time.monotonic() - lapsed >= 55, 'not before two looks'
    check_nothing_left(cluster, instance)
    check_settled(cluster, compute)


# F1: host forget killed between its steps: a repeat of the command continues.


# {failpoint: how many of two instances and a provider the repeat removes}; the name goes with the provider.
FORGET_FAILPOINTS = {'host-released': 3, 'host-emptied': 1, 'host-unregistered': 1}


@pytest.mark.parametrize(('step', 'left'), FORGET_FAILPOINTS.items())
def test_host_forget_killed_is_completed_by_a_repeat(cluster: Control, step: str, left: int) -> None:
    """F1: kill -9 of host forget with a claim released, or with only the provider or its name left (fake)."""
    compute = cluster.ecompute()
    instances = boot_all(cluster, 2)
    compute.kill()
    expire_key(cluster, f'/computes/{compute.uuid}')
    assert cluster.eschedule('destroy', *instances).code == 0
    with Eschedule(cluster, 'host', 'forget', '--fenced', compute.uuid, failpoint=f'{step}:kill') as killed:
        killed.assert_killed_at(step)
    assert (compute.uuid in cluster.eschedule('hosts').stdout) == (step != 'host-unregistered')
    repeated = cluster.eschedule('host', 'forget', '--fenced', socket.gethostname())
    assert repeated.code == 0, repeated
    assert len(repeated.stderr.splitlines()) == left, repeated
    for instance in instances:
        wait_state(cluster, instance, 'gone')
    record_keys = {f'/instances/{compute.uuid}/{instance}' for instance in instances}
    assert set(read_lasting_keys(cluster)) - {'/cluster'} == record_keys
    assert_one_line(cluster.eschedule('host', 'forget', '--fenced', compute.uuid), 4, 'no host has this name or uuid')
    check_settled(cluster)


# F15: eschedule has its claim and loses etcd. No claim stays forever, and the message tells how to continue.


MAX_SECONDS = 40.0


@pytest.fixture
def etcd_proxy(cluster: Control) -> Iterator[Proxy]:
    """A proxy in front of the cluster's etcd."""
    with Proxy(cluster.etcd.port) as proxy:
        yield proxy


def run_and_lose_etcd(
    control: Control, proxy: Proxy, directory: Path, instance: str, etcd_returns: bool = False
) -> Result:
    """Run an eschedule that loses etcd after its claim; return its result.

    With `back` etcd is away only for a moment.
    """
    config = write_config(directory / 'cut.yaml', proxy.address, control.placement.url)
    words = (SMALL_QUERY, '--uuid', instance)
    with Eschedule(control, *words, failpoint='claimed:stop', config=config) as eschedule:
        eschedule.wait_frozen_at('claimed')
        assert len(control.placement.read_allocations(instance)) == 1
        proxy.go_away()
        if etcd_returns:
            proxy.come_back()
        began = time.monotonic()
        eschedule.resume()
        result = eschedule.wait()
        assert time.monotonic() - began < SLOWDOWN_FACTOR * MAX_SECONDS
        return result


@pytest.mark.parametrize('then', ['the same again', 'nobody comes back'])
def test_etcd_lost_permanently_after_the_claim(cluster: Control, etcd_proxy: Proxy, tmp_path: Path, then: str) -> None:
    """F15: eschedule loses etcd after its claim: exit 7 with its uuid; resumed, or released by a compute (fake)."""
    compute, instance = cluster.ecompute(), str(uuid.uuid4())
    result = run_and_lose_etcd(cluster, etcd_proxy, tmp_path, instance)
    assert result.stdout == ''
    assert_one_line(result, 7, 'etcd', etcd_proxy.address, f'--uuid {instance}')
    assert cluster.etcd.get(f'/requests/{instance}') is not None, 'somebody is at it, for as long as the lease lives'
    if then == 'the same again':
        assert parse_notice(cluster.eschedule(SMALL_QUERY, '--uuid', instance)) == (compute.uuid, instance)
        wait_address(cluster, instance)
    else:
        check_claims_twice(cluster, compute)
        assert len(cluster.placement.read_allocations(instance)) == 1
        expire_key(cluster, f'/requests/{instance}')
        check_claims_twice(cluster, compute)
        assert cluster.placement.read_allocations(instance) == {}
        assert [key for key in read_lasting_keys(cluster) if instance in key] == []
    check_settled(cluster, compute)


def test_etcd_lost_briefly_after_the_claim(cluster: Control, etcd_proxy: Proxy, tmp_path: Path) -> None:
    """F15: eschedule's connection to etcd breaks after its claim, etcd stays: placed, or undone completely (fake)."""
    compute, instance = cluster.ecompute(), str(uuid.uuid4())
    result = run_and_lose_etcd(cluster, etcd_proxy, tmp_path, instance, etcd_returns=True)
    if result.code == 0:
        assert parse_notice(result) == (compute.uuid, instance)
        wait_address(cluster, instance)
    else:
        assert result.code == 5, result
        assert 'undone' in result.stderr
        assert cluster.placement.read_allocations(instance) == {}
        assert [key for key in read_lasting_keys(cluster) if instance in key] == []
    check_settled(cluster, compute)
