"""eschedule while a server is away: it ends soon, exit 7, and one line says what is away and what the request became.

Killed and frozen, before the command begins and between its steps, for every form there is. Afterwards the server comes
back, and nothing is left half done. What an ecompute does meanwhile is in the other files.
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

ETCD_SECONDS = 40.0
"""At most a few calls of 5 s each, and the start of seven commands at once on a slow machine."""
PLACEMENT_SECONDS = 100.0
"""A read that is not answered is given up after 30 s; a claim is read back once."""


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
    """How each form ended; subprocess.TimeoutExpired if one did not in time."""
    with ThreadPoolExecutor(len(forms)) as threads:
        ends = threads.map(lambda words: control.eschedule(*words, timeout=seconds), forms.values())
        return dict(zip(forms, ends, strict=True))


def after_waiting(result: Result, url: str) -> Result:
    """The result without its first line: nobody waits for half a minute without a word."""
    first, rest = result.stderr.split('\n', 1)
    assert first.startswith(f'eschedule: waiting for placement at {url}, which has not answered for')
    return result._replace(stderr=rest)


def works_again(control: Control, compute: Ecompute, *instances: str) -> None:
    """The compute is alive, what was there is there, a new instance is placed and all of them go."""
    until(lambda: control.etcd.keys('/computes/'), 30, 'the compute says again that it is alive')
    _, new = place(control)
    for instance in (*instances, new):
        addressed(control, instance)
    settled(control, compute)
    for instance in (*instances, new):
        assert control.eschedule('destroy', instance).code == 0
    for instance in (*instances, new):
        reached(control, instance, 'gone')
    settled(control, compute)
    assert control.placement.consumers(compute.uuid) == {}
    assert control.etcd.keys('/hosts/') + control.etcd.keys('/requests/') == []


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
def test_every_form_without_etcd(own_control: Control, compute: Ecompute, how: str) -> None:
    """F10: etcd killed, or frozen, under every form of eschedule: exit 7 soon, and the state of the request (fake)"""
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
    says = {
        **dict.fromkeys(('create', 'create again'), 'nothing was changed'),
        **dict.fromkeys(('destroy', 'destroy and wait'), f'the destroy of {instance} is not accepted'),
        'forget': 'nothing was removed',
    }
    for name, result in all_at_once(own_control, forms, ETCD_SECONDS).items():
        one_line(result, 7, f'etcd at {own_control.etcd.endpoint} cannot be reached', says.get(name, ''))
        assert result.stdout == '', name
    bring_back(own_control.etcd, how)
    works_again(own_control, compute, instance)


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
def test_every_form_without_placement(own_control: Control, compute: Ecompute, how: str) -> None:
    """F16: placement killed, or frozen, under every form of eschedule: exit 7 in half a minute, or not needed (fake)"""
    instance = boot(own_control)
    take_away(own_control.placement, how)
    needed = {
        'create': (SMALL,),
        'create again': (SMALL, '--uuid', NOBODY),
        'hosts': ('hosts',),
        'forget': ('host', 'forget', NOBODY),
    }
    not_needed = {'query': (instance,), 'list': ('list',), 'show': ('show', instance), 'destroy': ('destroy', instance)}
    ends = all_at_once(own_control, {**needed, **not_needed}, PLACEMENT_SECONDS)
    says = {**dict.fromkeys(('create', 'create again'), 'nothing was changed'), 'forget': 'nothing was removed'}
    for name in needed:
        ended = after_waiting(ends[name], own_control.placement.url) if how == 'frozen' else ends[name]
        one_line(ended, 7, f'placement at {own_control.placement.url}', says.get(name, ''))
        assert ends[name].stdout == '', name
    for name in not_needed:
        assert ends[name].code == 0, ends[name]
    bring_back(own_control.placement, how)
    reached(own_control, instance, 'gone')
    works_again(own_control, compute)


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
@pytest.mark.parametrize('step', ['announced', 'claimed'])
def test_etcd_lost_between_the_steps(own_control: Control, step: str, how: str) -> None:
    """F15: etcd lost before the claim, and before the delivery: the same command with --uuid goes on (fake)"""
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
    """F15: etcd lost at the moment of a delivery: it is said that nobody knows, and the same command knows (fake)"""
    key = f'/hosts/{compute.uuid}/{instance}'
    with Proxy(own_control.etcd.port) as proxy:
        config = write_config(own_control.directory / 'proxy.yaml', proxy.address, own_control.placement.url)
        if arrived:
            proxy.lose_answer(b'"allocations"', lambda: own_control.etcd.get(key), and_stay_away=True)
        else:
            proxy.lose_request(b'"allocations"', and_stay_away=True)
        result = eschedule(config, SMALL, '--uuid', instance, timeout=ETCD_SECONDS)
        assert proxy.has_lost
    not_known = f'whether {instance} was delivered is not known', f'the same command with --uuid {instance}'
    one_line(result, 7, f'etcd at {proxy.address} cannot be reached', *not_known)
    assert result.stdout == ''
    assert bool(own_control.etcd.get(key)) is arrived
    # Whose outcome is not known is not released.
    assert set(own_control.placement.allocations(instance)) == {compute.uuid}
    again = own_control.eschedule(SMALL, '--uuid', instance)
    assert notified(again) == (compute.uuid, instance)
    works_again(own_control, compute, instance)


@pytest.mark.slow
def test_etcd_lost_before_the_delivery_and_left_alone(own_control: Control, compute: Ecompute, instance: str) -> None:
    """F15: etcd killed before the delivery, and nobody asks again: the computes release the claim (fake)"""
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
    """F15: etcd killed when a claim was found there: that is another attempt's, and it stays as it was (fake)"""
    with Eschedule(own_control, SMALL, '--uuid', instance, failpoint='claimed:kill') as dead:
        dead.killed_at('claimed')
    lapse(own_control, f'/requests/{instance}')
    with Gate(own_control.placement.port) as gate:
        config = write_config(own_control.directory / 'gate.yaml', own_control.etcd.endpoint, gate.url)
        gate.hold(b'PUT /allocations')
        with Eschedule(own_control, SMALL, '--uuid', instance, config=config) as command:
            assert gate.held.wait(30)
            own_control.etcd.kill()
            gate.open()
            result = command.end(ETCD_SECONDS)
    away = f'etcd at {own_control.etcd.endpoint} cannot be reached'
    one_line(result, 7, away, 'nothing was changed')
    assert set(own_control.placement.allocations(instance)) == {compute.uuid}
    own_control.etcd.start()
    lapse_requests(own_control)
    look_twice(own_control, compute)
    assert own_control.placement.allocations(instance) == {}
    works_again(own_control, compute)


