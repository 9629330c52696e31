"""Faults of a lab fire each alert, and each panel has data: docs/howto/monitor.md.

The alerts are those of examples/prometheus, with their minutes divided by 30.
With ECOMP_DASHBOARD=write the test writes docs/howto/dashboard.svg, the picture of what it did.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import dashboard
from docs.dashboard import get_json
from ecomp.lab import state
from ecomp.lab.network import CONTROL
from tests.kit.hypervisor import Hypervisor
from tests.kit.lab import Lab, is_alive, make_lab_name
from tests.kit.lab_fixtures import start_lab
from tests.kit.servers import TOP, Server, wait_until

PAGE, RULES = TOP / 'docs/howto/monitor.md', TOP / 'examples/prometheus/ecomp.rules.yaml'
# As Debian's package installs it: the page says what to add, and what to remove.
PROMETHEUS_YML = Path('/etc/prometheus/prometheus.yml')
# By this factor the minutes of the alerts are shorter.
SPEED = 30
# Seconds in which the slowest metrics change: ecompute asks placement once a minute, and writes its file every 15 s.
CHANGE_SECONDS = 90.0
# What the page calls a few places.
COLLECTED, COMPUTE_YAML = '/var/lib/prometheus/node-exporter', '/etc/ecomp/compute.yaml'
ESCHEDULE = '/opt/ecomp/bin/eschedule --config /root/.config/ecomp/schedule.yaml'
CONTROL_ADDRESS = '10.0.0.5'


def find_in_page(pattern: str) -> str:
    (found,) = re.findall(pattern, PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def shorten_minutes(rules: str) -> str:
    shortened = re.sub(r'(for: |\[)(\d+)m\b', lambda found: f'{found[1]}{int(found[2]) * 60 // SPEED}s', rules)
    before, after = (yaml.safe_load(text)['groups'][0]['rules'] for text in (rules, shortened))
    for old, new in zip(before, after, strict=True):
        assert re.sub(r'\[\w+\]', '', old['expr']) == re.sub(r'\[\w+\]', '', new['expr'])
        assert not re.search(r'\d+[mhd]\b', f'{new["expr"]} {new.get("for")}'), new
    return shortened


class LabProgram(Server):
    def __init__(self, lab: Lab, place: str, name: str, words: Sequence[str], url: str) -> None:
        self.name, self.url = name, url
        super().__init__(lab.directory / f'{place}-{name}')
        self._command = [*state.load(lab.name).make_command_prefix(place), *words]

    def command(self) -> list[str]:
        return self._command

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url, timeout=5) as answer:
            return bool(answer.status == 200)
        return False


class ClusterMetrics(Server):
    """The service of the page that runs `eschedule top -f prometheus`, every 2 s."""

    name = 'cluster-metrics'

    def __init__(self, lab: Lab, directory: Path) -> None:
        super().__init__(directory)
        service = find_in_page(r"^    ExecStart=/bin/sh -c '(.*?)'$")
        own = f'{sys.executable} -m ecomp.schedule --config {lab.directory}/schedule.yaml'
        assert ESCHEDULE in service
        script = re.sub(r'\\\n\s*', ' ', service).replace(ESCHEDULE, own)
        self._script = f"trap 'exit 0' TERM; while :; do {script}; sleep 2; done"

    def command(self) -> list[str]:
        return ['/bin/sh', '-c', self._script]

    def is_ready(self) -> bool:
        return (self.directory / 'ecomp-cluster.prom').exists()


class Monitoring:
    """The monitoring of a lab, with a line in `log` for each alert that fired or ended."""

    def __init__(self, lab: Lab, at_exit: ExitStack) -> None:
        self.lab, self.log = lab, list[str]()
        layout = state.load(lab.name).layout
        addresses = {CONTROL: str(layout.control), **{host: str(layout.get_address(host)) for host in lab.hosts}}
        for place, address in addresses.items():
            directory = lab.directory / f'{place}-collected'
            directory.mkdir(mode=0o755)
            if place == CONTROL:
                metrics = at_exit.enter_context(ClusterMetrics(lab, directory))
                at_exit.callback(metrics.stop)
            else:
                self._add_metrics(place, directory)
            words = ['prometheus-node-exporter', '--collector.disable-defaults', '--collector.textfile']
            words += [f'--collector.textfile.directory={directory}', f'--web.listen-address={address}:9100']
            at_exit.enter_context(LabProgram(lab, place, 'exporter', words, f'http://{address}:9100/'))
        self.url, self.control_instance = f'http://{layout.control}:9090', f'{layout.control}:9100'
        (directory := lab.directory / f'{CONTROL}-prometheus').mkdir()
        (directory / 'ecomp.rules.yaml').write_text(shorten_minutes(RULES.read_text()))
        (directory / 'prometheus.yml').write_text(self._make_configuration(addresses[CONTROL]))
        names = {'localhost': '127.0.0.1', **addresses}
        (directory / 'hosts').write_text(''.join(f'{address} {name}\n' for name, address in names.items()))
        prometheus = [
            *('prometheus', f'--config.file={directory}/prometheus.yml', f'--storage.tsdb.path={directory}/data'),
            *('--web.listen-address=:9090', '--log.level=warn'),
        ]
        # So that the page's names of hosts are known to it alone.
        words = ['unshare', '--mount', 'sh', '-c', 'mount --bind "$0" /etc/hosts && exec "$@"', f'{directory}/hosts']
        ready = f'{self.url}/-/ready'
        at_exit.enter_context(LabProgram(lab, CONTROL, 'prometheus', [*words, *prometheus], ready))

    def _add_metrics(self, host: str, directory: Path) -> None:
        """Type what the page says for a hypervisor, and look at its file."""
        places = {COLLECTED: str(directory), COMPUTE_YAML: str(self.lab.directory / host / 'compute.yaml')}
        setting, look = find_in_page(r"^    (echo 'metrics:.*?)$"), find_in_page(r'^    (grep \^ecomp_.*?)$')
        for old, new in places.items():
            assert old in setting
            setting, look = setting.replace(old, new), look.replace(old, new)
        subprocess.run(['sh', '-c', setting], check=True)
        self.lab.stop_ecompute(host)
        self.lab.start_ecomputes()
        file = directory / 'ecompute.prom'
        wait_until(file.exists, 60, f'{host} writes its metrics')
        assert 'ecomp_instances{state="active"} ' in subprocess.check_output(['sh', '-c', look], text=True)

    @staticmethod
    def _make_configuration(control: str) -> str:
        settings = yaml.safe_load(PROMETHEUS_YML.read_text())
        addition = find_in_page(r'^(    rule_files:.*?)\n\n')
        assert CONTROL_ADDRESS in addition
        for key, added in yaml.safe_load(addition.replace(CONTROL_ADDRESS, control)).items():
            settings[key] = [each for each in settings[key] or [] if each.get('job_name') != 'node'] + added
        settings['global'] |= {'scrape_interval': '1s', 'evaluation_interval': '1s'}
        del settings['alerting']
        return yaml.safe_dump(settings)

    def get(self, path: str, **parameters: str) -> Any:
        return get_json(f'{self.url}/api/v1/{path}', **parameters)

    def query(self, expression: str) -> list[float]:
        return [float(each['value'][1]) for each in self.get('query', query=expression)['result']]

    def list_alerts(self, *states: str) -> list[str]:
        alerts = self.get('alerts')['alerts']
        return [alert['labels']['alertname'] for alert in alerts if alert['state'] in states]

    def list_fired(self, began: float) -> dict[str, set[str]]:
        """Return the alerts that have fired since then, each with its other labels' values."""
        now = time.time()
        times = {'start': f'{began}', 'end': f'{now}', 'step': '1'}
        fired: dict[str, set[str]] = {}
        for found in self.get('query_range', query='ALERTS{alertstate="firing"}', **times)['result']:
            labels = found['metric']
            own = {name for name in labels if name not in ('__name__', 'alertname', 'alertstate', 'severity', 'job')}
            text = ' '.join(labels[name].replace(f'{self.lab.directory}/', '') for name in sorted(own))
            fired.setdefault(labels['alertname'], set()).add(text)
        return fired

    def wait_firing(
        self, name: str, fault: str, began: float, seconds: float = CHANGE_SECONDS, alerts: int = 1
    ) -> None:
        """Wait until `alerts` of a name fire, where `began` is a time of the monotonic clock."""
        wait_until(lambda: self.list_alerts('firing').count(name) >= alerts, seconds, f'{name} fires: {fault}')
        self.log.append(f'{name} fired {time.monotonic() - began:.0f} s after: {fault}')

    def wait_resolved(self, cure: str, began: float, *names: str) -> None:
        for name in names:
            wait_until(partial(self._is_over, name), CHANGE_SECONDS, f'{name} ends: {cure}')
            self.log.append(f'{name} ended {time.monotonic() - began:.0f} s after: {cure}')

    def _is_over(self, name: str) -> bool:
        return name not in self.list_alerts('firing', 'pending')


