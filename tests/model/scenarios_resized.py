"""Instances that are resized or rebuilt, beside other commands and after a restore of etcd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ecomp.errors import BuildFailed, Conflict, NoCapacity, StillGoing, Unreachable
from ecomp.model import keys
from ecomp.model.order import REBOOT, PowerAction
from ecomp.model.states import ACTIVE, STOPPED
from ecomp.placement.allocations import read_consumer, replace_allocations
from ecomp.scheduler.placing.modify import rebuild, resize
from ecomp.store.client import Delete
from tests.model.acting import SINGLE_FAULT, Actor, Bounds
from tests.model.applying import OTHER_IMAGE, add_apply, make_file, run_apply
from tests.model.cloud import IMAGE, A, B, Cloud, U, make_numbered_uuid
from tests.model.cloud import SIZE as ONE
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, Scene, make_scenarios
from tests.model.invariants import CLAIM
from tests.model.scenarios_evacuated import WEB, add_evacuation, add_return, lose_power
from tests.model.scenarios_losses import restore_etcd
from tests.model.scenarios_pairs import make_active
from tests.model.scenarios_strangers import add_manual_writes
from tests.model.scenarios_threads import make_threaded_planning
from tests.model.virtual import HOST, find_pid

HOST_KEYS = ('ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f',)


def _resize(cloud: Cloud, vcpus: int, restart: bool = True) -> object:
    power = PowerAction(REBOOT, make_numbered_uuid(80 + vcpus)) if restart else None
    owner = {'host': HOST, 'pid': find_pid()}
    return resize(ModelStore(cloud.etcd), cloud.placement, U, {'VCPU': vcpus}, owner, power)


def add_resize(cloud: Cloud, vcpus: int, restart: bool = False) -> Actor:
    work = partial(_resize, cloud, vcpus, restart)
    return cloud.add_actor(f'resize to {vcpus}', work, retry=work, command='resize', subjects=(U,))


def _make_sized(cloud: Cloud) -> Compute:
    """Return A, on which U runs with 2 VCPUs."""
    cloud.set_instance_limit(5)
    host = make_active(cloud)
    _resize(cloud, 2)
    host.plan(6)
    return host


def _make_scene(name: str, *changes: int | str | Callable[[Cloud], object], is_mortal: bool = True) -> Scene:
    def scene(cloud: Cloud) -> None:
        host = _make_sized(cloud)
        for change in changes:
            if callable(change):
                change(cloud)
            elif isinstance(change, int):
                add_resize(cloud, change, restart=change == 3)
            else:
                cloud.add_destroy(change, U) if change == 'destroy' else cloud.add_power(change, U, change)
        cloud.add_compute_actor(A, '', host.repeat(5, host.plan)).mortal = is_mortal

    scene.__name__, scene.__doc__ = name, f'U has 2 VCPUs. {name.replace("_", " ")}; with 3 it is rebooted, too.'
    return scene


def resized_beside_evacuation(cloud: Cloud) -> None:
    """The dead host of an instance that is resized is evacuated, and comes back."""
    host = _make_sized(cloud)
    cloud.add_host(B)
    _resize(cloud, 1, restart=False)
    host.plan(2)
    lose_power(cloud, host)
    evacuation = add_evacuation(cloud, 'evacuate')
    add_resize(cloud, 3)
    add_return(cloud, host).is_ready = lambda: not evacuation.is_active


def resized_beside_apply(cloud: Cloud) -> None:
    """An instance and a new member of a stack want the last room."""
    host = _make_sized(cloud)
    cloud.has_ample_room = False
    run_apply(cloud, make_file('web/1'))
    host.plan(3)
    add_resize(cloud, 3).retry = None  # which may find no room
    add_apply(cloud, 'apply', make_file('web/1', 'db/1'), (NoCapacity,))
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))


def resize_frozen(cloud: Cloud) -> None:
    """A resize is slower than its lease, and the compute sets its claim back."""
    host, generation = _make_sized(cloud), read_consumer(cloud.placement, U).generation
    replace_allocations(cloud.placement, U, {A: {**ONE, 'VCPU': 3}}, 'u', 'p', generation)
    host.plan()
    host.reconcile()  # it sees what a killed resize has left
    cloud.world.clock += 61.0
    add_resize(cloud, 3, restart=True).retry = None
    cloud.add_compute_actor(A, '', lambda: host.run_all(host.reconcile, *[host.plan] * 5))


def resizes_frozen(cloud: Cloud) -> None:
    """The same with another resize, which may find the first one's attempt."""
    resize_frozen(cloud)
    add_resize(cloud, 4)


