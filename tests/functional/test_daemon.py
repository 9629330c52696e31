"""The daemon's threads in this process: what one of them waits for, or cannot have, holds up no other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ecomp.agent.compute import Daemon
from ecomp.agent.host.claims import ClaimKeeper
from ecomp.agent.planner import EVERY, LOOKING, POLL, Planner, poll_after
from ecomp.agent.turns import Threads
from ecomp.model import keys
from ecomp.model.guest import Guest, GuestSpec
from ecomp.model.record import ACTIVE, from_json
from ecomp.scheduler.changing.change import destroy
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud
from tests.functional.toy import Toy, toy
from tests.kit.servers import until

pytestmark = pytest.mark.fast


class Keeper(ClaimKeeper):
    """Waits for placement for as long as it is frozen."""

    def __init__(self, one: Toy) -> None:
        super().__init__(one.compute, one.cloud.store, one.cloud.placement)
        self.asks, self.answers = threading.Event(), threading.Event()
        self.answers.set()

    def look(self, guests: Collection[str], now: float) -> None:
        self.asks.set()
        self.answers.wait()
        super().look(guests, now)


@contextmanager
def running(one: Toy, keeper: Keeper, shared: Threads | None = None) -> Iterator[Daemon]:
    """The daemon of a compute, which is told by tell(); drained at the end, as at a signal.

    `shared` are the threads of several; None: it has its own.
    """
    far = {LOOKING: lambda: keeper.look(one.hypervisor.guests(), time.monotonic())}
    threads = shared or Threads(1, 2)
    made = Daemon(one.host, one.planner, far, threads, first=0.0, on_planned=lambda: None)
    made.begin()
    try:
        yield made
    finally:
        made.stop()
        made.drain()
        if shared is None:
            threads.close()


def tell(daemon: Daemon, one: Toy) -> None:
    """What is asked of it, whole, as its follower would."""
    daemon.on_state(one.cloud.store.snapshot(keys.request_prefix(one.compute)).entries)


def reached(one: Toy, instance: str, state: str) -> None:
    def there() -> bool:
        value = one.cloud.etcd.record(instance)
        return value is not None and from_json(value).state == state

    until(there, 20, f'{instance} is {state}')


def test_a_placement_that_gives_no_answer_holds_up_nothing_else(one: Toy, cloud: Cloud) -> None:
    keeper = Keeper(one)
    keeper.answers.clear()
    with running(one, keeper) as daemon:
        first = one.place()
        tell(daemon, one)
        reached(one, first, ACTIVE)
        assert keeper.asks.wait(60), 'it is asked once a minute, and first at the start'
        second = one.place()
        destroy(cloud.store, first)
        tell(daemon, one)
        reached(one, second, ACTIVE)
        until(lambda: cloud.etcd.get(keys.request(one.compute, first)) is None, 20, 'the destroy is carried out')
    assert not keeper.answers.is_set(), 'nor does its end wait for placement'
    keeper.answers.set()


def test_guests_are_plugged_in_as_soon_as_a_network_was_restarted(cloud: Cloud, tmp_path: Path) -> None:
    class Plugged(FakeHypervisor):
        def __init__(self) -> None:
            super().__init__()
            self.plugged: queue.SimpleQueue[None] = queue.SimpleQueue()
            self.look: Callable[[str], None] | None = None

        def on_change(self, notify: Callable[[str], None], look: Callable[[str], None] | None = None) -> None:
            super().on_change(notify, look)
            self.look = look

        def plug_in(self) -> None:
            self.plugged.put(None)

    hypervisor = Plugged()
    with toy(cloud, tmp_path, hypervisor) as one, running(one, Keeper(one)) as daemon:
        tell(daemon, one)
        hypervisor.plugged.get(timeout=20)
        assert hypervisor.look is not None
        hypervisor.look('libvirt: network default was started or stopped')
        hypervisor.plugged.get(timeout=20)
        instance = one.place()
        tell(daemon, one)
        reached(one, instance, ACTIVE)
        assert hypervisor.plugged.empty(), 'once, until a minute has passed'


def test_of_those_that_share_threads_one_that_waits_holds_up_no_other(cloud: Cloud, tmp_path: Path) -> None:
    """Some of a process wait for placement, in its minute's looks and in libvirt, say; the others plan and build."""
    threads, hangs = Threads(8, 2), threading.Event()

    class Hung(FakeHypervisor):
        def guests(self) -> Mapping[str, Guest]:
            hangs.wait()
            return super().guests()

    with ExitStack() as at_exit:
        at_exit.callback(threads.close)
        one, frozen, silent = (
            at_exit.enter_context(toy(cloud, tmp_path / name, hypervisor))
            for name, hypervisor in (('one', None), ('frozen', Hung()), ('silent', None))
        )
        keepers = [Keeper(each) for each in (one, frozen, silent)]
        keepers[2].answers.clear()
        at_exit.callback(keepers[2].answers.set)
        daemons = [
            at_exit.enter_context(running(each, keeper, threads))
            for each, keeper in zip((one, frozen, silent), keepers, strict=True)
        ]
        at_exit.callback(hangs.set)
        instances = [each.place() for each in (one, frozen, silent)]
        for daemon, each in zip(reversed(daemons), (silent, frozen, one), strict=True):
            tell(daemon, each)
        assert keepers[2].asks.wait(60)
        reached(one, instances[0], ACTIVE)
        reached(silent, instances[2], ACTIVE)
        assert keepers[0].asks.wait(60)
        destroy(cloud.store, instances[0])
        tell(daemons[0], one)
        until(lambda: cloud.etcd.get(keys.request(one.compute, instances[0])) is None, 20, 'it is carried out')
        assert frozen.hypervisor._guests == {}
        hangs.set()
        reached(frozen, instances[1], ACTIVE)


