"""F16: placement fails in every way there is, for ecompute and eschedule. A proxy before the real one does it."""

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

from tests.kit.commands import Control, Ecompute, Result, eschedule, write_config
from tests.kit.faulty_placement import KINDS, METHODS, FaultyPlacement
from tests.kit.hands import Eschedule, guests, idle, lapse_requests, losses, settled, some
from tests.kit.servers import until
from tests.kit.story import SMALL, addressed, boot, boot_all, log_of, logs, notified, place, reached, record, reserved
from tests.kit.tuned import tuned

LOUD = [kind for kind in KINDS if kind not in ('slow', 'lost')]
"""Those that ecompute cannot but notice."""


@pytest.fixture
def faulty(cluster: Control) -> Iterator[FaultyPlacement]:
    """A proxy before the cluster's placement that does not fail yet."""
    with FaultyPlacement(cluster.placement.port) as made:
        yield made


@pytest.mark.parametrize('kind', some([*LOUD, 'lost'], 'refused', '409', 'html', 'lost'))
def test_ecompute_builds_and_destroys(cluster: Control, faulty: FaultyPlacement, kind: str) -> None:
    """F16: placement fails while a build and a destroy arrive: each is done once it is back, and said once (fake)"""
    compute = tuned(cluster, placement=faulty.url)
    kept, doomed = boot_all(cluster, 2)
    compute.pause()
    _, new = place(cluster)
    assert cluster.eschedule('destroy', doomed).code == 0
    faulty.fail(kind)
    compute.resume()
    began = time.monotonic()
    if kind == 'lost':
        reached(cluster, doomed, 'gone')  # read back: nothing is left to be released
        assert faulty.hits == 1
    else:
        until(lambda: losses(compute, 'placement')[0] or losses(compute, 'changed by somebody')[0], 20, 'it is noticed')
        with idle(compute.pid):
            count = faulty.hits
            until(lambda: faulty.hits > count + 2 or time.monotonic() - began > 3, 20, 'it tries again')
        if kind != '409':
            assert record(cluster, new) is None, 'neither built nor failed while nobody can confirm it'
        assert cluster.placement.allocations(doomed), 'not gone: it still holds its claim'
        assert (record(cluster, doomed) or {})['state'] == 'destroying'
    assert kept in guests(compute)
    faulty.heal()
    addressed(cluster, new)
    reached(cluster, doomed, 'gone')
    said_once(compute, 0 if kind == 'lost' else 1)
    settled(cluster, compute)


def said_once(compute: Ecompute, times: int) -> None:
    """Its log says that placement is lost so many times, and as often that it is back."""
    with contextlib.suppress(AssertionError):
        until(lambda: losses(compute, '')[1] >= times, 20, 'the return is logged')
    assert losses(compute, '') == (times, times), log_of(compute)


def test_ecompute_looks_around(cluster: Control, faulty: FaultyPlacement) -> None:
    """F16: every failure in turn of what ecompute asks placement once a minute: one loss, one return (fake)"""
    compute = tuned(cluster, placement=faulty.url)
    # Of a provider that it has just made, and of one that is as it was, it asks no more.
    addressed(cluster, place(cluster)[1])
    compute.stop()
    faulty.fail('500', which=lambda _, path: path.endswith(f'{compute.uuid}/allocations'))
    compute.start()
    for kind in ('500', 'html', 'wrong', 'truncated', 'broken', '503'):
        count = faulty.hits
        faulty.fail(kind, which=lambda _, path: path.endswith(f'{compute.uuid}/allocations'))
        if kind in ('500', 'html', 'wrong'):
            until(lambda count=count: faulty.hits > count, 30, 'it looks')  # type: ignore[misc]
    _, instance = place(cluster)
    addressed(cluster, instance)  # nothing else waits for it
    faulty.heal()
    said_once(compute, 1)
    settled(cluster, compute)


