"""Evacuations leave alone what else has a claim, an attempt or a newer instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from ecomp.errors import Conflict
from ecomp.model import keys
from ecomp.model.json_object import dump, load_object
from ecomp.model.stack import Stack, StackEntry
from ecomp.model.stored import decode, encode
from ecomp.store.client import Delete, Put
from tests.kit.removal import clear
from tests.model.applying import OTHER_IMAGE, STACK, make_file, run_apply
from tests.model.cloud import LARGER_QUERY, A, B, C, Cloud, S, U, V, W
from tests.model.explorer import open_quiet_cloud
from tests.model.scenarios_evacuated import WEB, die, lose_power, run_evacuation

REPLACEMENT = keys.derive_uuid(U, 'evacuated')
pytestmark = pytest.mark.fast


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with open_quiet_cloud() as quiet:
        yield quiet


def read_entry(cloud: Cloud) -> StackEntry:
    return decode(Stack, cloud.etcd.entries[keys.stack(STACK)].value, name=STACK).entries[WEB]


def run_once_after(cloud: Cloud, prefix: str, action: Callable[[], object]) -> None:
    pending = [action]

    def note(operations: Sequence[Put | Delete]) -> None:
        if pending and any(isinstance(each, Put) and each.key.startswith(prefix) for each in operations):
            pending.pop()()

    cloud.etcd.listeners.append(note)


# Claims on the evacuated host


def test_evacuation_releases_only_claims_without_an_owner(cloud: Cloud) -> None:
    die(cloud, (U, 'web'))
    cloud.announce_attempt(V)
    cloud.enqueue_request(W)
    for instance in (V, W, S):
        cloud.claim(instance, A)
    run_evacuation(cloud)
    assert cloud.model.held.keys() & {V, W, S} == {V, W}


def test_evacuation_keeps_the_claims_of_a_host_that_is_back(cloud: Cloud) -> None:
    host = die(cloud, (U, 'web'))
    cloud.claim(W, A)
    run_once_after(cloud, keys.request_prefix(B), host.restart)
    (outcome,) = run_evacuation(cloud)
    assert outcome.replaced_by == REPLACEMENT
    assert W in cloud.model.held


# The uuid of the replacement


def test_evacuation_waits_for_an_older_attempt_with_its_uuid(cloud: Cloud) -> None:
    die(cloud, (U, 'web'))
    cloud.announce_attempt(REPLACEMENT)
    with pytest.raises(Conflict, match='the older request'):
        run_evacuation(cloud)


def test_replacement_claimed_on_the_evacuated_host_gets_another_uuid(cloud: Cloud) -> None:
    die(cloud, (U, 'web'))
    cloud.claim(REPLACEMENT, A)
    (outcome,) = run_evacuation(cloud)
    assert (outcome.compute, outcome.replaced_by == REPLACEMENT) == (B, False)


def test_guest_whose_request_was_changed_after_the_plan_stays(cloud: Cloud) -> None:
    die(cloud, (U, 'web'))
    changed = dump(load_object(cloud.etcd.entries[keys.request(A, U)].value) | {'query': LARGER_QUERY})
    run_once_after(cloud, keys.ATTEMPTS, lambda: cloud.store.commit([], [Put(keys.request(A, U), changed)]))
    (outcome,) = run_evacuation(cloud)
    assert 'or it was changed' in outcome.reason
    assert cloud.model.held.keys() == {U}


# The entry in the stack's key


def test_evacuation_leaves_an_entry_with_a_newer_instance(cloud: Cloud) -> None:
    host = cloud.add_host(A)
    run_apply(cloud, make_file(WEB))
    host.plan(4)
    cloud.add_hosts(B, C)
    lose_power(cloud, host)
    stack = decode(Stack, cloud.etcd.entries[keys.stack(STACK)].value, name=STACK)
    newer = stack.with_delivered({stack.make_place(WEB): C})
    put = Put(keys.stack(STACK), encode(newer))
    run_once_after(cloud, keys.ATTEMPTS, lambda: cloud.store.commit([], [put]))
    (outcome,) = run_evacuation(cloud)
    assert 'has another instance of web/1' in outcome.reason
    assert read_entry(cloud) == newer.entries[WEB]


def test_removed_record_of_a_replaced_instance_does_not_end_its_entry(cloud: Cloud) -> None:
    host = cloud.add_host(A)
    for image in ({}, {'image': OTHER_IMAGE}):
        run_apply(cloud, make_file(WEB, **image), replace_all=True)
        host.plan(4)
    assert clear(cloud.store).removed
    assert read_entry(cloud) == StackEntry(2, A)
