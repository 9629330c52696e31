"""The doctor on real servers: no findings in a healthy cluster, otherwise each with its cure."""

from __future__ import annotations

import json
from typing import Any

from ecomp.model.cluster import describe_vulnerabilities
from tests.kit.commands import Control, run_eschedule_process, write_config
from tests.kit.servers import free_port


def read_findings(control: Control) -> dict[str, Any]:
    """Run the doctor; return its findings by check and validate the rest of its report.

    A finding about etcd's version depends on the machine and is left out.
    """
    result = control.eschedule('doctor', '-f', 'json')
    report = json.loads(result.stdout)
    findings_by_check = {finding['check']: finding for finding in report['findings']}
    warning = findings_by_check.pop('etcd-version', None)
    assert (warning is not None) == (describe_vulnerabilities(report['etcd']['version']) is not None)
    assert warning is None or warning['level'] == 'warning'
    assert {finding['level'] for finding in findings_by_check.values()} <= {'error'}
    assert result.code == (8 if findings_by_check else 0)
    assert report['configuration'] == str(control.schedule_yaml)
    assert report['placement'] == {'name': f'placement at {control.placement.url}', 'microversion': '1.39'}
    return findings_by_check


def test_stopped_compute_is_a_finding_with_its_cure(cluster: Control) -> None:
    compute = cluster.ecompute()
    assert read_findings(cluster) == {}
    compute.stop()
    closed = read_findings(cluster)
    assert list(closed) == ['compute']
    assert closed['compute']['what'].endswith(
        ' is closed: its ecompute was stopped, or changes nothing because etcd is not the one that it knows'
    )
    assert closed['compute']['cure'] == (
        'run `systemctl start ecompute` on its host; if it runs, `journalctl -u ecompute` shows the reason'
    )
    table = cluster.eschedule('doctor')
    assert table.code == 8
    assert table.stdout.splitlines()[-1] == (f'compute: {closed["compute"]["what"]}. Fix: {closed["compute"]["cure"]}')
    assert f'; configuration: {cluster.schedule_yaml}' in table.stderr
    compute.start()
    assert read_findings(cluster) == {}


def test_unreachable_backend_is_a_finding(cluster: Control) -> None:
    for etcd, placement, away in (
        (f'127.0.0.1:{free_port()}', cluster.placement.url, 'etcd'),
        (cluster.etcd.endpoint, f'http://127.0.0.1:{free_port()}', 'placement'),
    ):
        config = write_config(cluster.directory / 'away.yaml', etcd, placement)
        result = run_eschedule_process(config, 'doctor', '-f', 'json')
        assert (result.code, f'{away} at' in result.stderr) == (7, True)
        cures = {finding['check']: finding['cure'] for finding in json.loads(result.stdout)['findings']}
        assert cures[away] == f'start {away} at this address, or correct `{away}:` in {config}'
