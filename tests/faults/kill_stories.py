"""The story of each failpoint: what its process does there, and what must be true after it."""

from __future__ import annotations

import json
import os
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ecomp.model import keys
from tests.kit.by_hand import make_request, put_claim
from tests.kit.commands import Control, Ecompute
from tests.kit.foreign import list_marked, make_foreign, start_with_foreign, write_foreign
from tests.kit.hands import (
    ArmedEcompute,
    Eschedule,
    check_claims_twice,
    expire_attempts,
    list_running_guests,
    read_guests,
)
from tests.kit.invariants import read_allocations
from tests.kit.servers import wait_until
from tests.kit.sharing import kill_and_lapse, read_members, read_usage
from tests.kit.stacks import QUERY, list_instances, write_stack
from tests.kit.story import (
    IMAGE,
    REACTION_SECONDS,
    SMALL_QUERY,
    boot,
    boot_all,
    place,
    read_record,
    read_reserved,
    require_record,
    wait_address,
    wait_state,
)
from tests.kit.tuned import make_tuned

# eschedule asks nothing after these, so no answer can be lost.
LAST_FAILPOINTS = {
    *('tombstoned', 'queued', 'unqueued', 'power-asked', 'changed', 'host-disabled', 'host-enabled'),
    'stack-delivered',
}
SHOP = {'db': {}, 'web': {'count': 3}}
ROOM = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'
ROOMY = 'VCPU:12,DISK_GB:100,MEMORY_MB:4096'
SHARED = ('--name', 'one', '--project', 'web', '--group', 'web', '--policy', 'anti-affinity')


@dataclass
class Scene:
    """What a story needs exists, and its process has not begun.

    Attributes:
        words: the command, which completes what a killed one began when it is repeated.
        codes: exit codes that mean that it is done, also by an earlier one.
        detour: a failpoint before the tested one, and what happens while the command is frozen there.
        leaves_a_finding: what a killed command leaves is a finding of the audit.
    """

    words: Sequence[str]
    check: Callable[[], object]
    computes: list[Ecompute] = field(default_factory=list)
    codes: tuple[int, ...] = (0,)
    detour: tuple[str, Callable[[], object]] | None = None
    leaves_a_finding: bool = False

    @property
    def living(self) -> list[Ecompute]:
        return [compute for compute in self.computes if compute.is_running]

    def begin(self, control: Control, action: str, *steps: str, config: Path | None = None) -> Eschedule:
        armed = [f'{step}:{action}' for step in steps]
        if self.detour is None or self.detour[0] in steps:
            return Eschedule(control, *self.words, failpoint=','.join(armed), config=config)
        step, act = self.detour
        eschedule = Eschedule(control, *self.words, failpoint=','.join([f'{step}:stop:1', *armed]), config=config)
        eschedule.wait_frozen_at(step)
        act()
        eschedule.resume()
        return eschedule


def run(control: Control, *words: str) -> None:
    result = control.eschedule(*words)
    assert result.code == 0, result


def require_claims(control: Control, *instances: str) -> None:
    wait_until(lambda: read_allocations(control).keys() == set(instances), REACTION_SECONDS, f'{instances} hold claims')


# eschedule: a command is killed, frozen, interrupted or loses an answer.


def prepare_create(control: Control) -> Scene:
    compute, instance = control.ecompute(ROOM), str(uuid.uuid4())
    run(control, 'quota', 'set', 'web', 'instances=1')

    def check() -> None:
        wait_address(control, instance)
        require_claims(control, instance)
        assert read_members(control, 'web') == {instance: compute.uuid}
        assert read_usage(control, 'web')['instances'] == 1
        assert require_record(control, instance)['name'] == 'one'

    return Scene((SMALL_QUERY, '--uuid', instance, *SHARED), check, [compute])


def prepare_late_create(control: Control) -> Scene:
    scene = prepare_create(control)
    return Scene(scene.words, scene.check, scene.computes, detour=('claimed', lambda: expire_attempts(control)))


