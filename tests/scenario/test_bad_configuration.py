"""Whatever is configured, and whoever answers there or does not: one clear line, and the right exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.kit.commands import Control, Ecompute, eschedule, run, write_config
from tests.kit.invariants import allocations, check, everything
from tests.kit.servers import environment, free_port
from tests.kit.story import NOBODY, SMALL, logged, one_line

WRONG_YAML = """\
# line 1
resise: False
etcd:
  hots: localhost
  port: many
  password: secret
placement:
  endpoint: localhost:8080
uuid: 17
"""


@pytest.mark.parametrize(
    ('module', 'name', 'extra'),
    [('ecomp.compute', 'compute.yaml', {'resise': 2, 'uuid': 9}), ('ecomp.schedule', 'schedule.yaml', {'uuid': 9})],
)
def test_every_wrong_key_is_named_with_its_line(tmp_path: Path, module: str, name: str, extra: dict[str, int]) -> None:
    (tmp_path / name).write_text(WRONG_YAML)
    words = ['list'] if module == 'ecomp.schedule' else ['--fake', 'VCPU:1,DISK_GB:1,MEMORY_MB:1']
    command = 'eschedule' if module == 'ecomp.schedule' else 'ecompute'
    refused = run(module, *words, directory=tmp_path)
    assert refused.code == 2
    assert refused.stdout == ''
    # One message, with a line for each mistake.
    first, *rest = refused.stderr.splitlines()
    assert first.startswith(f'{command}: {name}:'), refused
    assert all(line.startswith(f'{name}:') for line in rest), refused
    lines = [first, *rest]
    wanted = {'hots': 4, 'port': 5, 'password': 6, 'endpoint': 8, **extra}
    for key, number in wanted.items():
        assert [line for line in lines if f'{name}:{number}: ' in line and key in line], (key, refused)
    assert 'secret' not in refused.stderr


@pytest.mark.parametrize(
    ('text', 'says'), [('etcd: [', 'not YAML'), ('- a\n- b\n', 'keys with values'), ('a: b: c\n', ':1:'), ('x', 'keys')]
)
def test_configuration_that_is_none(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / 'schedule.yaml').write_text(text)
    one_line(run('ecomp.schedule', 'list', directory=tmp_path), 2, 'schedule.yaml', says)


def test_grpc_options_are_ignored_with_one_line(cluster: Control) -> None:
    said = 'etcd.grpc_options is ignored: etcd is asked without gRPC now. Fix: remove the key; version 2.0 refuses it'
    compute = cluster.ecompute()
    for config in (cluster.schedule_yaml, compute.config):
        content = yaml.safe_load(config.read_text())
        content['etcd']['grpc_options'] = {'grpc.keepalive_time_ms': 1000}
        config.write_text(yaml.safe_dump(content))
    done = eschedule(cluster.schedule_yaml, 'list')
    assert (done.code, done.stderr) == (0, f'eschedule: {cluster.schedule_yaml}: {said}\n')
    compute.restart()
    assert len(logged(compute, ' WARNING ', f'{compute.config}: {said}')) == 1


def test_eschedule_without_etcd(cluster: Control) -> None:
    cluster.ecompute()
    nowhere = f'127.0.0.1:{free_port()}'
    config = write_config(cluster.directory / 'no-etcd.yaml', nowhere, cluster.placement.url)
    for words in ([SMALL], [SMALL, '--uuid', NOBODY], [NOBODY], ['list'], ['show', NOBODY], ['destroy', NOBODY]):
        refused = eschedule(config, *words, timeout=15)
        one_line(refused, 7, 'etcd', nowhere, 'cannot be reached', f'(told by {config})')
        assert refused.stdout == ''
    assert allocations(cluster) == {}


def test_who_was_told_by_no_file_says_so(tmp_path: Path) -> None:
    """Nobody listens on the port of this machine's that is guessed, or somebody who is no etcd: behind TLS, say."""
    alone = {**environment(), 'HOME': str(tmp_path)}
    for module, name in (('schedule', 'schedule.yaml'), ('compute', 'compute.yaml')):
        words = ['list'] if module == 'schedule' else ['--fake', 'VCPU:1']
        inside = ['unshare', '-n', sys.executable, '-m', f'ecomp.{module}', *words]
        done = subprocess.run(inside, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=60)
        said = done.stderr.splitlines()[-1]
        assert (done.returncode, 'localhost:2379 cannot be reached' in said) == (7, True), done
        assert said.endswith(f' (a guess: no {name} was found, --config FILE names one)')


def test_eschedule_without_placement(cluster: Control, compute: Ecompute) -> None:
    nowhere = f'http://127.0.0.1:{free_port()}'
    config = write_config(cluster.directory / 'no-placement.yaml', cluster.etcd.endpoint, nowhere)
    for words in ([SMALL], [SMALL, '--uuid', NOBODY]):
        refused = eschedule(config, *words, timeout=15)
        one_line(refused, 7, 'placement', nowhere, 'cannot be reached')
        assert refused.stdout == ''
    assert set(everything(cluster)) - {'/cluster'} == {f'/computes/{compute.uuid}', f'/hostnames/{compute.uuid}'}
    # What does not need placement does not ask for it.
    assert eschedule(config, 'list').code == 0


def test_something_else_answers_in_placements_place(cluster: Control) -> None:
    cluster.ecompute()
    config = write_config(cluster.directory / 'odd.yaml', cluster.etcd.endpoint, f'http://{cluster.etcd.endpoint}')
    one_line(eschedule(config, SMALL), 7, cluster.etcd.endpoint, 'is `placement:` right?')
    assert cluster.etcd.keys('/requests/') == []


def test_frozen_servers_are_not_waited_for_for_ever(own_control: Control) -> None:
    own_control.ecompute()
    config = yaml.safe_load(own_control.schedule_yaml.read_text())
    config['etcd']['timeout'] = 1
    own_control.schedule_yaml.write_text(yaml.safe_dump(config))
    own_control.etcd.pause()
    one_line(own_control.eschedule(SMALL, timeout=15), 7, 'etcd', own_control.etcd.endpoint)
    own_control.etcd.resume()
    check(own_control)
