"""The metadata server that root starts drops its rights, and its monitor opens files for it."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from mdserver import conf, monitor, server
from mdserver.monitor import Monitor

from ecomp.agent.host.metadata import SERVER_UID, GuestData
from ecomp.agent.host.state import Identity, Memory
from ecomp.model.order import Request
from tests.kit.servers import TOP, wait_until
from tests.security import rights
from tests.security.rights import COMMAND, LOOPBACK, MAC, MAC_2, OTHER_UUID, UUID, MetadataServer, write_files

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason='who is not root has nothing to give up')


def run_command(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=rights.ENVIRONMENT, cwd='/', stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


def read_rights(pid: int | str) -> dict[str, list[str]]:
    lines = (line.partition(':') for line in Path(f'/proc/{pid}/status').read_text().splitlines())
    fields = ('Uid', 'Gid', 'Groups', 'CapPrm', 'CapEff', 'CapAmb', 'NoNewPrivs')
    return {name: value.split() for name, _, value in lines if name in fields}


def make_no_rights(uid: str, gid: str) -> dict[str, list[str]]:
    zero = ['0' * 16]
    return {
        'Uid': 4 * [uid], 'Gid': 4 * [gid], 'Groups': [], 'CapPrm': zero, 'CapEff': zero, 'CapAmb': zero,
        'NoNewPrivs': ['1'],
    }  # fmt: skip


def test_server_without_rights_serves_all_requests(running_server: MetadataServer, tmp_path: Path) -> None:
    threads = os.listdir(f'/proc/{running_server.pid}/task')
    assert len(threads) > 4
    assert [read_rights(f'{running_server.pid}/task/{thread}') for thread in threads] == len(threads) * [
        make_no_rights(SERVER_UID, SERVER_UID)
    ]
    assert f' AS UID {SERVER_UID}\n' in running_server.log.read_text()
    # Another process of that user, such as the server of another host in a lab, cannot inspect it.
    script = f'cat /proc/{running_server.pid}/environ /proc/{running_server.pid}/mem; ls /proc/{running_server.pid}/fd/'
    assert (
        run_command(
            'setpriv', '--reuid', SERVER_UID, '--regid', SERVER_UID, '--clear-groups', 'sh', '-c', script
        ).stdout
        == ''
    )

    assert running_server.request('/latest/meta-data/instance-id') == (200, UUID.encode())
    # The file and its directory are readable by root only. Edits take effect, however the editor saves.
    assert running_server.request('/latest/user-data') == (200, b'#!one\n')
    (tmp_path / 'user-data').write_text('#!two\n')
    assert running_server.request('/latest/user-data') == (200, b'#!two\n')
    (tmp_path / 'new').write_text('#!three\n')
    (tmp_path / 'new').chmod(0o600)
    (tmp_path / 'new').rename(tmp_path / 'user-data')
    assert running_server.request('/latest/user-data') == (200, b'#!three\n')
    (tmp_path / 'user-data').rename(tmp_path / 'elsewhere')
    (tmp_path / 'user-data').symlink_to('elsewhere')
    assert running_server.request('/latest/user-data') == (200, b'#!three\n')
    (tmp_path / 'user-data').unlink()
    assert running_server.request('/latest/user-data')[0] == 500
    assert f'{tmp_path}/user-data: No such file or directory' in running_server.log.read_text()
    (tmp_path / 'user-data').write_text('#!four\n')

    data = GuestData(tmp_path / 'metadata')
    assert running_server.request(f'/phone-home/{OTHER_UUID}/', 'POST')[0] == 404
    assert data.find_ready() == set()
    assert running_server.request(f'/phone-home/{UUID}/', 'POST') == (200, b'ok')
    assert data.find_ready() == {UUID}
    report = (tmp_path / f'metadata/{UUID}.ready').stat()
    assert (report.st_uid, report.st_mode & 0o777) == (0, 0o600)
    data.write(Request(UUID, {}, name='web1', user_data=b'#!mine'), [MAC])
    assert running_server.request('/latest/user-data') == (200, b'#!mine')
    assert data.find_ready() == set()
    data.remove(UUID, [MAC])
    assert running_server.request('/latest/user-data')[0] == 404
    (tmp_path / 'virbr0.status').write_text('[]')
    assert running_server.request('/latest/meta-data/') == (
        404,
        b'404 Not Found: no current DHCP lease for 127.0.0.1\n',
    )


def test_server_keeps_no_descriptor_that_root_opened(running_server: MetadataServer) -> None:
    open_files = Counter(
        os.readlink(path).partition(':')[0] for path in Path(f'/proc/{running_server.pid}/fd').iterdir()
    )
    del open_files['pipe']  # waitress's own, and the one that tells if its monitor lives
    # The sockets are the listener and the connection to its monitor.
    assert open_files == {'/dev/null': 2, str(running_server.log): 1, 'socket': 2}


def test_server_without_user_option_keeps_its_user(tmp_path: Path) -> None:
    write_files(tmp_path, {LOOPBACK: (MAC, UUID)})
    script = [sys.executable, str(TOP / 'md_server/mdserver/server.py')]
    with contextlib.closing(MetadataServer(tmp_path, command=script)) as mdserver:
        assert read_rights(mdserver.pid) == read_rights('self')
        assert psutil.Process(mdserver.pid).children() == []
        assert mdserver.request('/latest/user-data') == (200, b'#!one\n')
    with contextlib.closing(MetadataServer(tmp_path, '--verbose', '--user', SERVER_UID, command=script)) as mdserver:
        assert read_rights(mdserver.pid) == make_no_rights(SERVER_UID, SERVER_UID)
        assert mdserver.request('/latest/user-data') == (200, b'#!one\n')


def test_server_imports_nothing_after_its_start(tmp_path: Path) -> None:
    """Later imports would fail if its Python is below /root, for example."""
    write_files(tmp_path, {LOOPBACK: (MAC, UUID)})
    command = [COMMAND[0], '-v', *COMMAND[1:]]
    with contextlib.closing(MetadataServer(tmp_path, '--verbose', '--user', SERVER_UID, command=command)) as mdserver:
        before = len(mdserver.log.read_text())
        for path in ('/', '/latest/user-data', '/latest/no-such', f'/seed/{UUID}/vendor-data', '/%ff%00'):
            mdserver.request(path)
        (tmp_path / 'user-data').unlink()
        for method in ('GET', 'HEAD', 'PUT', 'POST', 'X'):
            mdserver.request('/latest/user-data', method)
        mdserver.request(f'/phone-home/{UUID}/', 'POST')
        (tmp_path / f'metadata/{MAC}.json').unlink()
        assert mdserver.request(f'/phone-home/{UUID}/', 'POST')[0] == 404
        with socket.create_connection((LOOPBACK, mdserver.port)) as odd:
            odd.sendall(b'GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n')
            assert odd.recv(100)
        with socket.create_connection((LOOPBACK, mdserver.port)) as long:
            long.sendall(b'GET / HTTP/1.1\r\nX: ' + 10_000 * b'x' + b'\r\n\r\n')
            assert b'431' in long.recv(100)
        log = mdserver.log.read_text()[before:]
    assert ' 500 client=' in log
    assert re.findall(r"^import '.*|^# trying .*|^# code object from .*", log, re.MULTILINE) == []


def test_concurrent_guests_get_their_own_data(tmp_path: Path) -> None:
    """One monitor serves all threads."""
    guests = {f'127.0.0.{n}': (f'52:54:00:aa:00:{n:02x}', str(uuid.uuid4())) for n in range(10, 22)}
    write_files(tmp_path, guests)
    wrong: list[object] = []
    with contextlib.closing(MetadataServer(tmp_path, '--user', SERVER_UID)) as mdserver:

        def crawl(source: str, instance: str) -> None:
            for _ in range(20):
                answer = mdserver.request('/latest/meta-data/instance-id', source=source)
                if answer != (200, instance.encode()):
                    wrong.append((source, answer))

        threads = [threading.Thread(target=crawl, args=(ip, instance)) for ip, (_, instance) in guests.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


# What else it could access.

ATTEMPTS_SCRIPT = """
import os, sys
from pathlib import Path
done = []
def attempt(what, deed):
    try:
        deed()
    except PermissionError:
        return
    done.append(what)
