"""eschedule while a server is away: it soon ends with exit 7 and names the server.

The server is killed or frozen before the command and between its steps. Then it returns: nothing is half done.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.commands import Control, Ecompute, Result, run_eschedule_process, write_config
from tests.kit.gate import Gate
from tests.kit.hands import Eschedule, check_settled
from tests.kit.proxy import Proxy
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


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
@pytest.mark.parametrize('step', [pytest.param('announced', marks=pytest.mark.slow), 'claimed'])
def test_etcd_lost_before_claim_or_delivery(own_control: Control, step: str, how: str) -> None:
    """F15: etcd lost before claim or delivery: the same command with --uuid continues (fake)."""
    compute, instance = own_control.ecompute(), str(uuid.uuid4())
    with Eschedule(own_control, SMALL_QUERY, '--uuid', instance, failpoint=f'{step}:stop') as command:
        command.wait_frozen_at(step)
        stop_server(own_control.etcd, how)
        command.resume()
        result = command.wait(ETCD_SECONDS)
    line = assert_one_line(result, 7, f'etcd at {own_control.etcd.endpoint} cannot be reached')
    if step == 'announced':
        assert 'nothing was changed' in line
    else:
        # Groups and quotas are read before anything is delivered.
        assert f'{instance} is not placed' in line
        assert f'the same command with --uuid {instance}' in line
    assert result.stdout == ''
    assert bool(own_control.placement.read_allocations(instance)) == (step == 'claimed')
    restore_server(own_control.etcd, how)
    wait_until(lambda: own_control.etcd.list_keys('/computes/'), 30, 'the compute says again that it is alive')
    assert parse_notice(own_control.eschedule(SMALL_QUERY, '--uuid', instance)) == (compute.uuid, instance)
    check_recovery(own_control, compute, instance)


@pytest.mark.parametrize('arrived', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_etcd_lost_during_delivery(own_control: Control, compute: Ecompute, instance: str, arrived: bool) -> None:
    """F15: etcd lost during a delivery: unknown, the same command finds out (fake)."""
    key = f'/hosts/{compute.uuid}/{instance}'
    with Proxy(own_control.etcd.port) as proxy:
        config = write_config(own_control.directory / 'proxy.yaml', proxy.address, own_control.placement.url)
        if arrived:
            proxy.lose_answer(b'"allocations"', lambda: own_control.etcd.get(key), stay_away=True)
        else:
            proxy.lose_request(b'"allocations"', stay_away=True)
        result = run_eschedule_process(config, SMALL_QUERY, '--uuid', instance, timeout=ETCD_SECONDS)
        assert proxy.has_lost
    unknown = f'it is unknown whether {instance} was delivered', f'the same command with --uuid {instance}'
    assert_one_line(result, 7, f'etcd at {proxy.address} cannot be reached', *unknown)
    assert result.stdout == ''
    assert bool(own_control.etcd.get(key)) is arrived
    # A claim whose delivery has an unknown outcome is not released.
    assert set(own_control.placement.read_allocations(instance)) == {compute.uuid}
    repeated = own_control.eschedule(SMALL_QUERY, '--uuid', instance)
    assert parse_notice(repeated) == (compute.uuid, instance)
    check_recovery(own_control, compute, instance)


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
def test_placement_lost_after_it_stored_the_claim(
    own_control: Control, compute: Ecompute, instance: str, how: str
) -> None:
    """F16: placement lost after it stored the claim: the same command continues (fake)."""
    with Gate(own_control.placement.port) as gate:
        config = write_config(own_control.directory / 'gate.yaml', own_control.etcd.endpoint, gate.url)
        gate.hold(b'PUT /allocations')
        with Eschedule(own_control, SMALL_QUERY, '--uuid', instance, config=config) as command:
            assert gate.held.wait(30)
            stop_server(own_control.placement, how)
            if how == 'killed':
                gate.cut()
            result = command.wait(PLACEMENT_SECONDS)
    message = f'placement at {gate.url}'
    result = strip_waiting_line(result, gate.url) if how == 'frozen' else result
    assert_one_line(result, 7, message, f'it is unknown whether {instance} holds its claim', f'with --uuid {instance}')
    restore_server(own_control.placement, how)
    assert set(own_control.placement.read_allocations(instance)) == {compute.uuid}
    assert parse_notice(own_control.eschedule(SMALL_QUERY, '--uuid', instance)) == (compute.uuid, instance)
    check_recovery(own_control, compute, instance)


@pytest.mark.parametrize('arrived', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_etcd_lost_during_destroy(own_control: Control, compute: Ecompute, arrived: bool) -> None:
    """F27: etcd lost during a destroy: unknown, and the same command finds out (fake)."""
    instance = boot(own_control)
    key, pattern = f'/hosts/{compute.uuid}/{instance}', b'"allocations": {}'
    compute.pause()  # keeps the tombstone

    def is_tombstoned() -> bool:
        return pattern in (own_control.etcd.get(key) or b'')

    with Proxy(own_control.etcd.port) as proxy:
        config = write_config(own_control.directory / 'proxy.yaml', proxy.address, own_control.placement.url)
        if arrived:
            proxy.lose_answer(pattern, is_tombstoned, stay_away=True)
        else:
            proxy.lose_request(pattern, stay_away=True)
        result = run_eschedule_process(config, 'destroy', instance, timeout=ETCD_SECONDS)
        assert proxy.has_lost
    unknown = f'it is unknown whether the destroy of {instance} is accepted', 'the same command again'
    assert_one_line(result, 7, f'etcd at {proxy.address} cannot be reached', *unknown)
    assert is_tombstoned() is arrived
    assert_one_line(own_control.eschedule('destroy', instance), 0, instance, 'already' if arrived else 'accepted')
    compute.resume()
    wait_state(own_control, instance, 'gone')
    check_recovery(own_control, compute)


@pytest.mark.slow
def test_etcd_lost_while_commands_wait(own_control: Control, compute: Ecompute) -> None:
    """F10: etcd killed while a create and a destroy wait: both are already accepted (fake)."""
    doomed = boot(own_control)
    wait = ('--wait', '--timeout', '2')
    with (
        Eschedule(own_control, SMALL_QUERY, *wait, failpoint='delivered:stop') as create,
        Eschedule(own_control, 'destroy', *wait, doomed, failpoint='tombstoned:stop') as destroy,
    ):
        create.wait_frozen_at('delivered')
        destroy.wait_frozen_at('tombstoned')
        own_control.etcd.kill()
        create.resume()
        destroy.resume()
        created, destroyed = create.wait(ETCD_SECONDS), destroy.wait(ETCD_SECONDS)
    _, instance = parse_notice(created._replace(code=0))
    *_, last = created.stderr.splitlines()
    assert created.code == 6, created
    assert 'etcd did not answer' in last, created
    accepted, lost = destroyed.stderr.splitlines()
    assert destroyed.code == 7, destroyed
    assert f'{doomed}: destroy accepted' in accepted, destroyed
    assert f'etcd at {own_control.etcd.endpoint} cannot be reached' in lost, destroyed
    own_control.etcd.start()
    wait_state(own_control, doomed, 'gone')
    check_recovery(own_control, compute, instance)
