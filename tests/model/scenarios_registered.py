"""A compute's provider in placement, while it starts, ends, is disabled or forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ecomp.agent.host.provider import Inventory, Registration
from ecomp.errors import EcompError
from ecomp.model import status
from ecomp.scheduler.operating.decommission import disable, enable
from tests.model.acting import SHAKY, Bounds, Call
from tests.model.cloud import A, B, Cloud, U, V
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, within
from tests.model.scenarios_operators import forgetting


def inventory(room: int) -> Inventory:
    """Return the inventory that compute.yaml configures."""
    sizes = {'VCPU': room, 'MEMORY_MB': 9, 'DISK_GB': 9}
    return {name: {'total': total, 'reserved': 0, 'allocation_ratio': 1.0} for name, total in sizes.items()}


def registration(cloud: Cloud, host: Compute, room: int = 4, traits: Iterable[str] = ()) -> Registration:
    """Return the registration of one process."""
    return Registration(cloud.placement, host.uuid, inventory(room), (), [*traits], (), host.disk.at('state'))


def _tries(times: int, work: Callable[[], object]) -> None:
    """Repeat the work after an error, as a restart or the next minute does."""
    for _ in range(times):
        try:
            work()
            return
        except EcompError:
            continue


def _is_closed(cloud: Cloud, compute: str) -> list[str]:
    provider = cloud.model.providers[compute]
    cpu = provider.inventories['VCPU']
    problems = [] if cpu['reserved'] == cpu['total'] else ['it ended in good order, and its VCPU are not reserved']
    return (
        problems
        if status.DISABLED in provider.traits
        else [*problems, 'it ended in good order, and has no trait for it']
    )


def _is_as(cloud: Cloud, mine: Registration, disabled: bool | None) -> list[str]:
    """Return what is wrong with the provider after a minute; `disabled` None accepts either."""
    mine.keep(lambda: False)
    provider = cloud.model.providers.get(mine.compute)
    if provider is None:
        return ['it lives, and placement does not know it']
    is_right = all(
        provider.inventories.get(name, {}).get(part) == value
        for name, fields in mine.inventory.items()
        for part, value in fields.items()
    )
    problems = [] if is_right else ['it lives, and its inventory is not as it is to be']
    by_operator, is_disabled = status.BY_OPERATOR in provider.traits, status.DISABLED in provider.traits
    if by_operator != is_disabled:
        problems.append(f'its traits are {sorted(provider.traits)}')
    return problems if disabled in (None, is_disabled) else [*problems, f'it is disabled: {is_disabled}']


def closed_while_it_is_kept(cloud: Cloud) -> Check:
    """SIGTERM during the periodic check of the provider: it is closed in the end."""
    host = cloud.host(A)
    own_registration = registration(cloud, host)
    cloud.model.providers[A].inventories['VCPU']['total'] = 2
    closing: list[bool] = []

    def close() -> None:
        cloud.world.call(Call('libvirt', ('is told to end:', A), writes=True), lambda: closing.append(True))
        own_registration.close()

    cloud.world.prints.append(lambda: tuple(closing))

    cloud.works(A, 'looking at the provider', lambda: own_registration.keep(lambda: bool(closing)))
    cloud.works(A, 'ending', close)
    return lambda: _is_closed(cloud, A)


def started_and_disabled(cloud: Cloud) -> Check:
    """A compute ends, and starts with other traits and less room, while it is disabled."""
    return _started(cloud, 'disable')


def started_and_enabled(cloud: Cloud) -> Check:
    """The same for a disabled compute that is enabled."""
    return _started(cloud, 'enable')


def _started(cloud: Cloud, what: str) -> Check:
    host = cloud.host(A)
    before = registration(cloud, host, 4, ['CUSTOM_OLD'])
    before.register()
    if what == 'enable':
        disable(cloud.placement, A, A)
    after: list[Registration] = []

    def restart() -> None:
        before.close()
        ModelStore(cloud.etcd).revoke(host.presence.lease)

        def start() -> None:
            own_registration = registration(cloud, host, 3, ['CUSTOM_NEW'])
            after[:] = [own_registration]
            own_registration.register()

        _tries(3, start)
        host.restart()

    cloud.act(A, restart, mortal=False)
    store = ModelStore(cloud.etcd)

    def change_trait() -> str:
        return disable(cloud.placement, A, A) if what == 'disable' else enable(store, cloud.placement, A, A)

    command = cloud.act(f'host {what}', change_trait, mortal=False, command=what, about=(A,))

    def check() -> list[str]:
        if isinstance(command.outcome, BaseException):
            return [f'host {what} fails: {command.outcome}']
        problems = _is_as(cloud, after[0], what == 'disable')
        return [*problems, *(['its old trait stays'] if 'CUSTOM_OLD' in cloud.model.providers[A].traits else [])]

    return check


def started_beside_a_create(cloud: Cloud) -> Check:
    """A compute with an instance ends, and starts with room for one more, during a create."""
    host = cloud.host(A)
    cloud.is_ample = False
    cloud.delivered(U, A)
    host.plan(3)
    before = registration(cloud, host)

    def restart() -> None:
        before.close()
        own_registration = registration(cloud, host, 2)
        own_registration.register()
        host.rounds(2, host.plan)()

    cloud.works(A, '', restart)
    cloud.creates('eschedule', V)

    return lambda: _is_as(cloud, registration(cloud, host, 2), disabled=False)


def forgotten_as_it_starts(cloud: Cloud) -> Check:
    """A silent compute starts while it is forgotten: it is registered in the end."""
    host = cloud.host(A)
    cloud.host(B)
    cloud.limited(5)
    cloud.delivered(U, A, 'web')
    cloud.etcd.end(host.presence.lease)
    cloud.destroys('destroy', U)

    def start() -> None:
        own_registration = registration(cloud, host)
        _tries(3, own_registration.register)
        host.start()
        host.rounds(2, host.plan)()

    cloud.act('host forget', forgetting(cloud, A), mortal=False, command='forget', about=(A,))
    cloud.act('A', start, mortal=False)
    cloud.creates('eschedule', V)
    return lambda: _is_as(cloud, registration(cloud, host), disabled=False)


SCENARIOS = [
    *within(Bounds(2, 0), closed_while_it_is_kept, started_and_disabled, started_and_enabled, forgotten_as_it_starts),
    *within(SHAKY, started_beside_a_create),
]
