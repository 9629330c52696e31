"""elab's command line: refusals, exit codes, and the labs that commands work on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ecomp.errors import EcompError
from ecomp.lab import control, elab, guest, machine, state
from ecomp.lab.elab import find_name, main, make_parser
from ecomp.lab.hosts import COMPUTE_YAML
from ecomp.lab.machine import ServerProcess
from ecomp.lab.network import divide_resources, reduce_inventory
from tests.kit.servers import make_environment
from tests.unit.lab_root import make_lab


@pytest.mark.parametrize('words', [['up'], ['status'], ['exec', 'hv1', 'true'], ['down']])
def test_lab_commands_need_root(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, '-m', 'ecomp.lab.elab', *words]
    if os.geteuid() == 0:
        if shutil.which('setpriv') is None:
            pytest.skip('setpriv is not installed: apt-get install util-linux')
        command = ['setpriv', '--reuid', '65534', '--clear-groups', *command]
    env = {**os.environ, 'PYTHONPATH': str(Path(__file__).resolve().parents[2])}
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (process.returncode, process.stdout) == (2, '')
    command_line = shlex.join(['sudo', sys.executable, '-P', '-m', 'ecomp.lab.elab', *words])
    otherwise = '; or, without root: elab up --fake' if words == ['up'] else ''
    assert process.stderr == f'elab: elab {words[0]} needs root. Fix: {command_line}{otherwise}\n'


@pytest.mark.parametrize(
    ('subdirectory', 'shell', 'name'),
    [('one', None, 'one'), ('one/hv1', 'two', 'one'), (None, 'two', 'two'), (None, None, 'lab'), ('two', None, 'two')],
)
def test_default_lab_is_chosen_by_directory_and_environment(
    subdirectory: str | None, shell: str | None, name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / 'one/hv1').mkdir(parents=True)
    (tmp_path / 'disk').mkdir()
    (root / 'two').symlink_to(tmp_path / 'disk')
    monkeypatch.chdir(tmp_path if subdirectory is None else root / subdirectory)
    monkeypatch.delenv('ECOMP_CONFIG', raising=False)
    if shell is not None:
        monkeypatch.setenv('ECOMP_CONFIG', str(root / shell))
    for words in (['up'], ['status'], ['exec', 'hv1', 'true'], ['down'], ['shell']):
        assert find_name(make_parser().parse_args(words)) == name
        assert find_name(make_parser().parse_args([words[0], '--name', 'three', *words[1:]])) == 'three'


def test_deleted_working_directory_selects_the_default_lab(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('ECOMP_CONFIG', raising=False)
    (root / 'one').mkdir()
    monkeypatch.chdir(root / 'one')
    (root / 'one').rmdir()
    try:
        assert find_name(make_parser().parse_args(['status'])) == 'lab'
    finally:
        os.chdir(tmp_path)


@pytest.mark.parametrize('words', [['up'], ['down'], ['certs', 'd'], ['guest', 'd/x'], ['control'], ['list']])
def test_interrupt_of_up_and_down_says_how_to_continue(
    words: list[str], root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for module, name in (
        (machine, 'require_root'),
        (machine, 'require'),
        (guest, 'make_image'),
        (control, 'run_control'),
    ):
        monkeypatch.setattr(module, name, interrupt)
    monkeypatch.setattr(state, 'list_labs', interrupt)
    assert main(words) == 1
    hint = '. Try: `elab up` to complete the lab, or `elab down` to remove it' if words[0] in ('up', 'down') else ''
    assert capsys.readouterr() == ('', f'elab: interrupted{hint}\n')
    assert not [*root.iterdir()]


@pytest.mark.parametrize('name', ['.', '..', '/', 'directory', 'none/guest.qcow2'])
def test_guest_image_path_must_be_a_file_in_a_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / 'directory').mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(['guest', name]) == 2
    message = capsys.readouterr().err
    assert message.count('\n') == 1
    if not name.startswith('none'):
        assert message == f'elab: {name} is a directory. Fix: give the name of the image file\n'


# Prints a unit, without the check that no directory above the clone keeps root out.
PRINT_UNIT = (
    'import sys; from ecomp import systemd; systemd.find_unsafe_directory = lambda _: None; '
    'from ecomp.lab import elab; sys.exit(elab.main(["control", "--unit"]))'
)


def test_broken_pipe_ends_silently(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, '-c', PRINT_UNIT]
    try:
        process = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, env=make_environment(), timeout=60
        )
    finally:
        os.close(writing)
    assert (process.returncode, process.stderr) == (1, b'')


def test_list_shows_all_labs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    me = ServerProcess('me', os.getpid(), machine.read_start_time(os.getpid()) or 0)
    assert main(['list']) == 0
    assert capsys.readouterr() == ('', 'no lab exists. Try: elab up\n')
    make_lab(root, 'off', 3)
    servers = ('etcd', 'placement', 'hv1 libvirtd', 'hv1 ecompute')
    make_lab(root, 'on', 1, **dict.fromkeys(servers, me))
    make_lab(root, 'some', 2, **dict.fromkeys(servers, me))
    assert main(['list']) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    network = '10.33.0.0/16'
    assert rows == [
        ['off', 'down', '3', network, str(root / 'off')],
        ['on', 'up', '1', network, str(root / 'on')],
        ['some', 'partly', 'up', '2', network, str(root / 'some')],
    ]
    make_lab(root, 32 * 'x', 64)
    assert main(['list']) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    for title, values in (('STATE', {'down', 'up', 'partly up'}), ('NETWORK', {network})):
        assert {re.split('  +', line[head.index(title) :])[0] for line in lines} == values


def test_missing_lab_is_reported_with_the_command_to_make_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_lab(root, 'one', 1)
    assert main(['shell', '--name', 'two']) == 4
    assert capsys.readouterr().err == "elab: lab 'two' does not exist (existing labs: one). Try: elab up --name two\n"
    assert main(['shell', '--name', 'one']) == 1
    assert 'cannot be read. Try: elab up --name one\n' in capsys.readouterr().err


@pytest.mark.usefixtures('fake_root')
@pytest.mark.parametrize('text', ['', '{', 'null', '[]', '{}', '{"version": 2}', '\xff', 'changed'])
def test_malformed_lab_is_reported_and_can_be_removed(
    text: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_lab(root, 'one', 1)
    broken = make_lab(root, 'two', 1).directory / 'lab.json'
    state_text = broken.read_text().replace('"processes": {}', '"processes": {"etcd": 1}')
    broken.write_text(state_text if text == 'changed' else text, encoding='latin-1')
    assert main(['list']) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ['one']
    for words in ('status', 'shell'):
        assert main([words, '--name', 'two']) == 1
        message = f'elab: {broken} is malformed. Fix: remove the lab with `elab down --name two`\n'
        assert capsys.readouterr() == ('', message)
    assert main(['down', '--name', 'two']) == 0
    assert [path.name for path in root.iterdir()] == ['one']


def test_lock_creates_the_target_of_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / 'link').symlink_to(tmp_path / 'there')
    with machine.hold_lock(tmp_path / 'link'):
        assert (tmp_path / 'there').is_dir()


@pytest.mark.usefixtures('fake_root')
@pytest.mark.parametrize('words', ['up', 'status', 'down'])
def test_file_in_place_of_a_lab_is_reported_and_kept(
    words: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, 'require', lambda *_: None)
    (root / 'lab').write_text('mine')
    assert main([words]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count('\n')) == ('', 1)
    assert err.startswith(f'elab: {root}/lab')
    assert err.endswith(': Not a directory\n')
    assert (root / 'lab').read_text() == 'mine'


@pytest.fixture
def failing_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], None]:
    """A function that runs an elab up, which fails after the certificates are made."""

    def refuse(*_: object) -> None:
        raise EcompError('far enough')

    def run_up() -> None:
        assert main(['up']) == 1
        assert capsys.readouterr().err == 'elab: far enough\n'

    monkeypatch.setattr(machine, 'require', lambda *_: None)
    monkeypatch.setattr(machine, 'run', lambda *_: '[]')
    monkeypatch.setattr(machine, 'ensure_control', lambda _: None)
    monkeypatch.setattr(control, 'make_lab_servers', refuse)
    monkeypatch.setattr(elab, '_remove_lab', lambda *_: None)  # what was made is looked at
    return run_up


@pytest.mark.usefixtures('fake_root')
@pytest.mark.parametrize('linked', [False, True])
def test_up_refuses_a_directory_with_other_files(
    linked: bool, root: Path, failing_up: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """`elab down` would remove the existing files."""
    directory = root.parent / 'there' if linked else root / 'lab'
    (directory / 'photos').mkdir(parents=True)
    if linked:
        (root / 'lab').symlink_to(directory)
    assert main(['up']) == 2
    message = (
        f'elab: {root}/lab is not empty, but `elab down` would remove its content. Fix: move the content away, or make '
        f'{root}/lab a link to an empty directory\n'
    )
    assert capsys.readouterr() == ('', message)
    assert [path.name for path in directory.iterdir()] == ['photos']
    (directory / 'photos').rmdir()
    if not linked:
        (directory / 'hv1').mkdir()  # allowed: users may prepare a host's compute.yaml, which elab keeps
    # Left by an up that was killed as it wrote lab.json.
    (directory / '.lab.json.part').write_text('{')
    failing_up()
    failing_up()


@pytest.mark.usefixtures('fake_root')
def test_modes_of_a_lab_do_not_depend_on_the_umask(root: Path, failing_up: Callable[[], None]) -> None:
    root.rmdir()
    before = os.umask(0o077)
    try:
        failing_up()
    finally:
        os.umask(before)
    lab = root / 'lab'
    for path, mode in (
        (lab.parent, 0o755), (lab, 0o755), (lab / 'lab.json', 0o644), (lab / 'images', 0o755), (lab / 'certs', 0o711),
        *((path, 0o600) for path in lab.glob('certs/**/*') if path.is_file()),
    ):  # fmt: skip
        assert path.stat().st_mode & 0o777 == mode, path


@pytest.mark.usefixtures('fake_root')
@pytest.mark.skipif(os.geteuid() != 0, reason='only root gives a file away')
def test_up_as_root_keeps_the_owner_from_sudo(
    root: Path, failing_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = root / 'lab/certs/operator-lab'
    monkeypatch.setenv('SUDO_UID', '12345')
    failing_up()
    monkeypatch.delenv('SUDO_UID')
    failing_up()
    (own / 'client.crt').unlink()
    failing_up()
    assert {path.name: path.stat().st_uid for path in (own, *own.iterdir())} == dict.fromkeys(
        ('operator-lab', 'ca.crt', 'client.crt', 'client.key', 'schedule.yaml', 'token'), 12345
    )


def test_shell_has_the_environment_of_its_lab(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lab = make_lab(root, 'one', 1)
    (lab.directory / 'schedule.yaml').write_text('')
    assert main(['shell', '--name', 'one', 'sh', '-c', 'echo $ECOMP_CONFIG; echo $PATH; exit 3']) == 3
    config, path = capfd.readouterr().out.splitlines()
    assert config == str(lab.directory)
    assert path.split(':')[0] == str(Path(sys.executable).parent)
    assert main(['shell', '--name', 'one', '--', 'sh', '-c', 'exit $#', '--', '--', '-x']) == 2
    assert main(['shell', '--name', 'one', 'no-such-command']) == 1
    assert capfd.readouterr().err == 'elab: no-such-command: No such file or directory\n'
    script = 'printf "%s\\n" "$PS1" "$ECOMP_CONFIG" >said; exit 5\n'
    command = (
        f'{shlex.quote(sys.executable)} -c "import os; from ecomp.lab import elab, state; from pathlib import Path; '
        f"raise SystemExit(elab.enter_shell(Path('{root}/one'), 'one', []))\""
    )
    env = {**os.environ, 'HOME': str(root), 'PYTHONPATH': str(Path(__file__).parents[2])}
    terminal = ['script', '-qec', command, '/dev/null']
    process = subprocess.run(terminal, input=script, text=True, capture_output=True, cwd=root, timeout=60, env=env)
    assert process.returncode == 5, process
    assert (root / 'said').read_text().startswith('(one) ')
    assert (root / 'said').read_text().splitlines()[-1] == str(lab.directory)


def test_with_less_lowers_amounts_to_the_share() -> None:
    text = COMPUTE_YAML.format(backends='', compute='x', state='y', VCPU=8, MEMORY_MB=8035, DISK_GB=2)
    part = divide_resources(8, 3 * 8035, 100, 5)
    assert reduce_inventory(text, part) == text.replace('8035', '4821').replace('VCPU: 8', 'VCPU: 4')
    # An amount that is smaller already stays, and so does a port.
    assert reduce_inventory('  MEMORY_MB: 512\n  port: 2379\n', part) == '  MEMORY_MB: 512\n  port: 2379\n'