def prepare_set(control: Control) -> Scene:
    """Prepare a set of six, one of whose two computes gets full after it was offered."""
    first, other, set_uuid = control.ecompute(ROOM), control.ecompute(ROOM), str(uuid.uuid4())
    fillers: list[str] = []

    def fill() -> None:
        if fillers:
            return
        fillers.append(place(control, SMALL_QUERY.replace('VCPU:1', 'VCPU:8'), '--on', first.uuid)[1])

    def check() -> None:
        wait_until(lambda: len(read_guests(other)) == 6, REACTION_SECONDS, 'all members are built')
        require_claims(control, *fillers, *read_guests(other))

    words = (SMALL_QUERY, '--count', '6', '--uuid', set_uuid)
    return Scene(words, check, [first, other], detour=('announced', fill))


def prepare_destroy(control: Control) -> Scene:
    compute = control.ecompute()
    instance, other = boot_all(control, 2)

    def check() -> None:
        wait_state(control, instance, 'gone')
        require_claims(control, other)

    return Scene(('destroy', instance), check, [compute], (0, 4))


def prepare_queue(control: Control) -> Scene:
    instance = str(uuid.uuid4())
    run(control, 'flavor', 'set', 'small', SMALL_QUERY)
    compute = control.ecompute(queues=True)

    def check() -> None:
        wait_address(control, instance)
        require_claims(control, instance)

    return Scene(('--queue', '--flavor', 'small', '--uuid', instance), check, [compute])


def prepare_cancel(control: Control) -> Scene:
    instance = str(uuid.uuid4())
    run(control, 'flavor', 'set', 'small', SMALL_QUERY)
    run(control, '--queue', '--flavor', 'small', '--uuid', instance)
    return Scene(('destroy', instance), lambda: wait_state(control, instance, 'gone'), [], (0, 4))


def prepare_stop(control: Control) -> Scene:
    compute = control.ecompute()
    instance = boot(control)

    def check() -> None:
        wait_state(control, instance, 'stopped')
        assert not read_guests(compute)[instance]['running']

    return Scene(('stop', instance), check, [compute])


def prepare_rename(control: Control) -> Scene:
    compute, instance = control.ecompute(), boot(control, SMALL_QUERY, '--name', 'web')

    def check() -> None:
        wait_until(lambda: require_record(control, instance)['name'] == 'db', REACTION_SECONDS, 'its record follows')
        assert control.etcd.list_keys(keys.NAMES) == [keys.name('db')]

    return Scene(('rename', instance, 'db'), check, [compute])


def prepare_resize(control: Control) -> Scene:
    compute, instance = control.ecompute(ROOM), boot(control)

    def check() -> None:
        wait_until(lambda: require_record(control, instance).get('resize'), REACTION_SECONDS, 'its domain has it')
        assert read_allocations(control)[instance][compute.uuid]['VCPU'] == 2

    return Scene(('resize', instance, 'resources=VCPU:2'), check, [compute])


def prepare_disable(control: Control) -> Scene:
    compute = control.ecompute()

    def check() -> None:
        assert control.eschedule(SMALL_QUERY).code == 3

    return Scene(('host', 'drain', compute.uuid), check, [compute])


def prepare_enable(control: Control) -> Scene:
    compute = control.ecompute()
    run(control, 'host', 'drain', compute.uuid)
    return Scene(('host', 'enable', compute.uuid), lambda: boot(control), [compute])


def prepare_forget(control: Control) -> Scene:
    compute = control.ecompute()
    instances = boot_all(control, 2)
    kill_and_lapse(control, compute)
    run(control, 'destroy', *instances)

    def check() -> None:
        for instance in instances:
            wait_state(control, instance, 'gone')
        require_claims(control)
        left = [key for key in control.etcd.list_keys('/') if compute.uuid in key and not key.startswith('/released/')]
        assert left == sorted(keys.record(compute.uuid, instance) for instance in instances)
        assert control.placement.read_inventory(compute.uuid) == {}

    # By its name, which goes last. No compute completes what a killed command began.
    return Scene(('host', 'forget', '--fenced', socket.gethostname()), check, codes=(0, 4), leaves_a_finding=True)


