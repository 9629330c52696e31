"""Virtual time, randomness and threads in a world: a wait lets other actors run."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta, tzinfo
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ecomp.model.choose import Offer
from tests.model import directory
from tests.model.acting import LONG_SLEEP_SECONDS
from tests.model.etcd import ModelStore
from tests.model.world import World

NOW = '2030-01-01T00:00:00Z'
HOST = 'h'
# The process id of the first actor of a world; the next one has the next.
FIRST_PID = 1000


class CurrentWorld:
    """The world that the current thread is in, or None outside, and for all other threads."""

    world: World | None = None
    thread = 0

    @classmethod
    def get(cls) -> World | None:
        return cls.world if cls.world is not None and threading.get_ident() == cls.thread else None


class FixedDatetime(datetime):
    # Whole minutes, because each new value is a new state.
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> FixedDatetime:
        world = CurrentWorld.get()
        return cls(2030, 1, 1, tzinfo=tz or UTC) + timedelta(minutes=world.clock // 60 if world else 0)


_sleep, _monotonic, _uniform, _uuid4, _wait, _original_is_enabled_for = (
    *(time.sleep, time.monotonic, random.uniform, uuid.uuid4, threading.Event.wait, logging.Logger.isEnabledFor),
)


def _virtual_sleep(seconds: float) -> None:
    world = CurrentWorld.get()
    if world is None:
        _sleep(seconds)
    else:
        world.sleep(seconds)


def _virtual_monotonic() -> float:
    world = CurrentWorld.get()
    return _monotonic() if world is None else world.read_clock()


def _virtual_uniform(low: float, high: float) -> float:
    return _uniform(low, high) if CurrentWorld.get() is None else (low + high) / 2


def _virtual_uuid4() -> uuid.UUID:
    world = CurrentWorld.get()
    if world is None:
        return _uuid4()
    if world.current is None:
        world.scene_uuids += 1
        return uuid.UUID(int=world.scene_uuids, version=4)
    world.current.uuids += 1
    return uuid.UUID(int=(abs(hash(world.current.name)) << 16) + world.current.uuids, version=4)


def _virtual_wait(event: threading.Event, timeout: float | None = None) -> bool:
    world = CurrentWorld.get()
    if world is None:
        return _wait(event, timeout)
    if not event.is_set():
        assert timeout is not None, 'waits for ever'
        world.sleep(timeout)
    return event.is_set()


def find_pid() -> int:
    """Return the process id of the current actor. That of the scene belongs to nobody."""
    world = CurrentWorld.get()
    assert world is not None
    return FIRST_PID - 1 if world.current is None else FIRST_PID + world.actors.index(world.current)


def _virtual_kill(pid: int, _: int) -> None:
    """Raise ProcessLookupError if the actor with this process id has ended."""
    world = CurrentWorld.get()
    assert world is not None
    is_alive = pid >= FIRST_PID and world.actors[pid - FIRST_PID].is_active
    if world.current is not None:
        world.current.history = hash((world.current.history, pid, is_alive))
    if not is_alive:
        raise ProcessLookupError


def _virtual_ask_placement(placement: object, *_: object) -> Future[tuple[object, Offer]]:
    # The product connects to placement in a thread.
    future: Future[tuple[object, Offer]] = Future()
    future.set_result((placement, Offer(())))
    return future


def _make_apply_patches() -> list[Any]:
    """Patch `eschedule apply`: its file is that of its context, and its process is its actor."""
    import ecomp.cli.apply
    import ecomp.cli.stack_file
    import ecomp.scheduler.changes.wait
    import ecomp.scheduler.placing.evacuate
    import ecomp.scheduler.placing.offer
    import ecomp.scheduler.placing.session
    import ecomp.scheduler.queries.stacks

    system = SimpleNamespace(kill=_virtual_kill, urandom=lambda _: uuid.uuid4().bytes)
    return [
        mock.patch.object(ecomp.cli.apply, 'os', system),
        mock.patch.object(ecomp.cli.apply, 'random', SimpleNamespace(Random=lambda: random.Random(find_pid()))),
        mock.patch.object(ecomp.cli.apply, 'make_timestamp', return_value=NOW),
        mock.patch.object(ecomp.cli.apply, '_describe_origin', return_value='u@h:file'),
        mock.patch.object(
            ecomp.cli.apply, 'describe_owner', lambda since: {'host': HOST, 'pid': find_pid(), 'since': since}
        ),
        mock.patch.object(ecomp.scheduler.placing.session, 'os', system),
        mock.patch.object(ecomp.scheduler.placing.evacuate, 'os', system),
        mock.patch.object(ecomp.cli.apply, 'load_stack_file', lambda ctx, _: ctx.file),
        mock.patch.object(ecomp.cli.stack_file, 'load_stack_file', lambda ctx, _: ctx.file),
        mock.patch.object(
            ecomp.scheduler.queries.stacks, 'random', SimpleNamespace(randrange=lambda low, _: low + find_pid())
        ),
        mock.patch.object(ecomp.scheduler.placing.offer, 'ask_placement', _virtual_ask_placement),
        mock.patch.object(ecomp.scheduler.changes.wait, 'Store', lambda config: ModelStore(config.memory)),
        mock.patch.object(ecomp.cli.apply, 'LiveLine'),
        # In a shorter sleep no other actor would go first.
        mock.patch.object(ecomp.scheduler.changes.wait, 'MIN_TICK_SECONDS', LONG_SLEEP_SECONDS),
    ]


def _record_exception(_: logging.Logger, message: str, *arguments: object) -> None:
    world = CurrentWorld.get()
    if world is not None:
        world.unexpected_errors.append(f'{message % arguments}: {sys.exc_info()[1]!r}')


def _is_enabled_for(logger: logging.Logger, level: int) -> bool:
    return CurrentWorld.get() is None and _original_is_enabled_for(logger, level)


def _make_inline_pool(_: int) -> AbstractContextManager[SimpleNamespace]:
    return nullcontext(SimpleNamespace(map=map))


@contextmanager
def patch_environment() -> Iterator[None]:
    import ecomp.agent.host.metadata
    import ecomp.agent.host.provider
    import ecomp.agent.host.state
    import ecomp.scheduler.changes.change
    import ecomp.scheduler.operations.audit
    import ecomp.scheduler.placing.modify

    patches: list[Any] = [
        mock.patch.object(time, 'sleep', _virtual_sleep),
        # One step instead of a hundred.
        mock.patch.object(ecomp.store.client, 'FENCE_POLL_SECONDS', ecomp.store.client.FENCE_RENEWAL_SECONDS),
        mock.patch.object(time, 'monotonic', _virtual_monotonic),
        mock.patch.object(random, 'uniform', _virtual_uniform),
        mock.patch.object(uuid, 'uuid4', _virtual_uuid4),
        mock.patch.object(threading.Event, 'wait', _virtual_wait),
        mock.patch.object(ecomp.scheduler.operations.audit, 'ThreadPoolExecutor', _make_inline_pool),
        mock.patch.object(ecomp.scheduler.changes.change, 'datetime', FixedDatetime),
        mock.patch.object(ecomp.scheduler.placing.modify, 'datetime', FixedDatetime),
        mock.patch.object(ecomp.store.client, 'datetime', FixedDatetime),
        mock.patch.object(ecomp.agent.host.state, 'write_durably', directory.write_as_step),
        mock.patch.object(ecomp.agent.host.metadata, 'write_durably', directory.write_within_step),
        mock.patch.object(ecomp.agent.host.provider, 'write_durably', directory.write_as_step),
        mock.patch.object(logging.Logger, 'exception', _record_exception),
        mock.patch.object(logging.Logger, 'isEnabledFor', _is_enabled_for),
        *_make_apply_patches(),
    ]
    with ExitStack() as patched:
        for patch in patches:
            patched.enter_context(patch)
        yield


@contextmanager
def enter_world(world: World) -> Iterator[None]:
    """Put the current thread into the world. Use it inside patch_environment() only."""
    CurrentWorld.world, CurrentWorld.thread = world, threading.get_ident()
    try:
        yield
    finally:
        CurrentWorld.world = None
