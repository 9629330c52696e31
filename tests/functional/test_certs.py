"""Certificates of `elab certs`: openssl and etcd accept them, and only for their purpose."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip('cryptography', reason="pip install '.[lab]'")

from ecomp.compute_conf import load_compute
from ecomp.conf import load_schedule
from ecomp.errors import EcompError, Unreachable, UsageError
from ecomp.lab import certs, elab
from ecomp.store.client import Store
from tests.kit.secured import SecuredEtcd

NOW = datetime.now(UTC).replace(microsecond=0)
CONTROL = ('localhost', '127.0.0.1', '::1')


def make_cluster(**overrides: tuple[str, ...]) -> certs.Cluster:
    names = {
        'servers': CONTROL,
        'computes': ('hv1', 'hv2'),
        'schedulers': ('shell',),
        'operators': ('ann',),
        **overrides,
    }
    return certs.Cluster(**names, etcd_port=2379, placement_port=8080)


def make_certs(directory: Path, now: datetime = NOW, **overrides: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    certs.make_certificates(directory, make_cluster(**overrides), now, lines.append)
    return lines


def run_openssl(*words: str | Path) -> str:
    result = subprocess.run(['openssl', *map(str, words)], check=True, capture_output=True, text=True)
    return result.stdout


def read_files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob('*') if path.is_file()}


def test_each_machine_gets_a_complete_directory(tmp_path: Path) -> None:
    top = tmp_path / 'certs'
    lines = make_certs(top)
    clients = ('compute-hv1', 'compute-hv2', 'scheduler-shell', 'operator-ann')
    assert {path.name for path in top.iterdir()} == {'ca.crt', 'ca.key', 'etcd', 'placement', *clients}
    assert len(lines) == 7
    for server in ('etcd', 'placement'):
        run_openssl('verify', '-CAfile', top / 'ca.crt', '-purpose', 'sslserver', top / server / 'server.crt')
        names = run_openssl('x509', '-in', top / server / 'server.crt', '-noout', '-ext', 'subjectAltName')
        assert names.split('\n')[1].strip() == 'DNS:localhost, IP Address:127.0.0.1, IP Address:0:0:0:0:0:0:0:1'
    for client in clients:
        certificate = top / client / 'client.crt'
        run_openssl('verify', '-CAfile', top / client / 'ca.crt', '-purpose', 'sslclient', certificate)
        subject = run_openssl('x509', '-in', certificate, '-noout', '-subject', '-nameopt', 'RFC2253').strip()
        assert subject == f'subject=CN={client}'
        assert (top / client / 'token').read_bytes() == (top / 'placement/token').read_bytes()
        # A client's certificate is not valid for a server, so a compromised client cannot pose as etcd.
        result = subprocess.run(
            ['openssl', 'verify', '-CAfile', top / 'ca.crt', '-purpose', 'sslserver', certificate], capture_output=True
        )
        assert result.returncode != 0
    for path in (top, *top.rglob('*')):
        assert path.stat().st_mode & 0o077 == 0, path


def test_valid_certificates_stay_and_expiring_ones_are_renewed(tmp_path: Path) -> None:
    make_certs(tmp_path)
    before = read_files(tmp_path)
    (tmp_path / 'compute-hv1/compute.yaml').write_text('# mine\n')
    assert make_certs(tmp_path) == []
    assert make_certs(tmp_path, NOW + timedelta(days=certs.CERTIFICATE_DAYS - certs.MIN_REMAINING_DAYS - 1)) == []
    assert read_files(tmp_path) == {**before, 'compute-hv1/compute.yaml': b'# mine\n'}
    lines = make_certs(tmp_path, NOW + timedelta(days=certs.CERTIFICATE_DAYS - certs.MIN_REMAINING_DAYS + 1))
    assert len(lines) == 6
    after = read_files(tmp_path)
    changed = {name for name in after if after[name] != before[name]} - {'compute-hv1/compute.yaml'}
    assert {name.rpartition('/')[2] for name in changed} == {'server.crt', 'server.key', 'client.crt', 'client.key'}
    assert after['ca.crt'] == before['ca.crt']
    assert after['compute-hv1/compute.yaml'] == b'# mine\n'


def test_command_without_names_renews_all_expiring_certificates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operator who renews them has no list of the names."""
    long_ago = NOW - timedelta(days=certs.CERTIFICATE_DAYS - certs.MIN_REMAINING_DAYS + 1)
    make_certs(tmp_path, long_ago)
    (tmp_path / 'operator-ann (old)').mkdir()
    for name in ('client.crt', 'client.key'):
        (tmp_path / 'operator-ann (old)' / name).write_bytes((tmp_path / 'operator-ann' / name).read_bytes())
    (tmp_path / 'compute-hv3').mkdir()
    (tmp_path / 'compute-hv2/compute.yaml').unlink()
    # The only copy of this key is on its machine. A new key here would not match the certificate there.
    (tmp_path / 'scheduler-shell/client.key').unlink()
    before = read_files(tmp_path)
    renewed = ('etcd', 'placement', 'compute-hv1', 'compute-hv2', 'operator-ann')
    assert elab.main(['certs', str(tmp_path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(':')[0] for line in lines] == [str(tmp_path / machine) for machine in renewed]
    after = read_files(tmp_path)
    # A deleted compute.yaml is not written again: its new uuid would give the compute another one's role.
    assert after.keys() == before.keys()
    changed = {name for name in after if after[name] != before[name]}
    assert {name.partition('/')[0] for name in changed} == {*renewed}
    assert {name.rpartition('/')[2] for name in changed} == {'server.crt', 'server.key', 'client.crt', 'client.key'}
    subject = run_openssl(
        'x509', '-in', tmp_path / 'operator-ann/client.crt', '-noout', '-subject', '-nameopt', 'RFC2253'
    )
    assert subject.strip() == 'subject=CN=operator-ann'
    assert elab.main(['certs', str(tmp_path)]) == 0
    assert capsys.readouterr().err == ''


def test_certificates_from_the_future_are_renewed(tmp_path: Path) -> None:
    """A certificate that is not valid yet would be refused."""
    make_certs(tmp_path, NOW - timedelta(days=3))
    (tmp_path / 'etcd/server.crt').unlink()
    make_certs(tmp_path)
    assert [line.partition(':')[0] for line in make_certs(tmp_path, NOW - timedelta(days=1))] == [
        str(tmp_path / 'etcd')
    ]
    assert make_certs(tmp_path, NOW - timedelta(days=1)) == []


def test_certificates_expire_with_the_authority(tmp_path: Path) -> None:
    make_certs(tmp_path)
    end = NOW + timedelta(days=certs.AUTHORITY_DAYS)
    for late in (end - timedelta(days=certs.MIN_REMAINING_DAYS + 1), end - timedelta(days=1)):
        lines = make_certs(tmp_path, late)
        assert [line.partition(': valid until ')[2] for line in lines] == len(lines) * [end.date().isoformat()]
        assert make_certs(tmp_path, late) == []
    before = read_files(tmp_path)
    for moment in (end, end + timedelta(days=1), NOW - timedelta(days=1)):
        with pytest.raises(EcompError, match='correct the clock, or move .* away') as caught:
            make_certs(tmp_path, moment)
        assert '\n' not in str(caught.value)
    assert read_files(tmp_path) == before


def test_unchanged_files_are_not_rewritten(tmp_path: Path) -> None:
    """A rewritten file would lose the owner that the operator gave it."""
    make_certs(tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.rglob('*')}
    make_certs(tmp_path)
    assert {path: path.stat().st_ino for path in tmp_path.rglob('*')} == before
    (tmp_path / 'operator-ann/token').write_text('another')
    make_certs(tmp_path)
    assert (tmp_path / 'operator-ann/token').read_bytes() == (tmp_path / 'placement/token').read_bytes()


def test_changed_server_names_renew_only_server_certificates(tmp_path: Path) -> None:
    make_certs(tmp_path)
    before = read_files(tmp_path)
    make_certs(tmp_path, servers=('ds1', '10.0.0.5'), computes=('hv3',))
    after = read_files(tmp_path)
    assert before.keys() < after.keys()
    changed = {name.partition('/')[0] for name in before if after[name] != before[name]}
    assert changed == {'etcd', 'placement'}
    assert "host: 'ds1'" in after['compute-hv3/compute.yaml'].decode()


def test_dropped_server_names_are_logged(tmp_path: Path) -> None:
    """Clients that connect by a dropped address fail at the next connection."""
    no_clients: dict[str, tuple[str, ...]] = {'computes': (), 'schedulers': (), 'operators': ()}
    make_certs(tmp_path, servers=('fd00:0::5', 'ds1', '10.0.0.5'), **no_clients)
    until = (NOW + timedelta(days=certs.CERTIFICATE_DAYS)).date().isoformat()
    assert make_certs(tmp_path, servers=('ds1',), **no_clients) == [
        f'{tmp_path}/{server}: {line}' for server in ('etcd', 'placement')
        for line in (f'valid until {until}', 'no longer valid for fd00::5, 10.0.0.5')
    ]  # fmt: skip
    assert make_certs(tmp_path, servers=('ds1', 'fd00::5'), **no_clients) == [
        f'{tmp_path}/{server}: valid until {until}' for server in ('etcd', 'placement')
    ]
    assert make_certs(tmp_path, servers=('ds1', 'fd00:0::5'), **no_clients) == []


def test_server_names_need_not_be_repeated(tmp_path: Path) -> None:
    make_certs(tmp_path)
    before = read_files(tmp_path)
    lines = make_certs(tmp_path, servers=(), computes=('hv3',), schedulers=(), operators=())
    assert [line.partition(':')[0] for line in lines] == [str(tmp_path / 'compute-hv3')]
    after = read_files(tmp_path)
    assert {name: after[name] for name in before} == before
    new, old = (yaml.splitlines() for yaml in (after['compute-hv3/compute.yaml'], before['compute-hv1/compute.yaml']))
    assert new[:-1] == old[:-1]  # the last is the uuid


def test_compute_yaml_contains_a_stable_uuid(tmp_path: Path) -> None:
    make_certs(tmp_path)
    uuids = {name: load_compute(tmp_path / f'compute-{name}/compute.yaml').uuid for name in ('hv1', 'hv2')}
    assert None not in uuids.values()
    assert uuids['hv1'] != uuids['hv2']
    make_certs(tmp_path)
    assert load_compute(tmp_path / 'compute-hv1/compute.yaml').uuid == uuids['hv1']
    assert 'uuid' not in (tmp_path / 'operator-ann/schedule.yaml').read_text()


def test_given_uuid_is_checked_and_written_to_compute_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, other = str(uuid.uuid4()), str(uuid.uuid4())
    top, path = str(tmp_path / 'x'), tmp_path / 'x/compute-hv1/compute.yaml'

    def certify(*words: str) -> tuple[int, str]:
        return elab.main(['certs', top, '--control', 'ds1', '--compute', *words]), capsys.readouterr().err

    for malformed in ('', 'x', own.upper(), own.replace('-', '')):
        code, message = certify(f'hv1={malformed}')
        assert (code, message.count('\n')) == (2, 1)
        assert message.startswith(f'elab: --compute hv1={malformed}: must be a uuid, like ')
    assert not (tmp_path / 'x').exists()
    assert certify(f'hv1={own}', 'hv2')[0] == 0
    assert load_compute(path).uuid == own
    assert certify(f'hv1={own}') == (0, '')
    conflict, fix = f'has uuid {own}, but --compute gives {other}', f'write `uuid: {other}` into it'
    assert certify(f'hv1={other}', 'hv3') == (2, f'elab: {path}: {conflict}. Fix: {fix}\n')
    path.write_text(path.read_text().replace(f'uuid: {own}\n', ''))
    conflict, fix = f'has no uuid, but --compute gives {own}', f'write `uuid: {own}` into it'
    assert certify(f'hv1={own}') == (2, f'elab: {path}: {conflict}. Fix: {fix}\n')
    assert not (tmp_path / 'x/compute-hv3').exists()


def test_certificates_of_another_authority_are_replaced(tmp_path: Path) -> None:
    one, other = tmp_path / 'one', tmp_path / 'other'
    make_certs(one)
    make_certs(other)
    for name in ('client.crt', 'client.key'):
        (one / 'operator-ann' / name).write_bytes((other / 'operator-ann' / name).read_bytes())
    assert [line.partition(':')[0] for line in make_certs(one)] == [str(one / 'operator-ann')]
    (one / 'scheduler-shell/client.crt').write_text('none')
    assert [line.partition(':')[0] for line in make_certs(one)] == [str(one / 'scheduler-shell')]


def test_mismatched_key_and_certificate_are_replaced(tmp_path: Path) -> None:
    """Such a pair remains if elab is killed between the key and its certificate."""
    make_certs(tmp_path)
    before = read_files(tmp_path)
    for machine, kind in (('etcd', 'server'), ('compute-hv1', 'client')):
        (tmp_path / machine / f'{kind}.key').write_bytes(before['compute-hv2/client.key'])
        assert [line.partition(':')[0] for line in make_certs(tmp_path)] == [str(tmp_path / machine)]
        (tmp_path / machine / f'{kind}.key').write_text('none')
        assert [line.partition(':')[0] for line in make_certs(tmp_path)] == [str(tmp_path / machine)]
    assert make_certs(tmp_path) == []
    for key in (before['compute-hv1/client.key'], b'none'):
        (tmp_path / 'ca.key').write_bytes(key)
        with pytest.raises(EcompError, match=r'ca\.key'):
            make_certs(tmp_path)
    (tmp_path / 'ca.key').unlink()
    with pytest.raises(EcompError, match=r'ca\.key: No such file'):
        make_certs(tmp_path)


def test_concurrent_runs_make_one_authority(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda name: make_certs(tmp_path / 'certs', computes=(name,)), ('a', 'b', 'c', 'd')))
    assert sum(line.startswith(f'{tmp_path}/certs/ca.crt') for lines in outputs for line in lines) == 1
    for name in 'abcd':
        run_openssl('verify', '-CAfile', tmp_path / 'certs/ca.crt', tmp_path / f'certs/compute-{name}/client.crt')
    tokens = {path.read_bytes() for path in (tmp_path / 'certs').glob('*/token')}
    assert len(tokens) == 1


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[Path, SecuredEtcd]]:
    top = tmp_path / 'certs'
    make_certs(top)
    with SecuredEtcd(tmp_path / 'etcd', top) as etcd:
        yield top, etcd


