"""Protect, unprotect and rename, with a compute in this process and an etcd in memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ecomp.errors import Conflict, NotFound, UnknownOutcome
from ecomp.model import keys
from ecomp.model.choose import Offer
from ecomp.model.order import STOP, NameOwner, PowerAction, Request
from ecomp.model.record import Failure, Record
from ecomp.model.states import ERROR
from ecomp.model.stored import decode, encode
from ecomp.scheduler.changes.change import change_power, destroy
from ecomp.scheduler.operations.audit import audit
from ecomp.scheduler.operations.forget import forget
from ecomp.scheduler.placing.evacuate import PROTECTED, Evacuated, evacuate
from ecomp.scheduler.placing.modify import protect, rename
from ecomp.scheduler.placing.session import Scheduler
from ecomp.scheduler.queries.find import find_living, resolve
from ecomp.store.client import Delete, Put
from tests.functional.cloud import IMAGE, OWNER, RESOURCES, Cloud, make_uuid
from tests.functional.toy import ToyCompute
from tests.kit.store_client import read_entry

pytestmark = pytest.mark.fast


def build(toy: ToyCompute, name: str) -> str:
    order = replace(toy.cloud.make_order_on(toy.compute), query=RESOURCES, name=name)
    toy.cloud.create(order)
    toy.settle()
    return order.instance


def read_names(cloud: Cloud) -> dict[str, str]:
    entries = cloud.store.snapshot(keys.NAMES).entries
    return {keys.get_last_part(key): decode(NameOwner, entry.value).instance for key, entry in entries.items()}


def find_problems(cloud: Cloud) -> list[str]:
    """Return what `check` finds, except of computes, which publish nothing here."""
    findings = audit(cloud.store, cloud.placement, 0.0).findings
    return [each.sentence for each in findings if not each.code.startswith('compute')]


def read_request(toy: ToyCompute, instance: str) -> Request:
    return toy.cloud.read_request(toy.compute, instance)


def run_evacuation(cloud: Cloud, compute: str, with_protected: bool = False) -> list[Evacuated]:
    outcomes, answer = list[Evacuated](), (cloud.placement, Offer(()))
    scheduler = Scheduler(cloud.store, lambda: answer, {**OWNER, 'since': 'today'}, random.Random(), lambda: 'now')
    evacuate(scheduler, compute, 'hv1', outcomes.append, with_protected)
    return outcomes


def test_rename_moves_the_name_at_once(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance = build(toy_compute, 'web')
    assert rename(cloud.store, instance, 'db') == f'{instance}: is called db now'
    assert read_names(cloud) == {'db': instance}
    assert toy_compute.read_record(instance).name == 'web'
    assert find_living(cloud.store, resolve(cloud.store, 'db')).name == 'db'
    with pytest.raises(NotFound, match='web: no living instance has this name'):
        resolve(cloud.store, 'web')
    assert find_problems(cloud) == []
    # Its compute adds the new name to the record.
    assert toy_compute.step() == [f'changed {instance}']
    assert toy_compute.plan() == []
    assert toy_compute.read_record(instance).name == 'db'
    assert toy_compute.memory.get_entries()[instance].request == read_request(toy_compute, instance)
    assert rename(cloud.store, instance, 'db') == f'{instance}: is called db'
    assert find_problems(cloud) == []


def test_rename_to_a_taken_name_is_refused(toy_compute: ToyCompute, cloud: Cloud) -> None:
    first, second = build(toy_compute, 'web'), build(toy_compute, 'db')
    with pytest.raises(Conflict, match=f'db: name taken by instance {second}. Fix: choose another name'):
        rename(cloud.store, first, 'db')
    destroy(cloud.store, second)
    with pytest.raises(Conflict, match='which is being destroyed. Fix: wait until it is gone'):
        rename(cloud.store, first, 'db')
    assert read_names(cloud) == {'web': first, 'db': second}
    toy_compute.settle()
    rename(cloud.store, first, 'db')
    assert read_names(cloud) == {'db': first}


def test_rename_takes_the_name_of_a_failed_instance(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance, failed, lease = build(toy_compute, 'web'), make_uuid(), cloud.store.grant(3600)
    record = Record(failed, toy_compute.compute, ERROR, image=IMAGE, name='db', error=Failure('image', 'HTTP 404', ''))
    puts = [Put(keys.record(toy_compute.compute, failed), encode(record), lease)]
    cloud.store.commit([], [*puts, Put(keys.name('db'), encode(NameOwner(failed)), lease)])
    rename(cloud.store, instance, 'db')
    toy_compute.settle()
    cloud.store.revoke(lease)
    assert read_names(cloud) == {'db': instance}


@pytest.mark.parametrize('change', [lambda *words: rename(*words, 'db'), lambda *words: protect(*words, True)])
def test_change_of_an_instance_that_does_not_live_is_refused(
    toy_compute: ToyCompute, cloud: Cloud, change: Callable[..., str]
) -> None:
    instance = toy_compute.place()
    with pytest.raises(Conflict, match='is not built yet. Fix: wait until it is active'):
        change(cloud.store, instance)
    toy_compute.settle()
    destroy(cloud.store, instance)
    with pytest.raises(Conflict, match='is being destroyed'):
        change(cloud.store, instance)
    toy_compute.settle()
    with pytest.raises(NotFound, match='has been gone since'):
        change(cloud.store, instance)


def test_rename_and_stop_are_both_kept(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance = build(toy_compute, 'web')
    cloud.store.commit([], [Put(keys.request(toy_compute.compute, instance), _add_later_field(toy_compute, instance))])
    change_power(cloud.store, instance, PowerAction(STOP, make_uuid()))
    rename(cloud.store, instance, 'db')
    assert b'"later"' in read_entry(cloud.store, keys.request(toy_compute.compute, instance)).value
    toy_compute.settle()
    record = toy_compute.read_record(instance)
    assert (record.name, record.state) == ('db', 'stopped')


def _add_later_field(toy: ToyCompute, instance: str) -> str:
    value = read_entry(toy.cloud.store, keys.request(toy.compute, instance)).value.decode()
    return value.replace('{', '{"later": 1, ', 1)


END_KINDS = ('destroyed', 'destroyed as in 2019', 'vanished', 'forgotten', 'evacuated')


@pytest.mark.parametrize('has_seen_it', [False, True])
@pytest.mark.parametrize('end', END_KINDS)
def test_end_after_a_rename_frees_the_new_name_only(
    toy_compute: ToyCompute, cloud: Cloud, end: str, has_seen_it: bool
) -> None:
    instance = build(toy_compute, 'web')
    rename(cloud.store, instance, 'db')
    if has_seen_it:
        toy_compute.settle()
    other = build(toy_compute, 'web')
    names = {'web': other}
    if end == 'destroyed as in 2019':
        toy_compute.destroy(instance)
    elif end in ('destroyed', 'forgotten'):
        destroy(cloud.store, instance)
    if end == 'vanished':
        toy_compute.hypervisor.destroy(instance, toy_compute.compute)
        toy_compute.hypervisor.delete_disk(instance)
        revision = read_entry(cloud.store, keys.request(toy_compute.compute, instance)).revision
        toy_compute.instances.end_vanished(read_request(toy_compute, instance), revision)
    elif end == 'forgotten':
        destroy(cloud.store, other)
        names = {}
        cloud.etcd.delete(keys.compute(toy_compute.compute))
        forget(cloud.store, cloud.placement, toy_compute.compute, 'hv1', lambda: 'now', lambda _: None, fenced=True)
    elif end == 'evacuated':
        cloud.make_compute(VCPU=10, MEMORY_MB=1024, DISK_GB=10)
        cloud.etcd.delete(keys.compute(toy_compute.compute))
        names = {each.name or '': each.replaced_by or '' for each in run_evacuation(cloud, toy_compute.compute)}
        assert names.keys() == {'web', 'db'}
        assert instance not in names.values()
        assert read_names(cloud) == names
    if end != 'forgotten':
        toy_compute.settle()
    assert read_names(cloud) == names
    assert find_problems(cloud) == []


def test_lost_answer_of_a_rename_says_so(
    toy_compute: ToyCompute, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = build(toy_compute, 'web')
    commit = cloud.store.commit

    def lose_answer(*words: Any) -> int:
        commit(*words)
        raise UnknownOutcome('no answer', 'etcd')

    monkeypatch.setattr(cloud.store, 'commit', lose_answer)
    with pytest.raises(UnknownOutcome, match=f'unknown whether the change of {instance} is accepted'):
        rename(cloud.store, instance, 'db')
    monkeypatch.setattr(cloud.store, 'commit', commit)
    assert rename(cloud.store, instance, 'db') == f'{instance}: is called db'
    assert read_names(cloud) == {'db': instance}


# An older etcd is restored.


def save(cloud: Cloud) -> dict[str, str]:
    """Return etcd's keys, without those of living computes, as `restore` writes them."""
    entries = cloud.store.snapshot('/').entries
    return {key: each.value.decode() for key, each in entries.items() if not key.startswith(keys.COMPUTES)}


