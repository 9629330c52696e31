"""F35: etcd with certificates: one line for each error, and replaced files are loaded."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from ecomp.store.watch import MAX_DELAY_SECONDS
from tests.faults.etcds import EtcdControl, Member, Tls
from tests.kit.certificates import Authority
from tests.kit.commands import Ecompute, Result
from tests.kit.hands import check_settled
from tests.kit.servers import PlacementServer, make_environment, wait_until
from tests.kit.story import SMALL_QUERY, assert_one_line, boot, find_log_lines

HOSTS = ('localhost', '127.0.0.1')
LOST_MESSAGE = 'trying again until it is back'


class CertificateOffice:
    """The authority, the configured client certificate, and one for the tests' own queries."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory / 'authority')
        self.client = self.authority.issue(directory / 'client', 'ecomp')
        self._own = self.authority.issue(directory / 'tests', 'tests')
        self.section: dict[str, Any] = {
            'ca_cert': str(self.authority.certificate),
            'cert_cert': str(self.client[0]),
            'cert_key': str(self.client[1]),
        }

    def tls(self, name: str, *hosts: str, days: int = 10) -> Tls:
        certificate, key = self.authority.issue(self.directory / name, name, *hosts, days=days)
        return Tls(certificate, key, self.authority.certificate, self._own)


@pytest.fixture
def office(tmp_path: Path) -> CertificateOffice:
    return CertificateOffice(tmp_path / 'certificates')


@pytest.fixture
def secured(office: CertificateOffice, own_placement: PlacementServer, tmp_path: Path) -> Iterator[EtcdControl]:
    with (
        Member(tmp_path / 'etcd', 'm0', office.tls('server', *HOSTS), 'localhost') as etcd,
        closing(
            EtcdControl(etcd, own_placement, tmp_path, {'endpoints': [etcd.endpoint], **office.section})
        ) as control,
    ):
        yield control


def check_refused(control: EtcdControl, changes: Mapping[str, Any], *words: str, code: int = 7) -> None:
    right, control.section = control.section, {**control.section, **changes}
    control.section = {name: value for name, value in control.section.items() if value is not None}
    control.configure(control.schedule_yaml)
    try:
        line = assert_one_line(control.eschedule(SMALL_QUERY), code, *words)
        assert ('cannot be reached' in line) == (code == 7)
        assert len(line.replace(f' (as configured in {control.schedule_yaml}). Try: eschedule check', '')) < 220
        assert 'SSL' not in line
        assert 'ipv4' not in line
    finally:
        control.section = right
        control.configure(control.schedule_yaml)


@pytest.mark.usefixtures('compute')
def test_wrong_client_certificates_are_reported(
    secured: EtcdControl, office: CertificateOffice, tmp_path: Path
) -> None:
    """F35: with any but its own certificate a client gets one line with the reason (fake)."""
    boot(secured)
    stranger = Authority(tmp_path / 'stranger')
    foreign_pair = [str(path) for path in stranger.issue(tmp_path / 'theirs', 'ecomp')]
    expired = [str(path) for path in office.authority.issue(tmp_path / 'late', 'ecomp', days=-1)]
    junk = tmp_path / 'junk'
    junk.write_text('no certificate\n')
    empty = tmp_path / 'empty'
    empty.touch()
    check_refused(secured, {'ca_cert': str(stranger.certificate)}, 'not signed by the authority in ca_cert')
    check_refused(secured, {'ca_cert': None}, 'if not set: by a public one')
    check_refused(secured, {'cert_cert': None, 'cert_key': None}, 'it refuses our certificate')
    check_refused(secured, {'cert_cert': foreign_pair[0], 'cert_key': foreign_pair[1]}, 'it refuses our certificate')
    check_refused(secured, {'cert_cert': expired[0], 'cert_key': expired[1]}, 'it refuses our certificate', 'expired')
    check_refused(secured, {'ca_cert': str(junk)}, 'is not a certificate')
    check_refused(secured, {'cert_key': expired[1]}, 'cert_key does not belong to cert_cert')
    no_certificates: dict[str, Any] = dict.fromkeys(office.section)
    # By address: a name may have two, and the second one may not answer.
    check_refused(secured, {**no_certificates, 'endpoints': [f'127.0.0.1:{secured.etcd.port}']}, 'it may expect TLS')
    assert secured.etcd.list_keys('/requests/') == []
    for name in office.section:
        check_refused(secured, {name: str(empty)}, f'etcd certificate {empty}: is empty', code=2)
    foreign_result = run_refused_ecompute(secured, tmp_path, {'ca_cert': str(stranger.certificate)})
    assert_one_line(foreign_result, 7, 'not signed by the authority in ca_cert', command='ecompute')
    assert_one_line(run_refused_ecompute(secured, tmp_path, {'ca_cert': 'missing'}), 2, 'missing', command='ecompute')


