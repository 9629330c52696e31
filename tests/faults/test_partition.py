"""F14: ecompute cut off from etcd, or from placement, whole or one way; lossy and slow lines.

The ecomputes run in network namespaces of their own, etcd and placement on the machine; packets are dropped by iptables
inside the namespace. The delay is a relay's: the kernels this has to run on do not all have tc's netem.
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
    """etcd and placement on the machine, and fakes on islands of their own."""
    with ExitStack() as stack:
        made = stack.enter_context(islands(number))
        mainland = made[0].gateway
        etcd = stack.enter_context(EtcdAt(directory / 'etcd').at(mainland))
        placement = stack.enter_context(PlacementAt(directory / 'placement').at(mainland))
        control = Control(etcd, placement, directory, mortal=True)
        stack.callback(control.close)
        computes = []
        for number_, island in enumerate(made):
            compute = Islander(etcd.endpoint, placement.url, directory=directory / f'compute-{number_}')
            compute.island = island
            control.at_exit.callback(compute.close)
            computes.append(compute.launch())
        for compute in computes:
            compute.wait_ready()
        yield control, made, computes


def on(control: Control, compute: Ecompute) -> str:
    """A new instance on this compute."""
    return place(control, f'{SMALL}&in_tree={compute.uuid}')[1]


def at_peace(compute: Ecompute) -> int:
    """How often it has lost a server so far, once it has them all back."""
    until(lambda: operator.eq(*losses(compute, '')), SOON, 'whatever it missed is back')
    return losses(compute, '')[0]


QUICK = [('etcd', BOTH), ('etcd', REQUESTS), ('etcd', ANSWERS), ('placement', BOTH)]
WHOLE = [(server, which) for server in ('etcd', 'placement') for which in (BOTH, REQUESTS, ANSWERS)]


@pytest.mark.parametrize(
    ('cuts', 'seconds'), [(QUICK, 0.0), pytest.param(WHOLE, 65.0, marks=pytest.mark.slow)], ids=['quick', 'whole']
)
def test_partitions(tmp_path: Path, cuts: list[tuple[str, str]], seconds: float) -> None:
    """F14: ecompute is cut off from etcd or placement, both ways or one: guests run on, and it converges (fake)"""
    with archipelago(tmp_path, len(cuts)) as (control, made, computes):
        kept = [on(control, compute) for compute in computes]
        doomed = [on(control, compute) for compute in computes]
        for instance in (*kept, *doomed):
            addressed(control, instance)
        if not seconds:
            # The connections it keeps end, so that placement's loss shows in 3 s instead of 30.
            control.placement.restart()
        before = [at_peace(compute) for compute in computes]
        ports = {'etcd': control.etcd.port, 'placement': control.placement.port}
        for island, (server, which) in zip(made, cuts, strict=True):
            island.cut(ports[server], which)
        began = time.monotonic()
        # Alive as far as anybody knows: for those cut off from etcd it comes out when it is back.
        new = [on(control, compute) for compute in computes]
        for instance in doomed:
            assert control.eschedule('destroy', instance).code == 0
        for compute, island, (server, which), lost in zip(computes, made, cuts, before, strict=True):
            until(lambda: losses(compute, '')[0] > lost, DETECTED_WITHIN, f'{server}, {which}: it is noticed')  # noqa: B023
            assert island.dropped() > 0
        with ExitStack() as all_idle:
            for compute in computes:
                all_idle.enter_context(idle(compute.pid))
            until(lambda: time.monotonic() - began > seconds, seconds + 1, 'the partition lasts')
        for compute, (server, _), mine, unseen in zip(computes, cuts, kept, new, strict=True):
            assert guests(compute)[mine]['running']
            assert unseen not in guests(compute), f'{server}: not built while nobody confirms it'
            found = known(control, mine)
            assert found['state'] == 'active'
        for island in made:
            island.heal()
        for gone, there in zip(doomed, new, strict=True):
            until(lambda: control.etcd.get(f'/booted/{there}'), 60, f'{there} has an address')  # noqa: B023
            reached(control, gone, 'gone')
        for compute, (server, _), mine, there, lost in zip(computes, cuts, kept, new, before, strict=True):
            until(lambda: losses(compute, '')[1] > lost, 70, 'the return is logged')  # noqa: B023
            assert losses(compute, '') == (lost + 1, lost + 1), log_of(compute)
            assert server in logged(compute, 'trying again until')[-1]
            assert guests(compute).keys() == {mine, there}
            until(lambda: control.etcd.get(f'/computes/{compute.uuid}'), 20, 'it is alive')  # noqa: B023
        settled(control, *computes)


def work_on(control: Control, compute: Ecompute, rounds: int) -> None:
    """Creates and destroys, each of which has to be done in the end."""
    kept = on(control, compute)
    for _ in range(rounds):
        placed = on(control, compute)
        addressed(control, placed)
        assert control.eschedule('destroy', '--wait', placed).code == 0
    addressed(control, kept)
    assert guests(compute).keys() == {kept}


@pytest.mark.slow
def test_a_lossy_line(tmp_path: Path) -> None:
    """F14: 5 % of all packets between ecompute and the control plane are lost, both ways: it works (fake)"""
    with archipelago(tmp_path, 1) as (control, (island,), (compute,)):
        island.lose(0.05)
        work_on(control, compute, 4)
        assert island.dropped() > 0
        island.heal()
        settled(control, compute)
        assert compute.stop() == 0


@pytest.mark.parametrize('delay', [0.1, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_slow_line(cluster: Control, tmp_path: Path, delay: float) -> None:
    """F14: 100 ms, and 500 ms, of delay (a relay's) between ecompute and the control plane: it works (fake)"""
    with SlowLine(cluster.etcd.port, delay) as etcd, SlowLine(cluster.placement.port, delay) as placement:
        compute = Ecompute(cluster.etcd.endpoint, f'http://{placement.address}', directory=tmp_path / 'compute')
        write_etcd(compute, etcd.address)
        with compute:
            work_on(cluster, compute, 1)
            settled(cluster, compute)
            assert losses(compute, '') == (0, 0)
            assert compute.stop() == 0


def write_etcd(compute: Ecompute, address: str) -> None:
    """Have it reach its etcd at another address; the test asks etcd itself whether it is ready."""
    text = compute.config.read_text()
    compute.config.write_text(text.replace(compute._etcd, address))
