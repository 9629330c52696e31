"""Notifications to systemd, the unit files that ecomp prints, and the log."""

from __future__ import annotations

import configparser
import io
import logging
import math
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mdserver import server

from ecomp import compute, log, systemd
from ecomp.lab import elab
from ecomp.systemd import Service
from tests.kit.ear import NotifySocket
from tests.kit.servers import make_environment

CONTROL = ['control', '--bind', '10.0.0.5', '--data', 'd', '--unit']


def test_notifications_are_datagrams_of_this_process() -> None:
    with NotifySocket() as ear:
        service = Service.from_environment(ear.make_environment())
        service.notify_ready('kvm guests\nREADY=0')
        assert ear.receive() == (os.getpid(), ['READY=1', 'STATUS=kvm guests READY=0'])
        service.notify_stopping('the guests go on')
        assert ear.receive() == (os.getpid(), ['STOPPING=1', 'STATUS=the guests go on'])
        assert service.notify_alive() == math.inf
        assert ear.is_silent(0)


def test_watchdog_is_notified_twice_per_interval() -> None:
    with NotifySocket() as ear:
        service = Service.from_environment(ear.make_environment(watchdog=1000) | {'WATCHDOG_PID': str(os.getpid())})
        assert service.notify_alive() == pytest.approx(500, abs=10)
        assert ear.receive() == (os.getpid(), ['WATCHDOG=1'])
        assert service.notify_alive() == pytest.approx(500, abs=10)
        assert ear.is_silent(0), 'it is due in 500 s, however often the loop goes around'
        quick = Service.from_environment(ear.make_environment(watchdog=1e-6))
        quick.notify_alive()
        quick.notify_alive()
        assert [ear.receive()[1] for _ in range(2)] == [['WATCHDOG=1']] * 2


@pytest.mark.parametrize(
    'variables', [{}, {'WATCHDOG_USEC': '5000000', 'WATCHDOG_PID': '1'}, {'WATCHDOG_USEC': '0'}, {'WATCHDOG_USEC': 'x'}]
)
def test_watchdog_of_another_process_is_ignored(variables: dict[str, str]) -> None:
    with NotifySocket() as ear:
        assert Service.from_environment({'NOTIFY_SOCKET': ear.path, **variables}).notify_alive() == math.inf
        assert ear.is_silent(0)


def test_children_do_not_inherit_the_notify_environment() -> None:
    environment = {'NOTIFY_SOCKET': '/nowhere', 'WATCHDOG_USEC': '5000000', 'WATCHDOG_PID': str(os.getpid()), 'A': 'b'}
    service = Service.from_environment(environment)
    assert environment == {'A': 'b'}
    service.notify_ready('and nobody hears it')
    assert service.notify_alive() == pytest.approx(2.5)  # it is the difference of two times


def test_without_systemd_nothing_is_sent() -> None:
    service = Service.from_environment({})
    service.notify_ready('')
    service.notify_stopping('')
    assert service.notify_alive() == math.inf


def test_abstract_socket_address() -> None:
    assert Service('@name')._address == '\0name'


def test_program_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin/ecompute').touch(mode=0o755)
    (tmp_path / 'compute.py').touch(mode=0o644)
    assert systemd.make_command('bin/ecompute', '/python', 'ecomp.compute') == [str(tmp_path / 'bin/ecompute')]
    assert systemd.make_command('compute.py', '/python', 'ecomp.compute') == ['/python', '-P', '-m', 'ecomp.compute']


