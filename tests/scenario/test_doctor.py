"""`eschedule doctor` on real servers: nothing where all is well, and of what is not, what mends it."""

from __future__ import annotations

import json
from typing import Any

from ecomp import __version__
from ecomp.model.cluster import holes
from tests.kit.commands import Control, eschedule, run, write_config
from tests.kit.servers import free_port


def findings(control: Control) -> dict[str, Any]:
    """What it finds, by the check, but of etcd's version, which is the machine's; its words are as it ends."""
    result = control.eschedule('doctor', '-f', 'json')
    said = json.loads(result.stdout)
    found = {each['check']: each for each in said['findings']}
    assert result.code == (8 if found else 0)
    assert (found.pop('etcd-version', None) is not None) == (holes(said['etcd']['version']) is not None)
    assert said['configuration'] == str(control.schedule_yaml)
    assert said['placement'] == {'name': f'placement at {control.placement.url}', 'microversion': '1.39'}
    return found


def test_a_compute_that_was_stopped(cluster: Control) -> None:
    compute = cluster.ecompute()
    assert findings(cluster) == {}
    compute.stop()
    closed = findings(cluster)
    assert list(closed) == ['compute']
    assert closed['compute']['what'].endswith(
        ' is closed: its ecompute was stopped, or it only watches, for etcd is not the one that it knew'
    )
    assert closed['compute']['cure'] == (
        'systemctl start ecompute on its host; where that runs, journalctl -u ecompute says why'
    )
    table = cluster.eschedule('doctor')
    assert table.code == 8
    assert table.stdout.splitlines()[-1] == (
        f'compute: {closed["compute"]["what"]}. Mend it: {closed["compute"]["cure"]}'
    )
    assert f', by {cluster.schedule_yaml}' in table.stderr
    compute.start()
    assert findings(cluster) == {}


def test_a_compute_of_another_version(cluster: Control) -> None:
    compute = cluster.ecompute()
    lease = cluster.etcd.grant()
    other = '0b5e55ed-0000-4000-8000-000000000000'
    cluster.etcd.put('/computes/none', '[', lease)
    try:
        for version, named in (('0.9', ['version']), ("0.9\n'; reboot; '", [])):  # a cure is typed
            says = {'token': 'x', 'version': version, 'hostname': 'old'}
            cluster.etcd.put(f'/computes/{other}', json.dumps(says), lease)
            found = findings(cluster)
            assert list(found) == named
            if named:
                assert found['version']['what'] == f'compute old runs ecomp 0.9, and this is {__version__}'
    finally:
        cluster.etcd.delete(f'/computes/{other}')
        cluster.etcd.delete('/computes/none')
    assert findings(cluster) == {}
    compute.stop()


def test_a_backend_that_is_away_is_a_finding(cluster: Control) -> None:
    for etcd, placement, away in (
        (f'127.0.0.1:{free_port()}', cluster.placement.url, 'etcd'),
        (cluster.etcd.endpoint, f'http://127.0.0.1:{free_port()}', 'placement'),
    ):
        config = write_config(cluster.directory / 'away.yaml', etcd, placement)
        result = eschedule(config, 'doctor', '-f', 'json')
        assert result.code == 7
        assert f'{away} at' in result.stderr
        found = {each['check']: each['cure'] for each in json.loads(result.stdout)['findings']}
        assert found[away].startswith(f'{config} told where it is')


def test_check_goes_with_nothing_else(cluster: Control) -> None:
    for words in (['--fake', 'VCPU:1'], ['--accept-new-etcd'], ['--unit']):
        refused = run('ecomp.compute', '--check', *words, directory=cluster.directory)
        assert (refused.code, refused.stdout) == (2, '')
