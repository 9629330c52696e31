"""eschedule host forget: refusals, removal of a lost compute, and returning computes."""

from __future__ import annotations

import json
import socket
import uuid

import pytest

from tests.kit.by_hand import put_claim
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, read_guests
from tests.kit.invariants import check_invariants, read_allocations, read_lasting_keys
from tests.kit.servers import wait_until
from tests.kit.sharing import kill_and_lapse, list_hosts, list_states
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    boot,
    find_log_lines,
    place,
    read_log,
    read_record,
    read_reserved,
    wait_address,
    wait_log_lines,
    wait_state,
)


def forget(control: Control, compute: str) -> list[str]:
    """Forget a compute; return the messages without the program's name."""
    result = control.eschedule('host', 'forget', '--fenced', compute)
    assert (result.code, result.stdout) == (0, ''), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def place_unseen(control: Control, compute: Ecompute) -> str:
    """Place an instance whose compute never sees the request and becomes silent."""
    compute.pause()
    _, instance = place(control, f'{SMALL_QUERY}&in_tree={compute.uuid}')
    kill_and_lapse(control, compute)
    assert read_record(control, instance) is None
    return instance


def expect_forgotten(control: Control, compute: str) -> None:
    """Check that only the records of finished instances still mention the compute."""
    assert control.etcd.list_keys(f'/hosts/{compute}/') == []
    assert control.placement.read_inventory(compute) == {}
    providers = control.placement.call('GET', '/resource_providers')['resource_providers']
    assert compute not in {provider['uuid'] for provider in providers}
    assert compute not in list_hosts(control)
    assert control.etcd.list_keys(f'/hostnames/{compute}') == []


