"""Test the ready report of a guest: vendor-data's script, the metadata server and ecompute."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mdserver import guests, metadata, server

from ecomp.agent.host.metadata import GuestData
from ecomp.model.guest import GuestFailure, GuestReport
from ecomp.virt.xml import make_seed_url
from tests.functional.mdservers import AS_MODULE, start_server
from tests.kit.servers import wait_until

INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
MAC = '52:54:00:aa:00:01'
ADDRESS = '127.0.0.1'
STAGES = ('init-local', 'init', 'modules-config', 'modules-final')


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Provide the port of a metadata server that takes this machine for the guest."""
    (tmp_path / 'metadata').mkdir()
    (tmp_path / f'metadata/{MAC}.json').write_text(json.dumps({'instance': INSTANCE, 'mac': MAC}))
    leases = [{'ip-address': ADDRESS, 'mac-address': MAC, 'expiry-time': 0}]
    (tmp_path / 'virbr0.status').write_text(json.dumps(leases))
    (tmp_path / 'mdserver.conf').write_text('[mdserver]\nguests = metadata\nleases = *.status\n')
    with start_server(tmp_path, 'mdserver.conf', '--listen', f'{ADDRESS}:0', command=AS_MODULE) as process:
        yield process.port


class ScriptGuest:
    """A guest's directories that the script reads, and the script."""

    def __init__(self, root: Path, port: int) -> None:
        self.run = root / 'run'
        self.ssh = root / 'ssh'
        self.bin = root / 'bin'
        self.per_boot = root / 'per-boot'
        self.instance = root / 'instances' / INSTANCE
        for directory in (self.run, self.ssh, self.bin, self.instance):
            directory.mkdir(parents=True)
        self.serial = root / 'product_serial'
        self.serial.write_text(f'ds=nocloud-net;s={make_seed_url(INSTANCE)}\n')
        (self.bin / 'cloud-init').write_text(f'#!{sys.executable}\n')
        (self.bin / 'cloud-init').chmod(0o755)
        self.script = root / 'part-001'
        text = metadata.find_body(f'/seed/{INSTANCE}/vendor-data', guests.Guest(INSTANCE, 'web1', address=ADDRESS))
        assert text is not None
        script = text.decode().replace('/run/cloud-init/', f'{self.run}/').replace('/etc/ssh/', f'{self.ssh}/')
        script = script.replace('/var/lib/cloud/scripts/per-boot/', f'{self.per_boot}/')
        script = script.replace('/var/lib/cloud/instances/', f'{self.instance.parent}/')
        script = script.replace('/sys/class/dmi/id/product_serial', f'{self.serial}')
        self.script.write_text(script.replace('http://169.254.169.254/phone', f'http://{ADDRESS}:{port}/phone'))
        self.script.chmod(0o755)

    def make_host_key(self, kind: str) -> str:
        """Make a host key, and return its public part without the comment."""
        path = self.ssh / f'ssh_host_{kind}_key'
        subprocess.run(['ssh-keygen', '-q', '-t', kind, '-N', '', '-f', path], check=True, timeout=60)
        return ' '.join(path.with_suffix('.pub').read_text().split()[:2])

    def reboot(self) -> None:
        """Delete cloud-init's runtime files, and start the script that runs at each boot."""
        for path in self.run.iterdir():
            path.unlink()
        (self.script,) = self.per_boot.iterdir()
        self.start()

    def start(self) -> None:
        """Run the script, and fail if it blocks cloud-init."""
        path = f'{self.bin}:{os.environ["PATH"]}'
        result = subprocess.run([self.script], env={'PATH': path}, capture_output=True, timeout=20)
        assert (result.returncode, result.stdout, result.stderr) == (0, b'', b'')

    def finish_cloud_init(self, **errors: list[str]) -> None:
        """Write cloud-init's final status with the errors of its stages."""
        stages = {stage: {'errors': errors.get(stage.replace('-', '_'), [])} for stage in STAGES}
        (self.run / 'status.json').write_text(json.dumps({'v1': {'datasource': 'x', 'stage': None, **stages}}))
        (self.run / 'result.json').write_text('{}')