def prepare_quota(control: Control) -> Scene:
    compute = control.ecompute(ROOM)
    place(control, SMALL_QUERY, '--project', 'web')

    def check() -> None:
        expected = sum(read_record(control, name)['project_id'] == 'web' for name in read_allocations(control))  # type: ignore[index]
        assert read_usage(control, 'web')['instances'] == expected

    # A delivery while it counts is counted, too.
    detour = ('quota-counted', lambda: boot(control, SMALL_QUERY, '--project', 'web'))
    return Scene(('quota', 'set', 'web', 'instances=5'), check, [compute], detour=detour, leaves_a_finding=True)


def prepare_apply(control: Control) -> Scene:
    compute, path = control.ecompute(), write_stack(control, SHOP)
    return Scene(('apply', path), _make_stack_check(control, 'shop-db', *_WEBS), [compute])


_WEBS = ('shop-web-1', 'shop-web-2', 'shop-web-3')


def _make_stack_check(control: Control, *names: str) -> Callable[[], None]:
    def check() -> None:
        instances = list_instances(control)
        assert instances.keys() == set(names)
        require_claims(control, *instances.values())
        assert control.etcd.list_keys('/requests/') == []

    return check


def prepare_replace(control: Control) -> Scene:
    compute = control.ecompute(ROOM)
    run(control, 'apply', write_stack(control, {'web': {'count': 3}}), '--wait')
    before = set(list_instances(control).values())
    path = write_stack(control, {'web': {'count': 3, 'query': QUERY.replace('64', '65')}})
    check_stack = _make_stack_check(control, *_WEBS)

    def check() -> None:
        run(control, 'apply', path, '--wait')
        check_stack()
        assert not before & set(list_instances(control).values())

    return Scene(('apply', path, '--replace', 'web', '--yes', '--wait'), check, [compute])


def prepare_prune(control: Control) -> Scene:
    compute = control.ecompute()
    run(control, 'apply', write_stack(control, SHOP), '--wait')
    path = write_stack(control, {'web': {'count': 3}})
    return Scene(('apply', path, '--prune', '--yes', '--wait'), _make_stack_check(control, *_WEBS), [compute])


def prepare_evacuate(control: Control) -> Scene:
    dead = control.ecompute()
    run(control, QUERY, IMAGE, '--name', 'web', '--count', '4')
    before = list_instances(control)
    for instance in before.values():
        wait_state(control, instance, 'active')
    other = control.ecompute()
    kill_and_lapse(control, dead)

    def check() -> None:
        after = {name: json.loads(control.etcd.get(keys.name(name)) or b'')['instance'] for name in before}
        assert not set(after.values()) & set(before.values())
        tombstones = [json.loads(control.etcd.get(keys.request(dead.uuid, each)) or b'') for each in before.values()]
        assert sorted(each['replaced_by'] for each in tombstones) == sorted(after.values())
        require_claims(control, *before.values(), *after.values())
        dead.start()
        require_claims(control, *after.values())
        assert list_instances(control) == after

    return Scene(('evacuate', dead.uuid, '--fenced', '--yes'), check, [dead, other])


def prepare_adopt(control: Control) -> Scene:
    # These guests take two transactions.
    guests = [make_foreign(f'old-{number}', number % 2 == 0) for number in range(22)]
    compute = start_with_foreign(control, *guests)

    def check() -> None:
        instances = [guest['instance'] for guest in guests]
        for guest in guests:
            wait_state(control, guest['instance'], 'active' if guest['is_running'] else 'stopped')
        require_claims(control, *instances)
        assert list_instances(control) == {guest['name']: guest['instance'] for guest in guests}
        assert list_marked(compute) == {guest['name'] for guest in guests}
        assert json.loads(control.eschedule('hosts', '-f', 'json').stdout)[0]['state'] == 'up'

    return Scene(('adopt', compute.uuid, '--all'), check, [compute])


