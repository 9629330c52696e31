"""`elab up --fake`: a cluster of fakes, with real etcd and placement, for any user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ecomp.compute_conf import load_compute
from ecomp.errors import Denied
from ecomp.lab import fakes, machine
from ecomp.store.client import Put, Store
from tests.kit.commands import Result
from tests.kit.servers import make_environment, wait_until

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Run elab, or eschedule in its cluster, which is removed at the end."""
    state = tmp_path / 'state'
    env = {**make_environment(), 'XDG_STATE_HOME': str(state), 'HOME': str(tmp_path)}

    def run(*words: str, **variables: str) -> Result:
        module = 'ecomp.schedule' if words[0] == 'eschedule' else 'ecomp.lab.elab'
        config = {'ECOMP_CONFIG': str(state / 'elab/fake')}
        command = [sys.executable, '-m', module, *(words[1:] if words[0] == 'eschedule' else words)]
        done = subprocess.run(
            command, env={**env, **config, **variables}, capture_output=True, text=True, cwd=tmp_path, timeout=120
        )
        return Result(done.returncode, done.stdout, done.stderr)

    yield run
    run('down', '--name', 'fake')


def test_hosts_of_a_cluster_of_fakes_die_and_return(run: Run, tmp_path: Path) -> None:
    made = run('up', '--fake', '2')
    assert (made.code, re.findall('^etcd 127.0.0.1:', made.stdout)) == (0, ['etcd 127.0.0.1:']), made
    hosts = json.loads(run('eschedule', 'hosts', '-f', 'json').stdout)
    assert [(host['hostname'], host['kind']) for host in hosts] == [('fake1', 'fake'), ('fake2', 'fake')]
    # A fake guest has an address after a second, and is ready after another.
    query = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
    created = run('eschedule', query, '--name', 'db', '--on', 'fake2', '--wait=ready', '-f', 'json')
    assert created.code == 0, created
    stages = json.loads(run('eschedule', 'show', 'db', '-f', 'json').stdout)['stages']
    assert stages['started'] < stages['addressed'] < stages['ready']
    for command in ('log', 'ssh', 'console'):
        refused = run('eschedule', command, 'db')
        assert (refused.code, 'its guest is fake' in refused.stderr) == (4, True), refused

    assert run('exec', 'fake2', 'pwd').stdout == f'{tmp_path}/state/elab/fake/fake2\n'
    assert run('kill', 'fake2').code == 0
    status = run('status')
    assert (status.code, 'down: fake2. Fix: elab up --name fake' in status.stderr) == (1, True), status
    assert 'partly up' in run('list').stdout
    # It is back with its guest, and a third one beside it.
    assert run('up', '--fake', '3').code == 0
    assert run('status').code == 0
    assert json.loads(run('eschedule', 'show', 'db', '-f', 'json').stdout)['state'] == 'active'
    wait_until(lambda: run('eschedule', 'check', '--now').code == 0, 60, 'the audit is clean')
    # Roles are enforced: a fake's certificate cannot write what only operators write.
    own = Store(load_compute(tmp_path / 'state/elab/fake/certs/compute-fake1/compute.yaml').etcd)
    with closing(own), pytest.raises(Denied, match='/flavors/own'):
        own.commit([], [Put('/flavors/own', '{}')])
    assert run('down').code == 0
    assert list((tmp_path / 'state').iterdir()) == [], 'nothing is left'


def test_cluster_that_cannot_be_made_leaves_nothing(run: Run, tmp_path: Path) -> None:
    etcd = tmp_path / 'bin/etcd'
    etcd.parent.mkdir()
    etcd.write_text(
        '#!/bin/sh\necho "panic: write wal: no space left on device"; echo "goroutine 1 [running]:"; exit 2'
    )
    etcd.chmod(0o755)
    refused = run('up', '--fake', PATH=f'{etcd.parent}:{os.environ["PATH"]}')
    assert (refused.code, refused.stdout) == (1, ''), refused
    reason = 'panic: write wal: no space left on device. Fix: free space on this disk'
    assert refused.stderr == f'elab: etcd ended while starting: {reason}\n'
    assert list((tmp_path / 'state').iterdir()) == []


def test_missing_programs_are_named_and_fetched_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path))
    monkeypatch.setattr('os.environ', {**os.environ})
    monkeypatch.setattr('ecomp.lab.machine.get_search_path', lambda: os.environ['PATH'])
    monkeypatch.setattr('ecomp.lab.fakes.get_search_path', lambda: os.environ['PATH'])
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    programs = tmp_path / 'programs'
    programs.mkdir()
    for name in ('sh', 'apt-get', 'dpkg-deb', 'rm', 'tar', 'xz', 'zstd'):
        if path := next(Path('/usr/bin').glob(name), None):
            (programs / name).symlink_to(path)
    os.environ['PATH'] = str(programs)
    with pytest.raises(fakes.UsageError, match='missing programs: etcd, stunnel4.*; without root: .* --fetch'):
        fakes.load_or_create('fake', None, None)
    fakes.fetch_programs()
    fakes.use_fetched_programs()
    (programs / 'apt-get').unlink()
    fakes.fetch_programs()  # what is there is not fetched again
    for name in ('etcd', 'stunnel4'):
        assert machine.run([name, '--version' if name == 'etcd' else '-version'], timeout_seconds=30) is not None
