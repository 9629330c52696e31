"""eschedule host forget: refusals, removal of a lost compute, and returning computes."""

from __future__ import annotations

import socket
import uuid

import pytest

from tests.kit.by_hand import claim
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, guests
from tests.kit.invariants import allocations, check, everything
from tests.kit.servers import until
from tests.kit.sharing import hosts, silence, states
from tests.kit.story import NOBODY, SMALL, addressed, boot, log_of, logged, one_line, place, reached, record, reserved


def forget(control: Control, compute: str) -> list[str]:
    """Forget a compute; return the messages without the program's name."""
    result = control.eschedule('host', 'forget', '--fenced', compute)
    assert (result.code, result.stdout) == (0, ''), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def placed_on_a_deaf_one(control: Control, compute: Ecompute) -> str:
    """Place an instance whose compute never sees the request and becomes silent."""
    compute.pause()
    _, instance = place(control, f'{SMALL}&in_tree={compute.uuid}')
    silence(control, compute)
    assert record(control, instance) is None
    return instance


def nothing_of(control: Control, compute: str) -> None:
    """Check that only the records of finished instances still mention the compute."""
    assert control.etcd.keys(f'/hosts/{compute}/') == []
    assert control.placement.inventory(compute) == {}
    providers = control.placement.call('GET', '/resource_providers')['resource_providers']
    assert compute not in {provider['uuid'] for provider in providers}
    assert compute not in hosts(control)
    assert control.etcd.keys(f'/hostnames/{compute}') == []