for path in map(Path, sys.argv[1:]):
    if os.path.isdir(path):
        attempt(f'list {path}', lambda: os.listdir(path))
        attempt(f'link in {path}', lambda: os.symlink('/etc/passwd', path / 'planted'))
        attempt(f'file in {path}', lambda: open(path / 'planted.json', 'w'))
    else:
        attempt(f'read {path}', lambda: open(path).read())
        attempt(f'write {path}', lambda: open(path, 'r+'))
        attempt(f'replace {path}', lambda: os.rename(path, f'{path}.old'))
        attempt(f'remove {path}', lambda: os.unlink(path))
attempt('signal root', lambda: os.kill(os.getppid(), 0))
print(*done, sep='\\n')
"""


def test_unprivileged_user_cannot_access_the_state_directory() -> None:
    """In a directory that every user can enter, like /var/lib."""
    with tempfile.TemporaryDirectory(prefix='ecomp-rights-') as name:
        top = Path(name)
        top.chmod(0o755)
        state = Identity(top / 'state')
        state.choose_uuid(None)
        state.choose_token()
        state.save()
        state.close()
        directory = top / 'state'
        GuestData(directory / 'metadata').write(Request(UUID, {}, user_data=b'canary'), [MAC])
        (directory / f'metadata/{UUID}.ready').touch(0o600)
        Memory(directory, OTHER_UUID, lambda: '2026-01-01T00:00:00.000Z')
        paths = sorted(directory.rglob('*'))
        names = {path.name for path in paths}
        assert {'uuid', 'token', 'lock', 'metadata', f'{MAC}.json', f'{UUID}.ready', 'instances'} <= names
        (top / 'canary').write_text('readable')  # shows that the attempts work
        (top / 'canary').chmod(0o644)
        result = subprocess.run(
            [
                shutil.which('python3', path='/usr/bin:/usr/local/bin') or sys.executable,
                '-c',
                ATTEMPTS_SCRIPT,
                str(directory),
                *map(str, paths),
                str(top / 'canary'),
            ],
            user=int(SERVER_UID),
            group=int(SERVER_UID),
            extra_groups=[],
            cwd='/',
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (result.returncode, result.stderr) == (0, '')
        assert result.stdout.split('\n') == [f'read {top}/canary', '']


KEPT_CAPABILITIES_SCRIPT = """
import ctypes, sys
from mdserver import monitor
assert ctypes.CDLL(None).prctl(28, 4, 0, 0, 0) == 0  # PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP
try:
    monitor.drop_privileges(monitor.find_user(sys.argv[1]))
