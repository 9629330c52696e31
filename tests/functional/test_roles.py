"""Test `elab certs DIR --enable`: changes in etcd, refusals, and clients while roles change."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip('cryptography', reason="pip install '.[lab]'")

from ecomp.compute_conf import load_compute
from ecomp.errors import Denied, EcompError, Unreachable, UsageError
from ecomp.lab import elab
from ecomp.model import cluster, keys, roles
from ecomp.model.roles import Permission
from ecomp.model.stored import decode
from ecomp.shared.presence import Presence
from ecomp.store.client import Put, Unchanged
from ecomp.store.roles import Accounts
from ecomp.tls import ETCD_SENTENCES, TlsFailure
from tests.functional.present import start_and_stop
from tests.kit.behind_roles import EtcdWithRoles, start_etcd_with_roles
from tests.kit.certificates import Authority
from tests.kit.process import start_process
from tests.kit.secured import certify, load_etcd_config
from tests.kit.servers import PlacementServer, free_port, make_environment, wait_until


def read_roles(cloud: EtcdWithRoles, user: str = 'operator-ann') -> roles.Roles:
    with closing(Accounts(load_etcd_config(cloud.certs, user))) as accounts:
        return accounts.read_roles()


def put_key(cloud: EtcdWithRoles, key: str, user: str = 'compute-hv1', lease: int = 0) -> None:
    cloud.stores[user].commit([], [Put(key, 'x', lease)])


def is_allowed(action: Callable[[], None]) -> bool:
    try:
        action()
    except EcompError:
        return False
    return True


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[EtcdWithRoles]:
    with start_etcd_with_roles(tmp_path) as instance:
        yield instance


def expect_denied(cloud: EtcdWithRoles, key: str) -> None:
    with pytest.raises(Denied):
        put_key(cloud, key)


def test_enable_reports_its_changes_and_is_idempotent(cloud: EtcdWithRoles) -> None:
    put_key(cloud, '/flavors/small')
    assert cloud.stores['operator-ann'].get('/cluster') is None
    lines = cloud.enable()
    assert lines[-2:] == [
        '/cluster: written now, because computes with roles may not write it',
        f'etcd at localhost:{cloud.etcd.port} restricts each certificate to its role; '
        f'`elab certs {cloud.certs} --disable` undoes this',
    ]
    assert f'role compute-hv1: may write /hosts/{cloud.computes["compute-hv1"]}/' in lines
    assert {f'user {user}: added' for user in (*cloud.stores, 'root')} <= {*lines}
    entry = cloud.stores['compute-hv1'].get('/cluster')
    assert entry is not None
    assert decode(cluster.ClusterIdentity, entry.value)
    enabled_roles = read_roles(cloud)
    assert enabled_roles == roles.make_roles(cloud.computes, ['scheduler-shell'], ['operator-ann'])
    expect_denied(cloud, '/flavors/small')
    assert cloud.enable() == []
    assert read_roles(cloud) == enabled_roles
    entry_after = cloud.stores['compute-hv1'].get('/cluster')
    assert entry_after == entry


def test_enable_and_disable_commands(cloud: EtcdWithRoles, capsys: pytest.CaptureFixture[str]) -> None:
    server = f'etcd at localhost:{cloud.etcd.port}'
    assert elab.main(['certs', str(cloud.certs), '--enable']) == 0
    out, err = capsys.readouterr()
    assert out == ''
    assert f'{server} restricts each certificate to its role' in err
    version = cloud.stores['operator-ann'].read_version()
    warned = [line for line in err.splitlines() if line.startswith(f'warning: etcd {version}')]
    assert len(warned) == (cluster.describe_vulnerabilities(version) is not None)
    assert all('. Roles prevent mistakes in this etcd, but not attacks. Fix: upgrade etcd; ' in line for line in warned)
    expect_denied(cloud, '/flavors/small')
    for suffix in ('', ', as before'):
        assert elab.main(['certs', str(cloud.certs), '--disable']) == 0
        message = f'{server} lets every certificate write everything{suffix}; its users and roles remain\n'
        assert capsys.readouterr() == ('', message)
        put_key(cloud, '/flavors/small')
    assert read_roles(cloud) == roles.make_roles(cloud.computes, ['scheduler-shell'], ['operator-ann'])
    message = f'{server} restricts each certificate to its role; `elab certs {cloud.certs} --disable` undoes this'
    assert cloud.enable() == [message]
    expect_denied(cloud, '/flavors/small')
    assert elab.main(['certs', str(cloud.certs), '--enable', '--disable']) == 2
    assert elab.main(['certs', str(cloud.certs), '--compute', 'hv4', '--disable']) == 2
    assert not (cloud.certs / 'compute-hv4').exists()


def test_enable_adds_a_new_compute_and_operator(cloud: EtcdWithRoles, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.enable()
    # The alphabetically first operator is unknown to etcd so far.
    options = ['--compute', 'hv3', '--operator', 'aaron', '--etcd-port', str(cloud.etcd.port)]
    assert elab.main(['certs', str(cloud.certs), *options, '--enable']) == 0
    output = capsys.readouterr().err
    compute = load_compute(cloud.certs / 'compute-hv3/compute.yaml').uuid
    assert f'role compute-hv3: may write /hosts/{compute}/\n' in output
    assert 'user operator-aaron: has role root\n' in output
    assert 'hv1' not in output
    store = cloud.open_store('compute-hv3')
    store.commit([], [Put(f'/computes/{compute}', 'x')])
    with pytest.raises(Denied):
        store.commit([], [Put(f'/computes/{cloud.computes["compute-hv1"]}', 'x')])
    cloud.open_store('operator-aaron').commit([], [Put('/flavors/small', 'x')])


def test_enable_revokes_excess_rights_and_names_unknown_users(cloud: EtcdWithRoles) -> None:
    cloud.enable()
    old = Permission(roles.WRITE, '/instances/', '/instances0')
    with closing(Accounts(load_etcd_config(cloud.certs, 'operator-ann'))) as accounts:
        accounts.apply(roles.GrantPermission('compute-hv1', old))
        accounts.apply(roles.GrantPermission('scheduler', Permission(roles.READ_WRITE, '/hosts/', '/hosts0')))
        accounts.apply(roles.AddRole('compute-gone'))
        for user in ('compute-gone', 'operator-gone', 'backup'):
            accounts.apply(roles.AddUser(user))
        accounts.apply(roles.GrantRole('compute-gone', 'compute-gone'))
        accounts.apply(roles.GrantRole('compute-hv2', 'root'))
    put_key(cloud, '/instances/x', lease=cloud.stores['operator-ann'].grant(60))
    unknown = 'compute-gone, operator-gone'
    fix = 'to revoke a certificate, run `etcdctl user delete compute-gone`'
    warning = f'users of etcd without a certificate in {cloud.certs}: {unknown}. Fix: {fix}'
    assert cloud.enable() == [
        'role scheduler: may write /hosts/',
        'role compute-hv1: may no longer write /instances/',
        'user compute-hv2: no longer has role root',
        warning,
    ]
    expect_denied(cloud, '/instances/x')
    assert cloud.enable() == [warning]
    code, output = cloud.etcdctl('operator-ann', 'user', 'delete', 'compute-hv2')
    assert code == 0, output
    with pytest.raises(Denied):
        cloud.stores['compute-hv2'].get('/cluster')


def expect_refusal(cloud: EtcdWithRoles, error: type[Exception], *parts: str) -> None:
    before = read_roles(cloud), cloud.stores['operator-ann'].snapshot('/')
    with pytest.raises(error) as raised:
        cloud.enable()
    assert '\n' not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)
    assert (read_roles(cloud), cloud.stores['operator-ann'].snapshot('/')) == before
    put_key(cloud, '/flavors/small')


def test_compute_yaml_without_a_valid_uuid_is_refused(cloud: EtcdWithRoles) -> None:
    path, own = cloud.certs / 'compute-hv1/compute.yaml', cloud.computes['compute-hv1']
    text = path.read_text()
    path.write_text(text.replace(f'uuid: {own}\n', ''))
    expect_refusal(cloud, UsageError, f'{path}: has no uuid. Fix: add the line `uuid: …`')
    path.unlink()
    expect_refusal(cloud, UsageError, f'{path}: this file is missing')
    other = cloud.computes['compute-hv2']
    path.write_text(text.replace(own, other))
    expect_refusal(cloud, UsageError, 'compute-hv2/compute.yaml', f'compute-hv1 has uuid {other}, too')
    path.write_text(text.replace(own, 'x'))
    expect_refusal(cloud, UsageError, f'{path}:', 'must be a uuid')
    path.write_text(text)
    assert cloud.enable()


def test_enable_and_disable_need_an_operator_certificate(cloud: EtcdWithRoles) -> None:
    moved = cloud.certs / 'operator-ann'
    moved.rename(cloud.certs / 'ann')
    for act in (cloud.enable, cloud.disable):
        with pytest.raises(UsageError, match=r'certs has no operator certificate\. Fix: elab certs \S+ --operator'):
            act()
    (cloud.certs / 'ann').rename(moved)
    cloud.enable()
    certify(cloud.certs, cloud.etcd.port, operators=('bob',))
    moved.rename(cloud.certs / 'ann')
    for act in (cloud.enable, cloud.disable):
        with pytest.raises(Denied, match='operator-bob/client.crt do that'):
            act()


@pytest.mark.parametrize('asks', [0, 1])
def test_etcd_without_client_certificates_is_refused(cloud: EtcdWithRoles, asks: int) -> None:
    """No client could disable the roles again.

    One etcd requires no certificate. The other accepts any of the authority's.
    """
    original, cloud.etcd.client_auth_options = cloud.etcd.client_auth_options, cloud.etcd.client_auth_options[:asks]
    cloud.etcd.restart()
    wait_until(lambda: is_allowed(lambda: put_key(cloud, '/flavors/small')), 10, 'it is back')
    with pytest.raises(
        UsageError, match='ignores the user in a certificate. Fix: start each member with --client-cert-auth'
    ):
        cloud.enable()
    put_key(cloud, '/flavors/small')
    assert cloud.disable()[0].endswith('lets every certificate write everything, as before; its users and roles remain')
    cloud.etcd.client_auth_options = original
    cloud.etcd.restart()
    wait_until(lambda: is_allowed(lambda: put_key(cloud, '/flavors/small')), 10, 'it is back')
    assert len(cloud.enable()) == 1
    expect_denied(cloud, '/flavors/small')


def test_live_compute_without_a_certificate_is_named(cloud: EtcdWithRoles, capsys: pytest.CaptureFixture[str]) -> None:
    """Check a compute whose directory was recreated with a different uuid."""
    own, other = cloud.computes['compute-hv1'], str(uuid.uuid4())
    for compute in (own, other):
        put_key(cloud, keys.compute(compute), lease=cloud.stores['compute-hv1'].grant(60))
    put_key(cloud, keys.compute(str(uuid.uuid4())))  # has no lease, so it is not alive

    def read_warnings() -> list[str]:
        assert elab.main(['certs', str(cloud.certs), '--enable']) == 0
        return [
            line
            for line in capsys.readouterr().err.splitlines()
            if line.startswith('warning: computes that are alive, but ')
        ]

    cure = 'write the uuid of each, as `uuid: …`, into its compute.yaml in this directory, and repeat the command'
    for _ in range(2):
        message = f'warning: computes that are alive, but have no certificate in {cloud.certs}: {other}. Fix: {cure}'
        assert read_warnings() == [message]
    path = cloud.certs / 'compute-hv2/compute.yaml'
    path.write_text(path.read_text().replace(cloud.computes['compute-hv2'], other))
    assert read_warnings() == []
    path.write_text(path.read_text().replace(other, cloud.computes['compute-hv2']))
    assert read_warnings() == [message]


def test_unreachable_etcd_is_reported_in_one_line(cloud: EtcdWithRoles, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.etcd.stop()
    for option in ('--enable', '--disable'):
        assert elab.main(['certs', str(cloud.certs), option]) == 7
        output = capsys.readouterr().err
        assert output.startswith(f'elab: etcd at localhost:{cloud.etcd.port} cannot be reached: ')
        assert output.count('\n') == 1


def test_connection_errors_are_explained(cloud: EtcdWithRoles, tmp_path: Path) -> None:
    """Nothing was sent, so no outcome is unknown."""
    config = load_etcd_config(cloud.certs, 'operator-ann')
    stranger = Authority(tmp_path / 'stranger')
    certificate, key = stranger.issue(tmp_path / 'theirs', 'operator-ann')
    junk, empty = tmp_path / 'junk', tmp_path / 'empty'
    junk.write_text('no certificate\n')
    empty.touch()
    closed = f'localhost:{free_port()}'
    for broken, reason in (
        (config._replace(ca_cert=stranger.certificate), ETCD_SENTENCES[TlsFailure.UNTRUSTED]),
        (config._replace(cert_cert=certificate, cert_key=key), ETCD_SENTENCES[TlsFailure.OWN_REFUSED]),
        (config._replace(ca_cert=junk), ETCD_SENTENCES[TlsFailure.UNUSABLE_FILES]),
        (config._replace(endpoints=(closed,)), 'Connection refused'),
        (config._replace(endpoints=('no-such-host.invalid:1',)), 'no-such-host.invalid'),
    ):
        with closing(Accounts(broken)) as accounts, pytest.raises(Unreachable, match='cannot be reached: ') as caught:
            accounts.apply(roles.AddRole('x'))
        assert reason in str(caught.value)
        assert type(caught.value) is Unreachable
    with pytest.raises(UsageError, match=f'etcd certificate {empty}: is empty'):
        Accounts(config._replace(ca_cert=empty))
    with closing(Accounts(config._replace(endpoints=(closed, *config.endpoints)))) as accounts:
        accounts.apply(roles.AddRole('x'))
        assert accounts.read_roles() == roles.Roles({}, {'x': frozenset()})


# The product on an etcd with roles: which keys a compute may write, and what happens while roles change.


def test_presence_is_written_only_with_own_certificate(cloud: EtcdWithRoles) -> None:
    cloud.enable()
    lost: list[str] = []
    first, second = (keys.compute(cloud.computes[f'compute-hv{number}']) for number in (1, 2))
    foreign = Presence(cloud.stores['compute-hv1'], second, {'token': 'a'}, lost.append)
    for write in (foreign.check, foreign.start):
        with pytest.raises(Denied, match=f'compute-hv1/client.crt write {second}: its role does not allow that'):
            write()
    assert cloud.stores['operator-ann'].get(second) is None
    alive = Presence(cloud.stores['compute-hv1'], first, {'token': 'a'}, lost.append)
    alive.check()
    assert cloud.stores['operator-ann'].get(first) is None
    with start_and_stop(alive):
        assert cloud.stores['operator-ann'].get(first) is not None
    assert cloud.stores['operator-ann'].get(first) is None
    assert lost == []


def test_no_request_fails_while_roles_change(cloud: EtcdWithRoles) -> None:
    """A request that etcd receives before a role change and applies after it is sent again."""
    cloud.enable()
    errors: list[Exception] = []
    commits, stop = [0, 0, 0], threading.Event()

    def work(number: int) -> None:
        store, key = cloud.open_store('compute-hv1'), f'/hosts/{cloud.computes["compute-hv1"]}/{number}'
        while not stop.is_set():
            try:
                entry = store.get(key)
                assert store.commit([Unchanged(key, entry.revision if entry else 0)], [Put(key, 'x')])
                commits[number] += 1
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(commits))]
    for thread in threads:
        thread.start()
    try:
        certify(cloud.certs, cloud.etcd.port, tuple(f'n{number}' for number in range(4)))
        cloud.enable()
        cloud.disable()
        cloud.enable()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert all(commits)


def make_ecompute_command(cloud: EtcdWithRoles, compute: str, placement: PlacementServer) -> list[str]:
    state = str(cloud.certs / 'compute-hv1/state')
    config = cloud.write_config('compute-hv1', placement.url, uuid=compute, state=state)
    inventory = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'
    return [sys.executable, '-m', 'ecomp.compute', '--config', str(config), '--fake', inventory]


def test_ecompute_without_its_role_waits(cloud: EtcdWithRoles, own_placement: PlacementServer) -> None:
    """It logs the refusal once, retries with a back-off, and its request stays in etcd."""
    cloud.enable()
    compute = cloud.computes['compute-hv1']
    log = cloud.certs / 'compute-hv1/log'
    with log.open('w') as output:
        child = start_process(
            make_ecompute_command(cloud, compute, own_placement),
            cloud.certs,
            make_environment(),
            output.fileno(),
            output.fileno(),
        )
    try:
        wait_until(lambda: 'ready: ' in log.read_text(), 20, 'it is ready')
        path = cloud.certs / 'compute-hv1/compute.yaml'
        path.write_text(path.read_text().replace(compute, str(uuid.uuid4())))
        cloud.enable()
        config = cloud.write_config('scheduler-shell', own_placement.url)
        command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(config)]
        command += ['resources=VCPU:1,DISK_GB:1,MEMORY_MB:256', 'http://images.example/x.img']
        result = subprocess.run(command, capture_output=True, text=True, env=make_environment(), timeout=80)
        assert result.stdout.startswith(f'NOTIFIED TARGET, {compute}, OF INSTANCE '), result
        wait_until(lambda: 'does not let' in log.read_text(), 20, 'it says that it may not')
        jiffies_before = _read_jiffies(child.pid)
        time.sleep(5)
        assert _read_jiffies(child.pid) - jiffies_before < 100  # of 500
        refusals = [line.partition('client.crt write /')[2] for line in log.read_text().splitlines()]
        refused = sorted(line.partition('/')[0] for line in refusals if line)
        assert refused.count('instances') == 1
        assert refused == sorted(set(refused)), 'each is logged once'
        assert 'Traceback' not in log.read_text()
        assert cloud.stores['operator-ann'].count(keys.request_prefix(compute)) == 1
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


def _read_jiffies(pid: int) -> int:
    return sum(map(int, Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[11:13]))  # see proc(5)


def test_ecompute_with_certificate_of_another_compute_exits(
    cloud: EtcdWithRoles, own_placement: PlacementServer
) -> None:
    """It prints one line, and exits before it creates a provider that no compute serves."""
    cloud.enable()
    own, other_compute = cloud.certs / 'compute-hv1', cloud.computes['compute-hv2']
    command = make_ecompute_command(cloud, other_compute, own_placement)
    started_at = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, env=make_environment(), timeout=80)
    assert time.monotonic() - started_at < 60
    assert result.returncode == 1
    message = f'etcd at localhost:{cloud.etcd.port} does not let {own}/client.crt write {keys.compute(other_compute)}: '
    assert result.stderr.splitlines()[-1].startswith(f'ecompute: {message}')
    assert 'Traceback' not in result.stderr
    assert own_placement.call('GET', '/resource_providers')['resource_providers'] == []
    assert cloud.stores['operator-ann'].snapshot('/').entries.keys() == {'/cluster'}
