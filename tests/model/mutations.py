"""Bugs that are planted in the product, one at a time: each has to be found, or nobody looks at something that matters.

`python -m tests.model.mutations NAME` imports the product with one of them in it, and explores the scenarios that are
to find it: exit 0 if one does. Nothing is written; the source is changed as it is imported.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

TOP = Path(__file__).resolve().parents[2]
SCHEDULES = 3_000


class Mutation(NamedTuple):
    """`old` becomes `new` in a module; one of the scenarios finds something then."""

    module: str
    old: str
    new: str
    scenarios: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The module's file."""
        return TOP / (self.module.replace('.', '/') + '.py')

    def source(self) -> str:
        """The module with the bug in it. AssertionError where there is no such place any more, or more than one."""
        text = self.path.read_text()
        assert text.count(self.old) == 1, f'{self.path}: {text.count(self.old)} places have {self.old!r}'
        return text.replace(self.old, self.new)


MUTATIONS = {
    'abandon asks nobody who is at it': Mutation(
        'ecomp.scheduler.placing.claim',
        'if at_it is not None and at_it.revision != revision:',
        'if at_it is not None and at_it.revision < 0:',
        ('one_uuid_twice',),
    ),
    'abandon does not look for a delivery': Mutation(
        'ecomp.scheduler.placing.claim',
        'or store.read([key(each, instance) for each in held.allocations for key in (keys.request, keys.record)])',
        'or not held.allocations',
        ('lost_delivery', 'one_uuid_twice'),
    ),
    'a record is believed wherever it is': Mutation(
        'ecomp.agent.instance.records',
        'return from_json(entry.value, instance, compute) if',
        'return from_json(entry.value, instance) if',
        ('foreign_records',),
    ),
    'a set and one of its instances are delivered beside each other': Mutation(
        'ecomp.scheduler.placing.deliver', 'if is_older and mine & announced(key, entry.value):', 'if False:',
        ('set_and_its_member',),
    ),
    'a compute without queues keeps what it claimed for them': Mutation(
        'ecomp.agent.host.claims', 'wanted(self._store, on, waiting=self._takes)', 'wanted(self._store, on)',
        ('queues_off',),
    ),
    'an inventory is mended while it is closed': Mutation(
        'ecomp.agent.host.provider', 'self.inventory, known, is_closing)', 'self.inventory, known)',
        ('closed_while_it_is_kept',),
    ),
    'what fails lets go of what lives elsewhere': Mutation(
        'ecomp.agent.instance.records',
        'self._asked_elsewhere(instance) if record.state == ERROR else []', '[]',
        ('asked_of_two',),
    ),
    'a taker that gives up asks nobody who is at it': Mutation(
        'ecomp.agent.queue.taking',
        'if instance in in_requests(self.store.snapshot(keys.ATTEMPTS)):', 'if False:',
        ('waiting_removed',),
    ),
    'abandon does not ask who is being taken': Mutation(
        'ecomp.scheduler.placing.claim',
        'if instance in taken\n', 'if not held.allocations\n', ('overtaken_by_a_queue',)
    ),
    'what is released is read once more': Mutation(
        'ecomp.placement.claiming',
        'allocations.release(placement, each, found)',
        'allocations.release(placement, each, allocations.consumer(placement, each))',
        ('release_beside_resume', 'claim_keeper'),
    ),
    'who is at it is asked after the requests': Mutation(
        'ecomp.store.requests',
        '    there = at_it(store) if waiting else in_requests(store.snapshot(keys.ATTEMPTS))\n    return {',
        '''    asked = {
        instance
        for instance, computes in holding.items()
        if any(store.get(keys.request(compute, instance)) is not None for compute in computes)
    }
    there = at_it(store) if waiting else in_requests(store.snapshot(keys.ATTEMPTS))
    return asked | (there & holding.keys())
    return {''',
        ('fix_and_create', 'claim_keeper'),
    ),
    'an equal claim is taken for ours': Mutation(
        'ecomp.placement.claiming',
        'moved = sent is not None and held.generation == sent + 1',
        'moved = bool(held.allocations)',
        ('overtaken_by_a_queue',),
    ),
    'a claim is not moved far enough': Mutation(
        'ecomp.scheduler.placing.create',
        'highest(self.store, instances) if self.resume else 0', '0', ('late_release_keeper_and_resume',)
    ),
    'what is released is not noted': Mutation(
        'ecomp.placement.claiming',
        '        note({each: found.generation for each, found in going.items() if found.generation is not None})\n',
        '',
        ('late_release_keeper_and_resume', 'forget_and_taker'),
    ),
    'a taker does not claim above what was released': Mutation(
        'ecomp.agent.queue.taking', 'partial(highest, self.store, wanted)', 'lambda: 0', ('forget_and_taker',)
    ),
    'what is released is noted after that': Mutation(
        'ecomp.placement.claiming',
        '''        note({each: found.generation for each, found in going.items() if found.generation is not None})
        for each, found in held.items():
            done[each] = None if each in kept else allocations.release(placement, each, found)
''',
        '''        for each, found in held.items():
            done[each] = None if each in kept else allocations.release(placement, each, found)
        note({each: found.generation for each, found in going.items() if found.generation is not None})
''',
        ('late_release_keeper_and_resume', 'late_releases'),
    ),
    'a consumer that was left empty is a conflict': Mutation(
        'ecomp.placement.claiming', 'generations = dict.fromkeys(wanted, 0)', 'raise error', ('orphan_consumer',)
    ),
    'a consumer that is being made is taken for empty': Mutation(
        'ecomp.placement.claiming', 'EMPTY_SECONDS = 3.0', 'EMPTY_SECONDS = 0.0', ('orphan_consumer_taken_over',)
    ),
    'a drain does not wait for who has not announced itself': Mutation(
        'ecomp.scheduler.operating.drain', 'if all_announced and not (', 'if not (', ('drain_and_create',)
    ),
    'a first quota is counted once': Mutation(
        'ecomp.scheduler.operating.quotas',
        'if now is not None:\n            return new', 'if new:\n            return new',
        ('first_quota',),
    ),
    'a claim is moved without being asked': Mutation(
        'ecomp.placement.claiming', '        check()\n', '', ('one_uuid_twice', 'two_takers')
    ),
    'a delivery does not compare its attempt': Mutation(
        'ecomp.scheduler.placing.deliver',
        'conditions = [Unchanged(attempt_key, revision)]',
        'conditions: list[Unchanged] = []',
        ('one_uuid_twice',),
    ),
    'an attempt is on no lease': Mutation(
        'ecomp.scheduler.placing.deliver', '[Put(key, text, lease)]', '[Put(key, text)]', ('one_name', 'one_uuid_twice')
    ),
    'a lost delivery is only looked for': Mutation(
        'ecomp.scheduler.placing.deliver',
        'if withdraw(store, attempt_key, revision):',
        'if store.get(attempt_key) is not None:',
        ('late_delivery',),
    ),
    'a queued request does not compare who is at it': Mutation(
        'ecomp.scheduler.placing.enqueue',
        'conditions = [Unchanged(attempt_key, attempt_revision), Unchanged(', 'conditions = [Unchanged(',
        ('queued_and_direct',),
    ),
    'a mark is on no lease': Mutation(
        'ecomp.agent.queue.taking', '[Put(key, mark_to_json(self.compute), lease)]',
        '[Put(key, mark_to_json(self.compute))]', ('dead_taker',),
    ),
    'a taker releases what it does not note': Mutation(
        'ecomp.agent.queue.taking', 'partial(note, self.store)', 'lambda _: None', ('late_let_go', 'three_takers')
    ),
    'a compute builds what placement does not confirm': Mutation(
        'ecomp.agent.instance.instances',
        'if differs:\n                raise BuildFailed(',
        'if differs == "never":\n                raise BuildFailed(',
        ('unconfirmed',),
    ),
    'an end leaves its address': Mutation(
        'ecomp.agent.instance.records',
        'removed.append(keys.booted(instance))', 'removed.append(keys.request(self._compute, instance))',
        ('built_and_destroyed',),
    ),
    'an address whose record was lost is left': Mutation(
        'ecomp.agent.instance.records',
        'if had and not self._asked', 'if not had and not self._asked',
        ('record_removed_of_active',),
    ),
    'a half-made guest whose record was lost is called built': Mutation(
        'ecomp.agent.instance.instances',
        'is_begun = known is not None or (before is not None and before.record.state == BUILDING)',
        'is_begun = known is not None',
        ('record_removed_of_half_a_guest',),
    ),
    'a whole guest that is off is built over': Mutation(
        'ecomp.agent.instance.instances',
        'guest.running or (failing is None and (is_ours or not is_begun))',
        'guest.running or (failing is None and not is_begun)',
        ('off_before_it_was_active',),
    ),
    'one that ran is written down as off with its record lost': Mutation(
        'ecomp.agent.instance.adoption',
        'if is_off and not (remembered is not None and remembered.record.state == ACTIVE):',
        'if is_off:',
        ('power_fails_without_a_record',),
    ),
    'what a state directory lacks is never written': Mutation(
        'ecomp.agent.instance.records',
        'self._memory.put_right(wish, record)', 'pass',
        ('older_state_directory',),
    ),
    'what ended here may wait once more': Mutation(
        'ecomp.agent.instance.republish',
        'for key in queued if not key.endswith(keys.TAKER)]', 'for key in queued if key.endswith("never")]',
        ('destroyed_and_waiting_again',),
    ),
    'what runs elsewhere is taken from an older queue': Mutation(
        'ecomp.placement.claiming',
        'if instance not in movable}', 'if instance is None}',
        ('runs_and_waits_again',),
    ),
    'an end leaves its place in the group': Mutation(
        'ecomp.store.sharing',
        'operations.append(put_group(theirs.without(record.instance)))',
        'pass',
        ('built_and_destroyed',),
    ),
    'an end leaves its quota': Mutation(
        'ecomp.store.sharing',
        'operations.append(put_quota(counted.without_used(charge(record.resources))))',
        'pass',
        ('built_and_destroyed',),
    ),
    'a quota is not compared': Mutation(
        'ecomp.store.sharing',
        'return [unchanged], [put_quota(counted.with_used(summed(charges.values())))]',
        'return [], [put_quota(counted.with_used(summed(charges.values())))]',
        ('quota_of_one',),
    ),
    'a quota that is not there is not compared': Mutation(
        'ecomp.store.sharing',
        'return [unchanged], []  # one that is made this moment counts what is there\n    charges',
        'return [], []\n    charges',
        ('first_quota',),
    ),
    'a group is not compared': Mutation(
        'ecomp.store.sharing', 'return [unchanged], [put_group(now)]\n\n\ndef charged',
        'return [], [put_group(now)]\n\n\ndef charged', ('apart',),
    ),
    'a name is not compared': Mutation(
        'ecomp.scheduler.placing.joining', 'return free, [Put(', 'return [], [Put(', ('one_name',)
    ),
    'a group admits everybody': Mutation(
        'ecomp.model.group', 'return bool(on.get(compute)) == (self.policy == AFFINITY)', 'return True', ('apart',)
    ),
    'a quota allows everything': Mutation(
        'ecomp.model.quota', 'if each.asked and each.used + each.asked > each.limit]', 'if each.limit < 0]',
        ('quota_of_one',),
    ),
    'the keeper releases at the first look': Mutation(
        'ecomp.agent.host.claims', 'if now - when >= APART}', 'if now >= when}', ('foreign_claim',)
    ),
    'the keeper does not ask who is at it': Mutation(
        'ecomp.agent.host.claims', ' - set(guests) - set(at_it)', ' - set(guests)', ('claim_of_the_dead',)
    ),
    'the keeper does not look for requests': Mutation(
        'ecomp.agent.host.claims', 'set(held) - set(wished) - set(guests)', 'set(held) - set(guests)',
        ('claim_of_a_removed_request',),
    ),
    'a start does not ask what has ended': Mutation(
        'ecomp.agent.starting', 'memory.ended(instance)', 'pass', ('built_and_destroyed',)
    ),
    'what a dead attempt holds is no room': Mutation(
        'ecomp.agent.queue.pulling', '        if self._tidy:\n', '        if not self._tidy:\n', ('restarted_taker',)
    ),
    'a uuid used again is remembered as ended': Mutation(
        'ecomp.agent.host.memory', 'self._ended.pop(record.instance, None)', 'pass', ('used_again_and_rebooted',)
    ),
    'a refused request keeps what it shared': Mutation(
        'ecomp.model.instance',
        'printable(str(error))[:REASON_LIMIT], _shares(value))',
        'printable(str(error))[:REASON_LIMIT])',
        ('refused',),
    ),
    'a destroy of what is refused forgets what it shared': Mutation(
        'ecomp.scheduler.changing.destroy',
        'if request else _group_of(store, record)', 'if request else None', ('refused',)
    ),
    'a task without a thread is in work for ever': Mutation(
        'ecomp.agent.agenda',
        '            del self._in_work[name]\n            return True',
        '            return True',
        ('no_thread',),
    ),
    'one guest without an answer stops its host': Mutation(
        'ecomp.agent.planner',
        'found = self._hypervisor.addresses(instance)\n        except Unreachable:',
        'found = self._hypervisor.addresses(instance)\n        except EcompError:',
        ('unheard',),
    ),
    'a copy of a compute is the same compute': Mutation(
        'ecomp.store.presence',
        'if self._revision and {name: holder.get(name) for name in self._who} != self._who:',
        'if self._revision < 0:',
        ('cloned',),
    ),
    'what placement refuses is put down to its flavor': Mutation(
        'ecomp.agent.queue.pulling', 'except NoCapacity as error:', 'except (NoCapacity, PlacementRefusal) as error:',
        ('refused_by_placement',),
    ),
    'a full etcd takes no deletes of a compute without a lease': Mutation(
        'ecomp.store.presence',
        'if self._revision:\n                    # Nobody', 'if self._revision < 0:\n                    # Nobody',
        ('full',),
    ),
    'a compute does not keep its presence': Mutation(
        'ecomp.store.presence', 'put = Put(self._key, dump(value), lease)',
        'put = Put(self._key, dump(value))', ('one_name',),
    ),
    'a compute that says what it has left is fenced by what it said before': Mutation(
        'ecomp.store.presence', 'if written:\n            self._hold(written, value)',
        'if written:\n            self._put = value', ('few_while_hints_are_put',),
    ),
    'a few are asked about who are disabled': Mutation(
        'ecomp.scheduler.placing.few', '&in_tree={compute}', '&in_tree={compute}&root_required=COMPUTE_STATUS_DISABLED',
        ('few_and_disable',),
    ),
}
"""By name: what is wrong then."""