def test_ecompute_starts_and_stops(cluster: Control) -> None:
    """F16: placement fails, in all the ways, when ecompute starts: it ends and says why; and when it stops (fake)"""
    kinds = [*LOUD, 'lost']
    computes: dict[str, tuple[FaultyPlacement, Ecompute]] = {}
    with ExitStack() as proxies:
        for kind in kinds:
            faulty = proxies.enter_context(FaultyPlacement(cluster.placement.port))
            computes[kind] = faulty, tuned(cluster, placement=faulty.url, start=False)
            faulty.fail(kind)
            computes[kind][1].launch()
        for kind, (_, compute) in computes.items():
            until(lambda compute=compute: not compute.is_running, 40, f'{kind}: it ends')  # type: ignore[misc]
            # A provider whose generation moves all the time is a conflict; all else is out of reach.
            assert compute.stop() == (5 if kind == '409' else 7), (kind, compute.last_words())
            (line,) = [each for each in log_of(compute) if each.startswith('ecompute: ')]
            assert kind == '409' or 'placement at http' in line or 'as placement does' in line, (kind, line)
        assert cluster.etcd.keys('/computes/') == []
        for faulty, compute in computes.values():
            faulty.heal()
            compute.launch()
        for kind, (faulty, compute) in computes.items():
            compute.wait_ready()
            assert reserved(cluster, compute.uuid) == 0
            faulty.fail(kind)
        # At once, so that what each waits for is waited for together.
        with ThreadPoolExecutor(len(computes)) as threads:
            codes = list(threads.map(lambda each: each[1].stop(patience=40), computes.values()))
        assert codes == [0] * len(computes)
        for kind, (_, compute) in computes.items():
            assert reserved(cluster, compute.uuid) == (4 if kind == 'lost' else 0), kind
            assert logs(compute, 'could not reserve VCPU'), kind
    settled(cluster)


def test_eschedule_creates(cluster: Control, tmp_path: Path) -> None:
    """F16: placement fails, in all the ways, for eschedule: it ends in time, with one claim or none (fake)"""
    compute = cluster.ecompute('VCPU:64,DISK_GB:64,MEMORY_MB:65536')
    cases = [(kind, writes) for kind in KINDS for writes in (False, True) if kind != 'refused' or not writes]
    instances = {case: str(uuid.uuid4()) for case in cases}

    def create(case: tuple[str, bool]) -> tuple[Result, float]:
        kind, writes = case
        config = tmp_path / f'{kind}-{writes}.yaml'
        with FaultyPlacement(cluster.placement.port) as faulty:
            write_config(config, cluster.etcd.endpoint, faulty.url)
            faulty.fail(kind, which=lambda method, _: method != 'GET' or not writes, seconds=1.0)
            began = time.monotonic()
            return eschedule(config, SMALL, '--uuid', instances[case]), time.monotonic() - began

    with ThreadPoolExecutor(4) as threads:
        results = dict(zip(cases, threads.map(create, cases), strict=True))
    for case, (result, took) in results.items():
        kind, writes = case
        assert took < 40, (case, took)
        assert 'Traceback' not in result.stderr
        held = cluster.placement.allocations(instances[case])
        if kind in ('slow', 'lost'):
            assert result.code == 0, (case, result)
            assert notified(result) == (compute.uuid, instances[case])
        elif kind == '409':
            assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), result
        else:
            assert result.code == 7, (case, result)
            # Either nothing of it is left, or it is told how to go on.
            at_it = cluster.etcd.get(f'/requests/{instances[case]}') is not None
            assert (f'--uuid {instances[case]}' in result.stderr) == at_it, (case, result)
        assert len(held) == (1 if result.code == 0 else 0), (case, held)
    lapse_requests(cluster)  # of those that do not know what became of their claim
    # The same command later goes on, or says what became of it.
    for case, instance in instances.items():
        if case in (('500', True), ('truncated', True), ('lost', True)):
            assert notified(cluster.eschedule(SMALL, '--uuid', instance))[1] == instance
    for instance in [key.rsplit('/', 1)[1] for key in cluster.etcd.keys(f'/hosts/{compute.uuid}/')]:
        addressed(cluster, instance)
    settled(cluster, compute)


