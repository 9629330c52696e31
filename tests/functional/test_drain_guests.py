"""`host drain --stop`, `host enable --start` and `host forget`, on real etcd and placement."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Collection
from pathlib import Path

import pytest

from ecomp.errors import Conflict, NotFound, StillGoing
from ecomp.model import keys
from ecomp.model.order import DRAIN, REBOOT, START, STOP, PowerAction
from ecomp.model.states import ACTIVE, STOPPED
from ecomp.scheduler.changes.change import change_power
from ecomp.scheduler.changes.wait import Deadline
from ecomp.scheduler.operations.decommission import change_guests, disable, wait_until_drained
from ecomp.scheduler.operations.forget import forget
from ecomp.store.client import Put
from tests.functional.cloud import Cloud, make_uuid
from tests.functional.toy import ToyCompute, make_toy_compute


def stop_guests(toy: ToyCompute, changed_guests: set[str] | None = None) -> Collection[str]:
    return change_guests(
        toy.cloud.store, toy.compute, STOP, set() if changed_guests is None else changed_guests, lambda _: None
    )


def start_guests(toy: ToyCompute) -> list[str]:
    messages: list[str] = []
    assert not change_guests(toy.cloud.store, toy.compute, START, set(), messages.append)
    return messages


def read_reason(toy: ToyCompute, instance: str) -> str | None:
    power = toy.cloud.read_request(toy.compute, instance).power
    return power.reason if power else None


def test_drain_stops_running_guests_and_only_those_are_started_again(cloud: Cloud, tmp_path: Path) -> None:
    with make_toy_compute(cloud, tmp_path) as toy:
        running, stopped_by_user = toy.build(), toy.build()
        change_power(cloud.store, stopped_by_user, PowerAction(STOP, make_uuid()))
        toy.settle()
        assert stop_guests(toy) == [running]
        toy.settle()
        assert [toy.read_record(instance).state for instance in (running, stopped_by_user)] == [STOPPED, STOPPED]
        assert stop_guests(toy) == []
        toy.restart()
        assert start_guests(toy) == [f'{running}: start accepted; {toy.compute} carries it out']
        toy.settle()
        assert [toy.read_record(instance).state for instance in (running, stopped_by_user)] == [ACTIVE, STOPPED]
        assert start_guests(toy) == []


def test_guest_that_its_user_started_after_the_drain_is_not_touched(cloud: Cloud, tmp_path: Path) -> None:
    with make_toy_compute(cloud, tmp_path) as toy:
        instance, changed_guests = toy.build(), set[str]()
        assert stop_guests(toy, changed_guests) == [instance]
        toy.settle()
        change_power(cloud.store, instance, PowerAction(START, make_uuid()))
        toy.settle()
        assert stop_guests(toy, changed_guests) == [], 'the same drain looks again'
        assert toy.step() == []
        assert start_guests(toy) == []
        assert toy.read_record(instance).state == ACTIVE


@pytest.mark.parametrize('is_off', [True, False], ids=['off', 'shutting down'])
def test_guest_that_its_user_stops_after_the_drain_stays_off(cloud: Cloud, tmp_path: Path, is_off: bool) -> None:
    with make_toy_compute(cloud, tmp_path) as toy:
        instance = toy.build()
        stop_guests(toy)
        if is_off:
            toy.settle()
        assert read_reason(toy, instance) == DRAIN
        assert change_power(cloud.store, instance, PowerAction(STOP, make_uuid())).power is not None
        assert read_reason(toy, instance) == ''
        toy.settle()
        assert start_guests(toy) == []
        assert toy.read_record(instance).state == STOPPED


def test_drain_keeps_the_pending_stop_of_a_user_and_replaces_a_pending_reboot(cloud: Cloud, tmp_path: Path) -> None:
    with make_toy_compute(cloud, tmp_path) as toy:
        stopping, rebooting = toy.build(), toy.build()
        stop = PowerAction(STOP, make_uuid())
        change_power(cloud.store, stopping, stop)
        change_power(cloud.store, rebooting, PowerAction(REBOOT, make_uuid()))
        assert set(stop_guests(toy)) == {stopping, rebooting}
        assert cloud.read_request(toy.compute, stopping).power == stop
        assert read_reason(toy, rebooting) == DRAIN
        toy.settle()
        assert len(start_guests(toy)) == 1


def test_guest_is_started_while_it_still_shuts_down(cloud: Cloud, tmp_path: Path) -> None:
    with make_toy_compute(cloud, tmp_path) as toy:
        instance = toy.build()
        stop_guests(toy)
        assert len(start_guests(toy)) == 1
        toy.settle()
        assert toy.read_record(instance).state == ACTIVE


def test_waiting_drain_also_stops_what_is_being_built(cloud: Cloud, tmp_path: Path) -> None:
    with make_toy_compute(cloud, tmp_path) as toy:
        instance, changed_guests, remaining = toy.place(), set[str](), list[Collection[str]]()
        disable(cloud.placement, toy.compute, toy.compute)

        def stop_and_step() -> Collection[str]:
            remaining.append(stop_guests(toy, changed_guests))
            toy.step()
            return remaining[-1]

        wait_until_drained(
            cloud.store, cloud.placement, toy.compute, 'hv1', Deadline(60), lambda _: None, stop_and_step
        )
        assert remaining[0] == [instance]
        assert remaining[-1] == []
        assert toy.read_record(instance).state == STOPPED
        assert keys.request(toy.compute, instance) in cloud.store.snapshot(keys.HOSTS).entries, 'nothing is destroyed'


def test_timed_out_drain_names_the_guests_that_run(cloud: Cloud, tmp_path: Path) -> None:
    with make_toy_compute(cloud, tmp_path) as toy:
        toy.build()
        with pytest.raises(StillGoing, match='still waiting for 1 instance to stop; the host stays disabled'):
            wait_until_drained(
                cloud.store, cloud.placement, toy.compute, 'hv1', Deadline(0), lambda _: None, lambda: stop_guests(toy)
            )


# `host forget` on real etcd and placement.


def run_etcdctl(cloud: Cloud, *words: str | bytes) -> bytes:
    command = ['etcdctl', f'--endpoints={cloud.etcd.endpoint}', *words]
    environment = {**os.environ, 'ETCDCTL_API': '3'}
    return subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60).stdout


@pytest.mark.real_servers
def test_forget_advises_etcdctl_for_a_key_that_is_not_utf_8(cloud: Cloud) -> None:
    compute = cloud.make_compute(alive=False)
    prefix, messages = keys.request_prefix(compute), list[str]()
    # One key ends in three bytes that are not UTF-8, the other in the replacement character, which is valid UTF-8.
    cloud.store.commit([], [Put(f'{prefix}\udcff', 'x'), Put(f'{prefix}\ufffd', 'x')])

    def forget_compute() -> None:
        forget(cloud.store, cloud.placement, compute, 'hv1', lambda: 'now', messages.append, fenced=True)

    with pytest.raises(
        Conflict, match=f'compute hv1 is not forgotten: a key below {prefix} is not UTF-8 .* Fix: remove'
    ):
        forget_compute()
    key = run_etcdctl(cloud, 'get', '--keys-only', '--prefix', prefix)
    run_etcdctl(cloud, 'del', key.strip())
    forget_compute()
    assert messages == [
        f'{prefix}\ufffd: removed: no compute carries out this request',
        'hv1: its resource provider is removed',
    ]


def test_forget_needs_fenced_while_a_request_waits_in_a_queue(cloud: Cloud) -> None:
    """After a restore of etcd and placement, the compute may run a queued guest unclaimed."""
    compute, unknown = cloud.make_compute(alive=False), str(uuid.uuid4())
    cloud.etcd.put(keys.queue('small', str(uuid.uuid4())), '{}')

    def forget_compute(which: str, fenced: bool) -> None:
        forget(cloud.store, cloud.placement, which, which, lambda: 'now', lambda _: None, fenced)

    message = f'it may run queued requests. Fix: .* host forget {compute} --fenced'
    with pytest.raises(Conflict, match=message):
        forget_compute(compute, fenced=False)
    with pytest.raises(NotFound):
        forget_compute(unknown, fenced=False)
    forget_compute(compute, fenced=True)
    with pytest.raises(NotFound):
        forget_compute(compute, fenced=True)