except OSError as error:
    print(error.strerror)
"""


def test_kept_capabilities_are_an_error() -> None:
    result = run_command(sys.executable, '-c', KEPT_CAPABILITIES_SCRIPT, SERVER_UID)
    assert result.stdout == 'capabilities are kept\n', result


def test_missing_setuid_capability_is_an_error(tmp_path: Path) -> None:
    write_files(tmp_path, {LOOPBACK: (MAC, UUID)})
    conf = str(tmp_path / 'mdserver.conf')
    result = run_command(
        'setpriv', '--bounding-set', '-setuid', *COMMAND, conf, '--listen', f'{LOOPBACK}:0', '--user', SERVER_UID
    )
    assert (result.returncode, result.stderr) == (
        1,
        f'mdserver: --user {SERVER_UID}: cannot become this user: Operation not permitted: '
        'mdserver must start with CAP_SETUID and CAP_SETGID, and lose all capabilities when it changes its user\n',
    )


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('no-such-user', "user 'no-such-user' does not exist. Fix: give an existing user or a number"),
        ('', "user '' does not exist. Fix: give an existing user or a number"),
        ('4294967295', "user '4294967295' does not exist. Fix: give an existing user or a number"),
        ('65520 ', "user '65520 ' does not exist. Fix: give an existing user or a number"),
        ('root', "'root' is root, which keeps all rights. Fix: give another user"),
        ('0', "'0' is root, which keeps all rights. Fix: give another user"),
    ],
)
def test_invalid_users_are_refused(name: str, message: str) -> None:
    result = run_command(*COMMAND, '--listen', f'{LOOPBACK}:0', '--user', name)
    assert (result.returncode, result.stdout, result.stderr) == (2, '', f'mdserver: --user: {message}\n')


def test_number_of_a_user_means_that_user() -> None:
    nobody = pwd.getpwnam('nobody')
    assert monitor.find_user(str(nobody.pw_uid)) == monitor.find_user('nobody') == (nobody.pw_uid, nobody.pw_gid)
    assert monitor.find_user(SERVER_UID) == (int(SERVER_UID), int(SERVER_UID))


def test_user_option_requires_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    with pytest.raises(
        conf.ConfError, match=r'only root can become another user\. Fix: start mdserver with sudo, or omit --user'
    ):
        server._resolve_user('nobody')


ECOMPUTE_SCRIPT = """
import json, logging, os, signal, sys, time
from pathlib import Path
from ecomp.agent.host.metadata import MetadataServer, fetch_root_page, is_metadata
logging.basicConfig(level=logging.INFO)
os.system('ip link set lo up; ip addr add 169.254.169.254/32 dev lo')
server = MetadataServer(Path(sys.argv[1]), Path(sys.argv[2]), 'virbr0')
server.ensure()
pid = server._process.pid
print(Path(f'/proc/{pid}/status').read_text(), flush=True)
os.kill(int(Path(f'/proc/{pid}/task/{pid}/children').read_text()), signal.SIGKILL)
while server._process.poll() is None:
    time.sleep(0.05)
