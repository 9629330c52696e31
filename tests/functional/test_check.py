"""Plant faults on a host with its own libvirt, run `ecompute --check`, and apply its fixes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
import yaml

from ecomp import backends
from ecomp.agent import checking
from ecomp.compute_conf import load_compute
from ecomp.conf import EtcdConfig, PlacementConfig
from ecomp.model.finding import SERVERS, run_checks
from ecomp.model.health import CHECKS
from tests.functional.libvirt_host import LibvirtHost, describe_missing, start_libvirt_host
from tests.kit.certificates import Authority
from tests.kit.commands import Command
from tests.kit.listening import CannedServer, make_answer
from tests.kit.servers import Etcd, PlacementServer, free_port, make_environment, wait_until

FINDING_PATTERN = re.compile(r'(?P<check>[a-z-]+): (?P<what>.+)\. Fix: (?P<cure>.+)')


@pytest.fixture(scope='module')
def host() -> Iterator[LibvirtHost]:
    if reason := describe_missing():
        pytest.skip(f'no libvirtd of our own: {reason}')
    with start_libvirt_host() as own_host:
        own_host.run_inside(['virsh', '-q', 'net-start', 'default'])
        yield own_host


class Checker:
    """Run `ecompute --check`, without the findings that etcd and placement are unreachable."""

    def __init__(self, host: LibvirtHost) -> None:
        self.host, self.environ = host, make_environment()
        self.settings: dict[str, object] = {}
        self.state = host.root / 'state'

    def __call__(self) -> dict[str, tuple[str, str]]:
        """Return {check: (finding, fix)}."""
        config = self.host.root / 'compute.yaml'
        quick = {'etcd': {'timeout': 0.5}}
        config.write_text(yaml.safe_dump({'state': str(self.state), **quick, **self.settings}))
        command = [sys.executable, '-m', 'ecomp.compute', '--check', '--config', str(config)]
        with Command(command, self.host.root, self.environ, self.host.read_pid('virtlogd')) as process:
            result = process.wait()
        assert (result.code, len(result.stderr.splitlines())) == (7, 1), result
        findings = {}
        for line in result.stdout.splitlines():
            match = FINDING_PATTERN.fullmatch(line)
            assert match is not None, line
            findings[match['check']] = (match['what'], match['cure'])
        for backend in ('etcd', 'placement'):
            assert findings.pop(backend)[1] == f'start {backend} at this address, or correct `{backend}:` in {config}'
        return findings

    def get_fix(self, check: str, *texts: str) -> str:
        findings = self()
        assert list(findings) == [check]
        assert all(text in findings[check][0] for text in texts), findings
        return findings[check][1]

    def apply_fix(self, fix: str) -> None:
        self.host.run_inside(['sh', '-e', '-c', fix])
        assert self() == {}


@pytest.fixture
def check(host: LibvirtHost) -> Iterator[Checker]:
    checker = Checker(host)
    checker.state.mkdir(mode=0o711)
    if Path('/dev/kvm').exists():
        # As the distribution's package sets it: QEMU's user is in the group kvm.
        host.run_inside(['sh', '-c', 'chgrp kvm /dev/kvm; chmod 660 /dev/kvm'])
    yield checker
    subprocess.run(['rm', '-rf', str(checker.state)], check=True)


def read_host_state(host: LibvirtHost, state: Path) -> tuple[object, ...]:
    """Return all that a check could change."""
    commands = ('pool-list --all', 'net-list --all', 'nwfilter-list', 'list --all')
    outputs = [host.run_inside(['virsh', *words.split()]).stdout for words in commands]
    links = host.run_inside(['ip', '-o', 'address']).stdout
    return (*outputs, re.sub(r'valid_lft.*', '', links), sorted(map(str, state.rglob('*'))), state.stat().st_mode)


def test_healthy_host_has_no_findings_and_is_not_changed(check: Checker, host: LibvirtHost) -> None:
    before = read_host_state(host, check.state)
    assert check() == {}
    assert read_host_state(host, check.state) == before


def test_inaccessible_kvm_is_fixed(check: Checker, host: LibvirtHost) -> None:
    if not Path('/dev/kvm').exists():
        pytest.skip('this machine has no /dev/kvm whose rights could be wrong')
    host.run_inside(['sh', '-c', 'chgrp root /dev/kvm; chmod 600 /dev/kvm'])
    check.apply_fix(check.get_fix('kvm', 'libvirt-qemu cannot open /dev/kvm', 'up to a minute'))


def test_state_directory_that_qemu_cannot_enter_is_fixed(check: Checker) -> None:
    check.state.chmod(0o700)
    check.apply_fix(check.get_fix('way', 'libvirt-qemu, which cannot enter', str(check.state)))


def test_missing_bridge_is_fixed(check: Checker, host: LibvirtHost) -> None:
    check.settings['networks'] = [{'network': 'default'}, {'bridge': 'brgone'}]
    try:
        check.apply_fix(check.get_fix('network', 'no bridge brgone'))
    finally:
        host.run_inside(['ip', 'link', 'delete', 'brgone'])


def test_inactive_network_is_fixed(check: Checker, host: LibvirtHost) -> None:
    host.run_inside(['virsh', '-q', 'net-destroy', 'default'])
    check.apply_fix(check.get_fix('network', 'default is not active'))


def test_state_directory_of_another_user_is_fixed(check: Checker) -> None:
    os.chown(check.state, 12345, -1)
    check.apply_fix(check.get_fix('state', 'belongs to user 12345'))


def test_pool_over_another_directory_is_fixed(check: Checker, host: LibvirtHost, tmp_path: Path) -> None:
    host.run_inside(['virsh', '-q', 'pool-define-as', 'ecompute', 'dir', '--target', str(tmp_path)])
    host.run_inside(['virsh', '-q', 'pool-start', 'ecompute'])
    *_, command, end = check.get_fix('pool', f'ecompute is in {tmp_path}').split('`')
    assert end == ''
    check.apply_fix(command)


def test_web_server_on_port_of_metadata_server_is_found(check: Checker, host: LibvirtHost, tmp_path: Path) -> None:
    """A metadata server there is not a finding, with or without the bridge's address."""
    bind = ['ip', 'address', 'add', '169.254.169.254/32', 'dev', 'virbr0']
    remove = [*bind[:2], 'delete', *bind[3:]]
    for paths, is_found in (('index.html', True), ('latest 2009-04-04', False)):
        directory = tmp_path / paths.replace(' ', '_')
        directory.mkdir()
        (directory / 'index.html').write_text('\n'.join(paths.split()))
        serve = [sys.executable, '-m', 'http.server', '80', '--directory', str(directory)]
        web = subprocess.Popen(
            ['nsenter', '-t', str(host.read_pid('virtlogd')), '-m', '-n', *serve], stderr=subprocess.DEVNULL
        )
        try:
            wait_until(
                lambda: host.run_inside(['ss', '-Hltn', 'sport = :80']).stdout or None, 20, 'the web server listens'
            )
            for has_address in (False, True):
                if has_address:
                    host.run_inside(bind)
                try:
                    if is_found:
                        assert 'ss -ltnp' in check.get_fix('metadata', 'not a metadata server, listens on port 80')
                        check.settings['metadata'] = 'iso'
                    if has_address or not is_found:
                        assert check() == {}
                finally:
                    check.settings.pop('metadata', None)
                    if has_address:
                        host.run_inside(remove)
        finally:
            web.terminate()
            web.wait(10)


