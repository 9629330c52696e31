"""A default configuration is accepted only from trusted places, and TLS is verified."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ecomp.agent.host import metadata
from ecomp.agent.process import _warn_of_insecure_setup
from ecomp.backends import probe_backends
from ecomp.compute_conf import ComputeConfig, load_compute
from ecomp.conf import EtcdConfig, PlacementConfig, load_schedule
from ecomp.errors import BuildFailed, Unreachable, UsageError
from ecomp.lab.certs import enable_roles
from ecomp.model.finding import SERVERS, run_checks
from ecomp.model.health import CHECKS
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from tests.kit.certificates import Authority
from tests.kit.listening import ThreadedServer
from tests.kit.servers import free_port, make_environment, wait_until

STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason='only root can give a file to somebody else')


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.delenv('ECOMP_CONFIG', raising=False)
    monkeypatch.delenv('SUDO_UID', raising=False)
    (tmp_path / '.config/ecomp').mkdir(parents=True)
    (tmp_path / 'work').mkdir()
    monkeypatch.chdir(tmp_path / 'work')
    return tmp_path


def write_config(path: Path, user: str = 'nobody-else') -> Path:
    path.write_text(f'user_id: {user}\n')
    path.chmod(0o644)
    return path


def test_search_order_of_configuration_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = load_schedule().user_id
    write_config(home / '.config/ecomp/schedule.yaml', 'of-home')
    assert load_schedule().user_id == 'of-home'
    write_config(home / 'work/schedule.yaml', 'here')
    assert load_schedule().user_id == 'here'
    (home / 'other').mkdir()
    monkeypatch.setenv('ECOMP_CONFIG', str(home / 'other'))
    with pytest.raises(UsageError, match=f'^ECOMP_CONFIG={home}/other: this directory has no schedule.yaml$'):
        load_schedule()
    write_config(home / 'other/schedule.yaml', 'told')
    assert load_schedule().user_id == 'told'
    assert load_schedule(home / 'work/schedule.yaml').user_id == 'here'
    assert default not in ('of-home', 'here', 'told')


def test_relative_paths_start_at_the_configuration(home: Path) -> None:
    (home / '.config/ecomp/schedule.yaml').write_text('user_data: boot.sh\n')
    assert load_schedule().user_data == home / '.config/ecomp/boot.sh'


@needs_root
@pytest.mark.parametrize('load', [load_schedule, load_compute])
def test_configuration_of_another_user_is_refused(home: Path, load: Callable[..., object]) -> None:
    """The configuration names the user-data of guests, and the etcd (ENEMY 12)."""
    name = 'schedule.yaml' if load is load_schedule else 'compute.yaml'
    path = home / 'work' / name
    path.write_text('')
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(
        UsageError, match=f'^{name}: belongs to user {STRANGER}, .* Fix: change its owner with chown, or name'
    ):
        load()
    load(path)
    # A file of ours is accepted even through a stranger's link.
    path.rename(home / 'theirs')
    (home / 'ours').write_text('')
    path.symlink_to(home / 'ours')
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    load()


@needs_root
@pytest.mark.parametrize('links', [('work/schedule.yaml',), ('elsewhere/a.yaml', 'work/schedule.yaml')])
def test_relative_paths_start_at_the_file_that_a_link_leads_to(home: Path, links: tuple[str, ...]) -> None:
    """Another user's link beside a boot.sh of that user leads to a trusted file."""
    for name in ('ours', 'elsewhere'):
        (home / name).mkdir()
    target = home / 'ours/prod.yaml'
    target.write_text('user_data: boot.sh\nssh_keys: [id.pub]\n')
    for link in links:
        (home / link).symlink_to(target)
        os.chown(home / link, STRANGER, STRANGER, follow_symlinks=False)
        target = home / link
    config = load_schedule()
    expected = (home / 'ours/boot.sh', (home / 'ours/id.pub',), home / 'ours/prod.yaml')
    assert (config.user_data, config.ssh_keys, config.path) == expected
    (home / 'work/compute.yaml').symlink_to(home / 'ours/compute.yaml')
    (home / 'ours/compute.yaml').write_text('state: state\n')
    compute = load_compute()
    assert (compute.state, compute.directory) == (home / 'ours/state', home / 'ours')
    # A link that the user names is followed, and its own directory counts: it may belong to a configuration manager.
    assert load_schedule(home / 'work/schedule.yaml').user_data == home / 'work/boot.sh'


@needs_root
@pytest.mark.parametrize('loose', ['ours', 'ours/deep'])
@pytest.mark.parametrize(
    ('mode', 'owner', 'is_accepted'), [(0o755, STRANGER, False), (0o777, 0, False), (0o1777, 0, True)]
)
def test_link_into_a_directory_of_another_user_is_refused(
    home: Path, loose: str, mode: int, owner: int, is_accepted: bool
) -> None:
    (home / 'ours/deep').mkdir(parents=True)
    write_config(home / 'ours/deep/schedule.yaml')
    (home / 'work/schedule.yaml').symlink_to(home / 'ours/deep/schedule.yaml')
    assert load_schedule().user_id == 'nobody-else'
    (home / loose).chmod(mode)
    os.chown(home / loose, owner, owner)
    if is_accepted:
        assert load_schedule().user_id == 'nobody-else'
        return
    with pytest.raises(
        UsageError,
        match=f'^schedule.yaml: is a link to a file below {home / loose}, where another user can exchange files. '
        f'Fix: replace it with a file, or name a configuration with --config$',
    ):
        load_schedule()


