"""Faults of a monitored lab fire each alert, and each panel of the dashboard has data: docs/howto/monitor.md.

The alerts are those of examples/prometheus, with their minutes divided by 30: see tests/kit/monitoring.py.

With ECOMP_DASHBOARD=write the test writes docs/howto/dashboard.svg, the picture of what it did.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from docs import dashboard
from tests.kit.hypervisor import Hypervisor
from tests.kit.lab import Lab, is_alive, make_lab_name
from tests.kit.lab_fixtures import start_lab
from tests.kit.monitoring import RULES, Monitoring
from tests.kit.servers import TOP, wait_until

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
    """Two hosts of this test's own."""
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
        run(lab, IDLE_QUERY, idle.replace('/idle', ':81/idle'), '--on', 'hv1')
    fire('EcompBuildsFail', 'the image server of four builds on hv1 did not answer', began)
    began = time.monotonic()
    deaths = 0
    while deaths < 3:
        for pid in wait_until(first.list_workers, 60, 'hv1 has workers'):
            kill(pid)
            deaths += 1
    fire('EcompWorkersDie', f'{deaths} workers of hv1 were killed', began)
    failed_at = time.monotonic()

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
        assert host.find_log_lines('instances republished')
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
