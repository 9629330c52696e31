"""eschedule host forget: refusals, removal of a lost compute, and returning computes.

What happens beside it is in tests/model (scenarios with "forget") and tests/functional/test_claims.py.
"""

from __future__ import annotations

import socket
import uuid

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


def test_forgotten_compute_that_returns_removes_what_was_destroyed(cluster: Control) -> None:
    compute = cluster.ecompute()
    instance = boot(cluster)
    kill_and_lapse(cluster, compute)
    assert list_states(cluster) == {compute.uuid: 'silent'}
    assert cluster.eschedule('destroy', instance).code == 0
    forget(cluster, compute.uuid)
    expect_forgotten(cluster, compute.uuid)
    assert_one_line(cluster.eschedule('host', 'forget', compute.uuid), 4, compute.uuid, 'no host has this name or uuid')
    compute.start()
    # It registers again, and accepts new instances.
    assert list_states(cluster) == {compute.uuid: 'up'}
    assert read_reserved(cluster, compute.uuid) == 0
    wait_until(lambda: instance not in read_guests(compute), 20, 'the guest is removed')
    assert read_record(cluster, instance)['state'] == 'gone'  # type: ignore[index]
    assert not find_log_lines(compute, instance, 'the guest is kept')
    boot(cluster)
    check_invariants(cluster, compute)
    read_log(compute)


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
