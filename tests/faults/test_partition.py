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

from tests.faults.islands import ANSWERS, BOTH, REQUESTS, EtcdAt, Island, Islander, PlacementAt, SlowLine, islands
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import guests, idle, losses, settled
from tests.kit.servers import until
from tests.kit.story import SMALL, SOON, addressed, known, log_of, logged, place, reached

DETECTED_WITHIN = 45.0


@contextmanager
def archipelago(directory: Path, number: int) -> Iterator[tuple[Control, list[Island], list[Islander]]]:
    """Start etcd and placement on the machine, and a fake ecompute on each island."""
    with ExitStack() as stack:
        islands_made = stack.enter_context(islands(number))
        mainland = islands_made[0].gateway
        etcd = stack.enter_context(EtcdAt(directory / 'etcd').at(mainland))
        placement = stack.enter_context(PlacementAt(directory / 'placement').at(mainland))
        control = Control(etcd, placement, directory, mortal=True)
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


def on(control: Control, compute: Ecompute) -> str:
    """Place a new instance on this compute."""
    return place(control, f'{SMALL}&in_tree={compute.uuid}')[1]


def at_peace(compute: Ecompute) -> int:
    """Wait until it has every server back; return the number of losses so far."""
    until(lambda: operator.eq(*losses(compute, '')), SOON, 'whatever it missed is back')
    return losses(compute, '')[0]


QUICK = [('etcd', BOTH), ('etcd', REQUESTS), ('etcd', ANSWERS), ('placement', BOTH)]
WHOLE = [(server, which) for server in ('etcd', 'placement') for which in (BOTH, REQUESTS, ANSWERS)]


@pytest.mark.parametrize(
    ('cuts', 'seconds'), [(QUICK, 0.0), pytest.param(WHOLE, 65.0, marks=pytest.mark.slow)], ids=['quick', 'whole']
)
def test_partitions(tmp_path: Path, cuts: list[tuple[str, str]], seconds: float) -> None:
    """F14: ecompute is cut off from etcd or placement, in one or both directions: guests run, it converges (fake)."""
    with archipelago(tmp_path, len(cuts)) as (control, islands_made, computes):
        surviving = [on(control, compute) for compute in computes]
        doomed = [on(control, compute) for compute in computes]
        for instance in (*surviving, *doomed):
            addressed(control, instance)
        if not seconds:
            # Its kept-alive connections end, so that placement's loss is noticed in 3 s instead of 30.
            control.placement.restart()
        before = [at_peace(compute) for compute in computes]
        ports = {'etcd': control.etcd.port, 'placement': control.placement.port}
        for island, (server, which) in zip(islands_made, cuts, strict=True):
            island.cut(ports[server], which)
        began = time.monotonic()
        # The computes still count as alive; those cut off from etcd read these requests when it is back.
        created = [on(control, compute) for compute in computes]
        for instance in doomed:
            assert control.eschedule('destroy', instance).code == 0
        for compute, island, (server, which), count in zip(computes, islands_made, cuts, before, strict=True):
            until(lambda: losses(compute, '')[0] > count, DETECTED_WITHIN, f'{server}, {which}: it is noticed')  # noqa: B023
            assert island.dropped() > 0
        with ExitStack() as all_idle:
            for compute in computes:
                all_idle.enter_context(idle(compute.pid))
            until(lambda: time.monotonic() - began > seconds, seconds + 1, 'the partition lasts')
        for compute, (server, _), stayed, pending in zip(computes, cuts, surviving, created, strict=True):
            assert guests(compute)[stayed]['running']
            assert pending not in guests(compute), f'{server}: not built while nobody confirms it'
            status = known(control, stayed)
            assert status['state'] == 'active'
        for island in islands_made:
            island.heal()
        for destroyed, late in zip(doomed, created, strict=True):
            until(lambda: control.etcd.get(f'/booted/{late}'), 60, f'{late} has an address')  # noqa: B023
            reached(control, destroyed, 'gone')
        for compute, (server, _), stayed, late, count in zip(computes, cuts, surviving, created, before, strict=True):
            until(lambda: losses(compute, '')[1] > count, 70, 'the return is logged')  # noqa: B023
            assert losses(compute, '') == (count + 1, count + 1), log_of(compute)
            assert server in logged(compute, 'trying again until')[-1]
            assert guests(compute).keys() == {stayed, late}
            until(lambda: control.etcd.get(f'/computes/{compute.uuid}'), 20, 'it is alive')  # noqa: B023
        settled(control, *computes)


def work_on(control: Control, compute: Ecompute, rounds: int) -> None:
    """Create and destroy instances; each has to be completed in the end."""
    surviving = on(control, compute)
    for _ in range(rounds):
        instance = on(control, compute)
        addressed(control, instance)
        assert control.eschedule('destroy', '--wait', instance).code == 0
    addressed(control, surviving)
    assert guests(compute).keys() == {surviving}


@pytest.mark.slow
def test_a_lossy_line(tmp_path: Path) -> None:
    """F14: 5 % of all packets between ecompute and the control plane are lost, both ways: it works (fake)."""
    with archipelago(tmp_path, 1) as (control, (island,), (compute,)):
        island.lose(0.05)
        work_on(control, compute, 4)
        assert island.dropped() > 0
        island.heal()
        settled(control, compute)
        assert compute.stop() == 0


@pytest.mark.parametrize('delay', [0.1, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_slow_line(cluster: Control, tmp_path: Path, delay: float) -> None:
    """F14: a delay of 100 ms, and 500 ms, by a relay between ecompute and the control plane: it works (fake)."""
    with SlowLine(cluster.etcd.port, delay) as etcd, SlowLine(cluster.placement.port, delay) as placement:
        compute = Ecompute(cluster.etcd.endpoint, f'http://{placement.address}', directory=tmp_path / 'compute')
        write_etcd(compute, etcd.address)
        with compute:
            work_on(cluster, compute, 1)
            settled(cluster, compute)
            assert losses(compute, '') == (0, 0)
            assert compute.stop() == 0


def write_etcd(compute: Ecompute, address: str) -> None:
    """Set the address of ecompute's etcd; the test still queries etcd itself for readiness."""
    text = compute.config.read_text()
    compute.config.write_text(text.replace(compute._etcd, address))