@pytest.mark.usefixtures('compute')
def test_a_refusal_stands_whatever_becomes_of_its_reasons(cluster: Control, tmp_path: Path) -> None:
    """F16: placement fails once eschedule has its refusal, each way an answer can: exit 3 in time, no reasons (fake)"""
    cases = [kind for kind in KINDS if kind != 'refused' and kind not in METHODS]

    def create(kind: str) -> tuple[Result, float]:
        config = tmp_path / f'{kind}.yaml'
        with FaultyPlacement(cluster.placement.port) as faulty:
            write_config(config, cluster.etcd.endpoint, faulty.url)
            faulty.fail(kind, which=lambda _, path: path.startswith('/resource_providers'), seconds=60.0)
            began = time.monotonic()
            return eschedule(config, SMALL.replace('VCPU:1', 'VCPU:9')), time.monotonic() - began

    with ThreadPoolExecutor(4) as threads:
        results = dict(zip(cases, threads.map(create, cases), strict=True))
    for kind, (result, took) in results.items():
        assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), (kind, result)
        said, why = result.stderr.splitlines()
        assert 'placement names no provider' in said, (kind, result)
        assert why.startswith('eschedule: what each compute lacks could not be found out'), (kind, result)
        assert took < 40, (kind, took)


def test_nobody_has_to_wait_for_the_reasons(cluster: Control, faulty: FaultyPlacement, tmp_path: Path) -> None:
    """F16: Ctrl-C while placement takes its time over the reasons of a refusal: exit 3 all the same (fake)"""
    config = write_config(tmp_path / 'slow.yaml', cluster.etcd.endpoint, faulty.url)
    faulty.fail('slow', which=lambda _, path: path.startswith('/resource_providers'), seconds=60.0)
    with Eschedule(cluster, SMALL, config=config) as refused:
        until(lambda: faulty.hits, 20, 'the reasons are asked for')
        os.kill(refused.pid, signal.SIGINT)
        done = refused.end(40)
    assert (done.code, done.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert done.stderr == 'eschedule: no compute is alive: is ecompute running anywhere?\n'


@pytest.mark.slow
@pytest.mark.parametrize('seconds', [5.0, 35.0])
def test_answers_that_take_long(cluster: Control, faulty: FaultyPlacement, tmp_path: Path, seconds: float) -> None:
    """F16: placement takes 5 s, and 35 s: longer than anybody waits, so what was given up arrives late (fake)"""
    compute = tuned(cluster, placement=faulty.url)
    doomed = boot(cluster)
    config = write_config(tmp_path / 'slow.yaml', cluster.etcd.endpoint, faulty.url)
    faulty.fail('slow', which=lambda method, _: method != 'GET', seconds=seconds)
    assert cluster.eschedule('destroy', doomed).code == 0
    instance = str(uuid.uuid4())
    placed = eschedule(config, SMALL, '--uuid', instance, timeout=200)
    assert notified(placed) == (compute.uuid, instance)
    assert list(cluster.placement.consumers(compute.uuid)).count(instance) == 1
    until(lambda: (record(cluster, doomed) or {}).get('state') == 'gone', 90, 'it is gone')
    addressed(cluster, instance)
    # The reads, too: a build waits for its confirmation, for as long as it takes.
    compute.pause()
    _, waits = place(cluster)
    faulty.fail('slow', seconds=seconds)
    compute.resume()
    if seconds > 30:
        until(lambda: losses(compute, '')[0], 60, 'it is noticed')
        faulty.heal()
    until(lambda: (record(cluster, waits) or {}).get('state') == 'active', 60, 'it is active')
    assert compute.stop(patience=90) == 0
    compute.start()
    settled(cluster, compute)