@pytest.fixture
def unit_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Each unit as its --unit prints it, for a program whose directory name has to be quoted."""
    monkeypatch.setattr(systemd, 'find_unsafe_directory', lambda _: None)
    directory = tmp_path / 'a $b %c'
    directory.mkdir()
    monkeypatch.chdir(directory)
    texts = {}
    for name in ('ecompute', 'elab', 'mdserver'):
        (directory / name).symlink_to('/bin/true')
    options = compute.make_parser().parse_args(['--unit', '--config', '"c".yaml'])
    texts['ecompute'] = compute.render_unit(
        options, systemd.make_command('./ecompute', sys.executable, 'ecomp.compute')
    )
    monkeypatch.setattr(sys, 'argv', [str(directory / 'elab')])
    assert elab.main(CONTROL) == 0
    texts['ecomp-control'] = capsys.readouterr().out
    monkeypatch.setattr(sys, 'argv', [str(directory / 'mdserver')])
    assert server.main(['--unit', 'mdserver.conf']) == 0
    texts['mdserver'] = capsys.readouterr().out
    return texts


def test_systemd_accepts_each_unit(unit_texts: dict[str, str], tmp_path: Path) -> None:
    assert shutil.which('systemd-analyze'), 'apt-get install systemd'
    paths = []
    for name, text in unit_texts.items():
        paths.append(tmp_path / f'{name}.service')
        paths[-1].write_text(text)
        assert not re.search(r'@\w+@', text), 'each place of the unit is filled in'
    verify = ['systemd-analyze', 'verify', '--recursive-errors=no', *map(str, paths)]
    process = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, '')
    # The check itself must be able to fail.
    paths[0].write_text(unit_texts['ecompute'].replace('WatchdogSec=60', 'WatchdogSec=often\nNoSuchThing=yes'))
    process = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert 'often' in process.stderr
    assert 'NoSuchThing' in process.stderr


def test_content_of_each_unit(unit_texts: dict[str, str], tmp_path: Path) -> None:
    for name, text in unit_texts.items():
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
        assert parser['Service']['Type'] == 'notify', name
        assert parser['Service']['NotifyAccess'] == 'main', name
        assert parser['Install']['WantedBy'] == 'multi-user.target', name
        assert parser['Service']['SystemCallFilter'] == '@system-service', name
        assert parser['Service']['MemoryDenyWriteExecute'] == 'yes', name
        # With a /proc of its own, ecompute in a container would read the boot id of the machine below.
        assert parser['Service'].get('ProtectProc') == (None if name == 'ecompute' else 'invisible'), name
        # On a file system that is not mounted, ecompute would be a new compute, and build on the one below.
        assert parser['Unit'].get('RequiresMountsFor') == ('/var/lib/ecompute' if name == 'ecompute' else None), name
    quoted = f'"{tmp_path}/a $$b %%c'
    program = quoted.replace('$$', '$')
    assert f'ExecStart={program}/ecompute" --config {quoted}/\\"c\\".yaml"\n' in unit_texts['ecompute']
    arguments = f'--data {quoted}/d" --etcd-port 2379 --placement-port 8080 --certs {quoted}/certs"'
    assert f'ExecStart={program}/elab" control --bind 10.0.0.5 {arguments}\n' in unit_texts['ecomp-control']
    assert (
        f'ExecStart={program}/mdserver" {quoted}/mdserver.conf" --bridge virbr0 --user 65520\n'
        in unit_texts['mdserver']
    )


def test_default_configuration_path_is_absolute() -> None:
    unit_text = compute.render_unit(compute.make_parser().parse_args(['--unit']), ['/opt/ecomp/bin/ecompute'])
    assert 'ExecStart=/opt/ecomp/bin/ecompute --config /etc/ecomp/compute.yaml\n' in unit_text


@pytest.mark.parametrize('more', [[], ['--unit']])
@pytest.mark.parametrize('address', ['fe80::1%lo', '::1%lo'])
def test_address_that_cannot_be_certified_is_refused(
    address: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(systemd, 'find_unsafe_directory', lambda _: None)
    monkeypatch.chdir(tmp_path)
    assert elab.main(['control', '--bind', address, *more]) == 2
    reason = (
        f'--bind {address}: a certificate cannot contain an address with a %. Fix: use another address of this machine'
    )
    assert capsys.readouterr() == ('', f'elab: {reason}\n')
    assert elab.main(['control', '--bind', '0.0.0.0', '--unit']) == 2
    assert capsys.readouterr().out == ''
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def ann_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that belongs to Ann, beside others that are root's."""
    home = tmp_path / 'home/ann'
    home.mkdir(parents=True)
    os_stat = Path.stat

    def stat_with_owner(path: Path, **more: bool) -> os.stat_result:
        fields = list(os_stat(path, **more))
        fields[stat.ST_UID] = 1000 if path.is_relative_to(home) else 0
        return os.stat_result(fields)

    monkeypatch.setattr(Path, 'stat', stat_with_owner)
    return home


