"""A stack is applied exactly once, at whatever moments its applies are killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import Control
from tests.kit.hands import LARGE_INVENTORY, begin_new_history, run_until
from tests.kit.invariants import check_invariants, read_allocations
from tests.kit.many import ManyComputes
from tests.kit.servers import Etcd, PlacementServer
from tests.kit.stacks import QUERY, list_instances, write_stack

# The members with a group, which has the name of its member.
GROUPS = ('spread', 'near')
# Applies of one stack that are killed one after the other, before one is left alone.
MAX_KILLS_OF_STACK = 8
# The latest moment, as a share of the time that an apply takes.
MAX_SHARE = 1.2


@pytest.fixture
def large_etcd_control(own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """Control of an etcd that takes a delivery of 100 instances in one transaction."""
    with Etcd(tmp_path / 'etcd', '--max-txn-ops=2048') as etcd:
        control = Control(etcd, own_placement, tmp_path)
        try:
            yield control
        finally:
            control.close()


def make_members(count: int) -> dict[str, dict[str, Any]]:
    """Make members with `count` instances in all, a multiple of ten: four queries, two strict groups."""
    queries = [QUERY.replace('MEMORY_MB:64', f'MEMORY_MB:{64 + number}') for number in range(4)]
    return {
        'web': {'count': count * 4 // 10, 'query': queries[0]},
        'db': {'count': count * 3 // 10, 'query': queries[1]},
        'spread': {
            'count': count * 2 // 10,
            'query': queries[2],
            'group': {'name': 'spread', 'policy': 'anti-affinity'},
        },
        'near': {'count': count // 10, 'query': queries[3], 'group': {'name': 'near', 'policy': 'affinity'}},
    }


def complete_apply(control: Control, path: str, names: Collection[str]) -> str:
    """Apply the stack to its end; return 'create' or 'keep', which is what that did with all its instances."""
    repeated = control.eschedule('apply', path, '-f', 'json')
    assert repeated.code == 0, repeated
    steps = json.loads(repeated.stdout)['instances']
    instances = list_instances(control)
    assert {step['name']: step['instance'] for step in steps} == instances
    assert sorted(instances) == sorted(names)
    assert read_allocations(control).keys() == set(instances.values())
    assert control.etcd.list_keys('/requests/') == []
    assert control.etcd.list_keys('/names/') == sorted(f'/names/{name}' for name in names)
    for group in GROUPS:
        joined = json.loads(control.etcd.get(f'/groups/{group}') or b'')['members']
        assert joined.keys() == {instance for name, instance in instances.items() if f'-{group}-' in name}
    (action,) = {step['action'] for step in steps}
    return str(action)


def destroy_all(control: Control, path: str) -> None:
    """Destroy the stack, check that nothing is left but records, and begin a new history without these."""
    destroyed = control.eschedule('destroy', '--file', path, '--yes', '--wait')
    assert destroyed.code == 0, destroyed
    left = [key for family in ('hosts', 'requests', 'names', 'groups') for key in control.etcd.list_keys(f'/{family}/')]
    assert (left, read_allocations(control)) == ([], {})
    check_invariants(control)
    begin_new_history(control)


@dataclass
class Killer:
    """Kills applies of `size` instances at random moments of the time that they take.

    `seconds` is how long the first apply of a stack takes, and `seconds_again` one that continues a killed one: this
    reads the claims of that one.
    """

    control: Control
    size: int
    rng: random.Random
    seconds: float = 60.0
    seconds_again: float = 60.0
    kills_before_delivery: int = 0
    kills_after_delivery: int = 0

    @property
    def kill_count(self) -> int:
        return self.kills_before_delivery + self.kills_after_delivery

    def measure_apply(self) -> None:
        """Measure an apply that is not killed."""
        path = write_stack(self.control, make_members(self.size), 'first')
        seconds = run_until(self.control, ('apply', path), self.seconds)
        assert seconds is not None, f'it was not done after {self.seconds:g} s'
        self.seconds = self.seconds_again = seconds
        destroy_all(self.control, path)

    def kill_applies(self, stack: str, max_kills: int) -> None:
        """Kill applies of a stack until it is delivered, `max_kills` at most; then complete it, and destroy it."""
        members, is_delivered = make_members(self.size), False
        names = [f'{stack}-{name}-{each}' for name, member in members.items() for each in range(1, member['count'] + 1)]
        path = write_stack(self.control, members, stack)
        for number in range(max_kills):
            # Beyond its end, because it may take longer than the measured one.
            longest = MAX_SHARE * (self.seconds_again if number else self.seconds)
            seconds_alone = run_until(self.control, ('apply', path), self.rng.uniform(0, longest))
            is_delivered = self.control.etcd.list_keys('/hosts/') != []
            if seconds_alone is not None:  # it ended before it was to be killed
                assert is_delivered
                self.seconds = self.seconds if number else seconds_alone
            elif is_delivered:
                self.kills_after_delivery += 1
            else:
                self.kills_before_delivery += 1
            if is_delivered:
                break
        began = time.monotonic()
        assert complete_apply(self.control, path, names) == ('keep' if is_delivered else 'create')
        if not is_delivered:
            self.seconds_again = time.monotonic() - began
        destroy_all(self.control, path)


def kill_applies(control: Control, size: int, kill_count: int) -> Killer:
    """Kill so many applies of `size` instances, MAX_KILLS_OF_STACK of one stack at most."""
    seed = os.urandom(8).hex()
    print(f'the moments are of random.Random({seed!r})')  # shown if the test fails
    killer = Killer(control, size, random.Random(seed))
    killer.measure_apply()
    for number in itertools.count():
        if killer.kill_count == kill_count:
            break
        killer.kill_applies(f'shop{number}', min(MAX_KILLS_OF_STACK, kill_count - killer.kill_count))
    return killer


def test_apply_killed_at_random_moments(cluster: Control) -> None:
    """F1: kill -9 of apply at 12 random moments: applied again, exactly the instances of its file exist (fake)."""
    with ManyComputes(cluster, 4, LARGE_INVENTORY):
        assert kill_applies(cluster, 20, 12).kills_before_delivery > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_apply_of_100_instances_killed_at_200_random_moments(large_etcd_control: Control) -> None:
    """F1: kill -9 of an apply of 100 instances at 200 random moments: applied again, exactly these exist (fake)."""
    with ManyComputes(large_etcd_control, 20, LARGE_INVENTORY):
        killer = kill_applies(large_etcd_control, 100, 200)
    assert killer.kills_before_delivery >= 150, killer
