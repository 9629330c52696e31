"""F14: ecompute cut off from etcd or placement in one or both directions; lossy and slow lines.

The ecomputes run in network namespaces of their own, etcd and placement on the machine; iptables drops packets inside
the namespace. A relay makes the delay, because not every kernel that runs these tests has tc's netem.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.faults.islands import (
    ANSWERS,
    BOTH,
    REQUESTS,
    DelayingRelay,
    EtcdAt,
    Island,
    Islander,
    PlacementAt,
    make_islands,
)
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import assert_idle, check_settled, count_losses, read_guests
from tests.kit.servers import wait_until
from tests.kit.story import (
    REACTION_SECONDS,
    SMALL_QUERY,
    find_log_lines,
    place,
    read_log,
    require_record,
    wait_address,
    wait_state,
)

DETECTION_SECONDS = 45.0


@contextmanager
def start_archipelago(directory: Path, number: int) -> Iterator[tuple[Control, list[Island], list[Islander]]]:
    """Start etcd and placement on the machine, and a fake ecompute on each island."""
    with ExitStack() as stack:
        islands_made = stack.enter_context(make_islands(number))
        mainland = islands_made[0].gateway
        etcd = stack.enter_context(EtcdAt(directory / 'etcd').set_address(mainland))
        placement = stack.enter_context(PlacementAt(directory / 'placement').set_address(mainland))
        control = Control(etcd, placement, directory, is_mortal=True)
        stack.callback(control.close)
        computes = []
        for number_, island in enumerate(islands_made):
            compute = Islander(etcd.endpoint, placement.url, directory=directory / f'compute-{number_}')
            compute.island = island
            control.at_exit.callback(compute.close)
            computes.append(compute.launch())
        for compute in computes:
            compute.wait_ready()
        yield control, islands_made, computes


def place_on(control: Control, compute: Ecompute) -> str:
    """Place a new instance on this compute."""
    return place(control, f'{SMALL_QUERY}&in_tree={compute.uuid}')[1]


def count_losses_when_back(compute: Ecompute) -> int:
    """Wait until it has every server back; return the number of losses so far."""
    wait_until(lambda: operator.eq(*count_losses(compute, '')), REACTION_SECONDS, 'whatever it missed is back')
    return count_losses(compute, '')[0]


QUICK_CUTS = [('etcd', BOTH), ('etcd', REQUESTS), ('etcd', ANSWERS), ('placement', BOTH)]
ALL_CUTS = [(server, which) for server in ('etcd', 'placement') for which in (BOTH, REQUESTS, ANSWERS)]


@pytest.mark.parametrize(
    ('cuts', 'seconds'),
    [(QUICK_CUTS, 0.0), pytest.param(ALL_CUTS, 65.0, marks=pytest.mark.slow)],
    ids=['quick', 'whole'],
)
def test_partitioned_computes_converge(tmp_path: Path, cuts: list[tuple[str, str]], seconds: float) -> None:
    """F14: ecompute is cut off from etcd or placement, in one or both directions: guests run, it converges (fake)."""
    with start_archipelago(tmp_path, len(cuts)) as (control, islands_made, computes):
        surviving = [place_on(control, compute) for compute in computes]
        doomed = [place_on(control, compute) for compute in computes]
        for instance in (*surviving, *doomed):
            wait_address(control, instance)
        if not seconds:
            # Its kept-alive connections end, so that placement's loss is noticed in 3 s instead of 30.
            control.placement.restart()
        before = [count_losses_when_back(compute) for compute in computes]
        ports = {'etcd': control.etcd.port, 'placement': control.placement.port}
        for island, (server, which) in zip(islands_made, cuts, strict=True):
            island.cut(ports[server], which)
        began = time.monotonic()
        # The computes still count as alive; those cut off from etcd read these requests when it is back.
        created = [place_on(control, compute) for compute in computes]
        for instance in doomed:
            assert control.eschedule('destroy', instance).code == 0
        for compute, island, (server, which), count in zip(computes, islands_made, cuts, before, strict=True):
            wait_until(
                lambda: count_losses(compute, '')[0] > count,  # noqa: B023
                DETECTION_SECONDS,
                f'{server}, {which}: it is noticed',
            )
            assert island.count_dropped() > 0
        with ExitStack() as all_idle:
            for compute in computes:
                all_idle.enter_context(assert_idle(compute.pid))
            wait_until(lambda: time.monotonic() - began > seconds, seconds + 1, 'the partition lasts')
        for compute, (server, _), stayed, pending in zip(computes, cuts, surviving, created, strict=True):
            assert read_guests(compute)[stayed]['running']
            assert pending not in read_guests(compute), f'{server}: not built while nobody confirms it'
            status = require_record(control, stayed)
            assert status['state'] == 'active'
        for island in islands_made:
            island.heal()
        for destroyed, late in zip(doomed, created, strict=True):
            wait_until(lambda: control.etcd.get(f'/booted/{late}'), 60, f'{late} has an address')  # noqa: B023
            wait_state(control, destroyed, 'gone')
        for compute, (server, _), stayed, late, count in zip(computes, cuts, surviving, created, before, strict=True):
            wait_until(lambda: count_losses(compute, '')[1] > count, 70, 'the return is logged')  # noqa: B023
            assert count_losses(compute, '') == (count + 1, count + 1), read_log(compute)
            assert server in find_log_lines(compute, 'trying again until')[-1]
            assert read_guests(compute).keys() == {stayed, late}
            wait_until(lambda: control.etcd.get(f'/computes/{compute.uuid}'), 20, 'it is alive')  # noqa: B023
        check_settled(control, *computes)


def create_and_destroy(control: Control, compute: Ecompute, rounds: int) -> None:
    """Create and destroy instances; each has to be completed in the end."""
    surviving = place_on(control, compute)
    for _ in range(rounds):
        instance = place_on(control, compute)
        wait_address(control, instance)
        assert control.eschedule('destroy', '--wait', instance).code == 0
    wait_address(control, surviving)
    assert read_guests(compute).keys() == {surviving}


@pytest.mark.slow
def test_lossy_line(tmp_path: Path) -> None:
    """F14: 5 % of all packets between ecompute and the control plane are lost, both ways: it works (fake)."""
    with start_archipelago(tmp_path, 1) as (control, (island,), (compute,)):
        island.lose(0.05)
        create_and_destroy(control, compute, 4)
        assert island.count_dropped() > 0
        island.heal()
        check_settled(control, compute)
        assert compute.stop() == 0


@pytest.mark.parametrize('delay', [0.1, pytest.param(0.5, marks=pytest.mark.slow)])
def test_slow_line(cluster: Control, tmp_path: Path, delay: float) -> None:
    """F14: a delay of 100 ms, and 500 ms, by a relay between ecompute and the control plane: it works (fake)."""
    with DelayingRelay(cluster.etcd.port, delay) as etcd, DelayingRelay(cluster.placement.port, delay) as placement:
        compute = Ecompute(cluster.etcd.endpoint, f'http://{placement.address}', directory=tmp_path / 'compute')
        set_etcd_address(compute, etcd.address)
        with compute:
            create_and_destroy(cluster, compute, 1)
            check_settled(cluster, compute)
            assert count_losses(compute, '') == (0, 0)
            assert compute.stop() == 0


def set_etcd_address(compute: Ecompute, address: str) -> None:
    """Set the address of ecompute's etcd; the test still queries etcd itself for readiness."""
    text = compute.config.read_text()
    compute.config.write_text(text.replace(compute._etcd, address))