def test_paths_closed_to_root_without_rights(ann_home: Path, tmp_path: Path) -> None:
    (tmp_path / 'opt').mkdir()
    (tmp_path / 'opt/ecomp').symlink_to(ann_home / 'clone')
    (ann_home / 'own').symlink_to(tmp_path / 'opt')
    for path in (tmp_path / 'opt', tmp_path / 'var/lib/ecomp', Path('/')):
        assert systemd.find_unsafe_directory(path) is None
    for path in (
        ann_home,
        ann_home / 'clone/certs',
        tmp_path / 'opt/ecomp/bin',
        ann_home / 'own/bin',
        tmp_path / 'opt/../home/ann',
    ):
        assert systemd.find_unsafe_directory(path) == ann_home
    (tmp_path / 'opt').chmod(0o600)
    assert systemd.find_unsafe_directory(tmp_path / 'opt/bin/elab') == tmp_path / 'opt'


def test_unit_that_root_without_rights_cannot_run_is_refused(
    ann_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unit is typed in a clone in a user's home, where systemd would restart it forever."""
    for name in ('clone', '.venv'):
        (ann_home / name).mkdir()
    for program in (ann_home / '.venv/elab', tmp_path / 'elab'):
        program.symlink_to('/bin/true')
    opt, var = str(tmp_path / 'elab'), tmp_path / 'var'
    monkeypatch.chdir(ann_home / 'clone')
    monkeypatch.setattr(systemd, 'PACKAGE', tmp_path)
    cure = 'install ecomp in /opt/ecomp, and use --data /var/lib/ecomp'
    for program, arguments, problem in (
        (f'{ann_home}/.venv/elab', [], f'{ann_home}/.venv/elab'),
        (opt, [], '--data elab-control'),
        (opt, ['--data', str(var)], '--certs certs'),
        (opt, ['--data', str(var), '--certs', str(ann_home / 'x')], f'--certs {ann_home}/x'),
    ):
        monkeypatch.setattr(sys, 'argv', [program])
        assert elab.main(['control', '--bind', '10.0.0.5', *arguments, '--unit']) == 2
        reason = f'{problem}: {ann_home} belongs to another user or is not accessible to root'
        fix = f'{cure} --certs /var/lib/ecomp/certs, as docs/howto/real-machines.md describes'
        assert capsys.readouterr() == ('', f'elab: --unit: the service cannot use {reason}. Fix: {fix}\n')
    assert elab.main(['control', '--bind', '10.0.0.5', '--data', str(var), '--certs', str(var), '--unit']) == 0
    assert f'--data {var} ' in capsys.readouterr().out
    # Without --bind no other host reaches it, so it has no certificates.
    assert elab.main(['control', '--unit']) == 2
    assert f'. Fix: {cure}, as docs/' in capsys.readouterr().err
    for target, name, problem in ((systemd, 'PACKAGE', "elab's code in"), (sys, 'executable', 'its Python')):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, str(ann_home / 'clone'))
            assert elab.main(['control', '--data', str(var), '--unit']) == 2
        assert f'{problem} {ann_home}/clone: {ann_home} belongs to another user' in capsys.readouterr().err


# Logging: one escaped line a record, without credentials; a broken terminal is harmless.


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
        ('ecomp.schedule', ['ssh', '--help'], b'print-config'),
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


def test_output_and_help_in_an_ascii_locale() -> None:
    program = "from ecomp import log; from ecomp.cli.commands import format_help; format_help(''); "
    program += "log.hold_descriptors(); print('web1 \\u2026')"
    env = {**make_environment(), 'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0', 'PYTHONUTF8': '0'}
    process = subprocess.run([sys.executable, '-c', program], capture_output=True, env=env, check=False)
    assert (process.stdout, process.stderr) == (b'web1 \\u2026\n', b'')
