"""A host is evacuated exactly once, at whatever moments its evacuations are killed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from ecomp.conf import ScheduleConfig
from ecomp.model import keys
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import begin_new_history, expire_attempts, run_until
from tests.kit.invariants import check_invariants, read_allocations
from tests.kit.many import ManyComputes
from tests.kit.servers import wait_until
from tests.kit.sharing import kill_and_lapse, read_members, read_usage
from tests.kit.stacks import QUERY, list_instances, list_states
from tests.kit.story import IMAGE

INVENTORY = 'VCPU:128,DISK_GB:128,MEMORY_MB:65536'
PROJECT = ScheduleConfig().project_id
# The sets of guests: their share of all, and their group.
SETS = {
    'web': (0.6, ()),
    'near': (0.1, ('--group', 'near', '--policy', 'affinity')),
    'apart': (0.3, ('--group', 'apart', '--policy', 'anti-affinity', '--soft')),
}
# Evacuations of one host that are killed one after the other, before one is left alone.
MAX_KILLS_OF_HOST = 8
# The share of an evacuation's time in which it has moved no guest.
START_SHARE = 0.5


@dataclass
class Killer:
    """Kills evacuations of a host with `size` guests at random moments of the time that they take.

    `seconds` is how long an evacuation takes that is left alone. `others` are the hosts that take the guests.
    """

    control: Control
    host: Ecompute
    others: tuple[str, ...]
    size: int
    rng: random.Random
    seconds: float = 120.0
    kills_before_end: int = 0
    kills_after_end: int = 0

    @property
    def kill_count(self) -> int:
        return self.kills_before_end + self.kills_after_end

    def run(self, *words: str) -> str:
        result = self.control.eschedule(*words)
        assert result.code == 0, result
        return result.stdout

    def fill_and_kill_host(self) -> dict[str, str]:
        """Create the guests on the host, and kill it; return {name: instance}."""
        self.run('host', 'disable', *self.others)
        for name, (share, group) in SETS.items():
            self.run(QUERY, IMAGE, '--name', name, '--count', str(round(self.size * share)), *group)
        wait_until(lambda: len(list_states(self.control, 'active')) == self.size, 60, 'all guests are active')
        guests = list_instances(self.control)
        assert {key.split('/')[2] for key in self.control.etcd.list_keys(keys.HOSTS)} == {self.host.uuid}
        kill_and_lapse(self.control, self.host)
        self.run('host', 'enable', *self.others)
        return guests

    def count_left(self, guests: Mapping[str, str]) -> int:
        """Count the guests that have not been moved."""
        requests = (self.control.etcd.get(keys.request(self.host.uuid, each)) for each in guests.values())
        return sum('replaced_by' not in json.loads(request or b'{}') for request in requests)

    def kill_evacuations(self, max_kills: int) -> None:
        """Kill evacuations of the host until all guests are moved, `max_kills` at most; then complete it."""
        words = ('evacuate', self.host.uuid, '--fenced', '--yes', '-f', 'json')
        guests = self.fill_and_kill_host()
        left, was_alone = self.size, False
        for _ in range(max_kills):
            share = START_SHARE + (1 - START_SHARE) * left / self.size
            seconds_alone = run_until(self.control, words, self.rng.uniform(0, self.seconds * share))
            left = self.count_left(guests)
            if seconds_alone is not None:  # it ended before it was to be killed
                assert left == 0
                was_alone = True
            elif left:
                self.kills_before_end += 1
            else:
                self.kills_after_end += 1
            if not left:
                self.seconds *= 0.8  # it takes less time than the measured one
                break
        if not left:
            expire_attempts(self.control)  # the next one has nothing to move, and so does not take it over
        rows = json.loads(self.run(*words))
        assert len(rows) == left or was_alone, rows
        self.check_moved(guests)
        self.return_host()

    def measure(self) -> None:
        """Measure an evacuation that is not killed."""
        guests = self.fill_and_kill_host()
        seconds = run_until(self.control, ('evacuate', self.host.uuid, '--fenced', '--yes'), self.seconds)
        assert seconds is not None, f'it was not done after {self.seconds:g} s'
        self.seconds = seconds
        self.check_moved(guests)
        self.return_host()

    def check_moved(self, guests: Mapping[str, str]) -> None:
        """Check that each guest has exactly one replacement, with its name, its place in a group, and its charge."""
        control = self.control
        moved = {name: str(json.loads(control.etcd.get(keys.name(name)) or b'{}').get('instance')) for name in guests}
        assert not set(moved.values()) & set(guests.values())
        tombstones = {
            name: json.loads(control.etcd.get(keys.request(self.host.uuid, old)) or b'{}')
            for name, old in guests.items()
        }
        assert {name: each.get('replaced_by') for name, each in tombstones.items()} == moved
        assert read_allocations(control).keys() == {*guests.values(), *moved.values()}
        assert control.etcd.list_keys('/requests/') == []
        assert control.etcd.list_keys('/names/') == sorted(map(keys.name, moved))
        for group in ('near', 'apart'):
            members = read_members(control, group)
            assert members.keys() == {each for name, each in moved.items() if name.startswith(group)}
            assert len(set(members.values())) == 1 or group != 'near'
        assert read_usage(control, PROJECT)['instances'] == self.size

    def return_host(self) -> None:
        """Start the host again, check that it destroys what was moved, and remove all instances."""
        self.host.start()
        self.run('host', 'enable', self.host.uuid)
        check_invariants(self.control, self.host)
        self.run('destroy', '--yes', '--wait', *list_instances(self.control).values())
        check_invariants(self.control, self.host)
        left = [
            key for each in ('hosts', 'requests', 'names', 'groups') for key in self.control.etcd.list_keys(f'/{each}/')
        ]
        assert (left, read_allocations(self.control)) == ([], {})
        begin_new_history(self.control)


def kill_evacuations(control: Control, hosts: int, size: int, kill_count: int) -> Killer:
    """Kill so many evacuations of one of `hosts` hosts, MAX_KILLS_OF_HOST of one evacuated host at most."""
    seed = os.urandom(8).hex()
    print(f'the moments are of random.Random({seed!r})')  # shown if the test fails
    with ManyComputes(control, hosts - 1, INVENTORY) as many:
        others = tuple(many.computes)
        killer = Killer(control, control.ecompute(INVENTORY), others, size, random.Random(seed))
        killer.run('quota', 'set', PROJECT, f'instances={2 * size}')
        killer.measure()
        while killer.kill_count < kill_count:
            killer.kill_evacuations(min(MAX_KILLS_OF_HOST, kill_count - killer.kill_count))
    return killer


def test_evacuation_killed_at_random_moments(cluster: Control) -> None:
    """F1: kill -9 of evacuate at 8 random moments: run again, each guest has exactly one replacement (fake)."""
    assert kill_evacuations(cluster, 4, 20, 8).kills_before_end > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_evacuation_of_100_guests_killed_at_200_random_moments(cluster: Control) -> None:
    """F1: kill -9 of an evacuation of 100 guests at 200 random moments: run again, each has one replacement (fake)."""
    killer = kill_evacuations(cluster, 20, 100, 200)
    assert killer.kills_before_end >= 150, killer