def prepare_release(control: Control) -> Scene:
    guests = [make_foreign('old'), make_foreign('other')]
    compute = start_with_foreign(control, *guests)
    run(control, 'adopt', compute.uuid, '--all')
    old, other = (guest['instance'] for guest in guests)
    for instance in (old, other):
        wait_state(control, instance, 'active')

    def check() -> None:
        wait_state(control, old, 'gone')
        require_claims(control, other)
        assert list_marked(compute) == {'other'}

    return Scene(('release', old), check, [compute], (0, 4))


COMMAND_STORIES: dict[str, Callable[[Control], Scene]] = {
    'create': prepare_create,
    'create too late': prepare_late_create,
    'create a set': prepare_set,
    'destroy': prepare_destroy,
    'queue': prepare_queue,
    'cancel': prepare_cancel,
    'stop': prepare_stop,
    'rename': prepare_rename,
    'resize': prepare_resize,
    'disable': prepare_disable,
    'enable': prepare_enable,
    'forget': prepare_forget,
    'set a quota': prepare_quota,
    'apply': prepare_apply,
    'replace': prepare_replace,
    'prune': prepare_prune,
    'evacuate': prepare_evacuate,
    'adopt': prepare_adopt,
    'release': prepare_release,
}


# ecompute: it is killed, frozen or stopped in its work.


@dataclass
class Work:
    """A compute and its work. `begin` adds a piece of it, `check` waits until all is done once."""

    compute: ArmedEcompute
    begin: Callable[[], str]
    check: Callable[[], object]

    def start(self, action: str, *steps: str) -> None:
        """Start the compute, and give it work unless it reaches an armed step before that."""
        self.compute.failpoint = ','.join(f'{step}:{action}' for step in steps)
        self.compute.launch()
        wait_until(lambda: self.compute.is_ready() or self.has_fired(), 30, 'it is ready')
        if not self.has_fired():
            self.begin()

    def has_fired(self) -> bool:
        return bool(self.compute._record.names)


def stop_gracefully(compute: Ecompute) -> ArmedEcompute:
    assert compute.stop() == 0
    assert isinstance(compute, ArmedEcompute)
    return compute


def prepare_build(control: Control, _: int) -> Work:
    compute, instances = make_tuned(control, ROOMY, start=False, metadata='iso'), list[str]()

    def begin() -> str:
        instances.append(place(control)[1])
        return instances[-1]

    def check() -> None:
        for instance in instances:
            wait_address(control, instance)
            assert wait_state(control, instance, 'active')['attempts'] == 0
        require_claims(control, *instances)
        assert list_running_guests(compute) == set(instances)
        seeds = (compute.directory / 'state/fake-seeds.json').read_text()
        assert [instance for instance in instances if instance not in seeds] == []

    return Work(compute, begin, check)


def prepare_mark(control: Control, count: int) -> Work:
    """Prepare requests that adopt guests. Their host is down."""
    compute = make_tuned(control, ROOMY, start=False)
    waiting = [make_foreign(f'old-{number}') for number in range(count)]
    write_foreign(compute, *waiting)
    adopted = list[str]()

    def begin() -> str:
        guest = waiting.pop()
        held = {compute.uuid: {'resources': guest['size']}}
        put_claim(control, guest['instance'], compute.uuid, amounts=guest['size'])
        request = {'instance': guest['instance'], 'allocations': held, 'image': None, 'adopted': True}
        control.etcd.put(keys.request(compute.uuid, guest['instance']), json.dumps(request))
        adopted.append(guest['instance'])
        return adopted[-1]

    def check() -> None:
        for instance in adopted:
            wait_state(control, instance, 'active')
        require_claims(control, *adopted)
        assert len(list_marked(compute)) == len(adopted)

    return Work(compute, begin, check)