PICTURE = TOP / 'docs/howto/dashboard.svg'
MAX_PICTURE_BYTES = 150_000
WEB_QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:128'
IDLE_QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
# Seconds without any alert before the first fault: longer than every shortened range and `for:`.
HEALTHY_SECONDS = 65
# EcompMetricsStale is not shortened.
STALE_SECONDS = 240.0


@pytest.fixture
def lab(guest_image: Path) -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip('hypervisors in namespaces need root')
    for program, package in (('prometheus', 'prometheus'), ('prometheus-node-exporter', 'prometheus-node-exporter')):
        if shutil.which(program) is None:
            pytest.skip(f'{program} is not installed: apt-get install {package}')
    with start_lab(make_lab_name('monitored'), 2, guest_image) as lab:
        yield lab


@pytest.fixture
def monitoring(lab: Lab) -> Iterator[Monitoring]:
    with ExitStack() as at_exit:
        yield Monitoring(lab, at_exit)


def run(lab: Lab, *words: str) -> None:
    result = lab.eschedule(*words)
    assert result.code == 0, (words, result)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 30, f'{pid} ends')


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.history_broken('etcd is wiped')
def test_each_alert_fires_by_its_fault_and_each_panel_has_data(lab: Lab, monitoring: Monitoring) -> None:
    started_at = time.time()
    first, second = Hypervisor(lab, 'hv1'), Hypervisor(lab, 'hv2')
    fire, end = monitoring.wait_firing, monitoring.wait_resolved

    # A healthy cluster with guests has no alert.
    run(lab, 'quota', 'set', 'shop', 'VCPU=6', 'MEMORY_MB=1024')
    run(lab, 'flavor', 'set', 'small', IDLE_QUERY)
    run(lab, WEB_QUERY, lab.make_url('guest.qcow2'), '--project', 'shop', '--name', 'web', '--count', '3', '--wait')
    healthy = f'count_over_time(ecomp_cluster_instances{{state="active"}}[1h]) >= {HEALTHY_SECONDS}'
    wait_until(lambda: monitoring.query(healthy), 2 * HEALTHY_SECONDS, 'the cluster is watched for a while')
    assert monitoring.query('ecomp_cluster_hosts{state="up"}') == [2.0]
    assert monitoring.query('up{job="ecomp"}') == [1.0, 1.0, 1.0]
    assert monitoring.list_alerts('pending', 'firing') == []
    assert monitoring.list_fired(started_at) == {}

    # The image server of builds on hv1 does not answer, and workers there are killed.
    began = time.monotonic()
    idle = lab.make_url('idle.raw')
    for _ in range(4):
        failed = lab.eschedule(IDLE_QUERY, idle.replace('/idle', ':81/idle'), '--on', 'hv1', '--wait')
        assert failed.code == 1, failed  # and its claim is released, for hv1 has no room for four
    fire('EcompBuildsFail', 'the image server of four builds on hv1 did not answer', began)
    began = time.monotonic()
    deaths = 0
    while deaths < 3:
        for pid in wait_until(first.list_workers, 60, 'hv1 has workers'):
            kill(pid)
            deaths += 1
    fire('EcompWorkersDie', f'{deaths} workers of hv1 were killed', began)
    failed_at = time.monotonic()

    # A partly written file is left behind.
    began = time.monotonic()
    part = first.state / 'images' / 'base-0123.part'
    part.write_bytes(b'half')
    fire('EcompFindings', 'a partly written file was left on hv1', began, 2 * 60)
    part.unlink()
    end('the file was removed', time.monotonic(), 'EcompFindings')

    # The storage pool of a host is off.
    began = time.monotonic()
    first.virsh('pool-destroy', 'ecompute')
    fire('EcompHostTroubled', 'the storage pool of hv1 was off', began, 2 * 60)
    first.virsh('pool-start', 'ecompute')
    end('the pool was started', time.monotonic(), 'EcompHostTroubled')

    # The cluster is full, and requests wait.
    filled_at = time.monotonic()
    fillers = [f'filler-{number}' for number in range(1, 6)]
    run(lab, IDLE_QUERY, idle, '--name', 'filler', '--count', '5')
    run(lab, 'wait', *fillers, '--for', 'started')
    for number in (1, 2):
        run(lab, '--queue', '--flavor', 'small', idle, '--name', f'later-{number}')
    fire('EcompCapacityLow', 'eight of eight VCPUs were allocated', filled_at)

    # The ecompute of hv2 is killed; its file stays, and gets old.
    killed_at = time.monotonic()
    lab.stop_process('hv2 ecompute')
    fire('EcompHostSilent', 'the ecompute of hv2 was killed', killed_at)
    end('nothing failed any more', failed_at, 'EcompBuildsFail', 'EcompWorkersDie')
    fire('EcompQueueStuck', 'two requests were queued in a full cluster', filled_at, 3 * 60)
    fire('EcompMetricsStale', 'the ecompute of hv2 was killed', killed_at, STALE_SECONDS)

    began = time.monotonic()
    lab.start_ecomputes()
    end('ecompute was started', began, 'EcompHostSilent', 'EcompMetricsStale')
    began = time.monotonic()
    lab.destroy(*fillers)
    end('five instances were destroyed', began, 'EcompCapacityLow', 'EcompQueueStuck')

    # placement is away.
    began = time.monotonic()
    lab.stop_process('placement')
    fire('EcompBackendDown', 'placement was killed', began, 2 * 60, alerts=2)
    began = time.monotonic()
    lab.start_ecomputes()
    end('placement was started', began, 'EcompBackendDown')

    # etcd has lost everything. Each ecompute accepts that.
    began = time.monotonic()
    lab.wipe_etcd()
    fire('EcompReadOnly', 'etcd was wiped', began, alerts=2)
    began = time.monotonic()
    for host in (first, second):
        host.kill(signal.SIGTERM)
        host.launch('', '--accept-new-etcd')
        host.wait_ready()
        assert host.find_log_lines('instances written to etcd again')
        host.kill(signal.SIGTERM)
    lab.start_ecomputes()
    end('the new etcd was accepted', began, 'EcompReadOnly')

    # Each alert has fired for its fault alone.
    print('\n'.join(monitoring.log))
    control = monitoring.control_instance
    fired = monitoring.list_fired(started_at)
    # Two files of an ecompute are 15 s apart, more than the shortened `for:`: etcd's short absence may fire this, too.
    fired['EcompBackendDown'] -= {'etcd hv1:9100', 'etcd hv2:9100'}
    assert fired == {
        'EcompHostSilent': {f'{control} silent'},
        'EcompBuildsFail': {'hv1:9100'},
        'EcompWorkersDie': {'hv1:9100'},
        'EcompFindings': {'hv1:9100'},
        'EcompHostTroubled': {control},
        'EcompMetricsStale': {'hv2-collected/ecompute.prom hv2:9100'},
        'EcompCapacityLow': {'VCPU'},
        'EcompQueueStuck': {'small'},
        'EcompBackendDown': {'placement hv1:9100', 'placement hv2:9100'},
        'EcompReadOnly': {'hv1:9100', 'hv2:9100'},
    }
    assert fired.keys() == {rule['alert'] for rule in yaml.safe_load(RULES.read_text())['groups'][0]['rules']}

    # Each expression of the dashboard has data, and makes the picture.
    now = time.time()
    panels = dashboard.read_panels(monitoring.url, started_at, now)
    data = {expression: series for panel in panels for expression, series in panel.series.items()}
    assert [
        expression for expression, series in data.items() if max((len(s.values) for s in series), default=0) < 2
    ] == []
    picture = dashboard.draw(panels, now - started_at)
    assert len(picture) < MAX_PICTURE_BYTES
    assert all(panel.title in picture for panel in panels)
    if os.environ.get('ECOMP_DASHBOARD') == 'write':
        PICTURE.write_text(picture)
