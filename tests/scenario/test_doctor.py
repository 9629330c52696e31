"""`eschedule check` on real servers: a healthy cluster has no finding, others have cures."""

from __future__ import annotations

import json
import re
from typing import Any

from ecomp.model.cluster import describe_vulnerabilities
from tests.kit.commands import Control


def read_findings(control: Control) -> dict[str, Any]:
    """Run the check, and return its findings by code, without the machine's etcd version."""
    result = control.eschedule('check', '-f', 'json')
    findings_by_code = {finding['code']: finding for finding in json.loads(result.stdout)}
    warning = findings_by_code.pop('etcd-version', None)
    summary = re.search(r'; etcd at \S+ \((\S+)\), (placement at \S+ \(.+\)); configuration: (.+)\n$', result.stderr)
    assert summary, result
    assert (warning is not None) == (describe_vulnerabilities(summary[1]) is not None)
    assert warning is None or warning['level'] == 'warning'
    assert {finding['level'] for finding in findings_by_code.values()} <= {'error'}
    assert result.code == (8 if findings_by_code else 0)
    assert summary[2] == f'placement at {control.placement.url} (microversion 1.39)'
    assert summary[3] == str(control.schedule_yaml)
    return findings_by_code


def test_stopped_compute_is_a_finding_with_its_cure(cluster: Control) -> None:
    compute = cluster.ecompute()
    assert read_findings(cluster) == {}
    compute.stop()
    closed = read_findings(cluster)
    assert list(closed) == ['compute']
    assert closed['compute']['sentence'].endswith(
        ' is closed: its ecompute was stopped, or changes nothing because etcd is not the one that it knows'
    )
    assert closed['compute']['how'] == (
        'run `systemctl start ecompute` on its host; if it runs, `journalctl -u ecompute` shows the reason'
    )
    table = cluster.eschedule('check')
    assert table.code == 8
    assert table.stdout.splitlines()[-1].startswith('compute ')
    assert f'eschedule: compute. Fix: {closed["compute"]["how"]}' in table.stderr.splitlines()
    assert f'; configuration: {cluster.schedule_yaml}' in table.stderr
    compute.start()
    assert read_findings(cluster) == {}
