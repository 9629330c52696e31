"""Stacks: an apply beside other commands, a loss, and whatever wants its names or room."""

from __future__ import annotations

from collections.abc import Sequence

from ecomp.errors import ClaimedElsewhere, Conflict, EcompError, NoCapacity, StillGoing
from ecomp.model import keys
from ecomp.model.stack import Stack
from ecomp.model.stored import decode
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.operations.decommission import disable
from ecomp.store.client import Delete
from tests.kit.removal import clear
from tests.model.acting import SINGLE_FAULT, Actor, Bounds
from tests.model.applying import OTHER_IMAGE, STACK, add_apply, add_destroy_file, make_file, run_apply
from tests.model.cloud import ANTI_AFFINITY, A, B, Cloud, U
from tests.model.compute import Compute
from tests.model.explorer import Check, make_scenarios
from tests.model.invariants import DELIVERY, ENTRY, WHOLE, is_living_request
from tests.model.scenarios_losses import restore_etcd
from tests.model.scenarios_operators import add_drain

DB, WEB, CACHE = 'db/1', 'web/1', 'cache/1'
FILE = make_file(DB, WEB)


def _add_hosts(cloud: Cloud, *computes: str) -> None:
    cloud.set_instance_limit(5)
    cloud.add_hosts(*(computes or (A, B)))


def _make_applied(cloud: Cloud, *entries: str, computes: Sequence[str] = (A, B)) -> dict[str, str]:
    _add_hosts(cloud, *computes)
    run_apply(cloud, make_file(*entries))
    _build(cloud)
    return dict(decode(Stack, cloud.etcd.entries[keys.stack(STACK)].value, name=STACK).list_instances())


def _build(cloud: Cloud) -> None:
    for host in cloud.computes.values():
        host.plan(3)


def _add_builds(cloud: Cloud) -> None:
    for host in list(cloud.computes.values()):
        cloud.add_compute_actor(host.uuid, '', host.repeat(2, host.plan))


def _add_apply_after(cloud: Cloud, *earlier: Actor, may_fail: tuple[type[EcompError], ...] = ()) -> Actor:
    """Add an apply that begins once these actors have ended."""
    later = add_apply(cloud, 'apply again', FILE, may_fail)
    later.is_ready = lambda: not any(actor.is_active for actor in earlier)
    return later


def applied_twice(cloud: Cloud) -> None:
    """Two applies of one file, both the first of their stack."""
    _add_hosts(cloud)
    for number in (1, 2):
        add_apply(cloud, f'apply {number}', FILE)


def applied_twice_and_frozen(cloud: Cloud) -> None:
    """The same where leases expire, and a minute passes in which claims are checked."""
    _add_hosts(cloud)
    cloud.add_compute_actor(A, 'looking at claims', cloud.computes[A].repeat(2, cloud.computes[A].reconcile))
    for number in (1, 2):
        add_apply(cloud, f'apply {number}', FILE)


def apply_frozen(cloud: Cloud) -> None:
    """An apply is slower than its lease, and the compute releases its claims as an orphan's."""
    _add_hosts(cloud, A)
    host = cloud.computes[A]
    add_apply(cloud, 'apply', FILE)
    cloud.add_compute_actor(A, '', host.repeat(2, host.reconcile, host.plan))


def apply_late(cloud: Cloud) -> None:
    """An apply's write may reach etcd after it has given up, and the file is applied again."""
    _add_hosts(cloud)
    _add_apply_after(cloud, add_apply(cloud, 'apply', FILE))


def apply_killed(cloud: Cloud) -> Check:
    """An apply is killed at any step, and applied again at any time after that, which succeeds."""
    _add_hosts(cloud)
    first = add_apply(cloud, 'apply', FILE)
    again = _add_apply_after(cloud, first)
    _add_builds(cloud)

    def check() -> list[str]:
        is_refused = isinstance(again.outcome, EcompError)
        return [f'an apply was killed, and the next one fails: {again.outcome}'] if first.dead and is_refused else []

    return check


def apply_interrupted(cloud: Cloud) -> None:
    """An apply ends with Ctrl-C at any step, and is repeated."""
    _add_hosts(cloud)
    _add_apply_after(cloud, add_apply(cloud, 'apply', FILE))
    _add_builds(cloud)


def applied_with_two_files(cloud: Cloud) -> None:
    """Two files of one stack, with one member in both."""
    _add_hosts(cloud)
    add_apply(cloud, 'apply 1', FILE)
    add_apply(cloud, 'apply 2', make_file(WEB, CACHE))


def applied_beside_create_of_its_name(cloud: Cloud) -> None:
    """An instance is created with the name of a member of a stack that is applied."""
    _add_hosts(cloud)
    add_apply(cloud, 'apply', FILE, may_fail=(Conflict,))
    cloud.add_create('eschedule', U, name='s-web-1')


def applied_in_one_group(cloud: Cloud) -> None:
    """A strict anti-affinity group of a stack, and a create that joins it, on two computes."""
    _add_hosts(cloud)
    cloud.has_ample_room = False
    add_apply(cloud, 'apply', make_file(DB, WEB, group=ANTI_AFFINITY), may_fail=(NoCapacity,))
    cloud.add_create('eschedule', U, group=ANTI_AFFINITY)