def test_what_must_not_be_forgotten(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    before = set(everything(cluster)), allocations(cluster)

    def expect_refusal(code: int, *words: str, of: str = compute.uuid) -> None:
        result = cluster.eschedule('host', 'forget', of)
        one_line(result, code, of, *words)
        assert result.stdout == ''
        assert (set(everything(cluster)) - {f'/computes/{compute.uuid}'}, allocations(cluster)) == expected

    expected = before[0] - {f'/computes/{compute.uuid}'}, before[1]
    expect_refusal(5, 'is alive', socket.gethostname(), 'stop its ecompute first')
    compute.stop()
    expect_refusal(5, f'instance {instance}', 'still there', 'destroy')
    compute.start()
    silence(cluster, compute)
    expect_refusal(5, f'instance {instance}', 'still there', 'destroy')
    expect_refusal(4, 'no such compute', of=NOBODY)
    # Providers of other services are not computes of ecomp, empty or not.
    other = str(uuid.uuid4())
    cluster.placement.call('POST', '/resource_providers', {'uuid': other, 'name': 'nova-compute-7'})
    expect_refusal(4, 'no such compute', 'nova-compute-7', of=other)
    expect_refusal(4, 'no such compute', of=cluster.placement.make_provider(DISK_GB=1000))
    providers = cluster.placement.call('GET', '/resource_providers')['resource_providers']
    assert len(providers) == 3
    compute.start()


def test_an_eschedule_at_a_claim_there_is_waited_for(cluster: Control, compute: Ecompute, instance: str) -> None:
    with Eschedule(cluster, '--uuid', instance, SMALL, failpoint='claimed:stop') as create:
        create.stopped_at('claimed')
        silence(cluster, compute)
        one_line(cluster.eschedule('host', 'forget', compute.uuid), 5, 'an eschedule is at work', instance)
        create.go_on()
        assert create.end().code == 0
    # The request was delivered and nothing is lost: the compute may come back.
    one_line(cluster.eschedule('host', 'forget', compute.uuid), 5, f'instance {instance} still there')
    compute.start()
    addressed(cluster, instance)


def test_an_instance_that_lives_elsewhere_keeps_its_claim(cluster: Control) -> None:
    dead, compute = cluster.ecompute(), cluster.ecompute()
    instance = boot(cluster, f'{SMALL}&in_tree={compute.uuid}')
    silence(cluster, dead)
    # A claim that was changed manually or by another client: one consumer on two computes.
    allocation = cluster.placement.call('GET', f'/allocations/{instance}')
    body = {
        'allocations': {provider: {'resources': {'VCPU': 1}} for provider in (dead.uuid, compute.uuid)},
        'consumer_type': 'INSTANCE',
        **{name: allocation[name] for name in ('user_id', 'project_id', 'consumer_generation')},
    }
    cluster.placement.call('PUT', f'/allocations/{instance}', body)
    message = f'instance {instance} of compute {socket.gethostname()}'
    one_line(cluster.eschedule('host', 'forget', dead.uuid), 5, message)
    assert set(cluster.placement.allocations(instance)) == {dead.uuid, compute.uuid}
    cluster.eschedule('destroy', '--wait', instance)
    assert forget(cluster, dead.uuid) == [f'{dead.uuid}: its resource provider is removed']
    check(cluster, compute)


@pytest.mark.parametrize('how', ['closed', 'orphaned'])
def test_an_empty_one_is_forgotten_once(cluster: Control, how: str) -> None:
    compute = cluster.ecompute()
    if how == 'closed':
        compute.stop()
    else:
        silence(cluster, compute)
    assert states(cluster) == {compute.uuid: how}
    assert forget(cluster, compute.uuid) == [f'{compute.uuid}: its resource provider is removed']
    nothing_of(cluster, compute.uuid)
    one_line(cluster.eschedule('host', 'forget', compute.uuid), 4, compute.uuid, 'no such compute')
    check(cluster)


def test_destroys_it_never_carried_out_end_with_it(cluster: Control) -> None:
    compute = cluster.ecompute()
    seen_instance = boot(cluster)
    unseen_instance = placed_on_a_deaf_one(cluster, compute)
    orphan = str(uuid.uuid4())
    claim(cluster, orphan, compute.uuid, room={'VCPU': 1})
    cluster.etcd.put(f'/hosts/{compute.uuid}/by-hand', '')
    for instance in (seen_instance, unseen_instance):
        one_line(cluster.eschedule('host', 'forget', compute.uuid), 5, 'still there')
        one_line(cluster.eschedule('destroy', instance), 0, 'when it is back')
    shown = hosts(cluster)[compute.uuid]
    assert (shown['state'], shown['instances'], shown['resources']['VCPU']['used']) == ('silent', 0, 3)

    refused = one_line(cluster.eschedule('host', 'forget', compute.uuid), 5, 'it holds claims and may run', '--fenced')
    assert len(allocations(cluster)) == 3, refused
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
        gone = reached(cluster, instance, 'gone')
        assert 'forgotten' in gone['fault']
        assert 'gone' in gone['stages']
        one_line(cluster.eschedule(instance), 4, 'gone since')
        one_line(cluster.eschedule('--uuid', instance, SMALL), 5, 'never used twice')
    assert allocations(cluster) == {}
    nothing_of(cluster, compute.uuid)
    assert set(everything(cluster)) - {'/cluster'} == {
        f'/instances/{compute.uuid}/{destroyed}' for destroyed in (seen_instance, unseen_instance)
    }
    check(cluster)
    one_line(cluster.eschedule('host', 'forget', compute.uuid), 4, 'no such compute')


def test_a_claim_made_meanwhile_keeps_the_provider(cluster: Control) -> None:
    compute = cluster.ecompute()
    silence(cluster, compute)
    with Eschedule(cluster, 'host', 'forget', compute.uuid, failpoint='host-emptied:stop') as forget_command:
        forget_command.stopped_at('host-emptied')
        claim(cluster, NOBODY, compute.uuid, room={'VCPU': 1})
        forget_command.go_on()
        one_line(forget_command.end(), 5, compute.uuid, 'its resource provider stays', 'allocations')
    assert cluster.placement.consumers(compute.uuid) == {NOBODY: {'VCPU': 1}}
    messages = forget(cluster, compute.uuid)
    assert messages == [
        f'{NOBODY}: its claim is released: no request stands behind it',
        f'{compute.uuid}: its resource provider is removed',
    ]
    nothing_of(cluster, compute.uuid)


def test_what_others_hold_of_others_stays(cluster: Control) -> None:
    other = str(uuid.uuid4())
    cluster.placement.call('POST', '/resource_providers', {'uuid': other, 'name': 'nova-compute-7'})
    inventories = {'resource_provider_generation': 0, 'inventories': {'VCPU': {'total': 8}}}
    cluster.placement.call('PUT', f'/resource_providers/{other}/inventories', inventories)
    claim(cluster, NOBODY, other, room={'VCPU': 2})
    one_line(cluster.eschedule('host', 'forget', other), 4, 'no such compute', 'nova-compute-7')
    cluster.etcd.put(f'/hosts/{other}/by-hand', '')
    assert forget(cluster, other) == [f'/hosts/{other}/by-hand: removed: no compute would have carried it out']
    assert cluster.placement.consumers(other) == {NOBODY: {'VCPU': 2}}


@pytest.mark.unaudited('the guest that a forgotten host still has is kept')
def test_a_forgotten_one_that_comes_back(cluster: Control) -> None:
    compute = cluster.ecompute()
    instance = boot(cluster)
    silence(cluster, compute)
    assert cluster.eschedule('destroy', instance).code == 0
    forget(cluster, compute.uuid)
    nothing_of(cluster, compute.uuid)
    compute.start()
    # It registers again, keeps and reports the unmanaged guest, and accepts new instances.
    assert states(cluster) == {compute.uuid: 'up'}
    assert reserved(cluster, compute.uuid) == 0
    until(lambda: logged(compute, instance, 'kept, and unmanaged'), 20, 'the guest is reported')
    assert guests(compute)[instance]['running']
    boot(cluster)
    assert record(cluster, instance)['state'] == 'gone'  # type: ignore[index]
    check(cluster, compute, foreign={instance})
    log_of(compute)


def test_one_that_comes_back_while_it_is_forgotten(cluster: Control, compute: Ecompute) -> None:
    silence(cluster, compute)
    with Eschedule(cluster, 'host', 'forget', compute.uuid, failpoint='host-emptied:stop') as forget_command:
        forget_command.stopped_at('host-emptied')
        compute.start()
        forget_command.go_on()
        result = forget_command.end()
    assert result.code == 5, result
    removed, refusal = result.stderr.splitlines()
    assert removed.endswith(f'{compute.uuid}: its resource provider is removed')
    assert all(word in refusal for word in (compute.uuid, 'came back', 'restart its ecompute')), refusal
    compute.restart()
    addressed(cluster, place(cluster)[1])


def test_nothing_is_ended_for_one_that_is_alive_again(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    silence(cluster, compute)
    assert cluster.eschedule('destroy', instance).code == 0
    before = set(everything(cluster))
    with Eschedule(
        cluster, 'host', 'forget', '--fenced', compute.uuid, failpoint='host-released:stop'
    ) as forget_command:
        forget_command.stopped_at('host-released')
        # Write a presence as if the compute were alive but had not read its requests yet.
        cluster.etcd.put(f'/computes/{compute.uuid}', '{}', cluster.etcd.grant())
        forget_command.go_on()
        one_line(forget_command.end(), 5, compute.uuid, 'is not forgotten', 'it is alive')
    assert set(everything(cluster)) == {*before, f'/computes/{compute.uuid}'}
    assert record(cluster, instance)['state'] == 'active'  # type: ignore[index]
    compute.start()
    assert reached(cluster, instance, 'gone')['fault'] is None


def test_one_that_comes_back_in_time_carries_its_destroys_out_itself(cluster: Control, compute: Ecompute) -> None:
    instances = [boot(cluster) for _ in range(2)]
    silence(cluster, compute)
    assert cluster.eschedule('destroy', *instances).code == 0
    with Eschedule(
        cluster, 'host', 'forget', '--fenced', compute.uuid, failpoint='host-released:stop'
    ) as forget_command:
        forget_command.stopped_at('host-released')
        compute.start()
        forget_command.go_on()
        one_line(forget_command.end(), 5, compute.uuid, 'is not forgotten', 'it is alive')
    for instance in instances:
        assert reached(cluster, instance, 'gone')['fault'] is None
    assert states(cluster) == {compute.uuid: 'up'}