def test_a_thread_that_cannot_be_started_is_tried_again(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the limit on processes is reached for a while."""
    real, tried, none = threading.Thread.start, threading.Event(), threading.Event()

    def start(thread: threading.Thread) -> None:
        if none.is_set() and thread.name.startswith(('build', 'task')):
            tried.set()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, 'start', start)
    with toy(cloud, tmp_path) as one, running(one, Keeper(one)) as daemon:
        none.set()
        instance = one.place()
        tell(daemon, one)
        assert tried.wait(60)
        until(lambda: 'no thread can be started' in caplog.text, 20, 'it says so')
        none.clear()
        reached(one, instance, ACTIVE)
        assert caplog.text.count('no thread can be started') <= 2, 'said once, and that it works again'
        assert one.hypervisor.guests().keys() == {instance}


def test_a_planner_that_meets_what_nobody_thought_of_goes_on(
    one: Toy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it only reckons when to plan next."""
    real, failures = Planner.due, [MemoryError('none'), MemoryError('none')]

    def due(planner: Planner) -> list[float]:
        if failures:
            raise failures.pop()
        return real(planner)

    monkeypatch.setattr(Planner, 'due', due)
    with running(one, Keeper(one)) as daemon:
        instance = one.place()
        tell(daemon, one)
        reached(one, instance, ACTIVE)
    assert failures == []
    assert 'unexpected error while planning' in caplog.text


def test_an_address_that_never_comes_is_looked_for_ever_less_often() -> None:
    """Of a guest on a LAN's bridge without an agent, say."""
    assert [poll_after(minutes * 60) for minutes in (0, 1, 2, 10, 30, 10_000)] == [POLL, POLL, 4, 20, EVERY, EVERY]


class Held(FakeHypervisor):
    """Makes no disk before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def create_disk(self, spec: GuestSpec) -> None:
        self.asked.set()
        assert self.may.wait(60)
        super().create_disk(spec)


def test_who_becomes_read_only_starts_nothing_that_is_in_work(cloud: Cloud, tmp_path: Path) -> None:
    """Somebody else is this compute, and makes it: frozen in the middle and continued, this one undoes what it did."""
    hypervisor = Held()
    with toy(cloud, tmp_path, hypervisor) as one, running(one, Keeper(one)) as daemon:
        one.place()
        tell(daemon, one)
        assert hypervisor.asked.wait(60)
        daemon.become_read_only('another one is this compute')
        hypervisor.may.set()
        until(lambda: not one.planner.in_work(), 20, 'it has ended')
        assert hypervisor.guests() == {}


@pytest.mark.parametrize('asked', ['to end', 'to be read-only'])
def test_no_build_that_waits_for_a_thread_is_begun_once_all_are_to_stop(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(Threads, 'BUILDS', 1)
    hypervisor, threads = Held(), Threads(1, 1)
    with toy(cloud, tmp_path, hypervisor) as one:
        with running(one, Keeper(one), threads) as daemon:
            instances = [one.place() for _ in range(3)]
            tell(daemon, one)
            assert hypervisor.asked.wait(60)
            if asked == 'to end':
                daemon.stop()
                monkeypatch.setattr(one.host.runner, 'tend', lambda _: hypervisor.may.set())
            else:
                daemon.become_read_only('another one is this compute')
                hypervisor.may.set()
                until(lambda: not one.planner.in_work(), 20, 'it has ended')
        threads.close()
        assert hypervisor.guests() == {}
        begun = [each for each in instances if cloud.etcd.record(each) is not None]
        assert len(begun) == 1, 'of the others nothing is begun'
