"""Logging to stderr, one line a record, without passwords in URLs."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from datetime import datetime
from typing import TextIO

from ecomp.model.text import escape_characters

# Up to the last @ before the path, as in URL parsers: a password may contain @.
USERINFO = re.compile(r'(?<=://)[^/\s?#"\'<>]*@')


def configure(stream: TextIO | None = None) -> None:
    """Log only to `stream` or stderr, from INFO for ecomp and from WARNING for libraries."""
    # Otherwise logging prints a traceback for every line if the disk is full or the terminal closed.
    logging.raiseExceptions = False
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_OneLineFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for ours in ('ecomp', '__main__'):  # a module started with python -m logs as __main__
        logging.getLogger(ours).setLevel(logging.INFO)
    # It logs warnings with tracebacks about responses; we report their consequences once.
    logging.getLogger('urllib3').setLevel(logging.ERROR)


def hold_descriptors() -> None:
    """Open closed standard streams on /dev/null, and let output escape unencodable characters."""
    # Call this first: otherwise a socket or a lock gets the stream's number, to which any library may write.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, this one
    sys.stdout = sys.stdout or open(os.devnull, 'w')  # noqa: SIM115  (open to the end)
    sys.stderr = sys.stderr or open(os.devnull, 'w')  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')  # do not fail if the terminal lacks a character


def switch_stdout_to_utf8() -> None:
    """Print UTF-8 from now on, regardless of the terminal: a program reads the output."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding='utf-8', errors='surrogateescape')


def flush_stdout() -> None:
    """Flush stdout, or point it to /dev/null and raise OSError."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's end would report it again
        raise


def redact(text: str) -> str:
    """Return the text with `user:password@` in URLs replaced by `***@`."""
    return USERINFO.sub('***@', text)


class _OneLineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123+01:00 INFO 4711 message`, always in one line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec='milliseconds')
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # arguments do not fit the format: still log them
            text = f'{record.msg} {record.args}'
        if record.exc_info:
            text = f'{text}\n{self.formatException(record.exc_info)}'
        if record.stack_info:
            text = f'{text}\n{record.stack_info}'
        return f'{when} {record.levelname} {record.process} {escape_characters(redact(text))}'


def configure_for_person(stream: TextIO | None = None) -> None:
    """Log only warnings and errors, as `eschedule: message`, to `stream` or stderr."""
    configure(stream=stream)
    handler = logging.getLogger().handlers[0]
    handler.setFormatter(_PrefixFormatter())
    handler.setLevel(logging.WARNING)


class _PrefixFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f'eschedule: {escape_characters(redact(record.getMessage()))}'
