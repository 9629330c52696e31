"""A compute's provider and instances while it starts, ends, is killed, disabled, forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ecomp.agent.host.provider import PlacementInventory, Registration
from ecomp.errors import EcompError
from ecomp.model import keys, status
from ecomp.model.record import Record
from ecomp.model.states import GONE, RETENTION_SECONDS
from ecomp.model.stored import encode
from ecomp.scheduler.operations.decommission import disable, enable
from ecomp.store.client import Delete, Put
from tests.model.acting import SINGLE_FAULT, Bounds, Call
from tests.model.cloud import AFFINITY, A, B, Cloud, U, V
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios
from tests.model.scenarios_operators import make_forget


def make_inventory(room: int) -> PlacementInventory:
    sizes = {'VCPU': room, 'MEMORY_MB': 9, 'DISK_GB': 9}
    return {name: {'total': total, 'reserved': 0, 'allocation_ratio': 1.0} for name, total in sizes.items()}


def make_registration(cloud: Cloud, host: Compute, room: int = 4, traits: Iterable[str] = ()) -> Registration:
    return Registration(
        cloud.placement, host.uuid, make_inventory(room), (), [*traits], (), host.disk.make_path('state')
    )


def retry(times: int, work: Callable[[], object]) -> None:
    """Repeat the work after an error, as a restart or the next minute does."""
    for _ in range(times):
        try:
            work()
            return
        except EcompError:
            continue


def _check_closed(cloud: Cloud, compute: str) -> list[str]:
    provider = cloud.model.providers[compute]
    cpu = provider.inventories['VCPU']
    problems = [] if cpu['reserved'] == cpu['total'] else ['it ended in good order, and its VCPU are not reserved']
    return (
        problems
        if status.DISABLED in provider.traits
        else [*problems, 'it ended in good order, and has no trait for it']
    )


def _check_registered(cloud: Cloud, registration: Registration, disabled: bool | None) -> list[str]:
    """Return what is wrong with the provider after a minute. `disabled` None accepts either."""
    registration.ensure_registered(lambda: False)
    provider = cloud.model.providers.get(registration.compute)
    if provider is None:
        return ['it lives, and placement does not know it']
    is_right = all(
        provider.inventories.get(name, {}).get(part) == value
        for name, fields in registration.inventory.items()
        for part, value in fields.items()
    )
    problems = [] if is_right else ['it lives, and its inventory is not as it is to be']
    by_operator, is_disabled = status.DISABLED_BY_OPERATOR in provider.traits, status.DISABLED in provider.traits
    if by_operator != is_disabled:
        problems.append(f'its traits are {sorted(provider.traits)}')
    return problems if disabled in (None, is_disabled) else [*problems, f'it is disabled: {is_disabled}']


def closed_during_check(cloud: Cloud) -> Check:
    """SIGTERM during the periodic check of the provider: it is closed in the end."""
    host = cloud.add_host(A)
    own_registration = make_registration(cloud, host)
    cloud.model.providers[A].inventories['VCPU']['total'] = 2
    closing: list[bool] = []

    def close() -> None:
        cloud.world.call(Call('libvirt', ('is told to end:', A), writes=True), lambda: closing.append(True))
        own_registration.close()

    cloud.world.state_parts.append(lambda: tuple(closing))

    cloud.add_compute_actor(
        A, 'looking at the provider', lambda: own_registration.ensure_registered(lambda: bool(closing))
    )
    cloud.add_compute_actor(A, 'ending', close)
    return lambda: _check_closed(cloud, A)


def started_and_disabled(cloud: Cloud) -> Check:
    """A compute ends, and starts with other traits and less room, while it is disabled."""
    return _run_restart(cloud, 'disable')


def started_and_enabled(cloud: Cloud) -> Check:
    """The same for a disabled compute that is enabled."""
    return _run_restart(cloud, 'enable')


def _run_restart(cloud: Cloud, command_name: str) -> Check:
    host = cloud.add_host(A)
    before = make_registration(cloud, host, 4, ['CUSTOM_OLD'])
    before.register()
    if command_name == 'enable':
        disable(cloud.placement, A, A)
    after: list[Registration] = []

    def restart() -> None:
        before.close()
        ModelStore(cloud.etcd).revoke(host.presence.lease)

        def start() -> None:
            own_registration = make_registration(cloud, host, 3, ['CUSTOM_NEW'])
            after[:] = [own_registration]
            own_registration.register()

        retry(3, start)
        host.restart()

    cloud.add_actor(A, restart, mortal=False)
    store = ModelStore(cloud.etcd)

    def change_trait() -> str:
        return disable(cloud.placement, A, A) if command_name == 'disable' else enable(store, cloud.placement, A, A)

    command = cloud.add_actor(f'host {command_name}', change_trait, mortal=False, command=command_name, subjects=(A,))

    def check() -> list[str]:
        if isinstance(command.outcome, BaseException):
            return [f'host {command_name} fails: {command.outcome}']
        problems = _check_registered(cloud, after[0], command_name == 'disable')
        return [*problems, *(['its old trait stays'] if 'CUSTOM_OLD' in cloud.model.providers[A].traits else [])]

    return check


def started_beside_a_create(cloud: Cloud) -> Check:
    """A compute with an instance ends, and starts with room for one more, during a create."""
    host = cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.deliver(U, A)
    host.plan(3)
    before = make_registration(cloud, host)

    def restart() -> None:
        before.close()
        own_registration = make_registration(cloud, host, 2)
        own_registration.register()
        host.repeat(2, host.plan)()

    cloud.add_compute_actor(A, '', restart)
    cloud.add_create('eschedule', V)

    return lambda: _check_registered(cloud, make_registration(cloud, host, 2), disabled=False)


def forgotten_as_it_starts(cloud: Cloud) -> Check:
    """A silent compute starts while it is forgotten: it is registered in the end."""
    host = cloud.add_host(A)
    cloud.add_host(B)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, 'web')
    cloud.etcd.end_lease(host.presence.lease)
    cloud.add_destroy('destroy', U)

    def start() -> None:
        own_registration = make_registration(cloud, host)
        retry(3, own_registration.register)
        host.start()
        host.repeat(2, host.plan)()

    cloud.add_actor('host forget', make_forget(cloud, A), mortal=False, command='forget', subjects=(A,))
    cloud.add_actor('A', start, mortal=False)
    cloud.add_create('eschedule', V)
    return lambda: _check_registered(cloud, make_registration(cloud, host), disabled=False)


SCENARIOS = [
    *make_scenarios(
        Bounds(2, 0), closed_during_check, started_and_disabled, started_and_enabled, forgotten_as_it_starts
    ),
    *make_scenarios(SINGLE_FAULT, started_beside_a_create),
]


# An instance is built, switched and destroyed while its ecompute is killed and restarted.


def _deliver(cloud: Cloud) -> Compute:
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, 'web', AFFINITY)
    return host


def _make_active(cloud: Cloud) -> Compute:
    host = _deliver(cloud)
    host.plan(3)
    return host


def built_and_destroyed(cloud: Cloud) -> None:
    """A destroy during a build: ecompute may be killed anywhere, and a message may be lost."""
    host = _deliver(cloud)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_destroy('destroy', U)


def destroyed_twice(cloud: Cloud) -> None:
    """Two destroys of an active instance while its compute works."""
    host = _make_active(cloud)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_destroy('destroy 1', U)
    cloud.add_destroy('destroy 2', U)


def stopped_and_destroyed(cloud: Cloud) -> None:
    """A stop and a destroy of an active instance."""
    host = _make_active(cloud)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_destroy('destroy', U)
    cloud.add_power('stop', U, 'stop')


def rebooted(cloud: Cloud) -> None:
    """A reboot of an active instance, where ecompute may be killed anywhere."""
    host = _make_active(cloud)
    cloud.add_compute_actor(A, '', host.repeat(4, host.plan))
    cloud.add_power('reboot', U, 'reboot')


def forged_records(cloud: Cloud) -> None:
    """A forged record says that U is gone on another compute: U is built nevertheless."""
    host = _deliver(cloud)
    cloud.add_host(B)
    forged = encode(Record(U, B, GONE))

    def forge() -> None:
        lease = cloud.store.grant(RETENTION_SECONDS[GONE])
        cloud.store.commit([], [Put(keys.record(B, U), forged, lease)])

    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_actor('somebody', forge)
    cloud.add_destroy('destroy', U)


def killed_twice(cloud: Cloud) -> None:
    """An ecompute is killed in a build, restarted during a destroy, and killed again."""
    host = _deliver(cloud)
    first = cloud.add_compute_actor(A, '', host.repeat(2, host.plan))

    def restart() -> None:
        cloud.world.wait('the first to be killed', lambda: first.dead)
        host.restart()
        host.repeat(3, host.plan)()

    cloud.add_actor('A again', restart, process=A)
    cloud.add_destroy('destroy', U)


def resumed_and_built(cloud: Cloud) -> None:
    """A create with the same --uuid while the first one's delivery is built."""
    host = cloud.add_host(A)
    cloud.add_two_creates(U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan, host.reconcile))


def destroyed_and_asked_again(cloud: Cloud) -> None:
    """A uuid is created again during its destroy: it is refused, or nothing is lost."""
    host = _make_active(cloud)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_create('eschedule', U, resume=True)


def published_again(cloud: Cloud) -> None:
    """A compute publishes its guests to an empty etcd during a create of the same name."""
    host = _make_active(cloud)
    cloud.store.commit([], [Delete(key) for key in cloud.etcd.entries])
    cloud.has_ample_room = False
    host.republishes = True
    cloud.add_compute_actor(A, '', lambda: host.start(republishes=True))
    cloud.add_create('eschedule', V, name='web')


SCENARIOS += [
    *make_scenarios(
        SINGLE_FAULT,
        *(built_and_destroyed, destroyed_twice, stopped_and_destroyed, rebooted, forged_records),
        *(destroyed_and_asked_again, published_again),
    ),
    *make_scenarios(Bounds(2, 2, kills=2), killed_twice),
    *make_scenarios(Bounds(2, 1, kills=1), resumed_and_built),
]