@pytest.mark.parametrize('how', ['killed', pytest.param('frozen', marks=pytest.mark.slow)])
def test_placement_lost_when_it_has_claimed(own_control: Control, compute: Ecompute, instance: str, how: str) -> None:
    """F16: placement lost when it has taken the claim and not answered: the same command with --uuid goes on (fake)"""
    with Gate(own_control.placement.port) as gate:
        config = write_config(own_control.directory / 'gate.yaml', own_control.etcd.endpoint, gate.url)
        gate.hold(b'PUT /allocations')
        with Eschedule(own_control, SMALL, '--uuid', instance, config=config) as command:
            assert gate.held.wait(30)
            take_away(own_control.placement, how)
            if how == 'killed':
                gate.cut()
            result = command.end(PLACEMENT_SECONDS)
    away = f'placement at {gate.url}'
    result = after_waiting(result, gate.url) if how == 'frozen' else result
    one_line(result, 7, away, f'whether {instance} holds its claim is not known', f'with --uuid {instance}')
    bring_back(own_control.placement, how)
    assert set(own_control.placement.allocations(instance)) == {compute.uuid}
    assert notified(own_control.eschedule(SMALL, '--uuid', instance)) == (compute.uuid, instance)
    works_again(own_control, compute, instance)


@pytest.mark.parametrize('arrived', [True, False])
def test_etcd_lost_at_the_tombstone(own_control: Control, compute: Ecompute, arrived: bool) -> None:
    """F27: etcd lost at the moment of a destroy: it is said that nobody knows, and the same command knows (fake)"""
    instance = boot(own_control)
    key, pattern = f'/hosts/{compute.uuid}/{instance}', b'"allocations": {}'
    compute.pause()  # so that the tombstone stays

    def applied() -> bool:
        return pattern in (own_control.etcd.get(key) or b'')

    with Proxy(own_control.etcd.port) as proxy:
        config = write_config(own_control.directory / 'proxy.yaml', proxy.address, own_control.placement.url)
        if arrived:
            proxy.lose_answer(pattern, applied, and_stay_away=True)
        else:
            proxy.lose_request(pattern, and_stay_away=True)
        result = eschedule(config, 'destroy', instance, timeout=ETCD_SECONDS)
        assert proxy.has_lost
    not_known = f'whether the destroy of {instance} is accepted is not known', 'the same command again'
    one_line(result, 7, f'etcd at {proxy.address} cannot be reached', *not_known)
    assert applied() is arrived
    one_line(own_control.eschedule('destroy', instance), 0, instance, 'already' if arrived else 'accepted')
    compute.resume()
    reached(own_control, instance, 'gone')
    works_again(own_control, compute)


@pytest.mark.slow
def test_etcd_lost_while_waiting(own_control: Control, compute: Ecompute) -> None:
    """F10: etcd killed when a create or a destroy is accepted and waited for: what is accepted has been said (fake)"""
    other = boot(own_control)
    wait = ('--wait', '--timeout', '2')
    with (
        Eschedule(own_control, SMALL, *wait, failpoint='delivered:stop') as create,
        Eschedule(own_control, 'destroy', *wait, other, failpoint='tombstoned:stop') as destroy,
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
    assert f'{other}: destroy accepted' in accepted, destroyed
    assert f'etcd at {own_control.etcd.endpoint} cannot be reached' in lost, destroyed
    own_control.etcd.start()
    reached(own_control, other, 'gone')
    works_again(own_control, compute, instance)
