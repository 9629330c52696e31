"""Repeated requests, and many concurrent requests."""

from __future__ import annotations

import random
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute, Result, run_eschedule_process, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.gate import Gate
from tests.kit.hands import Eschedule
from tests.kit.invariants import check_invariants, read_allocations, read_lasting_keys
from tests.kit.many import ManyComputes
from tests.kit.servers import wait_until
from tests.kit.story import (
    IMAGE,
    NOTIFIED_PATTERN,
    REACTION_SECONDS,
    SMALL_QUERY,
    assert_one_line,
    parse_notice,
    place,
    require_record,
    run_concurrently,
    wait_address,
    wait_log_lines,
    wait_state,
)

# A repeated uuid: nothing is made twice, however often it is requested and wherever the first attempt died.


CLAIM = b'PUT /allocations/'


@pytest.fixture
def gate(cluster: Control) -> Iterator[Gate]:
    """Provide a proxy of placement that can hold requests back."""
    with Gate(cluster.placement.port) as gate:
        yield gate


@pytest.fixture
def gated_config(cluster: Control, gate: Gate) -> Path:
    """Provide a schedule.yaml that reaches placement through the gate."""
    return write_config(cluster.directory / 'slow.yaml', cluster.etcd.endpoint, gate.url)


def test_repeated_request_changes_nothing(cluster: Control, compute: Ecompute, instance: str) -> None:
    assert place(cluster, '--uuid', instance, SMALL_QUERY, IMAGE) == (compute.uuid, instance)
    wait_address(cluster, instance)
    before = read_lasting_keys(cluster), read_allocations(cluster)
    revision = cluster.etcd.call('kv/range', {'key': 'AA=='})['header']['revision']

    repeated = cluster.eschedule('--uuid', instance, SMALL_QUERY, IMAGE)

    assert parse_notice(repeated) == (compute.uuid, instance)
    assert_one_line(repeated, 0, instance, 'requested before', 'this command changed nothing')
    # A uuid is compared without regard to case.
    assert parse_notice(cluster.eschedule('--uuid', instance.upper(), SMALL_QUERY, IMAGE))[1] == instance
    waited = cluster.eschedule('--uuid', instance, '--wait', SMALL_QUERY, IMAGE)
    assert waited.stdout.splitlines()[1:] == [wait_address(cluster, instance)]
    assert (read_lasting_keys(cluster), read_allocations(cluster)) == before
    assert cluster.etcd.call('kv/range', {'key': 'AA=='})['header']['revision'] == revision

    for words in ([f'{SMALL_QUERY}&limit=1', IMAGE], [SMALL_QUERY]):
        refused = cluster.eschedule('--uuid', instance, *words)
        assert_one_line(refused, 5, instance, 'exists', SMALL_QUERY, IMAGE)
        assert refused.stdout == ''
    assert (read_lasting_keys(cluster), read_allocations(cluster)) == before
    assert len(wait_log_lines(compute, 'INSTANTIATE')) == 1


def test_uuid_of_a_finished_instance_is_refused(cluster: Control, compute: Ecompute, instance: str) -> None:
    place(cluster, '--uuid', instance, SMALL_QUERY)
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    assert_one_line(cluster.eschedule('--uuid', instance, SMALL_QUERY), 5, instance, 'gone since', 'never used twice')
    failed = str(uuid.uuid4())
    cluster.etcd.put(f'/hosts/{compute.uuid}/{failed}', '{}')
    wait_state(cluster, failed, 'error')
    assert_one_line(cluster.eschedule('--uuid', failed, SMALL_QUERY), 5, failed, 'is in error', 'another uuid')
    assert read_allocations(cluster) == {}
    # A request that its compute has not seen yet counts, too.
    compute.pause()
    unseen = place(cluster)[1]
    assert_one_line(cluster.eschedule('--uuid', unseen, SMALL_QUERY), 0, 'this command changed nothing')
    assert_one_line(cluster.eschedule('--uuid', unseen, SMALL_QUERY, IMAGE), 5, unseen, 'exists')
    assert cluster.eschedule('destroy', unseen).code == 0
    assert_one_line(cluster.eschedule('--uuid', unseen, SMALL_QUERY), 5, unseen, 'being destroyed')
    assert_one_line(cluster.eschedule('destroy', unseen), 0, unseen, 'already')
    compute.resume()


@pytest.mark.usefixtures('compute')
def test_no_capacity_leaves_the_uuid_free(cluster: Control, instance: str) -> None:
    refused = cluster.eschedule('--uuid', instance, SMALL_QUERY.replace('VCPU:1', 'VCPU:5'))
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    place(cluster, '--uuid', instance, SMALL_QUERY)
    wait_state(cluster, instance, 'active')


