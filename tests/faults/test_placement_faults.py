"""F16: placement fails in every way, by a proxy in front of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from ecomp.model import keys
from tests.kit.commands import Control, Ecompute, Result, run_eschedule_process, write_config
from tests.kit.faulty_placement import KINDS, METHODS_BY_KIND, FaultyPlacement
from tests.kit.hands import (
    Eschedule,
    assert_idle,
    check_claims_twice,
    check_settled,
    count_losses,
    expire_attempts,
    mark_slow_steps,
    read_guests,
)
from tests.kit.servers import wait_until
from tests.kit.story import (
    SMALL_QUERY,
    boot,
    boot_all,
    parse_notice,
    place,
    read_log,
    read_record,
    read_reserved,
    wait_address,
    wait_log_lines,
    wait_state,
)
from tests.kit.tuned import make_tuned

# The kinds that ecompute always notices.
NOTICED_KINDS = [kind for kind in KINDS if kind not in ('slow', 'lost')]


@pytest.fixture
def faulty_placement(cluster: Control) -> Iterator[FaultyPlacement]:
    with FaultyPlacement(cluster.placement.port) as proxy:
        yield proxy


@pytest.mark.parametrize('kind', mark_slow_steps([*NOTICED_KINDS, 'lost'], 'refused', '409', 'html', 'lost'))
def test_placement_fails_during_build_and_destroy(
    cluster: Control, faulty_placement: FaultyPlacement, kind: str
) -> None:
    """F16: placement fails while a build and a destroy arrive: done later, logged once (fake)."""
    words = {'409': 'changed concurrently in each', 'lost': ''}.get(kind, 'placement')
    compute = make_tuned(cluster, placement=faulty_placement.url)
    surviving, doomed = boot_all(cluster, 2)
    compute.pause()
    _, created = place(cluster)
    assert cluster.eschedule('destroy', doomed).code == 0
    faulty_placement.fail(kind)
    compute.resume()
    began = time.monotonic()
    if kind == 'lost':
        wait_state(cluster, doomed, 'gone')  # read back: nothing is left to release
        assert faulty_placement.hits == 1
    else:
        wait_until(lambda: count_losses(compute, words)[0], 20, 'it is noticed')
        with assert_idle(compute.pid):
            count = faulty_placement.hits
            wait_until(lambda: faulty_placement.hits > count + 2 or time.monotonic() - began > 3, 20, 'it tries again')
        if kind != '409':
            assert read_record(cluster, created) is None, 'neither built nor failed while nobody can confirm it'
        assert cluster.placement.read_allocations(doomed), 'not gone: it still holds its claim'
        assert (read_record(cluster, doomed) or {})['state'] == 'destroying'
    assert surviving in read_guests(compute)
    faulty_placement.heal()
    wait_address(cluster, created)
    wait_state(cluster, doomed, 'gone')
    check_losses_logged(compute, words, 0 if kind == 'lost' else 1)
    check_settled(cluster, compute)


def check_losses_logged(compute: Ecompute, words: str, times: int) -> None:
    with contextlib.suppress(AssertionError):
        wait_until(lambda: count_losses(compute, words)[1] >= times, 20, 'the return is logged')
    assert count_losses(compute, words) == (times, times), '\n'.join(read_log(compute))


def test_placement_fails_in_the_periodic_check(cluster: Control, faulty_placement: FaultyPlacement) -> None:
    """F16: each failure of ecompute's query of once a minute: one loss, one return (fake)."""
    compute = make_tuned(cluster, placement=faulty_placement.url)
    # It skips this query for a provider that it has just created, and for one that is unchanged.
    wait_address(cluster, place(cluster)[1])
    compute.stop()
    faulty_placement.fail('500', matches=lambda _, path: path.endswith(f'{compute.uuid}/allocations'))
    compute.start()
    for kind in ('500', 'html', 'wrong', 'truncated', 'broken', '503'):
        count = faulty_placement.hits
        faulty_placement.fail(kind, matches=lambda _, path: path.endswith(f'{compute.uuid}/allocations'))
        if kind in ('500', 'html', 'wrong'):
            wait_until(lambda count=count: faulty_placement.hits > count, 30, 'it looks')  # type: ignore[misc]
    _, instance = place(cluster)
    wait_address(cluster, instance)  # its build does not depend on that query
    faulty_placement.heal()
    check_losses_logged(compute, 'placement', 1)
    check_settled(cluster, compute)