def restore(toy: ToyCompute, saved: dict[str, str]) -> None:
    added = save(toy.cloud).keys() - saved.keys()
    toy.cloud.store.commit([], [*map(Delete, added), *(Put(*item) for item in saved.items())])
    toy.restart()


@pytest.mark.parametrize('changes_again', [False, True])
@pytest.mark.parametrize('moment', ['before the instance', 'before', 'after'])
def test_older_etcd_keeps_a_change(toy_compute: ToyCompute, cloud: Cloud, moment: str, changes_again: bool) -> None:
    saved, other = {'before the instance': save(cloud)}, build(toy_compute, 'other')
    instance = build(toy_compute, 'web')
    saved['before'] = save(cloud)
    rename(cloud.store, instance, 'db')
    protect(cloud.store, instance, True)
    saved['after'] = save(cloud)
    toy_compute.settle()
    restore(toy_compute, saved[moment])
    name = 'db'
    if changes_again and moment != 'before the instance':
        name = 'cache'
        rename(cloud.store, instance, name)
        # Seconds later than what the older etcd does not know.
        newer = replace(read_request(toy_compute, instance), changed=2**40)
        cloud.store.commit([], [Put(keys.request(toy_compute.compute, instance), encode(newer))])
    toy_compute.republish(toy_compute.hypervisor.list_guests().keys())
    toy_compute.settle()
    assert read_names(cloud) == {name: instance, 'other': other}
    request, record = read_request(toy_compute, instance), toy_compute.read_record(instance)
    assert (request.name, record.name) == (name, name)
    is_known = not changes_again or moment != 'before'
    assert (request.is_protected, record.is_protected) == (is_known, is_known)
    assert find_problems(cloud) == []