@pytest.mark.slow
def test_claim_of_a_killed_attempt_is_released(cluster: Control, instance: str, gate: Gate, gated_config: Path) -> None:
    compute = cluster.ecompute()
    wait_address(cluster, place(cluster)[1])
    gate.hold(CLAIM)
    with Eschedule(cluster, '--uuid', instance, SMALL_QUERY, config=gated_config) as first:
        assert gate.held.wait(20)
        first.send_signal(signal.SIGKILL)
        first.wait()
    # First its lease expires, then two consecutive checks see the claim.
    wait_until(lambda: instance not in read_allocations(cluster), 300, 'its claim is released')
    assert wait_log_lines(compute, instance, 'the instance has no request')
    assert cluster.etcd.list_keys('/requests/') == []
    check_invariants(cluster, compute)
    place(cluster, '--uuid', instance, SMALL_QUERY)
    check_invariants(cluster, compute)


@pytest.mark.usefixtures('compute')
def test_interrupt_after_the_claim_releases_or_delivers(
    cluster: Control, instance: str, gate: Gate, gated_config: Path
) -> None:
    gate.hold(CLAIM)
    with Eschedule(cluster, '--uuid', instance, SMALL_QUERY, config=gated_config) as first:
        assert gate.held.wait(20)
        first.send_signal(signal.SIGINT)
        gate.open()
        ended = first.wait(20)
        assert 'Traceback' not in ended.stderr
        # The interrupt came before or after the delivery: all of the request exists, or nothing.
        assert ended.code in (0, 1)


@pytest.mark.parametrize('back', [True, False])
def test_lost_answer_to_the_claim_is_read_back_or_reported(
    cluster: Control, instance: str, gate: Gate, gated_config: Path, back: bool
) -> None:
    compute = cluster.ecompute()
    gate.hold(CLAIM)
    with Eschedule(cluster, '--uuid', instance, SMALL_QUERY, config=gated_config) as first:
        assert gate.held.wait(20)
        if back:
            gate.break_connections()  # only the connection breaks: eschedule can read the outcome of its claim
        else:
            gate.cut()
        code, out, err = first.wait(20)
    if back:
        assert (code, out, err) == (0, f'NOTIFIED TARGET, {compute.uuid}, OF INSTANCE {instance}\n', '')
    else:
        # The outcome is unknown, so nothing is released and the message names the command to continue.
        assert (code, out) == (7, '')
        assert_one_line(Result(7, out, err), 7, f'the same command with --uuid {instance}')
        assert instance in read_allocations(cluster)
        assert parse_notice(cluster.eschedule('--uuid', instance, SMALL_QUERY)) == (compute.uuid, instance)
    wait_address(cluster, instance)
    check_invariants(cluster, compute, dead=[first.pid])


def test_concurrent_requests_with_one_uuid_place_one_instance(cluster: Control) -> None:
    computes = cluster.ecompute(), cluster.ecompute()
    for _ in range(3):
        instance = str(uuid.uuid4())
        results = run_concurrently(cluster, [['--uuid', instance, SMALL_QUERY]] * 3, width=3)
        # One command creates it; the others report it as requested before, or that they were overtaken.
        assert {result.code for result in results} <= {0, 5}, results
        targets = {parse_notice(result) for result in results if result.code == 0}
        assert len(targets) == 1, results
        active_record = wait_state(cluster, instance, 'active')
        assert targets == {(active_record['compute'], instance)}
        check_invariants(cluster, *computes)


def test_second_attempt_takes_over_from_a_slow_first(
    cluster: Control, instance: str, gate: Gate, gated_config: Path
) -> None:
    computes = cluster.ecompute(), cluster.ecompute()
    gate.hold(CLAIM)
    with Eschedule(cluster, '--uuid', instance, SMALL_QUERY, config=gated_config) as first:
        assert gate.held.wait(20)
        second = cluster.eschedule('--uuid', instance, SMALL_QUERY)
        gate.open()
        code, out, err = first.wait(20)
    assert (code, out) == (5, '')
    assert 'Traceback' not in err
    assert parse_notice(second)[1] == instance
    wait_address(cluster, instance)
    check_invariants(cluster, *computes)


