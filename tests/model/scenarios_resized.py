"""Instances that are resized, beside other commands and after a restore of etcd."""

from __future__ import annotations

import copy
from functools import partial

from ecomp.errors import NoCapacity
from ecomp.model.order import REBOOT, PowerAction
from ecomp.placement.allocations import read_consumer, replace_allocations
from ecomp.scheduler.placing.modify import resize
from tests.model.acting import SINGLE_FAULT, Actor, Bounds
from tests.model.applying import add_apply, make_file, run_apply
from tests.model.cloud import SIZE as ONE
from tests.model.cloud import A, B, Cloud, U, make_numbered_uuid
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Scene, make_scenarios
from tests.model.invariants import CLAIM
from tests.model.scenarios_evacuated import add_evacuation, add_return, lose_power
from tests.model.scenarios_losses import restore_etcd
from tests.model.scenarios_pairs import make_active
from tests.model.virtual import HOST, find_pid


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


def _make_scene(name: str, *changes: int | str, is_mortal: bool = True) -> Scene:
    def scene(cloud: Cloud) -> None:
        host = _make_sized(cloud)
        for change in changes:
            if isinstance(change, int):
                add_resize(cloud, change, restart=change == 3)
            else:
                cloud.add_destroy(change, U) if change == 'destroy' else cloud.add_power(change, U, change)
        cloud.add_compute_actor(A, '', host.repeat(5, host.plan)).mortal = is_mortal

    scene.__name__, scene.__doc__ = name, f'U has 2 VCPUs, and at once: {changes}; with 3 it is rebooted, too.'
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
    host.check_claims()  # it sees what a killed resize has left
    cloud.world.clock += 61.0
    add_resize(cloud, 3, restart=True).retry = None
    cloud.add_compute_actor(A, '', lambda: host.run_all(host.check_claims, *[host.plan] * 5))


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
            host.repeat(3, host.plan, host.check_claims)()

        cloud.add_actor('A', accept, process=A)
        add_resize(cloud, 4)

    scene.__name__, scene.__doc__ = name, f'A resize is newer than etcd: {name.replace("_", " ")}.'
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
        Bounds(1, 2, requests=1, answers=1, late=1, reads=1), _make_scene('resize_unanswered', 3, is_mortal=False)
    ),
]
