"""Logging to the terminal, set up once per process by a front door or at a worker's start.

One record is one line on stderr: ISO time with zone, level, process id, message. Exceptions and line breaks inside a
message are escaped into that line, user and password are taken out of URLs, and a terminal that is gone or a disk
that is full stops nothing.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from datetime import datetime
from typing import TextIO

from ecomp.model.text import escaped

# Up to the last @ before the path, as URL parsers do it: a password may hold an @ of its own.
USERINFO = re.compile(r'(?<=://)[^/\s?#"\'<>]*@')


def configure(stream: TextIO | None = None) -> None:
    """Send this process's log to `stream`, stderr if None: our own from INFO on, and libraries' warnings.

    A second call replaces what the first one set up.
    """
    # Without this a full disk or a closed terminal makes logging write a traceback, for every line.
    logging.raiseExceptions = False
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_OneLine())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for ours in ('ecomp', '__main__'):  # a module started with python -m logs as __main__
        logging.getLogger(ours).setLevel(logging.INFO)
    # It warns of answers in its own words, with tracebacks; what comes of them is said in ours, once.
    logging.getLogger('urllib3').setLevel(logging.ERROR)


def hold_descriptors() -> None:
    """See that stdout and stderr take any text. Called before this process opens anything else.

    /dev/null is opened as descriptor 0, 1 or 2 where that is closed (`>&-`): the stream is None then, and a socket or a
    lock would get its number, into which any library may write. What a locale has no character for is escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or open(os.devnull, 'w')  # noqa: SIM115  (open to the end)
    sys.stderr = sys.stderr or open(os.devnull, 'w')  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')  # a terminal that has no ... sign is no reason to fail


def print_utf_8() -> None:
    """Have what is printed from now on be UTF-8: it is for a program that reads so, whatever the terminal does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding='utf-8', errors='surrogateescape')


def flush() -> None:
    """See that what was printed is written. OSError, once: Python would complain once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def redact(text: str) -> str:
    """The text with `user:password@` in URLs replaced by `***@`."""
    return USERINFO.sub('***@', text)


class _OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123+01:00 INFO 4711 message`, whatever the message holds."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec='milliseconds')
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit the format: better an ugly line than none
            text = f'{record.msg} {record.args}'
        if record.exc_info:
            text = f'{text}\n{self.formatException(record.exc_info)}'
        if record.stack_info:
            text = f'{text}\n{record.stack_info}'
        return f'{when} {record.levelname} {record.process} {escaped(redact(text))}'


def configure_plain(stream: TextIO | None = None) -> None:
    """Send warnings to `stream`, stderr if None, as `eschedule: message`: it is a person who types that."""
    configure(stream=stream)
    handler = logging.getLogger().handlers[0]
    handler.setFormatter(_Plain())
    handler.setLevel(logging.WARNING)


class _Plain(logging.Formatter):
    """`eschedule: message`, one line."""

    def format(self, record: logging.LogRecord) -> str:
        return f'eschedule: {escaped(redact(record.getMessage()))}'