@needs_root
@pytest.mark.parametrize(('module', 'name'), [('schedule', 'schedule.yaml'), ('compute', 'compute.yaml')])
def test_pipe_in_the_working_directory_does_not_block(home: Path, module: str, name: str) -> None:
    """Any user can put a pipe into /tmp: the command waited for a writer forever."""
    path = home / 'work' / name
    os.mkfifo(path)
    os.chown(path, STRANGER, STRANGER)

    def run_command() -> tuple[int, str]:
        command = [sys.executable, '-m', f'ecomp.{module}']
        result = subprocess.run(
            [*command, 'list'] if module == 'schedule' else command,
            cwd=path.parent, env=make_environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return result.returncode, result.stderr

    code, message = run_command()
    assert (code, message.startswith(f'e{module}: {name}: belongs to user {STRANGER}, ')) == (2, True), message
    os.chown(path, 0, 0)
    expected = f'e{module}: {name}: is not a regular file. Fix: remove it, or name a configuration with --config\n'
    assert run_command() == (2, expected)


def test_pipe_named_by_config_option_is_read(tmp_path: Path) -> None:
    """`--config <(…)` passes such a pipe."""
    path = tmp_path / 'pipe'
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=('user_id: of-a-pipe\n',), daemon=True)
    writer.start()
    assert load_schedule(path).user_id == 'of-a-pipe'
    writer.join(60)