def test_successful_boot_reports_the_host_keys(tmp_path: Path, port: int) -> None:
    data, guest = GuestData(tmp_path / 'metadata'), ScriptGuest(tmp_path, port)
    keys = tuple(guest.make_host_key(kind) for kind in ('ed25519', 'ecdsa', 'rsa'))
    guest.start()
    assert data.find_ready() == set(), 'cloud-init has not ended'
    guest.finish_cloud_init()
    wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
    assert data.read_report(INSTANCE) == GuestReport(keys)
    assert data.read_instances() == {MAC: INSTANCE, INSTANCE: INSTANCE}


def test_guest_reports_again_at_each_boot(tmp_path: Path, port: int) -> None:
    data, guest = GuestData(tmp_path / 'metadata'), ScriptGuest(tmp_path, port)
    guest.finish_cloud_init(modules_final=['the first time'])
    guest.start()
    for _ in range(2):
        wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
        data.remove_report(INSTANCE)
        assert data.find_ready() == set()
        guest.reboot()
        assert data.find_ready() == set(), 'cloud-init has not ended'
        guest.finish_cloud_init()
    wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
    assert data.read_report(INSTANCE) == GuestReport(())


def test_network_guest_keeps_its_instance_cache(tmp_path: Path, port: int) -> None:
    """Check the file that makes cloud-init keep its cache.

    Without it, a guest that boots while no metadata server answers makes new host keys, and ssh refuses them.
    """
    data, guest = GuestData(tmp_path / 'metadata'), ScriptGuest(tmp_path, port)
    marker = guest.instance / 'manual-clean'
    guest.finish_cloud_init()
    guest.start()
    wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
    assert marker.exists()
    # The instance that cloud-init assumes when no server answers is never kept.
    assert [path.name for path in guest.instance.parent.iterdir()] == [INSTANCE]
    # A copy of the disk belongs to another instance, which boots for the first time.
    for serial in (f'ds=nocloud-net;s={make_seed_url(INSTANCE[::-1])}', ''):
        guest.serial.write_text(serial)
        data.remove_report(INSTANCE)
        guest.reboot()
        guest.finish_cloud_init()
        wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
        assert not marker.exists()
        marker.touch()


def test_failure_is_reported_with_cloud_init_s_message(tmp_path: Path, port: int) -> None:
    data, guest = GuestData(tmp_path / 'metadata'), ScriptGuest(tmp_path, port)
    error = "('scripts-user', RuntimeError('Runparts: 1 failures (part-001) in 1 attempted commands'))"
    guest.finish_cloud_init(modules_final=[error])
    guest.start()
    wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
    assert data.read_report(INSTANCE) == GuestReport((), GuestFailure('modules-final', error))


def post(port: int, body: bytes) -> int:
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=20)
    with contextlib.closing(connection):
        connection.request('POST', f'/phone-home/{INSTANCE}/', body)
        return connection.getresponse().status


def test_first_report_counts_and_its_length_is_limited(tmp_path: Path, port: int) -> None:
    data = GuestData(tmp_path / 'metadata')
    assert post(port, b'stage=' + b'x' * (server.MAX_BODY_BYTES - 5)) == 413
    assert post(port, b'&'.join(b'a=b' for _ in range(metadata.MAX_FORM_FIELDS + 1))) == 400
    assert data.find_ready() == set()
    assert post(port, b'stage=init&error=' + 'ü'.encode() * 2039) == 200
    report = data.read_report(INSTANCE)
    assert report.failure is not None
    assert report.failure.stage == 'init'
    assert post(port, b'pub_key_ed25519=none') == 200
    assert data.read_report(INSTANCE) == report
    # remove() deletes a truncated report, too.
    (tmp_path / f'metadata/{INSTANCE}.said').write_text('{')
    data.remove(INSTANCE, [MAC])
    assert list((tmp_path / 'metadata').iterdir()) == []