def _make_restore(name: str, vcpus: int, plans: int, is_pending: bool, with_placement: bool) -> Scene:
    def scene(cloud: Cloud) -> None:
        host = _make_sized(cloud)
        cloud.exempt(CLAIM, 'etcd is restored, and with it the request and the quota')
        if is_pending:
            _resize(cloud, vcpus)
        saved, claims = dict(cloud.etcd.entries), copy.deepcopy((cloud.model.rows, cloud.model.held))
        if not is_pending:
            _resize(cloud, vcpus, restart=plans > 2)
        host.plan(plans)
        restore_etcd(cloud, saved)
        if with_placement:
            cloud.model.rows, cloud.model.held = claims
            cloud.model.writes += 1
        host.republishes = True

        def accept() -> None:
            host.start(republishes=True)
            host.repeat(3, host.plan, host.reconcile)()

        cloud.add_actor('A', accept, process=A)
        add_resize(cloud, 4)

    scene.__name__, scene.__doc__ = name, f'A resize is newer than etcd: {name.replace("_", " ")}.'
    return scene


def add_rebuild(cloud: Cloud, image: str = OTHER_IMAGE, instance: str = U) -> Actor:
    work = partial(rebuild, ModelStore(cloud.etcd), instance, image)
    return cloud.add_actor(f'rebuild of {image}', work, retry=work, command='rebuild', subjects=(instance,))


def _make_reported(cloud: Cloud) -> Compute:
    """Return A, on which U runs and has reported its host keys."""
    cloud.set_instance_limit(5)
    host = make_active(cloud)
    records, request = host.instances.records, cloud.etcd.entries[keys.request(A, U)]
    records.write(replace(records.require(U), host_keys=HOST_KEYS), request.revision)
    return host


def _make_pending(cloud: Cloud) -> Compute:
    host = _make_reported(cloud)
    rebuild(cloud.store, U, OTHER_IMAGE)
    return host


def rebuilt_beside_evacuation(cloud: Cloud) -> None:
    """The dead host of an instance that is to be rebuilt is evacuated, and comes back."""
    host = _make_pending(cloud)
    cloud.add_host(B)
    lose_power(cloud, host)
    evacuation = add_evacuation(cloud, 'evacuate')
    add_rebuild(cloud)
    add_return(cloud, host).is_ready = lambda: not evacuation.is_active


