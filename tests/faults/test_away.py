"""eschedule while a server is away: it soon ends with exit 7 and a line that names the server.

The line also gives the state of the request. The server is killed or frozen before the command and between its steps,
for every command. Afterwards the server returns, and nothing is left half done. The behaviour of ecompute is tested in
the other files.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.commands import Control, Ecompute, Result, eschedule, write_config
from tests.kit.gate import Gate
from tests.kit.hands import Eschedule, lapse, lapse_requests, look_twice, settled
from tests.kit.invariants import everything
from tests.kit.proxy import Proxy
from tests.kit.servers import Server, until
from tests.kit.story import NOBODY, SMALL, addressed, boot, notified, one_line, place, reached

# At most a few calls of 5 s each, and the concurrent start of seven commands on a slow machine.
ETCD_SECONDS = 40.0
# An unanswered read is abandoned after 30 s; a claim is read back once.
PLACEMENT_SECONDS = 100.0


def take_away(server: Server, how: str) -> None:
    if how == 'killed':
        server.kill()
    else:
        server.pause()


def bring_back(server: Server, how: str) -> None:
    if how == 'killed':
        server.start()
    else:
        server.resume()


def all_at_once(control: Control, forms: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Result]:
    """Run all commands concurrently; return the result of each.

    Raises subprocess.TimeoutExpired if one exceeds `seconds`.
    """
    with ThreadPoolExecutor(len(forms)) as threads:
        results = threads.map(lambda words: control.eschedule(*words, timeout=seconds), forms.values())
        return dict(zip(forms, results, strict=True))


def after_waiting(result: Result, url: str) -> Result:
    """Check that the first line reports the wait for placement; return the result without it.

    eschedule must not be silent for half a minute.
    """
    first, remaining = result.stderr.split('\n', 1)
    assert first.startswith(f'eschedule: waiting for placement at {url}, which has not answered for')
    return result._replace(stderr=remaining)


def works_again(control: Control, compute: Ecompute, *instances: str) -> None:
    """Check that existing instances still run, a new one is placed, and all can be destroyed."""
    until(lambda: control.etcd.keys('/computes/'), 30, 'the compute says again that it is alive')
    _, created = place(control)
    for instance in (*instances, created):
        addressed(control, instance)
    settled(control, compute)
    for instance in (*instances, created):
        assert control.eschedule('destroy', instance).code == 0
    for instance in (*instances, created):
        reached(control, instance, 'gone')
    settled(control, compute)
    assert control.placement.consumers(compute.uuid) == {}
    assert control.etcd.keys('/hosts/') + control.etcd.keys('/requests/') == []


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
def test_every_form_without_etcd(own_control: Control, compute: Ecompute, how: str) -> None:
    """F10: etcd killed, or frozen, during every eschedule command: soon exit 7 and the state of the request (fake)."""
    instance = boot(own_control)
    take_away(own_control.etcd, how)
    forms = {
        'create': (SMALL,),
        'create again': (SMALL, '--uuid', NOBODY),
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
        'forget': 'nothing was removed',
    }
    for name, result in all_at_once(own_control, forms, ETCD_SECONDS).items():
        one_line(result, 7, f'etcd at {own_control.etcd.endpoint} cannot be reached', messages.get(name, ''))
        assert result.stdout == '', name
    bring_back(own_control.etcd, how)
    works_again(own_control, compute, instance)


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
def test_every_form_without_placement(own_control: Control, compute: Ecompute, how: str) -> None:
    """F16: placement killed, or frozen, during every command: exit 7 within half a minute, or not needed (fake)."""
    instance = boot(own_control)
    take_away(own_control.placement, how)
    needed = {
        'create': (SMALL,),
        'create again': (SMALL, '--uuid', NOBODY),
        'hosts': ('hosts',),
        'forget': ('host', 'forget', NOBODY),
    }
    not_needed = {'query': (instance,), 'list': ('list',), 'show': ('show', instance), 'destroy': ('destroy', instance)}
    results = all_at_once(own_control, {**needed, **not_needed}, PLACEMENT_SECONDS)
    messages = {**dict.fromkeys(('create', 'create again'), 'nothing was changed'), 'forget': 'nothing was removed'}
    for name in needed:
        result = after_waiting(results[name], own_control.placement.url) if how == 'frozen' else results[name]
        one_line(result, 7, f'placement at {own_control.placement.url}', messages.get(name, ''))
        assert results[name].stdout == '', name
    for name in not_needed:
        assert results[name].code == 0, results[name]
    bring_back(own_control.placement, how)
    reached(own_control, instance, 'gone')
    works_again(own_control, compute)


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
@pytest.mark.parametrize('step', ['announced', 'claimed'])
def test_etcd_lost_between_the_steps(own_control: Control, step: str, how: str) -> None:
    """F15: etcd lost before the claim, and before the delivery: the same command with --uuid continues (fake)."""
    compute, instance = own_control.ecompute(), str(uuid.uuid4())
    with Eschedule(own_control, SMALL, '--uuid', instance, failpoint=f'{step}:stop') as command:
        command.stopped_at(step)
        take_away(own_control.etcd, how)
        command.go_on()
        result = command.end(ETCD_SECONDS)
    line = one_line(result, 7, f'etcd at {own_control.etcd.endpoint} cannot be reached')
    if step == 'announced':
        assert 'nothing was changed' in line
    else:
        # Groups and quotas are read before anything is delivered.
        assert f'{instance} is not placed' in line
        assert f'the same command with --uuid {instance}' in line
    assert result.stdout == ''
    assert bool(own_control.placement.allocations(instance)) == (step == 'claimed')
    bring_back(own_control.etcd, how)
    until(lambda: own_control.etcd.keys('/computes/'), 30, 'the compute says again that it is alive')
    assert notified(own_control.eschedule(SMALL, '--uuid', instance)) == (compute.uuid, instance)
    works_again(own_control, compute, instance)


@pytest.mark.parametrize('arrived', [True, False])
def test_etcd_lost_at_the_delivery(own_control: Control, compute: Ecompute, instance: str, arrived: bool) -> None:
    """F15: etcd lost during a delivery: reported as unknown, and the same command with --uuid finds out (fake)."""
    key = f'/hosts/{compute.uuid}/{instance}'
    with Proxy(own_control.etcd.port) as proxy:
        config = write_config(own_control.directory / 'proxy.yaml', proxy.address, own_control.placement.url)
        if arrived:
            proxy.lose_answer(b'"allocations"', lambda: own_control.etcd.get(key), and_stay_away=True)
        else:
            proxy.lose_request(b'"allocations"', and_stay_away=True)
        result = eschedule(config, SMALL, '--uuid', instance, timeout=ETCD_SECONDS)
        assert proxy.has_lost
    unknown = f'whether {instance} was delivered is not known', f'the same command with --uuid {instance}'
    one_line(result, 7, f'etcd at {proxy.address} cannot be reached', *unknown)
    assert result.stdout == ''
    assert bool(own_control.etcd.get(key)) is arrived
    # A claim whose delivery has an unknown outcome is not released.
    assert set(own_control.placement.allocations(instance)) == {compute.uuid}
    repeated = own_control.eschedule(SMALL, '--uuid', instance)
    assert notified(repeated) == (compute.uuid, instance)
    works_again(own_control, compute, instance)


@pytest.mark.slow
def test_etcd_lost_before_the_delivery_and_left_alone(own_control: Control, compute: Ecompute, instance: str) -> None:
    """F15: etcd killed before the delivery, and no client retries: the compute releases the claim (fake)."""
    with Eschedule(own_control, SMALL, '--uuid', instance, failpoint='claimed:stop') as command:
        command.stopped_at('claimed')
        own_control.etcd.kill()
        command.go_on()
        assert command.end(ETCD_SECONDS).code == 7
    own_control.etcd.start()
    lapse(own_control, f'/requests/{instance}')
    look_twice(own_control, compute)
    assert own_control.placement.allocations(instance) == {}
    assert [key for key in everything(own_control) if instance in key] == []
    works_again(own_control, compute)


@pytest.mark.slow
def test_etcd_lost_while_an_older_claim_is_taken_over(own_control: Control, compute: Ecompute, instance: str) -> None:
    """F15: etcd killed after a claim of another attempt was found: that claim stays unchanged (fake)."""
    with Eschedule(own_control, SMALL, '--uuid', instance, failpoint='claimed:kill') as killed:
        killed.killed_at('claimed')
    lapse(own_control, f'/requests/{instance}')
    with Gate(own_control.placement.port) as gate:
        config = write_config(own_control.directory / 'gate.yaml', own_control.etcd.endpoint, gate.url)
        gate.hold(b'PUT /allocations')
        with Eschedule(own_control, SMALL, '--uuid', instance, config=config) as command:
            assert gate.held.wait(30)
            own_control.etcd.kill()
            gate.open()
            result = command.end(ETCD_SECONDS)
    message = f'etcd at {own_control.etcd.endpoint} cannot be reached'
    one_line(result, 7, message, 'nothing was changed')
    assert set(own_control.placement.allocations(instance)) == {compute.uuid}
    own_control.etcd.start()
    lapse_requests(own_control)
    look_twice(own_control, compute)
    assert own_control.placement.allocations(instance) == {}
    works_again(own_control, compute)


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
def test_placement_lost_when_it_has_claimed(own_control: Control, compute: Ecompute, instance: str, how: str) -> None:
    """F16: placement lost after it stored the claim and before its answer: the same command continues (fake)."""
    with Gate(own_control.placement.port) as gate:
        config = write_config(own_control.directory / 'gate.yaml', own_control.etcd.endpoint, gate.url)
        gate.hold(b'PUT /allocations')
        with Eschedule(own_control, SMALL, '--uuid', instance, config=config) as command:
            assert gate.held.wait(30)
            take_away(own_control.placement, how)
            if how == 'killed':
                gate.cut()
            result = command.end(PLACEMENT_SECONDS)
    message = f'placement at {gate.url}'
    result = after_waiting(result, gate.url) if how == 'frozen' else result
    one_line(result, 7, message, f'whether {instance} holds its claim is not known', f'with --uuid {instance}')
    bring_back(own_control.placement, how)
    assert set(own_control.placement.allocations(instance)) == {compute.uuid}
    assert notified(own_control.eschedule(SMALL, '--uuid', instance)) == (compute.uuid, instance)
    works_again(own_control, compute, instance)


@pytest.mark.parametrize('arrived', [True, False])
def test_etcd_lost_at_the_tombstone(own_control: Control, compute: Ecompute, arrived: bool) -> None:
    """F27: etcd lost during a destroy: reported as unknown, and the same command finds out (fake)."""
    instance = boot(own_control)
    key, pattern = f'/hosts/{compute.uuid}/{instance}', b'"allocations": {}'
    compute.pause()  # keeps the tombstone

    def is_tombstoned() -> bool:
        return pattern in (own_control.etcd.get(key) or b'')

    with Proxy(own_control.etcd.port) as proxy:
        config = write_config(own_control.directory / 'proxy.yaml', proxy.address, own_control.placement.url)
        if arrived:
            proxy.lose_answer(pattern, is_tombstoned, and_stay_away=True)
        else:
            proxy.lose_request(pattern, and_stay_away=True)
        result = eschedule(config, 'destroy', instance, timeout=ETCD_SECONDS)
        assert proxy.has_lost
    unknown = f'whether the destroy of {instance} is accepted is not known', 'the same command again'
    one_line(result, 7, f'etcd at {proxy.address} cannot be reached', *unknown)
    assert is_tombstoned() is arrived
    one_line(own_control.eschedule('destroy', instance), 0, instance, 'already' if arrived else 'accepted')
    compute.resume()
    reached(own_control, instance, 'gone')
    works_again(own_control, compute)


@pytest.mark.slow
def test_etcd_lost_while_waiting(own_control: Control, compute: Ecompute) -> None:
    """F10: etcd killed while a create and a destroy wait: their acceptance has already been reported (fake)."""
    doomed = boot(own_control)
    wait = ('--wait', '--timeout', '2')
    with (
        Eschedule(own_control, SMALL, *wait, failpoint='delivered:stop') as create,
        Eschedule(own_control, 'destroy', *wait, doomed, failpoint='tombstoned:stop') as destroy,
    ):
        create.stopped_at('delivered')
        destroy.stopped_at('tombstoned')
        own_control.etcd.kill()
        create.go_on()
        destroy.go_on()
        created, destroyed = create.end(ETCD_SECONDS), destroy.end(ETCD_SECONDS)
    _, instance = notified(created._replace(code=0))
    *_, last = created.stderr.splitlines()
    assert created.code == 6, created
    assert 'etcd did not answer' in last, created
    accepted, lost = destroyed.stderr.splitlines()
    assert destroyed.code == 7, destroyed
    assert f'{doomed}: destroy accepted' in accepted, destroyed
    assert f'etcd at {own_control.etcd.endpoint} cannot be reached' in lost, destroyed
    own_control.etcd.start()
    reached(own_control, doomed, 'gone')
    works_again(own_control, compute, instance)
