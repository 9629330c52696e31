"""A lab that is monitored as docs/howto/monitor.md says, by node_exporter on each machine and by Prometheus.

Of the alerts only the minutes are changed: `for:` and the ranges in brackets are divided by SPEED. Prometheus scrapes
and evaluates every second, and `eschedule metrics` runs every 2 s instead of every minute. A threshold in an expression
stays as it is, so EcompMetricsStale needs its three minutes.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from docs.dashboard import get_json
from ecomp.lab import machine, state
from ecomp.lab.network import CONTROL
from tests.kit.lab import Lab
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
    """Return the first group of a pattern's only match in the page; `.` matches newlines, too."""
    (found,) = re.findall(pattern, PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def shorten_minutes(rules: str) -> str:
    """Divide the minutes of `for:` and of the ranges of the alerts by SPEED."""
    shortened = re.sub(r'(for: |\[)(\d+)m\b', lambda found: f'{found[1]}{int(found[2]) * 60 // SPEED}s', rules)
    before, after = (yaml.safe_load(text)['groups'][0]['rules'] for text in (rules, shortened))
    for old, new in zip(before, after, strict=True):
        assert re.sub(r'\[\w+\]', '', old['expr']) == re.sub(r'\[\w+\]', '', new['expr'])
        assert not re.search(r'\d+[mhd]\b', f'{new["expr"]} {new.get("for")}'), new
    return shortened


class LabProgram(Server):
    """A program on a machine of the lab that answers a URL when it is ready."""

    def __init__(self, lab: Lab, place: str, name: str, words: Sequence[str], url: str) -> None:
        self.name, self.url = name, url
        super().__init__(lab.directory / f'{place}-{name}')
        layout = state.load(lab.name).layout
        self._command = [*machine.make_command_prefix(layout, lab.directory, place), *words]

    def command(self) -> list[str]:
        return self._command

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url, timeout=5) as answer:
            return bool(answer.status == 200)
        return False


class ClusterMetrics(Server):
    """The service of the page that runs `eschedule metrics`, every 2 s."""

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
    """The monitoring of a lab, until `at_exit` is closed.

    Attributes:
        url: that of Prometheus.
        control_instance: the label `instance` of the metrics of the cluster.
        log: a line for each alert that fired, or ended: what a test reports.
    """

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
        """Change Debian's prometheus.yml as the page says."""
        settings = yaml.safe_load(PROMETHEUS_YML.read_text())
        addition = find_in_page(r'^(    rule_files:.*?)\n\n')
        assert CONTROL_ADDRESS in addition
        for key, added in yaml.safe_load(addition.replace(CONTROL_ADDRESS, control)).items():
            settings[key] = [each for each in settings[key] or [] if each.get('job_name') != 'node'] + added
        settings['global'] |= {'scrape_interval': '1s', 'evaluation_interval': '1s'}
        del settings['alerting']
        return yaml.safe_dump(settings)

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of Prometheus' API."""
        return get_json(f'{self.url}/api/v1/{path}', **parameters)

    def query(self, expression: str) -> list[float]:
        return [float(each['value'][1]) for each in self.get('query', query=expression)['result']]

    def list_alerts(self, *states: str) -> list[str]:
        """List the name of each alert in these states, of `pending` and `firing`."""
        alerts = self.get('alerts')['alerts']
        return [alert['labels']['alertname'] for alert in alerts if alert['state'] in states]

    def list_fired(self, began: float) -> dict[str, set[str]]:
        """Return which alerts have fired since then, each with what it fired for: its other labels' values."""
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
        """Wait until so many alerts of a name fire for a fault that was made at `began` of the monotonic clock."""
        wait_until(lambda: self.list_alerts('firing').count(name) >= alerts, seconds, f'{name} fires: {fault}')
        self.log.append(f'{name} fired {time.monotonic() - began:.0f} s after: {fault}')

    def wait_resolved(self, cure: str, began: float, *names: str) -> None:
        """Wait until alerts are neither firing nor pending after a cure that was made at `began`."""
        for name in names:
            wait_until(partial(self._is_over, name), CHANGE_SECONDS, f'{name} ends: {cure}')
            self.log.append(f'{name} ended {time.monotonic() - began:.0f} s after: {cure}')

    def _is_over(self, name: str) -> bool:
        return name not in self.list_alerts('firing', 'pending')