def applied_and_destroyed(cloud: Cloud) -> None:
    """An instance of a stack is destroyed during an apply, and the file applied again."""
    instances = _make_applied(cloud, WEB)
    destroyed = cloud.add_destroy('destroy', instances[WEB])
    _add_apply_after(cloud, add_apply(cloud, 'apply', FILE, may_fail=(StillGoing,)), destroyed, may_fail=(StillGoing,))
    _add_builds(cloud)


def pruned_and_destroyed(cloud: Cloud) -> None:
    """An instance is destroyed during an apply with --prune that destroys it, too."""
    instances = _make_applied(cloud, DB, WEB, computes=[A])
    add_apply(cloud, 'apply --prune', make_file(WEB), prune=True)
    cloud.add_destroy('destroy', instances[DB])
    _add_builds(cloud)


def applied_and_file_destroyed(cloud: Cloud) -> None:
    """The instances of a file are destroyed during an apply of a larger one."""
    _make_applied(cloud, WEB)
    add_apply(cloud, 'apply', FILE, may_fail=(StillGoing,))
    add_destroy_file(cloud, 'destroy --file', FILE)
    _add_builds(cloud)


def applied_and_drained(cloud: Cloud) -> None:
    """A compute is drained during an apply."""
    _add_hosts(cloud)
    add_apply(cloud, 'apply', FILE)
    add_drain(cloud, A)


def applied_and_disabled(cloud: Cloud) -> Check:
    """A compute is disabled during an apply, which places nothing there if it asks after that."""
    _add_hosts(cloud)
    _add_disable(cloud)
    add_apply(cloud, 'apply', FILE)

    def check() -> list[str]:
        operations = [str(step.call.operation) for step in cloud.world.steps if step.call and not step.fate]
        disabled = [number for number, text in enumerate(operations) if f'{A}/traits' in text and 'PUT' in text]
        queries = [number for number, text in enumerate(operations) if 'allocation_candidates' in text]
        is_placed = any(key.startswith(keys.request_prefix(A)) for key in cloud.etcd.entries)
        is_late = bool(disabled) and disabled[0] < min(queries, default=0)
        return ['something is placed on a compute that was disabled before'] if is_late and is_placed else []

    return check


def _add_disable(cloud: Cloud) -> None:
    cloud.add_actor('host drain', lambda: disable(cloud.placement, A, A), command='disable', subjects=(A,))


def apply_killed_and_disabled(cloud: Cloud) -> None:
    """A compute with claims of a killed apply is disabled, and the file applied again."""
    _add_hosts(cloud)
    first = add_apply(cloud, 'apply', FILE, may_fail=(ClaimedElsewhere,))
    _add_disable(cloud)
    _add_apply_after(cloud, first, may_fail=(ClaimedElsewhere,))


def _restore_older(cloud: Cloud) -> Compute:
    """Restore etcd to before an instance was applied, whose compute has not accepted it."""
    _make_applied(cloud, WEB)
    saved = dict(cloud.etcd.entries)
    run_apply(cloud, FILE)
    _build(cloud)
    restore_etcd(cloud, saved)
    cloud.exempt(DELIVERY, 'etcd is restored to before a delivery')
    cloud.exempt(WHOLE, 'a compute that accepts a restored etcd writes the request again')
    cloud.exempt(ENTRY, 'the restored key does not name what a compute publishes')
    host = next(host for host in cloud.computes.values() if _list_unrequested(cloud, host))
    for other in cloud.computes.values():
        other.republishes = True
    host.is_read_only = True
    return host


def _list_unrequested(cloud: Cloud, host: Compute) -> list[str]:
    return [each for each in host.hypervisor.list_guests() if keys.request(host.uuid, each) not in cloud.etcd.entries]


def _add_acceptance(cloud: Cloud, host: Compute, after: Actor | None = None) -> None:
    """Have an operator accept the etcd on a compute, at any time or once an actor has ended."""

    def accept() -> None:
        cloud.world.wait('the operator', lambda: after is None or not after.is_active)
        host.is_read_only = False
        host.restart()
        host.plan(3)

    cloud.add_actor('the compute, accepting', accept, mortal=False)


def applied_after_a_restore(cloud: Cloud) -> Check:
    """An instance is newer than the restored etcd: the file is applied as its compute accepts."""
    _add_acceptance(cloud, _restore_older(cloud))
    add_apply(cloud, 'apply', FILE, may_fail=(Conflict,))  # if the compute publishes it in between

    def check() -> list[str]:
        try:
            placements = run_apply(cloud, FILE)
        except Conflict as error:
            return [f'accepted, and applied again: {error}']
        guests = {each for host in cloud.computes.values() for each in host.hypervisor.list_guests()}
        return [] if placements.keys() == guests else ['an instance that ran is not of the stack']

    return check


def applied_after_a_restore_beside_silence(cloud: Cloud) -> None:
    """The same where that compute is silent until the apply has ended."""
    host = _restore_older(cloud)
    cloud.etcd.end_lease(host.presence.lease)
    cloud.has_ample_room = False
    _add_acceptance(cloud, host, add_apply(cloud, 'apply', FILE, may_fail=(ClaimedElsewhere, Conflict)))