def test_delivery_between_check_and_claim_is_a_conflict(cluster: Control, instance: str) -> None:
    """The smallest window: the first request is delivered after the second one found nothing."""
    from ecomp.conf import load_schedule
    from ecomp.model.choose import Offer
    from ecomp.model.order import SetOrder
    from ecomp.placement.allocations import read_candidates
    from ecomp.placement.client import Placement
    from ecomp.scheduler.placing.create import create
    from ecomp.store.client import Store

    first, second = cluster.ecompute(), cluster.ecompute()
    config = load_schedule(cluster.schedule_yaml)

    class Overtaken(Store):
        """A store in which another eschedule places the instance between check and claim."""

        def grant(self, seconds: int) -> int:
            place(cluster, '--uuid', instance, f'{SMALL_QUERY}&in_tree={first.uuid}')
            first.pause()  # so that it writes no record
            return super().grant(seconds)

    query = f'{SMALL_QUERY}&in_tree={second.uuid}'
    placement = Placement(config.placement)
    backend: Future[tuple[Placement, Offer]] = Future()
    backend.set_result((placement, read_candidates(placement, query)))
    order = SetOrder(
        instance,
        query=query,
        image=config.image,
        user_id=config.user_id,
        project_id=config.project_id,
        stages={'requested': '2026-01-01T00:00:00.000Z'},
    )
    store = Overtaken(config.etcd)
    try:
        with pytest.raises(Exception, match=instance) as refused:
            create(store, backend, order, {'pid': 0}, True, random.Random(1), lambda: '2026-01-01T00:00:00.000Z')
        assert getattr(refused.value, 'exit_code', None) == 5
    finally:
        store.close()
        placement.close()
    first.resume()
    assert wait_address(cluster, instance)
    active_record = require_record(cluster, instance)
    assert active_record['compute'] == first.uuid
    check_invariants(cluster, first, second)


# Many processes compete for the last slots: each slot is taken once, nothing fails, and few claims are refused.


class RecordingPlacement(FaultyPlacement):
    """A proxy of placement that records calls and replies."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.calls: list[tuple[str, str, int]] = []

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        """Forward a request to placement and record its status."""
        answer = super().pass_on(method, path, headers, body)
        self.calls.append((method, path.split('?')[0], answer[0]))
        return answer


@pytest.mark.parametrize(
    ('computes', 'slots', 'racing'),
    [(3, 7, 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((5, 12, 8), (20, 50, 32)))],
)
def test_last_slots_are_taken_once_with_few_claims(cluster: Control, computes: int, slots: int, racing: int) -> None:
    """Request twice as many instances as there are racing commands.

    Two commands may still claim the same slot: in about one of three races for 7 slots, and sometimes twice in one race
    on a busy machine. So claims are counted over several races. Without an order among the racers there would be 1.33
    claims a slot.
    """
    rounds = 4 if slots < 10 else 1
    many = ManyComputes(cluster, computes)
    many.start()
    prefilled = 4 * computes - slots
    done = cluster.eschedule(SMALL_QUERY, '--count', str(prefilled))
    assert done.code == 0, done
    before = {instance for _, instance in NOTIFIED_PATTERN.findall(done.stdout)}
    with RecordingPlacement(cluster.placement.port) as placement:
        config = write_config(cluster.directory / 'watched.yaml', cluster.etcd.endpoint, placement.url)
        for _ in range(rounds):
            placed = run_race(config, slots, racing)
            held = read_allocations(cluster)
            assert held.keys() == before | placed.keys()
            assert Counter(compute for allocation in held.values() for compute in allocation) == dict.fromkeys(
                many.computes, 4
            )
            for instance, compute in placed.items():
                assert wait_state(cluster, instance, 'active')['compute'] == compute
            check_invariants(cluster)
            for instance in placed:
                assert cluster.eschedule('destroy', instance).code == 0
            wait_until(
                lambda: read_allocations(cluster).keys() == before, REACTION_SECONDS, 'the slots of this race are free'
            )
    assert [call for call in placement.calls if call[2] >= 500] == []
    claims = [call for call in placement.calls if call[0] in ('PUT', 'POST') and call[1].startswith('/allocations')]
    assert len(claims) <= 1.2 * slots * rounds, Counter(claims)


def run_race(config: Path, slots: int, racing: int) -> dict[str, str]:
    """Run 2 * `racing` commands, `racing` at a time; return the compute of each instance."""
    with ThreadPoolExecutor(racing) as threads:
        results = list(threads.map(lambda _: run_eschedule_process(config, SMALL_QUERY), range(2 * racing)))
    assert Counter(result.code for result in results) == {0: slots, 3: 2 * racing - slots}
    placed = {instance: compute for result in results for compute, instance in NOTIFIED_PATTERN.findall(result.stdout)}
    assert len(placed) == slots
    return placed