def test_older_etcd_in_which_another_has_the_new_name(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance = build(toy_compute, 'web')
    saved = save(cloud)
    rename(cloud.store, instance, 'db')
    toy_compute.settle()
    restore(toy_compute, saved)
    other = cloud.make_order_on(cloud.make_compute())
    cloud.create(replace(other, name='db'))
    toy_compute.republish(toy_compute.hypervisor.list_guests().keys())
    toy_compute.settle()
    assert read_names(cloud)['db'] == other.instance


# protect


def test_protected_instance_is_kept(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance = build(toy_compute, 'web')
    assert protect(cloud.store, instance, True) == f'{instance}: is protected now'
    assert protect(cloud.store, instance, True) == f'{instance}: is protected'
    with pytest.raises(Conflict, match=f'{instance}: is protected, and is kept. Fix: eschedule unprotect {instance}'):
        destroy(cloud.store, instance)
    assert toy_compute.step() == [f'changed {instance}']
    assert toy_compute.read_record(instance).is_protected
    change_power(cloud.store, instance, PowerAction(STOP, make_uuid()))
    toy_compute.settle()
    assert protect(cloud.store, instance, False) == f'{instance}: is not protected now'
    assert 'destroy accepted' in destroy(cloud.store, instance)
    toy_compute.settle()
    assert toy_compute.hypervisor.list_guests() == {}
    assert find_problems(cloud) == []


def test_protected_adopted_instance_is_released(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance = build(toy_compute, 'web')
    key = keys.request(toy_compute.compute, instance)
    cloud.store.commit([], [Put(key, encode(replace(read_request(toy_compute, instance), is_adopted=True)))])
    record = replace(toy_compute.read_record(instance), is_adopted=True)
    cloud.store.commit([], [Put(keys.record(toy_compute.compute, instance), encode(record))])
    protect(cloud.store, instance, True)
    assert 'release accepted' in destroy(cloud.store, instance, releases=True)


def test_evacuation_leaves_a_protected_instance(toy_compute: ToyCompute, cloud: Cloud) -> None:
    kept, moved = build(toy_compute, 'kept'), build(toy_compute, 'moved')
    protect(cloud.store, kept, True)
    target = cloud.make_compute(VCPU=10, MEMORY_MB=1024, DISK_GB=10)
    cloud.etcd.delete(keys.compute(toy_compute.compute))
    outcomes = {each.instance: each for each in run_evacuation(cloud, toy_compute.compute)}
    assert (outcomes[kept].reason, outcomes[moved].compute) == (PROTECTED, target)
    (outcome,) = run_evacuation(cloud, toy_compute.compute, with_protected=True)
    assert (outcome.instance, outcome.compute) == (kept, target)
    assert outcome.replaced_by is not None
    assert cloud.read_request(target, outcome.replaced_by).is_protected
    assert read_request(toy_compute, kept).is_tombstone