def test_forget_refuses_living_used_and_foreign_providers(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    before = set(read_lasting_keys(cluster)), read_allocations(cluster)

    def expect_refusal(code: int, *words: str, of: str = compute.uuid) -> None:
        result = cluster.eschedule('host', 'forget', of)
        assert_one_line(result, code, of, *words)
        assert result.stdout == ''
        assert (set(read_lasting_keys(cluster)) - {f'/computes/{compute.uuid}'}, read_allocations(cluster)) == expected

    expected = before[0] - {f'/computes/{compute.uuid}'}, before[1]
    expect_refusal(5, 'is alive', socket.gethostname(), 'Fix: stop its ecompute')
    compute.stop()
    expect_refusal(5, f'it still has instance {instance}', 'Fix: destroy')
    compute.start()
    kill_and_lapse(cluster, compute)
    expect_refusal(5, f'it still has instance {instance}', 'Fix: destroy')
    expect_refusal(4, 'no host has this name or uuid', of=UNKNOWN_UUID)
    # Providers of other services are not computes of ecomp, empty or not.
    other = str(uuid.uuid4())
    cluster.placement.call('POST', '/resource_providers', {'uuid': other, 'name': 'nova-compute-7'})
    expect_refusal(4, 'no host has this name or uuid', 'nova-compute-7', of=other)
    expect_refusal(4, 'no host has this name or uuid', of=cluster.placement.make_provider(DISK_GB=1000))
    providers = cluster.placement.call('GET', '/resource_providers')['resource_providers']
    assert len(providers) == 3
    compute.start()


def test_forget_is_refused_while_a_claim_is_in_flight(cluster: Control, compute: Ecompute, instance: str) -> None:
    with Eschedule(cluster, '--uuid', instance, SMALL_QUERY, failpoint='claimed:stop') as create:
        create.wait_frozen_at('claimed')
        kill_and_lapse(cluster, compute)
        assert_one_line(
            cluster.eschedule('host', 'forget', compute.uuid), 5, 'an attempt to place', instance, 'is still running'
        )
        create.resume()
        assert create.wait().code == 0
    # The request was delivered and nothing is lost: the compute may come back.
    assert_one_line(cluster.eschedule('host', 'forget', compute.uuid), 5, f'it still has instance {instance}')
    compute.start()
    wait_address(cluster, instance)


def test_instance_on_another_compute_keeps_its_claim(cluster: Control) -> None:
    dead, compute = cluster.ecompute(), cluster.ecompute()
    instance = boot(cluster, f'{SMALL_QUERY}&in_tree={compute.uuid}')
    kill_and_lapse(cluster, dead)
    # A claim that was changed manually or by another client: one consumer on two computes.
    allocation = cluster.placement.call('GET', f'/allocations/{instance}')
    body = {
        'allocations': {provider: {'resources': {'VCPU': 1}} for provider in (dead.uuid, compute.uuid)},
        'consumer_type': 'INSTANCE',
        **{name: allocation[name] for name in ('user_id', 'project_id', 'consumer_generation')},
    }
    cluster.placement.call('PUT', f'/allocations/{instance}', body)
    message = f'instance {instance} belongs to compute {socket.gethostname()}'
    assert_one_line(cluster.eschedule('host', 'forget', dead.uuid), 5, message)
    assert set(cluster.placement.read_allocations(instance)) == {dead.uuid, compute.uuid}
    cluster.eschedule('destroy', '--wait', instance)
    assert forget(cluster, dead.uuid) == [f'{dead.uuid}: its resource provider is removed']
    check_invariants(cluster, compute)


@pytest.mark.parametrize('how', ['closed', 'orphaned'])
def test_empty_compute_is_forgotten_once(cluster: Control, how: str) -> None:
    compute = cluster.ecompute()
    if how == 'closed':
        compute.stop()
    else:
        kill_and_lapse(cluster, compute)
    assert list_states(cluster) == {compute.uuid: how}
    assert forget(cluster, compute.uuid) == [f'{compute.uuid}: its resource provider is removed']
    expect_forgotten(cluster, compute.uuid)
    assert_one_line(cluster.eschedule('host', 'forget', compute.uuid), 4, compute.uuid, 'no host has this name or uuid')
    check_invariants(cluster)


def test_forget_finishes_pending_destroys(cluster: Control) -> None:
    compute = cluster.ecompute()
    seen_instance = boot(cluster)
    unseen_instance = place_unseen(cluster, compute)
    orphan = str(uuid.uuid4())
    put_claim(cluster, orphan, compute.uuid, amounts={'VCPU': 1})
    cluster.etcd.put(f'/hosts/{compute.uuid}/by-hand', '')
    for instance in (seen_instance, unseen_instance):
        assert_one_line(cluster.eschedule('host', 'forget', compute.uuid), 5, 'it still has instance')
        assert_one_line(cluster.eschedule('destroy', instance), 0, 'once this compute is no longer silent')
    shown = list_hosts(cluster)[compute.uuid]
    # Both are there, as `host show` lists them, until they are destroyed.
    assert (shown['state'], shown['instances'], shown['resources']['VCPU']['used']) == ('silent', 2, 3)

    refused = assert_one_line(
        cluster.eschedule('host', 'forget', compute.uuid), 5, 'it holds claims and may run', '--fenced'
    )
    assert len(read_allocations(cluster)) == 3, refused
    messages = forget(cluster, compute.uuid)
    assert len(messages) == 5
    for line, words in zip(
        messages,
        [
            *(
                (destroyed, 'its claim and its keys are removed')
                for destroyed in sorted((seen_instance, unseen_instance))
            ),
            (f'/hosts/{compute.uuid}/by-hand: removed',),
            (f'{orphan}: its claim is released',),
            (f'{compute.uuid}: its resource provider is removed',),
        ],
        strict=True,
    ):
        assert all(word in line for word in words), messages
    for instance in (seen_instance, unseen_instance):
        gone = wait_state(cluster, instance, 'gone')
        assert 'forgotten' in gone['fault']
        assert 'gone' in gone['stages']
        assert_one_line(cluster.eschedule(instance), 4, 'gone since')
        assert_one_line(cluster.eschedule('--uuid', instance, SMALL_QUERY), 5, 'never used twice')
    assert read_allocations(cluster) == {}
    expect_forgotten(cluster, compute.uuid)
    assert set(read_lasting_keys(cluster)) - {'/cluster'} == {
        f'/instances/{compute.uuid}/{destroyed}' for destroyed in (seen_instance, unseen_instance)
    }
    check_invariants(cluster)
    assert_one_line(cluster.eschedule('host', 'forget', compute.uuid), 4, 'no host has this name or uuid')


def test_claim_made_during_forget_keeps_the_provider(cluster: Control) -> None:
    compute = cluster.ecompute()
    kill_and_lapse(cluster, compute)
    with Eschedule(cluster, 'host', 'forget', compute.uuid, failpoint='host-emptied:stop') as forget_command:
        forget_command.wait_frozen_at('host-emptied')
        put_claim(cluster, UNKNOWN_UUID, compute.uuid, amounts={'VCPU': 1})
        forget_command.resume()
        assert_one_line(forget_command.wait(), 5, compute.uuid, 'its resource provider stays', 'allocations')
    assert cluster.placement.read_consumers(compute.uuid) == {UNKNOWN_UUID: {'VCPU': 1}}
    messages = forget(cluster, compute.uuid)
    assert messages == [
        f'{UNKNOWN_UUID}: its claim is released: no request owns it',
        f'{compute.uuid}: its resource provider is removed',
    ]
    expect_forgotten(cluster, compute.uuid)


def test_foreign_allocations_on_foreign_providers_stay(cluster: Control) -> None:
    other = str(uuid.uuid4())
    cluster.placement.call('POST', '/resource_providers', {'uuid': other, 'name': 'nova-compute-7'})
    inventories = {'resource_provider_generation': 0, 'inventories': {'VCPU': {'total': 8}}}
    cluster.placement.call('PUT', f'/resource_providers/{other}/inventories', inventories)
    put_claim(cluster, UNKNOWN_UUID, other, amounts={'VCPU': 2})
    assert_one_line(cluster.eschedule('host', 'forget', other), 4, 'no host has this name or uuid', 'nova-compute-7')
    cluster.etcd.put(f'/hosts/{other}/by-hand', '')
    assert forget(cluster, other) == [f'/hosts/{other}/by-hand: removed: no compute carries out this request']
    assert cluster.placement.read_consumers(other) == {UNKNOWN_UUID: {'VCPU': 2}}


@pytest.mark.parametrize(
    'is_expired',
    [False, pytest.param(True, marks=pytest.mark.unaudited('a day later the guest of a forgotten host is kept'))],
)
def test_forgotten_compute_that_returns_removes_what_was_destroyed(cluster: Control, is_expired: bool) -> None:
    """Check that the accepted destroy is carried out while the record says gone, and that the guest is kept later."""
    compute = cluster.ecompute()
    instance = boot(cluster)
    kill_and_lapse(cluster, compute)
    assert cluster.eschedule('destroy', instance).code == 0
    forget(cluster, compute.uuid)
    expect_forgotten(cluster, compute.uuid)
    record_key = f'/instances/{compute.uuid}/{instance}'
    if is_expired:
        cluster.etcd.delete(record_key)
    compute.start()
    # It registers again, and accepts new instances.
    assert list_states(cluster) == {compute.uuid: 'up'}
    assert read_reserved(cluster, compute.uuid) == 0
    if is_expired:
        wait_log_lines(compute, instance, 'the guest is kept, but not managed')
        assert read_guests(compute)[instance]['running']
        findings = json.loads(cluster.eschedule('audit', '-f', 'json').stdout)
        assert [(finding['code'], finding['subject']) for finding in findings] == [('domain-orphaned', instance)]
    else:
        wait_until(lambda: instance not in read_guests(compute), 20, 'the guest is removed')
        assert read_record(cluster, instance)['state'] == 'gone'  # type: ignore[index]
        assert not find_log_lines(compute, instance, 'the guest is kept')
        compute.restart()
    boot(cluster)
    check_invariants(cluster, compute, foreign={instance} if is_expired else ())
    read_log(compute)


def test_compute_that_returns_during_forget_must_restart(cluster: Control, compute: Ecompute) -> None:
    kill_and_lapse(cluster, compute)
    with Eschedule(cluster, 'host', 'forget', compute.uuid, failpoint='host-emptied:stop') as forget_command:
        forget_command.wait_frozen_at('host-emptied')
        compute.start()
        forget_command.resume()
        result = forget_command.wait()
    assert result.code == 5, result
    removed, refusal = result.stderr.splitlines()
    assert removed.endswith(f'{compute.uuid}: its resource provider is removed')
    assert all(
        word in refusal for word in (compute.uuid, 'was started while it was being forgotten', 'restart its ecompute')
    ), refusal
    compute.restart()
    wait_address(cluster, place(cluster)[1])


def test_forget_stops_if_the_compute_is_alive_again(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    kill_and_lapse(cluster, compute)
    assert cluster.eschedule('destroy', instance).code == 0
    before = set(read_lasting_keys(cluster))
    with Eschedule(
        cluster, 'host', 'forget', '--fenced', compute.uuid, failpoint='host-released:stop'
    ) as forget_command:
        forget_command.wait_frozen_at('host-released')
        # Write a presence as if the compute were alive but had not read its requests yet.
        cluster.etcd.put(f'/computes/{compute.uuid}', '{}', cluster.etcd.grant())
        forget_command.resume()
        assert_one_line(forget_command.wait(), 5, compute.uuid, 'is not forgotten', 'it is alive')
    assert set(read_lasting_keys(cluster)) == {*before, f'/computes/{compute.uuid}'}
    assert read_record(cluster, instance)['state'] == 'active'  # type: ignore[index]
    compute.start()
    assert wait_state(cluster, instance, 'gone')['fault'] is None


def test_compute_that_returns_in_time_carries_out_its_destroys(cluster: Control, compute: Ecompute) -> None:
    instances = [boot(cluster) for _ in range(2)]
    kill_and_lapse(cluster, compute)
    assert cluster.eschedule('destroy', *instances).code == 0
    with Eschedule(
        cluster, 'host', 'forget', '--fenced', compute.uuid, failpoint='host-released:stop'
    ) as forget_command:
        forget_command.wait_frozen_at('host-released')
        compute.start()
        forget_command.resume()
        assert_one_line(forget_command.wait(), 5, compute.uuid, 'is not forgotten', 'it is alive')
    for instance in instances:
        assert wait_state(cluster, instance, 'gone')['fault'] is None
    assert list_states(cluster) == {compute.uuid: 'up'}
