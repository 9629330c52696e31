"""eschedule's stop, start and reboot: what they write, and what they refuse, also when an answer is lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import Conflict, EcompError, NotFound, StillGoing
from ecomp.model import keys
from ecomp.model.order import ASKED, OFF, REBOOT, START, STOP, Power
from ecomp.model.record import ACTIVE, GONE, STOPPED, Record, to_json
from ecomp.scheduler.changing.change import Acceptance, destroy, power
from ecomp.scheduler.changing.wait import Deadline, Wait, wait_for_power
from ecomp.store.client import Store
from tests.functional.cloud import IMAGE, Cloud, new
from tests.kit.proxy import Proxy
from tests.kit.servers import PATIENCE, until


def lives(cloud: Cloud, state: str = ACTIVE, said: str | None = None) -> tuple[str, str]:
    """A compute, and an instance on it in this state."""
    compute, wanted = cloud.make_order()
    cloud.create(wanted)
    write(cloud, compute, wanted.instance, state, said)
    return compute, wanted.instance


def write(cloud: Cloud, compute: str, instance: str, state: str, said: str | None, fault: str | None = None) -> None:
    record = Record(instance, compute, state, image=IMAGE, fault=fault, power=said)
    cloud.etcd.put_record(to_json(record))


def test_it_is_written_beside_all_that_is_there(cloud: Cloud) -> None:
    compute, instance = lives(cloud)
    before = json.loads(cloud.etcd.get(keys.request(compute, instance)) or b'')
    stop = Power(STOP, new())
    accepted = power(cloud.store, instance, stop)
    assert accepted.said == f'{instance}: stop accepted, {compute} carries it out'
    assert accepted.power == stop
    after = json.loads(cloud.etcd.get(keys.request(compute, instance)) or b'')
    assert after == {**before, 'power': {'action': 'stop', 'id': stop.id}}
    assert list(after)[:-1] == list(before)
    assert cloud.delivered(compute, instance).power == stop
    cloud.etcd.delete(keys.compute(compute))
    assert power(cloud.store, instance, Power(REBOOT, new())).said.endswith('when it is back: it is silent now')


def test_the_same_again_changes_nothing(cloud: Cloud) -> None:
    compute, instance = lives(cloud)
    stop, other = Power(STOP, new()), Power(STOP, new())
    power(cloud.store, instance, stop)
    before = cloud.etcd.get(keys.request(compute, instance))
    again = power(cloud.store, instance, other)
    assert again.said == f'{instance}: stop was asked for before, {compute} is at it'
    assert again.power == stop, 'that one is to be waited for'
    write(cloud, compute, instance, STOPPED, stop.id)
    assert power(cloud.store, instance, other) == Acceptance(f'{instance}: is stopped already')
    assert cloud.etcd.get(keys.request(compute, instance)) == before
    # A reboot is never "so already".
    assert power(cloud.store, instance, Power(REBOOT, new())).power is not None


def test_who_has_no_power_to_switch(cloud: Cloud) -> None:
    stop = Power(STOP, new())
    with pytest.raises(NotFound, match='no such instance'):
        power(cloud.store, new(), stop)
    for state, said in (('building', 'is being built: wait for it'), ('error', 'is in error'), ('scheduled', 'wait')):
        _, instance = lives(cloud, state)
        with pytest.raises(Conflict, match=said):
            power(cloud.store, instance, stop)
    compute, instance = lives(cloud)
    cloud.etcd.put(keys.request(compute, instance), 'nonsense')
    with pytest.raises(Conflict, match='cannot be understood: not JSON'):
        power(cloud.store, instance, stop)
    cloud.etcd.delete(keys.request(compute, instance))
    with pytest.raises(Conflict, match='nobody asks for it'):
        power(cloud.store, instance, stop)
    _, instance = lives(cloud)
    destroy(cloud.store, instance)
    with pytest.raises(Conflict, match='is being destroyed'):
        power(cloud.store, instance, stop)


@pytest.mark.parametrize('arrives', [True, False])
def test_an_order_that_is_lost_or_whose_answer_is(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, arrives: bool
) -> None:
    compute, instance = lives(cloud)
    stop = Power(STOP, new())
    with pytest.raises(NotFound):
        power(shaky_store, new(), stop)  # it is connected
    applied = (lambda: cloud.delivered(compute, instance).power == stop) if arrives else None
    etcd_proxy.lose(stop.id.encode(), applied)
    accepted = power(shaky_store, instance, stop)
    assert etcd_proxy.has_lost
    assert accepted.said == f'{instance}: stop accepted, {compute} carries it out'
    assert (accepted.power, cloud.delivered(compute, instance).power) == (stop, stop)


def test_several_at_once_are_one(cloud: Cloud) -> None:
    compute, instance = lives(cloud)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: power(cloud.store, instance, Power(REBOOT, new())), range(4)))
    assert {each.power for each in answers} == {cloud.delivered(compute, instance).power}
    assert sum('accepted' in each.said for each in answers) == 1


# Waiting for it


def test_its_steps_are_told_and_its_end(cloud: Cloud) -> None:
    told: list[str] = []
    before, reboot = new(), Power(REBOOT, new())
    compute, instance = lives(cloud, said=before)
    accepted = power(cloud.store, instance, reboot)
    config = EtcdConfig((cloud.etcd.endpoint,))

    def waits_for(what: str) -> bool:
        return any(f'waiting for: {what}' in each for each in told)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_power, Wait(config, instance, Deadline(60), told.append), accepted)
        until(lambda: waits_for('its compute to take it'), 10, 'nobody is at it')
        write(cloud, compute, instance, ACTIVE, reboot.at(ASKED))
        until(lambda: waits_for('the guest to turn itself off'), 10, 'it is asked')
        write(cloud, compute, instance, STOPPED, reboot.at(OFF))
        until(lambda: waits_for('its domain to start'), 10, 'it is off')
        write(cloud, compute, instance, ACTIVE, reboot.id)
        assert waiting.result(PATIENCE * 20).state == ACTIVE


def test_a_wait_in_vain_ends(cloud: Cloud) -> None:
    start = Power(START, new())
    compute, instance = lives(cloud, STOPPED)
    accepted, config = power(cloud.store, instance, start), EtcdConfig((cloud.etcd.endpoint,))

    def wait(seconds: float = 20) -> Record:
        return wait_for_power(Wait(config, instance, Deadline(seconds), lambda _: None), accepted)

    with pytest.raises(StillGoing, match='waiting for: its compute to take it; it goes on'):
        wait(0.1)
    write(cloud, compute, instance, STOPPED, start.id, 'it could not be started: no room')
    with pytest.raises(EcompError, match='it could not be started: no room') as caught:
        wait()
    assert caught.value.exit_code == 1
    write(cloud, compute, instance, STOPPED, start.id)
    with pytest.raises(EcompError, match='it was started, and is off again'):
        wait()
    write(cloud, compute, instance, STOPPED, new())
    with pytest.raises(Conflict, match='something else'):
        wait()
    write(cloud, compute, instance, GONE, start.id)
    with pytest.raises(NotFound, match='destroyed while waiting'):
        wait()