@pytest.mark.slow
def test_placement_fails_when_ecompute_starts_or_stops(cluster: Control) -> None:
    """F16: placement fails in every way when ecompute starts and when it stops (fake)."""
    kinds = [*NOTICED_KINDS, 'lost']
    computes: dict[str, tuple[FaultyPlacement, Ecompute]] = {}
    with ExitStack() as proxies:
        for kind in kinds:
            faulty = proxies.enter_context(FaultyPlacement(cluster.placement.port))
            computes[kind] = faulty, make_tuned(cluster, placement=faulty.url, start=False)
            faulty.fail(kind)
            computes[kind][1].launch()
        for kind, (_, compute) in computes.items():
            wait_until(lambda compute=compute: not compute.is_running, 40, f'{kind}: it ends')  # type: ignore[misc]
            # A provider whose generation changes with every query is a conflict; any other failure is a loss of
            # placement.
            assert compute.stop() == (5 if kind == '409' else 7), (kind, compute.tail_log())
            (line,) = [row for row in read_log(compute) if row.startswith('ecompute: ')]
            assert kind == '409' or 'placement at http' in line or 'as placement does' in line, (kind, line)
        assert cluster.etcd.list_keys('/computes/') == []
        for faulty, compute in computes.values():
            faulty.heal()
            compute.launch()
        for kind, (faulty, compute) in computes.items():
            compute.wait_ready()
            assert read_reserved(cluster, compute.uuid) == 0
            faulty.fail(kind)
        # Concurrently, so that all wait at the same time.
        with ThreadPoolExecutor(len(computes)) as threads:
            codes = list(threads.map(lambda each: each[1].stop(patience=40), computes.values()))
        assert codes == [0] * len(computes)
        for kind, (_, compute) in computes.items():
            assert read_reserved(cluster, compute.uuid) == (4 if kind == 'lost' else 0), kind
            assert wait_log_lines(compute, 'VCPU cannot be reserved'), kind
    check_settled(cluster)


def test_placement_fails_during_a_create(cluster: Control, tmp_path: Path) -> None:
    """F16: placement fails in every way for eschedule: it ends, with one claim or none (fake)."""
    compute = cluster.ecompute('VCPU:64,DISK_GB:64,MEMORY_MB:65536')
    cases = [(kind, writes) for kind in KINDS for writes in (False, True) if kind != 'refused' or not writes]
    instances = {case: str(uuid.uuid4()) for case in cases}

    def create(case: tuple[str, bool]) -> tuple[Result, float]:
        kind, writes = case
        config = tmp_path / f'{kind}-{writes}.yaml'
        with FaultyPlacement(cluster.placement.port) as faulty:
            write_config(config, cluster.etcd.endpoint, faulty.url)
            faulty.fail(kind, matches=lambda method, _: method != 'GET' or not writes, seconds=1.0)
            began = time.monotonic()
            return run_eschedule_process(config, SMALL_QUERY, '--uuid', instances[case]), time.monotonic() - began

    with ThreadPoolExecutor(4) as threads:
        results = dict(zip(cases, threads.map(create, cases), strict=True))
    for case, (result, seconds) in results.items():
        kind, writes = case
        assert seconds < 40, (case, seconds)
        assert 'Traceback' not in result.stderr
        claims = cluster.placement.read_allocations(instances[case])
        if kind in ('slow', 'lost'):
            assert result.code == 0, (case, result)
            assert parse_notice(result) == (compute.uuid, instances[case])
        elif kind == '409':
            assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), result
        else:
            assert result.code == 7, (case, result)
            # If an attempt is left, the message tells how to continue it.
            has_attempt = cluster.etcd.get(f'/requests/{instances[case]}') is not None
            assert (f'--uuid {instances[case]}' in result.stderr) == has_attempt, (case, result)
        assert len(claims) == (1 if result.code == 0 else 0), (case, claims)
    expire_attempts(cluster)  # of attempts whose claims have an unknown outcome
    # The same command later continues, or reports the outcome.
    for case, instance in instances.items():
        if case in (('500', True), ('truncated', True), ('lost', True)):
            assert parse_notice(cluster.eschedule(SMALL_QUERY, '--uuid', instance))[1] == instance
    for instance in [key.rsplit('/', 1)[1] for key in cluster.etcd.list_keys(f'/hosts/{compute.uuid}/')]:
        wait_address(cluster, instance)
    check_settled(cluster, compute)


@pytest.mark.usefixtures('compute')
def test_refusal_stands_without_its_reasons(cluster: Control, tmp_path: Path) -> None:
    """F16: placement fails at the advice of a refusal, in every way: exit 3 without it (fake)."""
    wait_until(lambda: cluster.etcd.list_keys(keys.FACTS), 20, 'the compute publishes what it has')
    cases = [kind for kind in KINDS if kind != 'refused' and kind not in METHODS_BY_KIND]

    def create(kind: str) -> tuple[Result, float]:
        config = tmp_path / f'{kind}.yaml'
        with FaultyPlacement(cluster.placement.port) as faulty:
            write_config(config, cluster.etcd.endpoint, faulty.url)
            faulty.fail(kind, matches=lambda _, path: 'in_tree=' in path, seconds=60.0)
            began = time.monotonic()
            return run_eschedule_process(config, SMALL_QUERY.replace('VCPU:1', 'VCPU:9')), time.monotonic() - began

    with ThreadPoolExecutor(4) as threads:
        results = dict(zip(cases, threads.map(create, cases), strict=True))
    for kind, (result, seconds) in results.items():
        assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), (kind, result)
        refusal, *reasons = result.stderr.splitlines()
        assert 'no compute satisfies the whole query' in refusal, (kind, result)
        is_late = reasons == ['eschedule: what each compute lacks is unknown: no answer within 5 s']
        assert is_late or 'VCPU short by' in reasons[0], (kind, result)
        assert 'which fits' not in result.stderr, (kind, result)
        assert seconds < 40, (kind, seconds)