def rebuilt_beside_apply(cloud: Cloud) -> None:
    """An instance of a stack is rebuilt while an apply replaces it."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    (instance,) = run_apply(cloud, make_file(WEB))
    host.plan(4)
    add_rebuild(cloud, OTHER_IMAGE, instance)
    add_apply(cloud, 'apply', make_file(WEB, image=OTHER_IMAGE), (Conflict, StillGoing), replace_all=True)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def rebuilt_in_threads(cloud: Cloud) -> None:
    """An instance is destroyed while a thread rebuilds it."""
    host = _make_pending(cloud)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, 'planning', make_threaded_planning(cloud, host, 4, host.planner.recheck))


def rebuild_failed(cloud: Cloud) -> Check:
    """The new disk cannot be made: the instance is stopped with its claim, and is rebuilt again."""
    cloud.starts_inconsistent = True
    host = _make_pending(cloud)
    host.hypervisor.errors['makes the disk'] = BuildFailed('disk', 'the pool is full')
    cloud.add_actor('later', lambda: None, retry=partial(rebuild, cloud.store, U, IMAGE))
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))

    def check() -> list[str]:
        record = host.instances.records.get(U)
        is_wrong = record and record.fault and (record.state, record.image) != (STOPPED, OTHER_IMAGE)
        return ['a rebuild has failed, and U is not stopped'] if is_wrong else []

    return check


def rebuilt_without_domain(cloud: Cloud) -> Check:
    """Neither domain nor disk is left of a rebuild that was interrupted, for a minute."""
    host = _make_pending(cloud)
    host.hypervisor.errors['makes the disk'] = Unreachable('libvirt gives no answer', 'libvirt')
    host.plan()
    host.hypervisor.destroy(U, A)
    for _ in range(2):
        host.missing_threads = 1
        host.run_all(host.planner.retry_now, host.plan)
        cloud.world.clock += 61.0
    cloud.add_compute_actor(A, '', host.repeat(2, host.planner.retry_now, host.plan))
    entries = cloud.etcd.entries
    return lambda: [] if ACTIVE.encode() in entries[keys.record(A, U)].value else ['U was to be rebuilt, and has ended']


def _make_late_restore(name: str, *what: str) -> Scene:
    """Make a scene in which A rebuilds, or is killed, and then accepts an etcd of before that."""

    def scene(cloud: Cloud) -> None:
        host = _make_reported(cloud)
        saved = dict(cloud.etcd.entries)
        rebuild(cloud.store, U, OTHER_IMAGE)
        saved = dict(cloud.etcd.entries) if 'pending' in what else saved
        if 'no record' in what:
            del saved[keys.record(A, U)]
        if 'fails' in what:
            host.hypervisor.errors['reserves an address for'] = BuildFailed('scheduled', 'no address is free')
        first = cloud.add_compute_actor(A, '', host.repeat(2, host.plan))

        def accept() -> None:
            cloud.world.wait('A to end', lambda: not first.is_active)
            restore_etcd(cloud, saved)
            cloud.world.clock += 61.0
            if 'no state' in what:
                host.disk.files = {'boot_id': 'first'}
            host.republishes = True
            host.start(republishes=True)
            host.repeat(3, host.plan)()

        cloud.add_actor('A, later', accept, mortal=False)
        if 'again' in what:
            add_rebuild(cloud, IMAGE).is_ready = lambda: host.republishes

    scene.__name__, scene.__doc__ = name, f'A rebuild is newer than etcd: {name.replace("_", " ")}.'
    return scene


# The number of VCPUs, how often A plans, and whether the restored etcd has the resize.
RESTORED = {
    **{'resized': (3, 6, False), 'resized_down': (1, 6, False), 'pending': (3, 2, False), 'accepted': (3, 0, False)},
    'resized_while_pending': (1, 6, True),
}
SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        *(_make_scene('resized_twice', 3, 1), _make_scene('resized_down_and_rebooted', 1, 'reboot')),
        _make_scene('resized_while_off', 'stop', 1, 'start'),
        _make_scene('resized_beside_destroy', 1, 3, 'destroy'),
        *(resized_beside_evacuation, resized_beside_apply),
        *(
            _make_restore(f'{name}_and_both_restored' if both else f'{name}_and_restored', *moment, both)
            for name, moment in RESTORED.items()
            for both in (False, True)
        ),
    ),
    *make_scenarios(Bounds(2, 1, kills=1, expiries=1), resize_frozen, resizes_frozen),
    *make_scenarios(
        Bounds(2, 0),
        _make_scene('rebuilt_beside_destroy', add_rebuild, 'destroy'),
        _make_late_restore('rebuilt_and_all_lost', 'no state'),
    ),
    *make_scenarios(
        SINGLE_FAULT,
        _make_scene('rebuilt_beside_stop', add_rebuild, 'stop'),
        _make_scene('rebuilt_while_off', add_rebuild, 'stop', 'start'),
        _make_scene('rebuilt_twice', add_rebuild, partial(add_rebuild, image=IMAGE)),
        _make_scene('rebuilt_and_resized', add_rebuild, 1),
        *(rebuilt_beside_evacuation, rebuilt_beside_apply, rebuilt_in_threads, rebuild_failed, rebuilt_without_domain),
    ),
    *make_scenarios(
        Bounds(1, 1, kills=1),
        _make_scene(
            'rebuilt_without_record', add_rebuild, lambda it: add_manual_writes(it, 'x', Delete(keys.record(A, U)))
        ),
        _make_late_restore('rebuilt_and_restored'),
        _make_late_restore('rebuilt_and_pending_restored', 'pending'),
        _make_late_restore('rebuilt_and_state_lost', 'pending', 'no state'),
        _make_late_restore('rebuild_failed_and_restored', 'fails'),
        _make_late_restore('rebuild_failed_and_pending_restored', 'fails', 'pending'),
        _make_late_restore('rebuild_failed_and_all_lost', 'fails', 'pending', 'no record', 'no state'),
        _make_late_restore('rebuilt_again_after_a_restore', 'again'),
    ),
    *make_scenarios(
        Bounds(1, 2, requests=1, answers=1, late=1, reads=1),
        _make_scene('resize_unanswered', 3, is_mortal=False),
        _make_scene('rebuild_unanswered', add_rebuild, is_mortal=False),
    ),
]