def prepare_fail(control: Control, _: int) -> Work:
    compute, instances = make_tuned(control, ROOMY, start=False), list[str]()

    def begin() -> str:
        instances.append(instance := str(uuid.uuid4()))
        control.etcd.put(keys.request(compute.uuid, instance), json.dumps(make_request(compute.uuid, instance)))
        return instance

    def check() -> None:
        for instance in instances:
            assert 'no allocation' in wait_state(control, instance, 'error')['error']['reason']
        wait_until(lambda: control.etcd.list_keys('/hosts/') == [], REACTION_SECONDS, 'their requests are gone')
        require_claims(control)
        assert read_guests(compute) == {}

    return Work(compute, begin, check)


def prepare_remove(control: Control, count: int) -> Work:
    compute = make_tuned(control, ROOMY)
    run(control, 'quota', 'set', 'web', f'instances={count}')
    words = (SMALL_QUERY, '--project', 'web', '--group', 'web', '--policy', 'affinity')
    waiting = [boot(control, *words) for _ in range(count)]
    other, destroyed = boot(control), list[str]()
    address = wait_address(control, other)
    stop_gracefully(compute)

    def begin() -> str:
        destroyed.append(waiting.pop())
        run(control, 'destroy', destroyed[-1])
        return destroyed[-1]

    def check() -> None:
        for instance in destroyed:
            wait_state(control, instance, 'gone')
        require_claims(control, other, *waiting)
        assert read_members(control, 'web').keys() == set(waiting)
        assert read_usage(control, 'web').get('instances', 0) == len(waiting)
        assert wait_address(control, other) == address
        assert list_running_guests(compute) == {other, *waiting}

    return Work(compute, begin, check)


def prepare_reboot(control: Control, count: int) -> Work:
    compute, requested = make_tuned(control, ROOMY), dict[str, str]()
    waiting = [boot(control) for _ in range(count)]
    stop_gracefully(compute)

    def begin() -> str:
        instance = waiting.pop()
        run(control, 'reboot', instance)
        value = json.loads(control.etcd.get(keys.request(compute.uuid, instance)) or b'')
        requested[instance] = value['power']['id']
        return instance

    def check() -> None:
        def is_done() -> bool:
            return {each: require_record(control, each)['power'] for each in requested} == requested

        wait_until(is_done, REACTION_SECONDS, 'the reboots are done')
        for instance in requested:
            record = require_record(control, instance)
            assert (record['state'], record['fault'], record['attempts']) == ('active', None, 0)
            # A guest that was started before the kill is not started again.
            assert compute.log.read_text().count(f'START INSTANCE {instance}') == 1
        assert list_running_guests(compute) == {*requested, *waiting}

    return Work(compute, begin, check)


def prepare_rebuild(control: Control, count: int) -> Work:
    compute, requested = make_tuned(control, ROOMY, metadata='iso'), dict[str, str]()
    waiting = [boot(control) for _ in range(count)]
    addresses = {instance: wait_address(control, instance) for instance in waiting}
    stop_gracefully(compute)

    def begin() -> str:
        instance = waiting.pop()
        run(control, 'rebuild', instance)
        value = json.loads(control.etcd.get(keys.request(compute.uuid, instance)) or b'')
        requested[instance] = str(value['rebuild'])
        return instance

    def check() -> None:
        def is_done() -> bool:
            return {each: require_record(control, each).get('rebuilt') for each in requested} == requested

        wait_until(is_done, REACTION_SECONDS, 'the rebuilds are done')
        for instance in requested:
            record = require_record(control, instance)
            assert (record['state'], record['fault'], record['attempts']) == ('active', None, 0)
            assert wait_address(control, instance) == addresses[instance]
            assert str(read_guests(compute)[instance]['rebuilt']) == requested[instance]
        require_claims(control, *addresses)
        assert list_running_guests(compute) == set(addresses)

    return Work(compute, begin, check)