def test_etcd_accepts_only_clients_with_a_certificate(secured: tuple[Path, SecuredEtcd]) -> None:
    top, etcd = secured
    for name, load in (('compute-hv1/compute.yaml', load_compute), ('operator-ann/schedule.yaml', load_schedule)):
        path = top / name
        path.write_text(path.read_text().replace('port: 2379', f'port: {etcd.port}'))
        config = load(path)
        with closing(Store(config.etcd)) as store:
            assert store.get('/nothing') is None
        with (
            closing(Store(config.etcd._replace(cert_cert=None, cert_key=None))) as stranger,
            pytest.raises(Unreachable, match='refuses our certificate'),
        ):
            stranger.get('/nothing')
        assert config.placement.endpoint == 'https://localhost:8080'
        assert config.placement.token_file == path.parent / 'token'


@pytest.mark.parametrize('name', ['', '../x', '-x', 'a b', 'é', 'a/b', 'ds1:2379', 'fe80::1%eth0', '[::1]'])
def test_invalid_names_are_refused(tmp_path: Path, name: str) -> None:
    for kind in ('servers', 'computes', 'operators'):
        with pytest.raises(UsageError, match='is not a valid (host name or address|name of a host or a person)'):
            make_certs(tmp_path / 'certs', **{kind: (name,)})
    assert not (tmp_path / 'certs').exists()


