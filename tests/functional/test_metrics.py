"""Metrics, alerts and dashboard of a cluster with fake guests, judged by promtool."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import writing
from ecomp.cli.terminal import CLEAR_SCREEN
from ecomp.metrics import TALLY
from ecomp.model import keys
from tests.functional.tended import TendedPool, make_job
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import check_claims_twice
from tests.kit.servers import TOP, make_environment, wait_until
from tests.kit.sharing import list_hosts
from tests.kit.story import SMALL_QUERY, boot
from tests.kit.tuned import make_tuned

EXAMPLES = TOP / 'examples/prometheus'
RULES = EXAMPLES / 'ecomp.rules.yaml'
METRIC_NAME = re.compile(r'\b(?:ecomp|node)_\w+')
# The suffixes of the samples of a metric of each kind.
SUFFIXES = {'histogram': ('_bucket', '_count', '_sum')}

Promtool = Callable[..., None]


@pytest.fixture(scope='module')
def promtool() -> Promtool:
    """A function that runs promtool, which must succeed and print no warning."""
    program = shutil.which('promtool')
    if program is None:
        pytest.skip('promtool is not installed: apt-get install prometheus')

    def run(*words: str, stdin: str = '', cwd: Path = TOP) -> None:
        process = subprocess.run([program, *words], input=stdin, capture_output=True, text=True, check=False, cwd=cwd)
        assert process.returncode == 0, process.stdout + process.stderr
        assert words[0] != 'check' or words[1] != 'metrics' or not process.stdout + process.stderr

    return run


def start_with_metrics(control: Control, directory: Path, **numbers: float) -> tuple[Ecompute, Path]:
    directory.mkdir(exist_ok=True)
    path = directory / 'ecompute.prom'
    numbers |= {'process.METRICS_INTERVAL_SECONDS': 0.2}
    return make_tuned(control, numbers=numbers, metrics=str(path)), path


def wait_sample(path: Path, sample: str, number: float) -> str:
    def find_text() -> str:
        text = path.read_text() if path.exists() else ''
        return text if f'\n{sample} {number}\n' in text else ''

    return wait_until(find_text, 30, f'{sample} is {number}')


def list_sample_names(text: str) -> set[str]:
    types = re.findall(r'(?m)^# TYPE (\w+) (\w+)$', text)
    return {name + suffix for name, kind in types for suffix in SUFFIXES.get(kind, ('',))}


def list_alerts() -> list[dict[str, Any]]:
    alerts: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())['groups'][0]['rules']
    return alerts


def list_expressions() -> dict[str, str]:
    panels = json.loads((EXAMPLES / 'dashboard.json').read_text())['panels']
    found = {f'{panel["title"]} {target["refId"]}': target['expr'] for panel in panels for target in panel['targets']}
    return found | {alert['alert']: alert['expr'] for alert in list_alerts()}


def test_output_passes_promtool_and_has_each_metric_of_alerts_and_panels(
    own_control: Control, promtool: Promtool, tmp_path: Path
) -> None:
    own_control.eschedule('quota', 'set', 'shop', 'VCPU=10', 'MEMORY_MB=1000')
    compute, path = start_with_metrics(own_control, tmp_path / 'node')
    # Prometheus sees the first event only as an increase from 0.
    wait_sample(path, 'ecomp_stage_duration_seconds_count{stage="addressed"}', 0.0)
    instance = boot(own_control, '--name', 'web1', SMALL_QUERY)
    text = wait_sample(path, 'ecomp_instances{state="active"}', 1.0)
    wait_sample(path, f'ecomp_vm_info{{name="web1",vm="{instance}"}}', 1.0)
    wait_sample(path, 'ecomp_builds_total', 1.0)
    text = wait_sample(path, 'ecomp_stage_duration_seconds_count{stage="addressed"}', 1.0)
    assert re.search(rf'\necomp_vm_resident_memory_bytes\{{vm="{instance}"\}} [1-9.]+e\+08\n', text)
    for backend in ('etcd', 'placement'):
        assert f'\necomp_backend_up{{backend="{backend}"}} 1.0\n' in text
    promtool('check', 'metrics', stdin=text)

    result = own_control.eschedule('top', '-f', 'prometheus')
    assert (result.code, result.stderr) == (0, '')
    for line in (
        'ecomp_cluster_hosts{state="up"} 1.0',
        'ecomp_cluster_instances{state="active"} 1.0',
        'ecomp_cluster_quota_limit{class="MEMORY_MB",project="shop",unit="bytes"} 1.048576e+09',
    ):
        assert f'\n{line}\n' in result.stdout
    name = list_hosts(own_control)[compute.uuid]['host']
    compute.stop()
    own_control.etcd.delete(keys.hostname(compute.uuid))  # as after etcd was wiped, until the host is back
    unnamed = own_control.eschedule('top', '-f', 'prometheus').stdout
    for output, host in ((result.stdout, name), (unnamed, compute.uuid)):
        labels = f'{{class="VCPU",compute="{compute.uuid}",host="{host}",unit="units"}}'
        assert f'\necomp_cluster_used{labels} 1.0\n' in output
    promtool('check', 'metrics', stdin=result.stdout)

    names = list_sample_names(text + result.stdout) | {'node_textfile_mtime_seconds'}
    used = {name: set(METRIC_NAME.findall(expression)) for name, expression in list_expressions().items()}
    assert all(used.values())
    assert {name: unknown for name, found in used.items() if (unknown := found - names)} == {}


def test_backend_that_does_not_answer_is_down_until_it_is_back(own_control: Control, tmp_path: Path) -> None:
    _, path = start_with_metrics(own_control, tmp_path / 'node', PLAN_INTERVAL_SECONDS=1)
    sample = 'ecomp_backend_up{backend="placement"}'
    wait_sample(path, sample, 1.0)
    own_control.placement.kill()
    text = wait_sample(path, sample, 0.0)
    assert '\necomp_backend_up{backend="etcd"} 1.0\n' in text
    own_control.placement.restart()
    wait_sample(path, sample, 1.0)


def test_file_is_removed_at_a_clean_end_and_left_behind_by_a_kill(control: Control, tmp_path: Path) -> None:
    compute, path = start_with_metrics(control, tmp_path / 'node')
    wait_sample(path, 'ecomp_read_only', 0.0)
    compute.kill()
    assert path.exists()
    compute.start()
    wait_sample(path, 'ecomp_read_only', 0.0)
    assert compute.stop() == 0
    assert list(path.parent.iterdir()) == []


def read_count(sample: str) -> float:
    return TALLY.copy_samples().get(sample, {}).get((), 0)


def test_death_of_a_worker_is_counted(pool: TendedPool) -> None:
    before, job = read_count('ecomp_worker_deaths_total'), make_job('stubborn')
    result = pool.submit(job)
    os.kill(pool.wait_for_pid(job), signal.SIGKILL)
    assert pool.wait_for_error(result) is not None
    assert read_count('ecomp_worker_deaths_total') == before + 1


def test_released_claim_is_counted(own_control: Control) -> None:
    compute, consumer = own_control.ecompute(), str(uuid.uuid4())
    before = read_count('ecomp_claims_released_total')
    body = {
        **{'allocations': {compute.uuid: {'resources': {'VCPU': 1}}}, 'consumer_generation': None},
        **{'user_id': 'me', 'project_id': 'mine', 'consumer_type': 'INSTANCE'},
    }
    own_control.placement.call('PUT', f'/allocations/{consumer}', body)
    check_claims_twice(own_control, compute)
    assert own_control.placement.read_allocations(consumer) == {}
    assert read_count('ecomp_claims_released_total') == before + 1


@pytest.mark.history_broken('the request was written manually')
def test_failed_build_is_counted_by_its_stage(own_control: Control, tmp_path: Path) -> None:
    compute, path = start_with_metrics(own_control, tmp_path / 'node')
    wait_sample(path, 'ecomp_build_failures_total{stage="scheduled"}', 0.0)
    own_control.etcd.put(f'/hosts/{compute.uuid}/{uuid.uuid4()}', '{}')
    wait_sample(path, 'ecomp_build_failures_total{stage="scheduled"}', 1.0)


# The alerts and the dashboard


def test_rules_and_expressions_of_panels_are_valid(promtool: Promtool, tmp_path: Path) -> None:
    promtool('check', 'rules', str(RULES))
    records = [{'record': f'panel:{number}', 'expr': each} for number, each in enumerate(list_expressions().values())]
    (tmp_path / 'panels.yaml').write_text(yaml.safe_dump({'groups': [{'name': 'panels', 'rules': records}]}))
    promtool('check', 'rules', str(tmp_path / 'panels.yaml'))


def test_each_alert_fires_when_it_should_and_only_then(promtool: Promtool, tmp_path: Path) -> None:
    cases = TOP / 'tests/functional/alerts.yaml'
    for path in (RULES, cases):
        shutil.copy(path, tmp_path)
    promtool('test', 'rules', cases.name, cwd=tmp_path)
    tests = [case for test in yaml.safe_load(cases.read_text())['tests'] for case in test['alert_rule_test']]
    for fires in (True, False):
        tested = {case['alertname'] for case in tests if bool(case['exp_alerts']) == fires}
        assert tested == {alert['alert'] for alert in list_alerts()}


def test_each_alert_names_a_section_that_says_what_to_do() -> None:
    alerts = list_alerts()
    assert len(alerts) == 10
    for alert in alerts:
        page, _, section = alert['annotations']['what_to_do'].partition('#')
        assert section in map(writing.make_anchor, re.findall(r'(?m)^### (.*)', (TOP / page).read_text())), alert
        assert alert['alert'].lower() == section


def test_dashboard_has_at_most_15_panels_side_by_side() -> None:
    panels = json.loads((EXAMPLES / 'dashboard.json').read_text())['panels']
    assert 0 < len(panels) <= 15
    places = [(panel['gridPos']['x'], panel['gridPos']['y']) for panel in panels]
    assert len({*places}) == len({panel['id'] for panel in panels}) == len(panels)


# `eschedule top` of a cluster with fake guests.


def test_each_host_and_guest_is_shown_and_a_frozen_host_is_unknown(own_control: Control) -> None:
    first, second = own_control.ecompute(), own_control.ecompute()
    web = boot(own_control, '--name', 'web', '--on', first.uuid, SMALL_QUERY)
    db = boot(own_control, '--name', 'db', '--on', second.uuid, SMALL_QUERY)
    result = own_control.eschedule('top', '-f', 'json')
    assert (result.code, result.stderr) == (0, '')
    shown = json.loads(result.stdout)
    for host in shown['hosts']:
        assert host['guests'] == 1
        assert [name for name, value in host.items() if value is None] == []
        assert 0 <= host['cpu_percent'] <= 110 * host['cpus']  # the kernel counts in steps of 10 ms
    assert {guest['instance']: guest['compute'] for guest in shown['guests']} == {web: first.uuid, db: second.uuid}
    for guest in shown['guests']:
        assert guest['memory_used_bytes'] == guest['memory_bytes'] == 128 * 2**20
        assert guest['cpu_percent'] == guest['disk_read_bytes_per_second'] == 0

    second.pause()
    result = own_control.eschedule('top')
    second.resume()
    assert result.code == 0
    assert 'its ecompute does not answer' in result.stderr
    assert result.stderr.count('\n') == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:3] == ['HOST', 'CPU', '%']
    assert lines[2][1:] == [f'({second.uuid})', *['-'] * 6]  # both have the name of this machine
    assert [line[:3] for line in lines[-2:]] == [['web', '0.0', '128/128'], ['db', '-', '-']]

    result = own_control.eschedule('top', first.uuid, '-f', 'csv', '-c', 'NAME,INSTANCE')
    assert (result.code, result.stdout, result.stderr) == (0, f'NAME,INSTANCE\nweb,{web}\n', '')
    second.stop()
    result = own_control.eschedule('top', '--name', 'd*', '-f', 'value', '-c', 'NAME,CPU %')
    assert (result.code, result.stdout) == (0, 'db\t-\n')
    assert result.stderr.endswith('its ecompute is not alive. Try: eschedule hosts\n')
    assert own_control.eschedule('top', 'nobody').code == 4


def test_terminal_is_redrawn_until_ctrl_c(control: Control) -> None:
    control.ecompute()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
    words = ['--config', str(control.schedule_yaml), 'top']
    process = subprocess.Popen(
        [sys.executable, '-m', 'ecomp.schedule', *words],
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, env=make_environment(),
    )  # fmt: skip
    os.close(theirs)
    output: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # EIO: the other end is closed
            while chunk := os.read(ours, 4096):
                output.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: b''.join(output).count(CLEAR_SCREEN.encode()) > 2, 15, 'it is drawn three times')
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (None, b'')
    finally:
        process.kill()
        reader.join()
        os.close(ours)
    assert process.returncode == 0
    assert control.etcd.list_keys('/audit/') == []
    wait_until(lambda: control.etcd.list_keys('/usage/') == [], 15, 'the computes remove their answers')


@pytest.mark.parametrize('form', ['table', 'json'])
def test_cluster_without_hosts_is_empty(own_control: Control, form: str) -> None:
    result = own_control.eschedule('top', '-f', form)
    assert (result.code, result.stderr) == (0, '')
    if form == 'json':
        assert json.loads(result.stdout) == {'hosts': [], 'guests': []}