def test_proxy_in_environment_is_found(check: Checker) -> None:
    check.environ['http_proxy'] = 'http://127.0.0.1:3128'
    cure = check.get_fix('proxy', 'the proxy in the environment (http_proxy)')
    name = cure.rpartition('`unset ')[2].removesuffix('`')
    del check.environ[name]
    assert check() == {}


def test_full_disk_is_found(check: Checker, host: LibvirtHost) -> None:
    state, check.state = check.state, host.root / 'small/state'
    check.state.mkdir(mode=0o711)
    (host.root / 'small').chmod(0o711)
    try:
        assert check.get_fix('disk', ' MiB free, less than 2048 MiB').endswith('or set another `state:`')
    finally:
        check.state.rmdir()
        check.state = state
    assert check() == {}


def test_network_without_metadata_server_is_fixed(check: Checker, host: LibvirtHost) -> None:
    host.run_inside(['ip', 'link', 'add', 'brlan', 'type', 'bridge'])
    check.settings['networks'] = [{'bridge': 'brlan'}]
    try:
        cure = check.get_fix('metadata', '169.254.169.254')
        check.settings |= yaml.safe_load(re.findall('`(.+)`', cure)[0])
        assert check() == {}
    finally:
        host.run_inside(['ip', 'link', 'delete', 'brlan'])


def test_stopped_libvirtd_is_found(check: Checker, host: LibvirtHost) -> None:
    host.kill_libvirtd()
    try:
        assert check.get_fix('libvirt', 'qemu:///system', 'libvirtd may not be running') == 'systemctl start libvirtd'
    finally:
        host.start_libvirtd()
    wait_until(lambda: check() == {}, 30, 'libvirtd is back')


@pytest.mark.skipif(os.geteuid() != 0, reason='only root gives a directory away')
def test_unreadable_state_directory_does_not_stop_other_checks(tmp_path: Path) -> None:
    private = tmp_path / 'away'
    private.mkdir(mode=0o700)
    os.chown(private, 65534, 65534)
    config = tmp_path / 'compute.yaml'
    etcd = {'endpoints': [f'127.0.0.1:{free_port()}'], 'timeout': 0.5}
    config.write_text(yaml.safe_dump({'state': str(private / 'ecompute/state'), 'etcd': etcd}))
    command = ['setpriv', '--bounding-set=-dac_override,-dac_read_search', '--inh-caps=-all', '--reuid=0', '--']
    command += [sys.executable, '-m', 'ecomp.compute', '--check', '--config', str(config)]
    result = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 7, result
    assert result.stdout.startswith('etcd: ')