def test_ctrl_c_skips_the_reasons_of_a_refusal(
    cluster: Control, faulty_placement: FaultyPlacement, tmp_path: Path
) -> None:
    """F16: Ctrl-C while placement slowly confirms a refusal's advice: still exit 3 (fake)."""
    compute = cluster.ecompute()
    wait_until(lambda: cluster.etcd.list_keys(keys.FACTS), 20, 'the compute publishes what it has')
    config = write_config(tmp_path / 'slow.yaml', cluster.etcd.endpoint, faulty_placement.url)
    faulty_placement.fail('slow', matches=lambda _, path: 'in_tree=' in path, seconds=60.0)
    with Eschedule(cluster, SMALL_QUERY.replace('VCPU:1', 'VCPU:9'), config=config) as command:
        wait_until(lambda: faulty_placement.hits, 20, 'the reasons are asked for')
        os.kill(command.pid, signal.SIGINT)
        result = command.wait(40)
    assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert result.stderr == 'eschedule: no compute satisfies the whole query\n'
    compute.stop()


@pytest.mark.slow
@pytest.mark.parametrize('seconds', [5.0, 35.0])
def test_slow_answers(cluster: Control, faulty_placement: FaultyPlacement, tmp_path: Path, seconds: float) -> None:
    """F16: placement takes 5 s, and 35 s: abandoned calls arrive late (fake)."""
    compute = make_tuned(cluster, placement=faulty_placement.url)
    doomed = boot(cluster)
    config = write_config(tmp_path / 'slow.yaml', cluster.etcd.endpoint, faulty_placement.url)
    faulty_placement.fail('slow', matches=lambda method, _: method != 'GET', seconds=seconds)
    assert cluster.eschedule('destroy', doomed).code == 0
    instance = str(uuid.uuid4())
    result = run_eschedule_process(config, SMALL_QUERY, '--uuid', instance, timeout=200)
    assert parse_notice(result) == (compute.uuid, instance)
    assert list(cluster.placement.read_consumers(compute.uuid)).count(instance) == 1
    wait_until(lambda: (read_record(cluster, doomed) or {}).get('state') == 'gone', 90, 'it is gone')
    wait_address(cluster, instance)
    # The reads, too: a build waits for its confirmation without a limit.
    compute.pause()
    _, waiting = place(cluster)
    faulty_placement.fail('slow', seconds=seconds)
    compute.resume()
    if seconds > 30:
        wait_until(lambda: count_losses(compute, '')[0], 60, 'it is noticed')
        faulty_placement.heal()
    wait_until(lambda: (read_record(cluster, waiting) or {}).get('state') == 'active', 60, 'it is active')
    assert compute.stop(patience=90) == 0
    compute.start()
    check_settled(cluster, compute)


@pytest.mark.parametrize('number', [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT])
def test_ended_while_placement_claims_a_large_set(cluster: Control, number: signal.Signals) -> None:
    """F1: eschedule ended while a slow placement claims: it soon holds nothing (fake)."""
    computes = [cluster.ecompute('VCPU:60,DISK_GB:600,MEMORY_MB:7680') for _ in range(2)]

    def count_claims() -> int:
        return sum(len(cluster.placement.read_consumers(compute.uuid)) for compute in computes)

    with FaultyPlacement(cluster.placement.port) as placement:
        config = write_config(cluster.directory / 'slow.yaml', cluster.etcd.endpoint, placement.url)
        placement.fail('slow', matches=lambda method, _: method == 'POST', seconds=600)
        with Eschedule(cluster, SMALL_QUERY, '--count', '60', config=config) as eschedule:
            wait_until(lambda: placement.hits == 2, 20, 'both calls are under way')
            began = time.monotonic()
            os.kill(eschedule.pid, number)
            result = eschedule.wait()
            assert time.monotonic() - began < 25, 'less than placement has for an answer'
    if number == signal.SIGINT:
        assert (result.code, result.stdout) == (1, '')
        assert 'eschedule: interrupted' in result.stderr
    wait_until(lambda: count_claims() == 60, 30, 'both calls are carried out all the same')
    expire_attempts(cluster)
    for compute in computes:
        check_claims_twice(cluster, compute)
    assert count_claims() == 0
    check_settled(cluster, *computes)