def prepare_new_sizes(control: Control, count: int) -> Work:
    compute, amounts = make_tuned(control, ROOMY), {'VCPU': 2, 'MEMORY_MB': 64, 'DISK_GB': 1}
    waiting, resized = [boot(control) for _ in range(count)], list[str]()
    stop_gracefully(compute)

    def begin() -> str:
        resized.append(waiting.pop())
        run(control, 'resize', resized[-1], 'resources=VCPU:2,MEMORY_MB:64', '--restart')
        return resized[-1]

    def check() -> None:
        records = [partial(require_record, control, instance) for instance in resized]
        wait_until(lambda: all(read()['resources'] == amounts for read in records), REACTION_SECONDS, 'they have it')
        assert [read()['fault'] for read in records] == [None] * len(resized)
        check_claims_twice(control, compute, read_guests(compute))

    return Work(compute, begin, check)


def prepare_take(control: Control, _: int) -> Work:
    """Prepare requests in a queue, each of which uses a third of the room."""
    run(control, 'flavor', 'set', 'third', SMALL_QUERY.replace('VCPU:1', 'VCPU:4'))
    compute, instances = make_tuned(control, ROOMY, start=False, queues=True), list[str]()

    def begin() -> str:
        instances.append(str(uuid.uuid4()))
        run(control, '--queue', '--flavor', 'third', '--uuid', instances[-1])
        return instances[-1]

    def check() -> None:
        for instance in instances:
            wait_address(control, instance)
        require_claims(control, *instances)
        assert list_running_guests(compute) == set(instances)

    return Work(compute, begin, check)


def prepare_start(control: Control, _: int) -> Work:
    """Prepare a start with other traits and aggregates, and a request and a destroy that wait."""
    compute, aggregate = make_tuned(control, traits=['CUSTOM_FIRST']), str(uuid.uuid4())
    kept, doomed = boot_all(control, 2)
    compute.kill()
    run(control, 'destroy', doomed)
    waiting = place(control)[1]
    settings = compute.config.read_text().replace('CUSTOM_FIRST', 'CUSTOM_SECOND')
    compute.config.write_text(f'{settings}aggregates: [{aggregate}]\n')

    def check() -> None:
        wait_state(control, doomed, 'gone')
        wait_address(control, waiting)
        require_claims(control, kept, waiting)
        assert list_running_guests(compute) == {kept, waiting}
        assert read_reserved(control, compute.uuid) == 0
        assert read_names(control, compute.uuid, 'traits') == {'CUSTOM_SECOND'}
        assert read_names(control, compute.uuid, 'aggregates') == {aggregate}

    return Work(compute, lambda: waiting, check)


def read_names(control: Control, compute: str, kind: str) -> set[str]:
    return set(control.placement.call('GET', f'/resource_providers/{compute}/{kind}')[kind])


def prepare_end(control: Control, _: int) -> Work:
    compute = make_tuned(control)
    kept = boot(control)
    stop_gracefully(compute)

    def begin() -> str:
        os.kill(compute.pid, signal.SIGTERM)
        return kept

    def check() -> None:
        require_claims(control, kept)
        assert list_running_guests(compute) == {kept}
        assert read_reserved(control, compute.uuid) == 0
        assert read_names(control, compute.uuid, 'traits') == set()

    return Work(compute, begin, check)


COMPUTE_STORIES: dict[str, Callable[[Control, int], Work]] = {
    'build': prepare_build,
    'mark': prepare_mark,
    'fail': prepare_fail,
    'remove': prepare_remove,
    'reboot': prepare_reboot,
    'rebuild': prepare_rebuild,
    'new sizes': prepare_new_sizes,
    'take': prepare_take,
    'start': prepare_start,
    'end': prepare_end,
}