@needs_root
def test_sudo_accepts_a_configuration_of_the_caller(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(home / 'work/schedule.yaml')
    os.chown(path, STRANGER, STRANGER)
    monkeypatch.setenv('SUDO_UID', str(STRANGER))
    assert load_schedule().user_id == 'nobody-else'
    monkeypatch.setenv('SUDO_UID', str(STRANGER + 1))
    with pytest.raises(UsageError, match='belongs to user'):
        load_schedule()
    monkeypatch.setattr(os, 'geteuid', lambda: STRANGER + 1)
    monkeypatch.setenv('SUDO_UID', str(STRANGER))
    with pytest.raises(UsageError, match='belongs to user'):
        load_schedule()


@needs_root
def test_configuration_writable_by_others_is_refused(home: Path) -> None:
    path = write_config(home / 'work/schedule.yaml')
    cases = (0o666, 0, False), (0o664, 0, True), (0o664, 4, False), (0o646, 0, False), (0o600, 4, True)
    for mode, group, is_accepted in cases:
        os.chown(path, 0, group)
        path.chmod(mode)
        if is_accepted:
            assert load_schedule().user_id == 'nobody-else'
        else:
            with pytest.raises(
                UsageError, match='^schedule.yaml: other users can write to it. Fix: chmod go-w schedule.yaml$'
            ):
                load_schedule()


def assert_seed_refused(home: Path, message: str) -> None:
    with pytest.raises(BuildFailed, match=message):
        metadata.make_seed(home, home / 'work', '52:54:00:00:00:01', phones_home=False)


@needs_root
def test_mdserver_conf_of_another_user_is_refused(home: Path) -> None:
    """The file lies beside compute.yaml, and is not named explicitly."""
    path = home / 'work/mdserver.conf'
    path.write_text('[public-keys]\n')
    os.chown(path, STRANGER, STRANGER)
    assert_seed_refused(home, 'mdserver.conf: belongs to user')


def test_mdserver_conf_is_read_from_the_checked_descriptor(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user could exchange the file after the check, for one that names /etc/shadow."""
    path = home / 'work/mdserver.conf'
    path.write_text('[mdserver]\nuser-data = beside\n')
    (home / 'work/beside').write_text('#!/bin/sh\n')
    check = metadata.require_trusted

    def exchange_file(name: str, status: os.stat_result) -> None:
        check(name, status)
        path.rename(home / 'work/other.conf')
        path.write_text('[of-somebody-else]\n')

    monkeypatch.setattr(metadata, 'require_trusted', exchange_file)
    assert_seed_refused(home, 'no instance with the MAC address 52:54:00:00:00:01')
    # By path, because threads and garbage of earlier tests close descriptors meanwhile.
    assert not [opened for opened in Path('/proc/self/fd').iterdir() if home in opened.resolve().parents]
    monkeypatch.setattr(metadata, 'require_trusted', check)
    # Errors name the file, and its paths are relative to its directory.
    wrong = {'[else]\n': 'line 1: unknown section', '[mdserver]\nuser-data = gone\n': 'work/gone: No such'}
    for text, reason in wrong.items():
        path.write_text(text)
        assert_seed_refused(home, f' {path}: .*{reason}')
    path.unlink()
    assert_seed_refused(home, 'no instance with the MAC')


@needs_root
def test_mdserver_conf_that_is_no_regular_file_is_not_opened(home: Path) -> None:
    """Opening a pipe would block, and opening a device may have any effect."""
    path = home / 'work/mdserver.conf'
    os.mkfifo(path)
    assert_seed_refused(home, f'^scheduled: {path}: is not a regular file. Fix: remove it')
    path.unlink()
    # A device without a driver: opening it would fail with another error.
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(240, 255))
    assert_seed_refused(home, f'^scheduled: {path}: is not a regular file. Fix: remove it')


# TLS is used whenever it is configured, and verified.


class RecordingServer(ThreadedServer):
    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.context, self.received = context, list[bytes]()
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        if self.context is None:
            self.received.append(connection.recv(24))
        else:
            with self.context.wrap_socket(connection, server_side=True) as secured:
                self.received.append(secured.recv(24))


def receive_first_bytes(**settings: Path) -> bytes:
    with (
        closing(RecordingServer()) as server,
        closing(Store(EtcdConfig((server.address,), timeout=2.0, **settings))) as store,
    ):  # type: ignore[arg-type]
        with pytest.raises(Unreachable):
            store.get('/x')
        # The client may give up before the server's thread has run.
        return wait_until(lambda: server.received, 10, 'the server has received something')[0]


def test_client_certificate_without_authority_enables_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue(tmp_path / 'own', 'ecomp')
    assert receive_first_bytes().startswith(b'PRI * HTTP/2.0')
    assert receive_first_bytes(ca_cert=authority.certificate).startswith(b'\x16\x03')
    assert receive_first_bytes(cert_cert=certificate, cert_key=key).startswith(b'\x16\x03')


@pytest.mark.parametrize('named', [(), ('other.example',)])
@pytest.mark.parametrize('server', ['etcd', 'placement', 'etcd by elab certs --enable'])
def test_server_is_not_accepted_by_its_common_name(server: str, named: tuple[str, ...], tmp_path: Path) -> None:
    """RFC 9525 6.3: only the alternative names count."""
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(['h2'])
    context.load_cert_chain(*authority.issue(tmp_path / 'server', 'localhost', *named))
    with closing(RecordingServer(context)) as listener:
        endpoint = f'localhost:{listener.address.rpartition(":")[2]}'
        store = Store(EtcdConfig((endpoint,), ca_cert=authority.certificate, timeout=2.0))
        client = Placement(PlacementConfig(f'https://{endpoint}', ca_cert=authority.certificate))
        operator = tmp_path / 'certs/operator-ann'
        operator.mkdir(parents=True)
        (operator / 'client.crt').touch()
        etcd = f"etcd: {{endpoints: ['{endpoint}'], ca_cert: {authority.certificate}}}"
        (operator / 'schedule.yaml').write_text(f"{etcd}\nplacement: {{endpoint: 'http://localhost'}}\n")
        connect = {
            'etcd': lambda: store.get('/x'),
            'placement': lambda: client.get('/x'),
            'etcd by elab certs --enable': lambda: enable_roles(operator.parent, datetime.now(UTC), print),
        }[server]
        try:
            with pytest.raises(Unreachable, match='name'):
                connect()
        finally:
            store.close()
            client.close()
    assert [data for data in listener.received if data] == []


@pytest.mark.parametrize(('mode', 'is_open'), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
def test_check_and_ecompute_name_secrets_open_to_all_users(
    mode: int, is_open: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, closed_endpoint = Authority(tmp_path), f'127.0.0.1:{free_port()}'
    certificate, key = authority.issue(tmp_path / 'own', 'client')
    token = tmp_path / 'token'
    token.write_text('secret\n')
    for path in (key, token):
        path.chmod(mode)
    etcd = EtcdConfig((closed_endpoint,), authority.certificate, key, certificate)
    placement = PlacementConfig(f'https://{closed_endpoint}', authority.certificate, key, certificate, token)
    expected = [str(key), str(token)] if is_open else []
    findings = run_checks(CHECKS, SERVERS, probe_backends(etcd, placement, None, ''))
    secrets = [(item.sentence.split()[0], item.how) for item in findings if item.code == 'secret']
    assert secrets == [(path, f'chmod o= {path}') for path in expected]
    store = Store(etcd)
    _warn_of_insecure_setup(ComputeConfig(etcd=etcd, placement=placement), store)
    store.close()
    assert [item.getMessage().split()[0] for item in caplog.records if 'chmod' in item.getMessage()] == expected


def test_check_ignores_a_key_that_it_cannot_stat(tmp_path: Path) -> None:
    key = tmp_path / ('x' * 300)  # ENAMETOOLONG, as EACCES is for others than root
    facts = probe_backends(EtcdConfig((f'127.0.0.1:{free_port()}',), cert_key=key), PlacementConfig(), None, '')
    assert 'secret' not in [finding.code for finding in run_checks(CHECKS, SERVERS, facts)]
