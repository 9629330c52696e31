"""Logging: one escaped line a record, without credentials; a broken terminal is harmless."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecomp import log
from tests.kit.servers import make_environment

LINE = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (INFO|WARNING|ERROR) \d+ (.*)')


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger('ecomp')
    before = root.handlers[:], root.level, ours.level, logging.raiseExceptions
    stream = io.StringIO()
    log.configure(stream=stream)
    yield stream
    root.handlers[:], root.level, ours.level, logging.raiseExceptions = before


def get_logger() -> logging.Logger:
    return logging.getLogger('ecomp.test')


def read_message(stream: io.StringIO) -> str:
    """Return the only line that was logged, without time, level and process id."""
    text = stream.getvalue()
    assert text.count('\n') == 1, text
    match = LINE.fullmatch(text.rstrip('\n'))
    assert match, text
    return match[2]


def test_a_line_has_time_with_zone_level_pid_and_message(stream: io.StringIO) -> None:
    get_logger().warning('ALLOCATIONS ARE %s', {'VCPU': 1})
    assert read_message(stream) == "ALLOCATIONS ARE {'VCPU': 1}"


def test_line_breaks_and_terminal_codes_are_escaped(stream: io.StringIO) -> None:
    get_logger().info('a\nb\rc\x1b[2Jd\u2028e\ud800 é')
    assert read_message(stream) == r'a\nb\rc\x1b[2Jd\u2028e\ud800 é'


def test_an_exception_is_one_line(stream: io.StringIO) -> None:
    try:
        raise ValueError('bad\nnews from http://me:secret@ds1/')
    except ValueError:
        get_logger().exception('failed')
    line = read_message(stream)
    assert line.startswith(r'failed\nTraceback')
    assert r'ValueError: bad\nnews' in line
    assert 'secret' not in line


def test_a_stack_is_in_the_same_line(stream: io.StringIO) -> None:
    get_logger().info('here', stack_info=True)
    assert read_message(stream).startswith(r'here\nStack')


def test_mismatched_arguments_are_still_logged(stream: io.StringIO) -> None:
    get_logger().info('%d and %d', 'x')
    assert read_message(stream) == "%d and %d ('x',)"


def test_a_second_configure_does_not_double_the_lines(stream: io.StringIO) -> None:
    log.configure(stream=stream)
    get_logger().info('once')
    assert read_message(stream) == 'once'


def test_library_chatter_is_not_logged(stream: io.StringIO) -> None:
    logging.getLogger('waitress').info('Serving')
    get_logger().debug('detail')
    logging.getLogger('urllib3').warning('Retrying')  # ecomp logs a lost connection itself, once
    logging.getLogger('waitress').warning('Task queue depth is 1')
    assert read_message(stream) == 'Task queue depth is 1'


def test_command_logs_only_warnings_with_its_name(stream: io.StringIO) -> None:
    log.configure_for_person(stream)
    get_logger().info('not for the person who typed')
    get_logger().warning('skipped %s:\nit is dead', 'http://u:p@ds1')
    assert stream.getvalue() == 'eschedule: skipped http://***@ds1:\\nit is dead\n'


def test_logging_to_a_closed_stream_is_ignored(stream: io.StringIO, capfd: pytest.CaptureFixture[str]) -> None:
    stream.close()
    get_logger().info('nobody reads this')
    assert capfd.readouterr().err == ''


@pytest.mark.parametrize('encoding', ['ascii', 'latin-1'])
def test_output_in_a_locale_without_utf_8(encoding: str, tmp_path: Path) -> None:
    """Characters that the locale lacks are escaped, except in a unit: systemd reads UTF-8."""
    unit = ['--unit', '--config', 'ö….yaml']
    for module, arguments, expected in (
        ('ecomp.schedule', ['ssh-config', '--help'], b'ssh-config'),
        ('ecomp.lab.elab', ['exec', '--help'], rb'(hv1, hv2 \u2026)'),
        ('ecomp.compute', unit, f'--config "{tmp_path}/ö….yaml"\n'.encode()),
        ('mdserver.server', ['--unit', 'ö….conf'], f'"{tmp_path}/ö….conf"'.encode()),
    ):
        process = subprocess.run(
            [sys.executable, '-m', module, *arguments], capture_output=True, cwd=tmp_path, timeout=60, check=False,
            env={**make_environment(), 'PYTHONIOENCODING': encoding, 'PYTHONUTF8': '1'},
        )  # fmt: skip
        assert (process.returncode, process.stderr) == (0, b''), module
        assert expected in process.stdout, module


def test_ecompute_output_in_an_ascii_locale() -> None:
    program = "from ecomp import log; log.hold_descriptors(); print('web1 …')"
    env = {**make_environment(), 'PYTHONIOENCODING': 'ascii'}
    process = subprocess.run([sys.executable, '-c', program], capture_output=True, env=env, check=False)
    assert (process.stdout, process.stderr) == (b'web1 \\u2026\n', b'')