CHEAP = (
    *('a delivery does not compare its attempt', 'a quota is not compared', 'an end leaves its address'),
    *('the keeper releases at the first look', 'a lost delivery is only looked for'),
)
"""Those that are always tried."""


class Loader(importlib.machinery.SourceFileLoader):
    """Imports one module with the bug in it."""

    def __init__(self, mutation: Mutation) -> None:
        super().__init__(mutation.module, str(mutation.path))
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
        """Compiled anew: what is kept of it has no bug."""
        del fullname
        return compile(self._mutation.source(), str(self._mutation.path), 'exec')


class Finder:
    """Finds that one module, and no other."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        del path, target
        if fullname != self._mutation.module:
            return None
        return importlib.util.spec_from_loader(fullname, Loader(self._mutation))


def main(name: str) -> int:
    """Plant it, and look for it; the exit code."""
    mutation = MUTATIONS[name]
    assert mutation.module not in sys.modules, 'the product is imported already'
    sys.meta_path.insert(0, Finder(mutation))  # type: ignore[arg-type]
    # Only now: they import the product.
    from tests.model.explorer import look_for
    from tests.model.scenarios import SCENARIOS

    for each in mutation.scenarios:
        found = look_for(SCENARIOS[each], SCHEDULES)
        for finding in found.findings:
            sys.stdout.write(f'{each}, after {found.schedules} schedules: {finding.wrong[0]}\n')
            return 0
        sys.stdout.write(f'{each}: nothing in {found.schedules} schedules\n')
    return 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1]))
