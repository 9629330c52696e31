"""`ecompute --check` on a host with a libvirt of its own: planted faults are found, and each cure as printed mends."""

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
from ecomp.model import health
from tests.functional.libvirt_host import LibvirtHost, libvirt_host, missing
from tests.kit.certificates import Authority
from tests.kit.listening import CannedServer, make_answer
from tests.kit.servers import Etcd, PlacementServer, environment, free_port, until

LINE = re.compile(r'(?P<check>[a-z-]+): (?P<what>.+)\. Mend it: (?P<cure>.+)')


@pytest.fixture(scope='module')
def host() -> Iterator[LibvirtHost]:
    if lacking := missing():
        pytest.skip(f'no libvirtd of our own: {lacking}')
    with libvirt_host() as made:
        made.inside(['virsh', '-q', 'net-start', 'default'])
        yield made


class Checked:
    """ecompute --check on the host, with settings of its own; what it finds, but that etcd and placement are away."""

    def __init__(self, host: LibvirtHost) -> None:
        self.host, self.environ = host, environment()
        self.settings: dict[str, object] = {}
        self.state = host.root / 'state'

    def __call__(self) -> dict[str, tuple[str, str]]:
        """{check: (what, cure)}."""
        config = self.host.root / 'compute.yaml'
        quick = {'etcd': {'timeout': 0.5}}
        config.write_text(yaml.safe_dump({'state': str(self.state), **quick, **self.settings}))
        words = [sys.executable, '-m', 'ecomp.compute', '--check', '--config', str(config)]
        done = self.host.inside(words, self.environ, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (7, 1), done
        found = {}
        for line in done.stdout.splitlines():
            told = LINE.fullmatch(line)
            assert told is not None, line
            found[told['check']] = (told['what'], told['cure'])
        for backend in ('etcd', 'placement'):
            assert f'{config} told where it is' in found.pop(backend)[1]
        return found

    def cure(self, check: str, *says: str) -> str:
        """The cure of the one thing that it finds; each of `says` is in what it finds."""
        found = self()
        assert list(found) == [check]
        assert all(each in found[check][0] for each in says), found
        return found[check][1]

    def mended(self, cure: str) -> None:
        """Run the cure as it is printed; then nothing is wrong."""
        self.host.inside(['sh', '-e', '-c', cure])
        assert self() == {}


@pytest.fixture
def check(host: LibvirtHost) -> Iterator[Checked]:
    checked = Checked(host)
    checked.state.mkdir(mode=0o711)
    if Path('/dev/kvm').exists():
        # As the machine's package has it: of its group, which QEMU's user is in.
        host.inside(['sh', '-c', 'chgrp kvm /dev/kvm; chmod 660 /dev/kvm'])
    yield checked
    subprocess.run(['rm', '-rf', str(checked.state)], check=True)


def everything(host: LibvirtHost, state: Path) -> tuple[object, ...]:
    """All that a check could change: libvirt's pools, networks and filters, the bridges, and the state directory."""
    asked = ('pool-list --all', 'net-list --all', 'nwfilter-list', 'list --all')
    said = [host.inside(['virsh', *each.split()]).stdout for each in asked]
    links = host.inside(['ip', '-o', 'address']).stdout
    return (*said, re.sub(r'valid_lft.*', '', links), sorted(map(str, state.rglob('*'))), state.stat().st_mode)


def test_a_host_that_is_well_has_nothing_and_is_as_it_was(check: Checked, host: LibvirtHost) -> None:
    before = everything(host, check.state)
    assert check() == {}
    assert everything(host, check.state) == before


def test_kvm_that_qemu_may_not_open(check: Checked, host: LibvirtHost) -> None:
    if not Path('/dev/kvm').exists():
        pytest.skip('this machine has no /dev/kvm whose rights could be wrong')
    host.inside(['sh', '-c', 'chgrp root /dev/kvm; chmod 600 /dev/kvm'])
    check.mended(check.cure('kvm', 'cannot be opened by libvirt-qemu', 'up to a minute'))


def test_disks_that_qemu_cannot_get_at(check: Checked) -> None:
    check.state.chmod(0o700)
    check.mended(check.cure('way', 'libvirt-qemu, who cannot enter', str(check.state)))


def test_a_bridge_that_is_gone(check: Checked, host: LibvirtHost) -> None:
    check.settings['networks'] = [{'network': 'default'}, {'bridge': 'brgone'}]
    try:
        check.mended(check.cure('network', 'no bridge brgone'))
    finally:
        host.inside(['ip', 'link', 'delete', 'brgone'])


def test_a_network_that_is_not_active(check: Checked, host: LibvirtHost) -> None:
    host.inside(['virsh', '-q', 'net-destroy', 'default'])
    check.mended(check.cure('network', 'default is not active'))


def test_a_state_directory_of_another_user(check: Checked) -> None:
    os.chown(check.state, 12345, -1)
    check.mended(check.cure('state', 'belongs to user 12345'))


def test_a_pool_over_another_directory(check: Checked, host: LibvirtHost, tmp_path: Path) -> None:
    host.inside(['virsh', '-q', 'pool-define-as', 'ecompute', 'dir', '--target', str(tmp_path)])
    host.inside(['virsh', '-q', 'pool-start', 'ecompute'])
    check.mended(check.cure('pool', f'over {tmp_path}'))


def test_a_web_server_where_the_metadata_server_would_listen(check: Checked, host: LibvirtHost, tmp_path: Path) -> None:
    """One on all addresses; one for metadata there is no finding, with the bridge's address or without it."""
    bind = ['ip', 'address', 'add', '169.254.169.254/32', 'dev', 'virbr0']
    remove = [*bind[:2], 'delete', *bind[3:]]
    for paths, finds in (('index.html', True), ('latest 2009-04-04', False)):
        served = tmp_path / paths.replace(' ', '_')
        served.mkdir()
        (served / 'index.html').write_text('\n'.join(paths.split()))
        serve = [sys.executable, '-m', 'http.server', '80', '--directory', str(served)]
        web = subprocess.Popen(
            ['nsenter', '-t', str(host.pid('virtlogd')), '-m', '-n', *serve], stderr=subprocess.DEVNULL
        )
        try:
            until(lambda: host.inside(['ss', '-Hltn', 'sport = :80']).stdout or None, 20, 'the web server listens')
            for has_address in (False, True):
                if has_address:
                    host.inside(bind)
                try:
                    if finds:
                        assert 'ss -ltnp' in check.cure('metadata', 'port 80 is no metadata server')
                        check.settings['metadata'] = 'iso'
                    assert check() == {}
                finally:
                    check.settings.pop('metadata', None)
                    if has_address:
                        host.inside(remove)
        finally:
            web.terminate()
            web.wait(10)
    assert check() == {}


def test_a_proxy_in_the_way(check: Checked) -> None:
    check.environ['http_proxy'] = 'http://127.0.0.1:3128'
    cure = check.cure('proxy', 'http_proxy is in the environment')
    name = cure.rpartition('unset ')[2]
    del check.environ[name]
    assert check() == {}


def test_a_disk_that_is_full(check: Checked, host: LibvirtHost) -> None:
    there, check.state = check.state, host.root / 'small/state'
    check.state.mkdir(mode=0o711)
    (host.root / 'small').chmod(0o711)
    try:
        assert check.cure('disk', 'is full').endswith('or set another `state:`')
    finally:
        check.state.rmdir()
        check.state = there
    assert check() == {}


def test_networks_without_metadata(check: Checked, host: LibvirtHost) -> None:
    host.inside(['ip', 'link', 'add', 'brlan', 'type', 'bridge'])
    check.settings['networks'] = [{'bridge': 'brlan'}]
    try:
        cure = check.cure('metadata', '169.254.169.254')
        check.settings |= yaml.safe_load(re.findall('`(.+)`', cure)[0])
        assert check() == {}
    finally:
        host.inside(['ip', 'link', 'delete', 'brlan'])


def test_libvirt_that_is_away(check: Checked, host: LibvirtHost) -> None:
    host.kill_libvirtd()
    try:
        assert check.cure('libvirt', 'qemu:///system', 'is libvirtd running?') == 'systemctl start libvirtd'
    finally:
        host.start_libvirtd()
    until(lambda: check() == {}, 30, 'libvirtd is back')


@pytest.mark.skipif(os.geteuid() != 0, reason='only root gives a directory away')
def test_a_state_directory_where_we_may_not_look(tmp_path: Path) -> None:
    """All is looked at all the same."""
    away = tmp_path / 'away'
    away.mkdir(mode=0o700)
    os.chown(away, 65534, 65534)
    config = tmp_path / 'compute.yaml'
    etcd = {'endpoints': [f'127.0.0.1:{free_port()}'], 'timeout': 0.5}
    config.write_text(yaml.safe_dump({'state': str(away / 'ecompute/state'), 'etcd': etcd}))
    command = ['setpriv', '--bounding-set=-dac_override,-dac_read_search', '--inh-caps=-all', '--reuid=0', '--']
    command += [sys.executable, '-m', 'ecomp.compute', '--check', '--config', str(config)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 7, done
    assert done.stdout.startswith('etcd: ')


def test_what_libvirt_lacks_is_what_its_cure_installs(tmp_path: Path) -> None:
    """Neither libvirt-python nor libvirtd is started by systemctl where it is not installed."""
    config = tmp_path / 'compute.yaml'
    etcd = {'endpoints': [f'127.0.0.1:{free_port()}'], 'timeout': 0.5}
    config.write_text(yaml.safe_dump({'state': str(tmp_path / 'state'), 'etcd': etcd}))
    hidden = 'import sys; sys.modules["libvirt"] = None; from ecomp.compute import main; sys.exit(main())'
    command = [sys.executable, '-c', hidden, '--check', '--config', str(config)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    (line,) = [each for each in done.stdout.splitlines() if each.startswith('libvirt')]
    cure = f"in a clone of ecomp: {sys.executable} -m pip install '.[hypervisor]' (it needs "
    assert line.startswith(f'libvirt: libvirt-python is missing. Mend it: {cure}'), done


def test_what_a_start_would_refuse(etcd: Etcd, placement: PlacementServer, tmp_path: Path) -> None:
    """A check that is silent of it has `systemctl enable --now` end with a unit that is not started again."""
    settings = {
        'state': str(tmp_path / 'state'), 'images': 'images',
        'etcd': {'endpoints': [etcd.endpoint]}, 'placement': {'endpoint': placement.url},
        'inventory': {'MEMORY': 2048, 'VGPU': 1}, 'allocation_ratios': {'VPCU': 4, 'VGPU': 1, 'VCPU': 4},
    }  # fmt: skip

    def found(**changed: object) -> list[str]:
        (tmp_path / 'compute.yaml').write_text(yaml.safe_dump(settings | changed))
        config = load_compute(tmp_path / 'compute.yaml')
        return [str(each) for each in (*checking.refused(config, True), checking.no_images(config)) if each]

    assert found() == [
        'allocation_ratios: there is no VPCU here, only DISK_GB, MEMORY, MEMORY_MB, VCPU, VGPU',
        'inventory: placement knows no resource class MEMORY (did you mean MEMORY_MB?)',
        str(tmp_path / 'images'),
    ]
    (tmp_path / 'images').mkdir()
    custom = {'inventory': {'CUSTOM_FPGA': 1}, 'allocation_ratios': {'VCPU': 4}}
    assert found(**custom) == ['inventory: placement knows no resource class CUSTOM_FPGA']
    assert found(traits=['HW_CPU_X86_AVX2'], inventory={'VGPU': 1}, allocation_ratios={'VGPU': 1}) == []
    # What placement is not asked for is all the same looked at where it is away.
    (tmp_path / 'compute.yaml').write_text(yaml.safe_dump(settings))
    (ratio,) = checking.refused(load_compute(tmp_path / 'compute.yaml'), False)
    assert ratio.startswith('allocation_ratios: ')


# The control plane, as both commands look at it


def odd_placement(microversion: str, ahead: timedelta) -> CannedServer:
    """A placement with this newest microversion, whose clock is ahead of ours."""
    body = f'{{"versions": [{{"max_version": "{microversion}"}}], "traits": []}}'.encode()
    date = format_datetime(datetime.now(UTC) + ahead, usegmt=True)
    return CannedServer(make_answer(200, 'application/json', body, f'date: {date}'))


def found(etcd: Etcd, url: str, **certificates: Path) -> set[str]:
    """The checks that find something, but of etcd's version, which is the machine's."""
    seen = backends.look(EtcdConfig((etcd.endpoint,)), PlacementConfig(url, **certificates), None, 'schedule.yaml')
    return {each.check for each in health.of_backends(seen)} - {'etcd-version'}


def test_a_strange_placement_and_its_clock(etcd: Etcd, placement: PlacementServer, tmp_path: Path) -> None:
    assert found(etcd, placement.url) == set()
    for microversion, ahead, wrong in (
        ('1.39', timedelta(0), set()),
        ('1.30', timedelta(0), {'placement-version'}),
        ('1.39', timedelta(hours=1), {'clock'}),
        ('latest', timedelta(hours=-1), {'clock', 'placement-version'}),
    ):
        with closing(odd_placement(microversion, ahead)) as server:
            assert found(etcd, server.url) == wrong
    # And something else that answers there.
    assert found(etcd, f'http://{etcd.endpoint}') == {'placement'}
    assert found(etcd, f'http://127.0.0.1:{free_port()}') == {'placement'}
    certificate, key = Authority(tmp_path / 'ca').issue(tmp_path, 'client', 'localhost', days=-1)
    assert found(etcd, placement.url, cert_cert=certificate, cert_key=key) == {'certificate'}


def test_an_etcd_that_is_gone(placement: PlacementServer) -> None:
    nowhere, told = EtcdConfig((f'127.0.0.1:{free_port()}',)), Path('/x/schedule.yaml')
    (ailment,) = health.of_backends(backends.look(nowhere, PlacementConfig(placement.url), told, 'schedule.yaml'))
    assert (ailment.check, 'cannot be reached' in ailment.what) == ('etcd', True)
    assert ailment.cure.startswith('/x/schedule.yaml told where it is')