def test_longest_names_are_accepted(tmp_path: Path) -> None:
    make_certs(tmp_path, schedulers=(50 * 'a',), servers=('.'.join(4 * [60 * 'a']),))
    run_openssl('verify', '-CAfile', tmp_path / 'ca.crt', tmp_path / f'scheduler-{50 * "a"}' / 'client.crt')
    for kind, name, message in (
        ('schedulers', 51 * 'a', 'not a valid name of a host or a person: a name has at most 50 '),
        ('servers', 254 * 'a', 'not a valid host name or address'),
    ):
        with pytest.raises(UsageError, match=message):
            make_certs(tmp_path, **{kind: (name,)})


def test_command_prints_errors_and_creates_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert elab.main(['certs', str(tmp_path / 'x'), '--compute', 'hv1']) == 2
    assert 'missing argument: --control NAME' in capsys.readouterr().err
    words = ['certs', str(tmp_path / 'x'), '--control', 'ds1', '10.0.0.5', '--compute', 'hv1', 'hv2']
    words += ['--operator', 'ann']
    assert elab.main(words) == 0
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ('', 6)
    (tmp_path / 'file').write_text('')
    assert elab.main(['certs', str(tmp_path / 'file'), '--compute', 'hv1']) == 1
    assert capsys.readouterr().err == f'elab: {tmp_path}/file/etcd/server.crt: Not a directory\n'
    assert elab.main(['certs', str(tmp_path / 'file'), '--control', 'ds1']) == 1
    assert capsys.readouterr().err.count('\n') == 1