def run_refused_ecompute(control: EtcdControl, directory: Path, changes: Mapping[str, Any]) -> Result:
    # The lines of stderr before the last one are the log.
    config = directory / 'refused.yaml'
    content = {'etcd': {**control.section, **changes}, 'placement': {'endpoint': control.placement.url}}
    config.write_text(yaml.safe_dump(content))
    fake = ['--fake', 'VCPU:1,DISK_GB:1,MEMORY_MB:1']
    command = [sys.executable, '-m', 'ecomp.compute', '--config', str(config), *fake]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, env=make_environment(), check=False)
    return Result(process.returncode, process.stdout, process.stderr.splitlines()[-1])


def is_listening(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(':')
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return False
    return True


def test_wrong_server_certificate_is_reported(
    secured: EtcdControl, compute: Ecompute, office: CertificateOffice
) -> None:
    """F35: etcd's certificate expired or for another name: reported, then repaired (fake)."""
    boot(secured)
    for hosts, days, words in ((HOSTS, -1, 'its certificate has expired'), (('elsewhere',), 10, 'for another name')):
        secured.etcd.kill()
        office.tls('server', *hosts, days=days)
        secured.etcd.launch()
        wait_until(lambda: is_listening(secured.etcd.endpoint), 30, 'etcd listens')
        check_refused(secured, {}, words)
        wait_until(
            lambda: len(find_log_lines(compute, LOST_MESSAGE)) > count_etcd_back(compute),
            20,
            'ecompute has said so, too',
        )
        secured.etcd.kill()
        office.tls('server', *HOSTS)
        secured.etcd.start()
        wait_until(
            lambda: count_etcd_back(compute) == len(find_log_lines(compute, LOST_MESSAGE)), 20, 'it follows etcd again'
        )


def count_etcd_back(compute: Ecompute) -> int:
    return len(find_log_lines(compute, ' INFO ', 'etcd at ', 'is back'))


@pytest.mark.slow
def test_replaced_client_certificate_is_loaded(secured: EtcdControl, office: CertificateOffice) -> None:
    """F35: a client certificate replaced on disk: the next connection uses it (fake)."""
    expired_pair = office.authority.issue(office.directory / 'late', 'ecomp', days=-1)
    compute = secured.ecompute()
    boot(secured)
    good = [path.read_bytes() for path in office.client]
    for source, target in zip(expired_pair, office.client, strict=True):
        shutil.copy(source, target)
    secured.etcd.restart()  # otherwise the existing connection would still work
    wait_until(lambda: find_log_lines(compute, LOST_MESSAGE), 20, 'the loss is logged')
    assert_one_line(secured.eschedule(SMALL_QUERY), 7, 'it refuses our certificate')
    # Intermediate states of a replacement: empty files, files of different pairs, truncated files.
    for torn in ((b'', b''), (good[0], expired_pair[1].read_bytes()), (good[0][:99], good[1]), (good[0], good[1][:99])):
        for content, target in zip(torn, office.client, strict=True):
            target.write_bytes(content)
        time.sleep(MAX_DELAY_SECONDS + 1)  # in that time it retries, after the longest delay too
        assert count_etcd_back(compute) == 0
        assert compute.is_running
    for content, target in zip(good, office.client, strict=True):
        target.write_bytes(content)
    wait_until(lambda: count_etcd_back(compute) == 1, 30, 'it is served again, with no restart')
    boot(secured)
    check_settled(secured, compute)
