"""Renamed and protected instances, beside other commands and after a restore of etcd."""

from __future__ import annotations

from functools import partial

from ecomp.errors import Conflict, StillGoing
from ecomp.model import keys
from ecomp.scheduler.placing.modify import protect, rename
from tests.model.acting import SINGLE_FAULT, Actor
from tests.model.applying import OTHER_IMAGE, add_apply, make_file, run_apply
from tests.model.cloud import A, Cloud, U, V, W
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios
from tests.model.scenarios_evacuated import WEB, add_evacuation, add_return, die
from tests.model.scenarios_losses import restore_etcd
from tests.model.scenarios_pairs import make_active


def _add_rename(cloud: Cloud, name: str = 'db') -> None:
    work = partial(rename, ModelStore(cloud.etcd), U, name)
    cloud.add_actor(f'rename to {name}', work, retry=work, command='rename', subjects=(U,))


def _add_protect(cloud: Cloud, instance: str = U) -> None:
    work = partial(protect, ModelStore(cloud.etcd), instance, is_protected=True)
    cloud.add_actor('protect', work, retry=work, command='protect', subjects=(instance,))


def _make_active(cloud: Cloud) -> None:
    cloud.set_instance_limit(5)
    host = make_active(cloud)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def renamed_beside_create(cloud: Cloud) -> None:
    """An instance is renamed while another one is created with its new name."""
    _make_active(cloud)
    _add_rename(cloud)
    cloud.add_create('eschedule', V, name='db')


def renamed_beside_destroy(cloud: Cloud) -> None:
    """An instance is renamed and destroyed, and both its names are used again."""
    _make_active(cloud)
    _add_rename(cloud)
    cloud.add_destroy('destroy', U)
    cloud.add_create('eschedule 1', V, name='web')
    cloud.add_create('eschedule 2', W, name='db')


def renamed_beside_stop(cloud: Cloud) -> None:
    """An instance is renamed and stopped at once: neither change is lost."""
    host = make_active(cloud)
    _add_rename(cloud)
    cloud.add_power('stop', U, 'stop')
    cloud.add_compute_actor(A, '', host.repeat(4, host.plan))


def renamed_beside_evacuation(cloud: Cloud) -> None:
    """An instance is renamed while its dead host is evacuated, which then comes back."""
    host = die(cloud, (U, 'web'))
    evacuation = add_evacuation(cloud, 'evacuate')
    _add_rename(cloud)
    add_return(cloud, host).is_ready = lambda: not evacuation.is_active


def _rename_and_restore(cloud: Cloud) -> Actor:
    """Rename U, restore etcd to before that, and return who accepts it."""
    cloud.set_instance_limit(5)
    cloud.has_ample_room = False
    host = make_active(cloud)
    saved = dict(cloud.etcd.entries)
    rename(cloud.store, U, 'db')
    host.plan(2)
    restore_etcd(cloud, saved)
    host.republishes = True

    def accept() -> None:
        host.start(republishes=True)
        host.repeat(3, host.plan)()

    return cloud.add_actor('A', accept, process=A)


def renamed_and_restored(cloud: Cloud) -> Check:
    """After a restore to before a rename A publishes it, so the old name is free again."""
    acceptance = _rename_and_restore(cloud)
    cloud.add_create('eschedule', V, name='web')

    def check() -> list[str]:
        is_lost = b'"name": "web"' in cloud.etcd.entries[keys.request(A, U)].value
        return ['A has accepted etcd, and U is not renamed'] * (is_lost and acceptance.done and not acceptance.outcome)

    return check


def changed_after_a_restore(cloud: Cloud) -> None:
    """After a restore to before a rename U is stopped and gets a third name as A accepts."""
    _rename_and_restore(cloud)
    cloud.add_power('stop', U, 'stop')
    _add_rename(cloud, 'cache')


def protected_beside_destroy(cloud: Cloud) -> None:
    """An instance is protected while it is destroyed: only one is accepted."""
    _make_active(cloud)
    _add_protect(cloud)
    cloud.add_destroy('destroy', U)


def protected_beside_replace(cloud: Cloud) -> None:
    """An instance of a stack is protected while an apply replaces it: only one is accepted."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    (instance,) = run_apply(cloud, make_file(WEB))
    host.plan(4)
    _add_protect(cloud, instance)
    add_apply(cloud, 'apply', make_file(WEB, image=OTHER_IMAGE), (Conflict, StillGoing), replace_all=True)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def protected_beside_evacuation(cloud: Cloud) -> None:
    """An instance is protected while its dead host is evacuated: it moves before, or stays."""
    die(cloud, (U, 'web')).is_dead = True
    add_evacuation(cloud, 'evacuate')
    _add_protect(cloud)


SCENARIOS = make_scenarios(
    SINGLE_FAULT,
    *(renamed_beside_create, renamed_beside_destroy, renamed_beside_stop, renamed_beside_evacuation),
    *(renamed_and_restored, changed_after_a_restore),
    *(protected_beside_destroy, protected_beside_replace, protected_beside_evacuation),
)
