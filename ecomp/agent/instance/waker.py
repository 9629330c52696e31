"""A pipe that ends a wait, also from a signal handler, and also when it has been closed."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress


class Waker:
    """A pipe that ends the main thread's wait. wake() is any thread's, all else the main thread's."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._on_signals = False
        # One that a signal handler may take while its own thread has it.
        self._lock = threading.RLock()
        self._closed = False

    def wake(self) -> None:
        """End the wait. Nothing once it is closed: by then its number may be another file's."""
        with self._lock, suppress(BlockingIOError):  # full of wakes nobody has read yet: that will do
            if not self._closed:
                os.write(self._writer, b'.')

    def wake_on_signals(self) -> None:
        """From now on a signal ends the wait. The main thread's work."""
        # The kernel may give a signal to any thread, and then the poll in the main thread, where alone Python's
        # handlers run, does not end: the signal would be heard up to a minute later.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._on_signals = True

    def clear(self) -> None:
        """Forget the wakes so far."""
        with suppress(BlockingIOError):
            while os.read(self.reader, 4096):
                pass

    def close(self) -> None:
        """Let the pipe go."""
        if self._on_signals:
            signal.set_wakeup_fd(-1)
        with self._lock:
            self._closed = True
            os.close(self.reader)
            os.close(self._writer)
