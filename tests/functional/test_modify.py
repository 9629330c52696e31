"""Protect, unprotect and rename, with a compute in this process and an etcd in memory."""

import random
from dataclasses import replace

import pytest

from ecomp.errors import Conflict, NotFound
from ecomp.model import keys
from ecomp.model.choose import Offer
from ecomp.model.order import NameOwner
from ecomp.model.stored import encode
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.operations.audit import audit
from ecomp.scheduler.operations.forget import forget
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.scheduler.placing.evacuate import PROTECTED, Evacuated, evacuate
from ecomp.scheduler.placing.modify import protect, rename, resize
from ecomp.scheduler.placing.session import Scheduler
from ecomp.scheduler.queries.find import resolve
from ecomp.store.client import Delete, Put
from tests.functional.cloud import OWNER, RESOURCES, Cloud, make_uuid
from tests.functional.toy import ToyCompute
from tests.kit.store_client import read_entry

pytestmark = pytest.mark.fast


def build(toy: ToyCompute, name: str) -> str:
    order = replace(toy.cloud.make_order_on(toy.compute), query=RESOURCES, name=name)
    toy.cloud.create(order)
    toy.settle()
    return order.instance


def check_names(cloud: Cloud, **owners: str) -> None:
    entries = cloud.store.snapshot(keys.NAMES).entries
    assert {key: entry.value.decode() for key, entry in entries.items()} == {
        keys.name(name): encode(NameOwner(instance)) for name, instance in owners.items()
    }
    # The computes publish nothing here.
    assert not [each for each in audit(cloud.store, cloud.placement, 0.0).findings if 'compute' not in each.code]


def test_rename_moves_the_name_at_once(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance, other = build(toy_compute, 'web'), build(toy_compute, 'other')
    with pytest.raises(Conflict, match=f'other: this name belongs to instance {other}. Fix: choose another name'):
        rename(cloud.store, instance, 'other')
    cloud.store.commit([], [Put(keys.name('db'), encode(NameOwner(make_uuid())), cloud.store.grant(60))])
    # A failed instance has the name on its lease.
    assert rename(cloud.store, instance, 'db') == f'{instance}: is called db now'
    check_names(cloud, db=instance, other=other)
    assert (resolve(cloud.store, 'db'), toy_compute.read_record(instance).name) == (instance, 'web')
    with pytest.raises(NotFound, match='web: no living instance has this name'):
        resolve(cloud.store, 'web')
    assert (toy_compute.step(), toy_compute.plan()) == ([f'changed {instance}'], [])
    assert toy_compute.read_record(instance).name == 'db'
    assert rename(cloud.store, instance, 'db') == f'{instance}: is called db'


@pytest.mark.parametrize('end', ['destroyed', 'vanished', 'forgotten'])
def test_end_after_a_rename_frees_the_new_name_only(toy_compute: ToyCompute, cloud: Cloud, end: str) -> None:
    """The end of a pending resize refunds what is charged for it, too."""
    set_limits(cloud.store, 'a-project', ['VCPU=12'])
    instance = build(toy_compute, 'web')
    rename(cloud.store, instance, 'db')
    resize(cloud.store, cloud.placement, instance, {'VCPU': 4}, OWNER)
    compute, others = toy_compute.compute, {'web': build(toy_compute, 'web')}
    if end == 'vanished':
        toy_compute.hypervisor.destroy(instance, compute)
        toy_compute.hypervisor.delete_disk(instance)
        revision = read_entry(cloud.store, keys.request(compute, instance)).revision
        toy_compute.instances.end_vanished(cloud.read_request(compute, instance), revision)
    else:
        destroy(cloud.store, instance)
    if end == 'forgotten':
        destroy(cloud.store, others.pop('web'))
        cloud.etcd.delete(keys.compute(compute))
        forget(cloud.store, cloud.placement, compute, 'hv1', lambda: 'now', lambda _: None, fenced=True)
    toy_compute.settle()
    check_names(cloud, **others)


@pytest.mark.parametrize('moment', ['before it', 'before its name', 'after that'])
def test_older_etcd_takes_no_name_back(toy_compute: ToyCompute, cloud: Cloud, moment: str) -> None:
    saved = {'before it': cloud.store.snapshot('/').entries}
    instance = build(toy_compute, 'web')
    saved['before its name'] = cloud.store.snapshot('/').entries
    rename(cloud.store, instance, 'db')
    saved['after that'] = cloud.store.snapshot('/').entries
    toy_compute.settle()
    puts = [Put(each.key, each.value.decode(), each.lease) for each in saved[moment].values()]
    cloud.store.commit([], [*map(Delete, cloud.store.snapshot('/').entries.keys() - saved[moment].keys()), *puts])
    toy_compute.restart()
    toy_compute.republish([instance])
    toy_compute.settle()
    request = cloud.read_request(toy_compute.compute, instance)
    assert request.name == toy_compute.read_record(instance).name == 'db'
    check_names(cloud, db=instance)


def test_protected_instance_stays(toy_compute: ToyCompute, cloud: Cloud) -> None:
    def run(with_protected: bool = False) -> dict[str, Evacuated]:
        outcomes, answer, owner = list[Evacuated](), (cloud.placement, Offer(())), {**OWNER, 'since': 'today'}
        scheduler = Scheduler(cloud.store, lambda: answer, owner, random.Random(), lambda: 'now')
        evacuate(scheduler, toy_compute.compute, 'hv1', outcomes.append, with_protected)
        return {each.instance: each for each in outcomes}

    kept, moved = build(toy_compute, 'kept'), build(toy_compute, 'web')
    assert protect(cloud.store, kept, True) == f'{kept}: is protected now'
    with pytest.raises(Conflict, match=f'is protected, and is kept. Fix: eschedule unprotect {kept}'):
        destroy(cloud.store, kept)
    rename(cloud.store, moved, 'db')
    target = cloud.make_compute(VCPU=10, MEMORY_MB=1024, DISK_GB=10)
    cloud.etcd.delete(keys.compute(toy_compute.compute))
    outcomes = run()
    assert (outcomes[kept].reason, outcomes[moved].compute) == (PROTECTED, target)
    toy_compute.settle()  # the host is back, and off again
    check_names(cloud, kept=kept, db=str(outcomes[moved].replaced_by))
    new = str(run(with_protected=True)[kept].replaced_by)
    assert cloud.read_request(target, new).is_protected