def test_missing_libvirt_python_is_fixed_by_installing_it(tmp_path: Path) -> None:
    """Starting libvirtd with systemctl would not help if a package is missing."""
    config = tmp_path / 'compute.yaml'
    etcd = {'endpoints': [f'127.0.0.1:{free_port()}'], 'timeout': 0.5}
    config.write_text(yaml.safe_dump({'state': str(tmp_path / 'state'), 'etcd': etcd}))
    script = 'import sys; sys.modules["libvirt"] = None; from ecomp.compute import main; sys.exit(main())'
    command = [sys.executable, '-c', script, '--check', '--config', str(config)]
    result = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=False, timeout=120)
    (line,) = [printed for printed in result.stdout.splitlines() if printed.startswith('libvirt')]
    fix = f"install libvirt-dev, pkg-config and gcc, then run `{sys.executable} -m pip install '.[hypervisor]'` in a "
    assert line.startswith(f'libvirt: libvirt-python is missing. Fix: {fix}'), result


def test_invalid_settings_are_found_before_a_start(etcd: Etcd, placement: PlacementServer, tmp_path: Path) -> None:
    """Otherwise `systemctl enable --now` would leave a failed unit that is not restarted."""
    settings = {
        'state': str(tmp_path / 'state'), 'images': 'images',
        'etcd': {'endpoints': [etcd.endpoint]}, 'placement': {'endpoint': placement.url},
        'inventory': {'MEMORY': 2048, 'VGPU': 1}, 'allocation_ratios': {'VPCU': 4, 'VGPU': 1, 'VCPU': 4},
    }  # fmt: skip

    def check_config(**changed: object) -> list[str]:
        (tmp_path / 'compute.yaml').write_text(yaml.safe_dump(settings | changed))
        config = load_compute(tmp_path / 'compute.yaml')
        found = (*checking.find_refusals(config, True), checking.explain_missing_images(config))
        return [problem.what for problem in found if problem]

    assert check_config() == [
        'allocation_ratios: the inventory has no VPCU, only DISK_GB, MEMORY, MEMORY_MB, VCPU, VGPU',
        'inventory: placement knows no resource class MEMORY (did you mean MEMORY_MB?)',
        f'`images:` {tmp_path}/images is not a directory: each file:// image fails',
    ]
    (tmp_path / 'images').mkdir()
    custom = {'inventory': {'CUSTOM_FPGA': 1}, 'allocation_ratios': {'VCPU': 4}}
    assert check_config(**custom) == ['inventory: placement knows no resource class CUSTOM_FPGA']
    assert check_config(traits=['HW_CPU_X86_AVX2'], inventory={'VGPU': 1}, allocation_ratios={'VGPU': 1}) == []
    # Findings that do not need placement are reported even if placement is unreachable.
    (tmp_path / 'compute.yaml').write_text(yaml.safe_dump(settings))
    (ratio,) = checking.find_refusals(load_compute(tmp_path / 'compute.yaml'), False)
    assert ratio.what.startswith('allocation_ratios: ')


# Checks of the control plane, which ecompute and eschedule share


def start_odd_placement(microversion: str, ahead: timedelta) -> CannedServer:
    body = f'{{"versions": [{{"max_version": "{microversion}"}}], "traits": []}}'.encode()
    date = format_datetime(datetime.now(UTC) + ahead, usegmt=True)
    return CannedServer(make_answer(200, 'application/json', body, f'date: {date}'))


def list_failed_checks(etcd: Etcd, url: str, **certificates: Path) -> set[str]:
    state = backends.probe_backends(
        EtcdConfig((etcd.endpoint,)), PlacementConfig(url, **certificates), None, 'schedule.yaml'
    )
    return {finding.code for finding in run_checks(CHECKS, SERVERS, state)} - {'etcd-version'}


def test_odd_placement_and_its_clock_are_found(etcd: Etcd, placement: PlacementServer, tmp_path: Path) -> None:
    assert list_failed_checks(etcd, placement.url) == set()
    for microversion, ahead, failed_checks in (
        ('1.39', timedelta(0), set()),
        ('1.30', timedelta(0), {'placement-version'}),
        ('1.39', timedelta(hours=1), {'clock'}),
        ('latest', timedelta(hours=-1), {'clock', 'placement-version'}),
    ):
        with closing(start_odd_placement(microversion, ahead)) as server:
            assert list_failed_checks(etcd, server.url) == failed_checks
    # A server that is not placement.
    assert list_failed_checks(etcd, f'http://{etcd.endpoint}') == {'placement'}
    assert list_failed_checks(etcd, f'http://127.0.0.1:{free_port()}') == {'placement'}
    certificate, key = Authority(tmp_path / 'ca').issue(tmp_path, 'client', 'localhost', days=-1)
    assert list_failed_checks(etcd, placement.url, cert_cert=certificate, cert_key=key) == {'certificate'}