server.ensure()  # as each minute
assert server._process.pid != pid and is_metadata(fetch_root_page())
server.stop()
assert fetch_root_page() is None
"""


def test_server_of_ecompute_binds_port_80_and_drops_rights(tmp_path: Path) -> None:
    GuestData(tmp_path / 'metadata')
    result = run_command(
        'unshare', '--net', sys.executable, '-c', ECOMPUTE_SCRIPT, str(tmp_path / 'metadata'), str(tmp_path)
    )
    assert result.returncode == 0, result.stderr
    for line in (
        f'Uid:\t{SERVER_UID}\t{SERVER_UID}\t{SERVER_UID}\t{SERVER_UID}',
        'Groups:\t ',
        'CapEff:\t0000000000000000',
        'NoNewPrivs:\t1',
    ):
        assert line in result.stdout.splitlines(), (line, result.stdout)
    assert f'LISTENING ON http://169.254.169.254:80/ GUESTS IN {tmp_path}/metadata AS UID {SERVER_UID}' in result.stderr
    assert 'the metadata server ended with exit code 1: starting it again' in result.stderr


def test_idle_server_uses_no_processor_time(running_server: MetadataServer) -> None:
    before = psutil.Process(running_server.pid).cpu_times().user
    time.sleep(2)
    assert psutil.Process(running_server.pid).cpu_times().user - before < 0.3
    assert running_server.request('/')[0] == 200


# The monitor of an unprivileged metadata server opens files for its five kinds of requests, and no others.


def test_monitor_ignores_signals_and_ends_with_the_server(running_server: MetadataServer) -> None:
    monitor = running_server.find_monitor()
    assert (monitor.uids().effective, monitor.name()) == (0, psutil.Process(running_server.pid).name())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        monitor.send_signal(number)  # Ctrl-C reaches both processes: only mdserver ends
    assert running_server.request('/latest/meta-data/instance-id') == (200, UUID.encode())
    running_server.process.kill()
    running_server.process.wait()
    wait_until(
        lambda: not monitor.is_running() or monitor.status() == psutil.STATUS_ZOMBIE, 10, 'it ends with mdserver'
    )


def test_server_ends_normally_with_its_monitor(running_server: MetadataServer) -> None:
    monitor = running_server.find_monitor()
    assert running_server.close() == 0
    assert not monitor.is_running()
    assert 'ENDED' in running_server.log.read_text()


def test_server_ends_if_its_monitor_is_killed(running_server: MetadataServer) -> None:
    """The ecompute notices that, and starts another."""
    running_server.find_monitor().kill()
    assert running_server.process.wait(20) == 1
    assert 'ENDED: the monitor process, which opens the files, has ended' in running_server.log.read_text()


def query_monitor(monitor: Monitor, request: str) -> list[str]:
    answers = []
    for _, content in monitor.ask(request):
        answers.append(str(content.strerror) if isinstance(content, OSError) else content.decode())
    return answers


def test_monitor_opens_no_other_files(tmp_path: Path) -> None:
    """Requests that a compromised mdserver could send."""
    write_files(tmp_path, {LOOPBACK: (MAC, UUID)})
    (tmp_path / 'token').write_text('canary')
    guests = tmp_path / 'metadata'
    with closing(Monitor(conf.load(tmp_path / 'mdserver.conf'))) as monitor:
        assert query_monitor(monitor, 'user-data') == ['#!one\n']
        malformed = (
            ' ', 'guest', 'guest ', 'guest ../token', 'guest ../../etc/shadow', f'guest  {MAC}', f'guest {MAC} x',
            f'guest {MAC}\n', f'guest {MAC.upper()}', f'guest {MAC}/../../token', f'guest {MAC}\0',
            'user-data ../token', 'user-data /etc/shadow', 'leases /etc/*', '/etc/shadow', 'open /etc/shadow',
            f'ready {MAC}', f'ready {MAC} ../../x', f'ready ../{MAC} {UUID}', f'ready {MAC} {UUID.upper()}',
            f'ready {MAC} {UUID}', 'refused', 'refused ../token x', f'refused {MAC}/../../token x',
            'guest ' + 300 * 'x', '\xff',
        )  # fmt: skip
        for request in malformed:
            assert query_monitor(monitor, request) == ['Invalid argument'], request
        # A report is accepted only of an existing guest: otherwise reports could fill the directory.
        assert (
            query_monitor(monitor, f'ready {MAC} {OTHER_UUID} {{}}')
            == query_monitor(monitor, f'ready {MAC_2} {UUID} {{}}')
            == ['No such file or directory']
        )
        assert sorted(path.name for path in guests.iterdir()) == [f'{MAC}.json']
        # Links are never followed, though only root could have made them.
        (guests / f'{MAC_2}.json').symlink_to(tmp_path / 'token')
        (tmp_path / 'z.status').symlink_to(tmp_path / 'token')
        (guests / f'{UUID}.said').symlink_to(tmp_path / 'made')
        link = 'Too many levels of symbolic links'
        assert query_monitor(monitor, f'guest {MAC_2}') == [link]
        assert query_monitor(monitor, 'leases')[1:] == [link]
        (guests / f'{MAC_2}.refused').symlink_to(tmp_path / 'token')
        assert query_monitor(monitor, f'refused {MAC_2} no lease') == []
        assert (tmp_path / 'token').read_text() == 'canary'
        assert (guests / f'{MAC_2}.refused').read_text() == 'no lease'
        assert query_monitor(monitor, f'refused {MAC_2} ') == []
        assert not (guests / f'{MAC_2}.refused').exists()
        # A link in the place of a report is replaced.
        assert query_monitor(monitor, f'ready {MAC} {UUID} {{}}') == []
        report = guests / f'{UUID}.ready'
        assert report.read_text() == '{}'
        assert not report.is_symlink()
        report.unlink()
        report.symlink_to(tmp_path / 'made')
        assert query_monitor(monitor, f'ready {MAC} {UUID} {{}}') == []
        assert not (tmp_path / 'made').exists()
