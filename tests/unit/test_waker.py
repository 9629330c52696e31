"""What ends a wait: a wake before, during and after it, from a signal handler, and one that comes too late."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator

import pytest

from ecomp.agent.turns import Waker


@pytest.fixture
def handled() -> Iterator[None]:
    """SIGUSR1 does what the test says; afterwards what it did before."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def is_woken(waker: Waker) -> bool:
    return bool(select.select([waker.reader], [], [], 0)[0])


def test_woken_and_cleared() -> None:
    waker = Waker()
    assert not is_woken(waker)
    for _ in range(100_000):  # more than the pipe holds
        waker.wake()
    assert is_woken(waker)
    waker.clear()
    assert not is_woken(waker)
    waker.close()


@pytest.mark.usefixtures('handled')
def test_a_signal_at_any_moment_of_its_end_is_none_of_its_business() -> None:
    """A second SIGTERM, while the first one's end has closed the pipe, and its number is another file's."""
    waker = Waker()
    signal.signal(signal.SIGUSR1, lambda *_: waker.wake())
    signal.raise_signal(signal.SIGUSR1)
    assert is_woken(waker)
    waker.close()
    signal.raise_signal(signal.SIGUSR1)
    reader, writer = os.pipe()  # of the numbers that were the waker's
    signal.raise_signal(signal.SIGUSR1)
    assert select.select([reader], [], [], 0)[0] == []
    os.close(reader)
    os.close(writer)


@pytest.mark.usefixtures('handled')
def test_a_handler_may_wake_while_its_own_thread_does() -> None:
    waker = Waker()
    signal.signal(signal.SIGUSR1, lambda *_: waker.wake())
    with waker._lock:
        signal.raise_signal(signal.SIGUSR1)
    assert is_woken(waker)
    waker.close()
