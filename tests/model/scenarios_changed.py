"""Renamed and protected instances, beside other commands and after a restore of etcd."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from ecomp.errors import Conflict, StillGoing
from ecomp.model import keys
from ecomp.scheduler.placing.modify import protect, rename
from ecomp.store.client import Delete, Put
from tests.model.acting import SINGLE_FAULT, Actor
from tests.model.applying import OTHER_IMAGE, add_apply, make_file, run_apply
from tests.model.cloud import A, Cloud, U, V
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios
from tests.model.invariants import NAME
from tests.model.scenarios_evacuated import WEB, add_evacuation, add_return, die
from tests.model.scenarios_losses import restore_etcd
from tests.model.scenarios_pairs import make_active


def add_rename(cloud: Cloud, name: str = 'db') -> Actor:
    work = partial(rename, ModelStore(cloud.etcd), U, name)
    return cloud.add_actor(f'rename to {name}', work, retry=work, command='rename', subjects=(U,))


def add_protect(cloud: Cloud, instance: str = U) -> Actor:
    work = partial(protect, ModelStore(cloud.etcd), instance, is_protected=True)
    return cloud.add_actor('protect', work, retry=work, command='protect', subjects=(instance,))


def _make_active(cloud: Cloud) -> None:
    cloud.set_instance_limit(5)
    host = make_active(cloud)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def renamed_beside_create(cloud: Cloud) -> None:
    """An instance is renamed while another one is created with its new name."""
    _make_active(cloud)
    add_rename(cloud)
    cloud.add_create('eschedule', V, name='db')


def renamed_twice(cloud: Cloud) -> None:
    """An instance gets two names at once, and its first one is created again."""
    _make_active(cloud)
    add_rename(cloud)
    add_rename(cloud, 'cache')
    cloud.add_create('eschedule', V, name='web')


def renamed_beside_destroy(cloud: Cloud) -> None:
    """An instance is renamed and destroyed, and its old name is used again."""
    _make_active(cloud)
    add_rename(cloud)
    cloud.add_destroy('destroy', U)
    cloud.add_create('eschedule', V, name='web')


def renamed_and_new_name_reused(cloud: Cloud) -> None:
    """The same for its new name."""
    _make_active(cloud)
    add_rename(cloud)
    cloud.add_destroy('destroy', U)
    cloud.add_create('eschedule', V, name='db')


def renamed_beside_stop(cloud: Cloud) -> None:
    """An instance is renamed and stopped at once: neither change is lost."""
    host = make_active(cloud)
    add_rename(cloud)
    cloud.add_power('stop', U, 'stop')
    cloud.add_compute_actor(A, '', host.repeat(4, host.plan))


def renamed_beside_evacuation(cloud: Cloud) -> None:
    """An instance is renamed while its dead host is evacuated, which then comes back."""
    host = die(cloud, (U, 'web'))
    evacuation = add_evacuation(cloud, 'evacuate')
    add_rename(cloud)
    add_return(cloud, host).is_ready = lambda: not evacuation.is_active


def _rename_and_restore(cloud: Cloud, is_delivered: bool = True) -> Actor:
    """Rename U, restore etcd to before that, or to before U, and add the actor that accepts it."""
    cloud.set_instance_limit(5)
    saved = dict(cloud.etcd.entries)
    host = make_active(cloud)
    saved = dict(cloud.etcd.entries) if is_delivered else saved
    rename(cloud.store, U, 'db')
    host.plan(2)
    restore_etcd(cloud, saved)
    host.republishes = True
    cloud.has_ample_room = False

    def accept() -> None:
        host.start(republishes=True)
        host.repeat(3, host.plan)()

    return cloud.add_actor('A', accept, process=A)


def renamed_and_restored(cloud: Cloud) -> Check:
    """After a restore to before a rename A publishes it, so the old name is free again."""
    acceptance = _rename_and_restore(cloud)
    cloud.add_create('eschedule', V, name='web')

    def check() -> list[str]:
        is_called = json.loads(cloud.etcd.entries[keys.request(A, U)].value)['name'] == 'db'
        is_due = acceptance.done and acceptance.outcome is None
        return ['U was renamed, and is not called so'] * (is_due and not is_called)

    return check


def renamed_again_after_a_restore(cloud: Cloud) -> None:
    """After a restore to before a rename U gets a third name as A accepts."""
    _rename_and_restore(cloud)
    add_rename(cloud, 'cache')


def stopped_after_a_restore(cloud: Cloud) -> None:
    """After a restore to before a rename U is stopped as A accepts."""
    _rename_and_restore(cloud)
    cloud.add_power('stop', U, 'stop')


def destroyed_after_a_restore(cloud: Cloud) -> None:
    """After a restore to before a rename U is destroyed as A accepts."""
    _rename_and_restore(cloud)
    cloud.add_destroy('destroy', U)
    cloud.add_create('eschedule', V, name='web')


def renamed_and_emptied(cloud: Cloud) -> None:
    """After a restore to before U, which was renamed, its old name is used again."""
    _rename_and_restore(cloud, is_delivered=False)
    cloud.add_create('eschedule', V, name='web')


def name_taken_after_a_restore(cloud: Cloud) -> Check:
    """After a restore to before a rename the new name is used again: V keeps it."""
    _rename_and_restore(cloud)
    cloud.exempt(NAME, "U is published with its name, which may be V's, as the log of A says")
    cloud.ends_inconsistent = True
    create = cloud.add_create('eschedule', V, name='db')

    def check() -> list[str]:
        owner = cloud.etcd.entries.get(keys.name('db'))
        is_taken = isinstance(create.outcome, dict) and (owner is None or V.encode() not in owner.value)
        return ['V was created with a name that is taken from it'] * is_taken

    return check


def state_directory_lost_after_a_rename(cloud: Cloud) -> None:
    """The same where A has lost its state directory, and U is renamed again."""
    _rename_and_restore(cloud)
    cloud.computes[A].disk.files = {'boot_id': 'first'}
    add_rename(cloud, 'cache')


def _make_protected_check(cloud: Cloud) -> Check:
    """Return a check that no request is replaced by a tombstone while it is protected."""
    protected, wrong = set[str](), list[str]()
    cloud.world.state_parts.append(lambda: (tuple(protected), tuple(wrong)))

    def note(operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            if not isinstance(operation, Put) or not operation.key.startswith(keys.HOSTS):
                continue
            value = json.loads(operation.value)
            if not value['allocations'] and operation.key in protected:
                wrong.append(f'{operation.key} is protected, and is to be destroyed')
            protected.add(operation.key) if value.get('protected') else protected.discard(operation.key)

    cloud.etcd.listeners.append(note)
    return lambda: wrong


def protected_beside_destroy(cloud: Cloud) -> Check:
    """An instance is protected while it is destroyed: only one is accepted."""
    _make_active(cloud)
    add_protect(cloud)
    cloud.add_destroy('destroy', U)
    return _make_protected_check(cloud)


def protected_beside_replace(cloud: Cloud) -> Check:
    """An instance of a stack is protected while an apply replaces it: only one is accepted."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    (instance,) = run_apply(cloud, make_file(WEB))
    host.plan(4)
    add_protect(cloud, instance)
    add_apply(cloud, 'apply', make_file(WEB, image=OTHER_IMAGE), (Conflict, StillGoing), replace_all=True)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    return _make_protected_check(cloud)


def protected_beside_evacuation(cloud: Cloud) -> Check:
    """An instance is protected while its dead host is evacuated: it moves before, or stays."""
    host = die(cloud, (U, 'web'))
    evacuation = add_evacuation(cloud, 'evacuate')
    add_protect(cloud)
    add_return(cloud, host).is_ready = lambda: not evacuation.is_active
    return _make_protected_check(cloud)


SCENARIOS = make_scenarios(
    SINGLE_FAULT,
    *(renamed_beside_create, renamed_twice, renamed_beside_destroy, renamed_and_new_name_reused),
    *(renamed_beside_stop, renamed_beside_evacuation, renamed_and_restored, renamed_again_after_a_restore),
    *(stopped_after_a_restore, destroyed_after_a_restore, renamed_and_emptied, name_taken_after_a_restore),
    *(state_directory_lost_after_a_rename, protected_beside_destroy, protected_beside_replace),
    protected_beside_evacuation,
)
