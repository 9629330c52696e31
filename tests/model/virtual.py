"""Virtual time, randomness and threads in a world: a wait lets other actors run."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime, tzinfo
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.model import directory
from tests.model.world import World

NOW = '2030-01-01T00:00:00Z'


class Inside:
    """The world that the current thread is in; None outside, and for all other threads."""

    world: World | None = None
    thread = 0

    @classmethod
    def here(cls) -> World | None:
        return cls.world if cls.world is not None and threading.get_ident() == cls.thread else None


class Moment(datetime):
    """A datetime whose current time is fixed."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Moment:
        return cls(2030, 1, 1, tzinfo=tz or UTC)


_sleep, _monotonic, _uniform, _uuid4, _wait, _heard = (
    *(time.sleep, time.monotonic, random.uniform, uuid.uuid4, threading.Event.wait, logging.Logger.isEnabledFor),
)


def _virtual_sleep(seconds: float) -> None:
    world = Inside.here()
    if world is None:
        _sleep(seconds)
    else:
        world.sleep(seconds)


def _virtual_monotonic() -> float:
    world = Inside.here()
    return _monotonic() if world is None else world.read_clock()


def _virtual_uniform(low: float, high: float) -> float:
    return _uniform(low, high) if Inside.here() is None else (low + high) / 2


def _virtual_uuid4() -> uuid.UUID:
    world = Inside.here()
    if world is None:
        return _uuid4()
    if world.now is None:
        world.quiet += 1
        return uuid.UUID(int=world.quiet, version=4)
    world.now.uuids += 1
    return uuid.UUID(int=(abs(hash(world.now.name)) << 16) + world.now.uuids, version=4)


def _virtual_wait(event: threading.Event, timeout: float | None = None) -> bool:
    world = Inside.here()
    if world is None:
        return _wait(event, timeout)
    if not event.is_set():
        assert timeout is not None, 'waits for ever'
        world.sleep(timeout)
    return event.is_set()


def _surprise(_: logging.Logger, message: str, *arguments: object) -> None:
    world = Inside.here()
    if world is not None:
        world.surprises.append(f'{message % arguments}: {sys.exc_info()[1]!r}')


def _is_heard(logger: logging.Logger, level: int) -> bool:
    return Inside.here() is None and _heard(logger, level)


def _no_threads(_: int) -> AbstractContextManager[SimpleNamespace]:
    """Return a thread pool that runs each job immediately in its caller."""
    return nullcontext(SimpleNamespace(map=map))


@contextmanager
def virtual() -> Iterator[None]:
    """Patch time, randomness and threads for code that runs inside a world."""
    import ecomp.agent.host.metadata
    import ecomp.agent.host.provider
    import ecomp.agent.host.state
    import ecomp.scheduler.changing.change
    import ecomp.scheduler.operating.audit

    patches: list[Any] = [
        mock.patch.object(time, 'sleep', _virtual_sleep),
        mock.patch.object(time, 'monotonic', _virtual_monotonic),
        mock.patch.object(random, 'uniform', _virtual_uniform),
        mock.patch.object(uuid, 'uuid4', _virtual_uuid4),
        mock.patch.object(threading.Event, 'wait', _virtual_wait),
        mock.patch.object(ecomp.scheduler.operating.audit, 'ThreadPoolExecutor', _no_threads),
        mock.patch.object(ecomp.scheduler.changing.change, 'datetime', Moment),
        mock.patch.object(ecomp.agent.host.state, 'write_durably', directory.write_durably),
        mock.patch.object(ecomp.agent.host.metadata, 'write_durably', directory.write_quietly),
        mock.patch.object(ecomp.agent.host.provider, 'write_durably', directory.write_durably),
        mock.patch.object(logging.Logger, 'exception', _surprise),
        mock.patch.object(logging.Logger, 'isEnabledFor', _is_heard),
    ]
    with ExitStack() as patched:
        for patch in patches:
            patched.enter_context(patch)
        yield


@contextmanager
def inside(world: World) -> Iterator[None]:
    """Put the current thread into the world. Use it inside patch_environment() only."""
    Inside.world, Inside.thread = world, threading.get_ident()
    try:
        yield
    finally:
        Inside.world = None