def apply_interrupted_after_a_restore(cloud: Cloud) -> None:
    """An instance is newer than the restored etcd: an interrupted apply leaves its claim."""
    host = _restore_older(cloud)
    _add_acceptance(cloud, host, add_apply(cloud, 'apply', FILE, may_fail=(Conflict,)))


def applied_without_its_key(cloud: Cloud) -> None:
    """The key of a stack is lost, with every trace of a gone instance, and it is applied."""
    instances = _make_applied(cloud, DB, WEB)
    destroy(cloud.store, instances[DB])
    _build(cloud)
    clear(cloud.store)
    cloud.store.commit([], [Delete(keys.stack(STACK))])
    for number in (1, 2):
        add_apply(cloud, f'apply {number}', FILE)


def replaced_beside_create_of_its_name(cloud: Cloud) -> None:
    """An instance is replaced while another one is created with its name."""
    _make_applied(cloud, WEB)
    add_apply(cloud, 'apply --replace', make_file(WEB, image=OTHER_IMAGE), replace_all=True)
    cloud.add_create('eschedule', U, name='s-web-1')
    _add_builds(cloud)


def replaced_beside_create_in_its_room(cloud: Cloud) -> None:
    """An instance is replaced while another one is created that wants the last room."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A, room=2)
    cloud.has_ample_room = False
    run_apply(cloud, make_file(WEB))
    host.plan(3)
    file = make_file(WEB, image=OTHER_IMAGE)
    add_apply(cloud, 'apply --replace', file, replace_all=True, may_fail=(NoCapacity,))
    cloud.add_create('eschedule', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def replaced_twice(cloud: Cloud) -> None:
    """An instance is replaced by two applies, one of which may be killed."""
    _make_applied(cloud, WEB, computes=[A])
    for number in (1, 2):
        add_apply(cloud, f'apply {number} --replace', make_file(WEB, image=OTHER_IMAGE), replace_all=True)
    _add_builds(cloud)


def pruned_and_applied(cloud: Cloud) -> None:
    """A member is pruned with one file while another file that has it is applied."""
    _make_applied(cloud, DB, WEB, computes=[A])
    add_apply(cloud, 'apply --prune', make_file(WEB), prune=True)
    add_apply(cloud, 'apply', make_file(DB, WEB, CACHE), may_fail=(StillGoing,))
    _add_builds(cloud)


def pruned_beside_create(cloud: Cloud) -> Check:
    """A member is pruned, and one is new, while an instance is created with the new one's name."""
    instances = _make_applied(cloud, DB, WEB)
    prune = add_apply(cloud, 'apply --prune', make_file(WEB, CACHE), may_fail=(Conflict,), prune=True)
    cloud.add_create('eschedule', U, name='s-cache-1')
    _add_builds(cloud)

    def check() -> list[str]:
        living = [key for key, entry in cloud.etcd.entries.items() if is_living_request(entry)]
        is_left = isinstance(prune.outcome, dict) and any(key.endswith(instances[DB]) for key in living)
        return ['a member was pruned, and lives'] if is_left else []

    return check


def pruned_first(cloud: Cloud) -> Check:
    """A new member needs the room of a pruned one, which an apply destroys first."""
    cloud.set_instance_limit(5)
    cloud.has_ample_room = False
    host = cloud.add_host(A, room=2)
    run_apply(cloud, make_file(DB, WEB))
    host.plan(3)
    prune = add_apply(cloud, 'apply --prune', make_file(WEB, CACHE), (StillGoing,), prune=True, timeout=4.0)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan, lambda: cloud.world.sleep(1.0)))

    def check() -> list[str]:
        is_wrong = cloud.is_unharmed and not isinstance(prune.outcome, dict | StillGoing)
        return [f'nothing was lost, and the apply fails: {prune.outcome}'] if is_wrong else []

    return check


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        *(applied_twice, applied_with_two_files, applied_in_one_group, applied_beside_create_of_its_name),
        *(applied_and_destroyed, applied_and_disabled, pruned_and_destroyed),
        *(applied_and_file_destroyed, applied_without_its_key, replaced_beside_create_of_its_name, replaced_twice),
        *(replaced_beside_create_in_its_room, pruned_and_applied, pruned_beside_create),
        *(applied_after_a_restore, applied_after_a_restore_beside_silence),
    ),
    *make_scenarios(Bounds(1, 1, kills=1, requests=1, answers=1, expiries=1), pruned_first),
    *make_scenarios(Bounds(2, 2, expiries=1, minutes=1), applied_twice_and_frozen, apply_frozen),
    *make_scenarios(Bounds(2, 1, late=1), apply_late),
    *make_scenarios(Bounds(2, 1, kills=1), apply_killed, apply_killed_and_disabled),
    *make_scenarios(Bounds(2, 1, interrupts=1), apply_interrupted, apply_interrupted_after_a_restore),
    *make_scenarios(Bounds(2, 0), applied_and_drained),
]
