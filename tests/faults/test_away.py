"""eschedule while a server is away: it soon ends with exit 7 and names the server.

The server is killed or frozen before the command and between its steps. Then it returns: nothing is half done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.commands import Control, Ecompute, Result, write_config
from tests.kit.gate import Gate
from tests.kit.hands import Eschedule, check_settled
from tests.kit.servers import Server, wait_until
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    boot,
    parse_notice,
    place,
    wait_address,
    wait_state,
)

# At most a few calls of 5 s each, and the concurrent start of seven commands on a slow machine.
ETCD_SECONDS = 40.0
# An unanswered read is abandoned after 30 s; a claim is read back once.
PLACEMENT_SECONDS = 100.0


def stop_server(server: Server, fault: str) -> None:
    if fault == 'killed':
        server.kill()
    else:
        server.pause()


def restore_server(server: Server, fault: str) -> None:
    if fault == 'killed':
        server.start()
    else:
        server.resume()


def run_concurrently(control: Control, forms: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Result]:
    with ThreadPoolExecutor(len(forms)) as threads:
        results = threads.map(lambda words: control.eschedule(*words, timeout=seconds), forms.values())
        return dict(zip(forms, results, strict=True))


def strip_waiting_line(result: Result, url: str) -> Result:
    # eschedule must not be silent for half a minute.
    first, remaining = result.stderr.split('\n', 1)
    assert first.startswith(f'eschedule: waiting for placement at {url}, which has not answered for')
    return result._replace(stderr=remaining)


def check_recovery(control: Control, compute: Ecompute, *instances: str) -> None:
    wait_until(lambda: control.etcd.list_keys('/computes/'), 30, 'the compute says again that it is alive')
    _, created = place(control)
    for instance in (*instances, created):
        wait_address(control, instance)
    check_settled(control, compute)
    for instance in (*instances, created):
        assert control.eschedule('destroy', instance).code == 0
    for instance in (*instances, created):
        wait_state(control, instance, 'gone')
    check_settled(control, compute)
    assert control.placement.read_consumers(compute.uuid) == {}
    assert control.etcd.list_keys('/hosts/') + control.etcd.list_keys('/requests/') == []


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
def test_every_command_without_etcd(own_control: Control, compute: Ecompute, how: str) -> None:
    """F10: etcd killed or frozen during every command: exit 7 and the request's state (fake)."""
    instance = boot(own_control)
    stop_server(own_control.etcd, how)
    forms = {
        'create': (SMALL_QUERY,),
        'create again': (SMALL_QUERY, '--uuid', UNKNOWN_UUID),
        'query': (instance,),
        'list': ('list',),
        'show': ('show', instance),
        'destroy': ('destroy', instance),
        'destroy and wait': ('destroy', '--wait', '--timeout', '2', instance),
        'hosts': ('hosts',),
        'forget': ('host', 'forget', compute.uuid),
    }
    messages = {
        **dict.fromkeys(('create', 'create again'), 'nothing was changed'),
        **dict.fromkeys(('destroy', 'destroy and wait'), f'the destroy of {instance} is not accepted'),
        'forget': 'only what is reported above was removed',
    }
    for name, result in run_concurrently(own_control, forms, ETCD_SECONDS).items():
        assert_one_line(result, 7, f'etcd at {own_control.etcd.endpoint} cannot be reached', messages.get(name, ''))
        assert result.stdout == '', name
    restore_server(own_control.etcd, how)
    check_recovery(own_control, compute, instance)


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
def test_every_command_without_placement(own_control: Control, compute: Ecompute, how: str) -> None:
    """F16: placement killed or frozen: exit 7 within half a minute, or not needed (fake)."""
    instance = boot(own_control)
    stop_server(own_control.placement, how)
    needed = {
        'create': (SMALL_QUERY,),
        'create again': (SMALL_QUERY, '--uuid', UNKNOWN_UUID),
        'hosts': ('hosts',),
        'forget': ('host', 'forget', UNKNOWN_UUID),
    }
    not_needed = {'query': (instance,), 'list': ('list',), 'show': ('show', instance), 'destroy': ('destroy', instance)}
    results = run_concurrently(own_control, {**needed, **not_needed}, PLACEMENT_SECONDS)
    messages = {
        **dict.fromkeys(('create', 'create again'), 'nothing was changed'),
        'forget': 'only what is reported above was removed',
    }
    for name in needed:
        result = strip_waiting_line(results[name], own_control.placement.url) if how == 'frozen' else results[name]
        assert_one_line(result, 7, f'placement at {own_control.placement.url}', messages.get(name, ''))
        assert results[name].stdout == '', name
    for name in not_needed:
        assert results[name].code == 0, results[name]
    restore_server(own_control.placement, how)
    wait_state(own_control, instance, 'gone')
    check_recovery(own_control, compute)


def test_placement_lost_after_it_stored_the_claim(own_control: Control, compute: Ecompute, instance: str) -> None:
    """F16: placement killed after it stored the claim: the same command continues (fake)."""
    with Gate(own_control.placement.port) as gate:
        config = write_config(own_control.directory / 'gate.yaml', own_control.etcd.endpoint, gate.url)
        gate.hold(b'PUT /allocations')
        with Eschedule(own_control, SMALL_QUERY, '--uuid', instance, config=config) as command:
            assert gate.held.wait(30)
            own_control.placement.kill()
            gate.cut()
            result = command.wait(PLACEMENT_SECONDS)
    unknown = f'it is unknown whether {instance} holds its claim', f'with --uuid {instance}'
    assert_one_line(result, 7, f'placement at {gate.url}', *unknown)
    own_control.placement.start()
    assert set(own_control.placement.read_allocations(instance)) == {compute.uuid}
    assert parse_notice(own_control.eschedule(SMALL_QUERY, '--uuid', instance)) == (compute.uuid, instance)
    check_recovery(own_control, compute, instance)
