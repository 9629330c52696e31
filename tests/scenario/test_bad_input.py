"""Refused starts: what a newcomer sees, and what a refused ecompute leaves unchanged.

The words of refused commands are in tests/golden/commands. Malformed words and files are in tests/faults/test_words.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from ecomp.model import keys
from tests.kit.commands import Control, Ecompute, Result, run_module
from tests.kit.servers import free_port, make_environment
from tests.kit.story import place, wait_address

OTHER_UUID = '0b5e55ed-0000-4000-8000-000000000000'
INVENTORY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


def test_eschedule_without_arguments_prints_the_help(tmp_path: Path) -> None:
    bare_result = run_module('ecomp.schedule', directory=tmp_path)
    assert (bare_result.code, bare_result.stderr) == (2, '')
    for form in ('destroy', 'list', 'show', '--uuid', '--wait', '--timeout', 'exit codes'):
        assert form in bare_result.stdout
    help_result = run_module('ecomp.schedule', '--help', directory=tmp_path)
    assert (help_result.code, help_result.stdout) == (0, bare_result.stdout)


def test_unreachable_default_server_is_reported_as_a_guess(tmp_path: Path) -> None:
    env = {**make_environment(), 'HOME': str(tmp_path)}
    for module, name in (('schedule', 'schedule.yaml'), ('compute', 'compute.yaml')):
        words = ['list'] if module == 'schedule' else ['--fake', 'VCPU:1']
        command = ['unshare', '-n', sys.executable, '-m', f'ecomp.{module}', *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        last_line = done.stderr.splitlines()[-1]
        assert (done.returncode, 'localhost:2379 cannot be reached' in last_line) == (7, True), done
        advice = '. Try: eschedule check'
        if module == 'compute':
            advice = '; no guest is started before it answers. Try: ecompute --check'
        assert last_line.endswith(f' (default, because no {name} was found; use --config FILE){advice}')


# A refused start of an ecompute leaves the state directory unchanged: the next start is the same compute.


def read_tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    paths = [directory, *sorted(directory.rglob('*'))]
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b'') for path in paths}


def try_start(compute: Ecompute, **settings: object) -> Result:
    old_settings = yaml.safe_load(compute.config.read_text())
    inventory = str(settings.pop('fake', INVENTORY))
    merged = {key: value for key, value in {**old_settings, **settings}.items() if value is not None}
    config = compute.directory / 'refused.yaml'
    config.write_text(yaml.safe_dump(merged))
    words = ('--config', str(config), '--fake', inventory)
    return run_module('ecomp.compute', *words, directory=compute.directory)


@pytest.fixture
def stopped_compute(cluster: Control) -> Ecompute:
    compute = cluster.ecompute(traits=['CUSTOM_OURS'])
    wait_address(cluster, place(cluster)[1])
    compute.stop()
    (compute.directory / 'state/.etcd.json.part').write_text('half')
    return compute


REFUSALS: Mapping[str, tuple[dict[str, object], int, str]] = {
    'a typo in uuid:': ({'uuid': OTHER_UUID}, 5, 'set `uuid: '),
    'a trait that placement does not know': ({'traits': ['HW_CPU_NO_SUCH']}, 2, 'HW_CPU_NO_SUCH'),
    'a ratio of what there is not': ({'allocation_ratios': {'SRIOV_NET_VF': 2.0}}, 2, 'SRIOV_NET_VF'),
    'a class that placement does not know': ({'fake': 'VCPU:4,MEMORY:512,DISK_GB:10'}, 2, 'resource class MEMORY (did'),
    'KVM for what is pretended': ({'virt_type': 'kvm'}, 2, 'the guests are fake'),
    'both': ({'uuid': OTHER_UUID, 'virt_type': 'kvm'}, 2, 'the guests are fake'),
}


def test_refused_start_leaves_the_state_directory_unchanged(stopped_compute: Ecompute, cluster: Control) -> None:
    state = stopped_compute.directory / 'state'
    before = read_tree(state)
    for what, (settings, code, says) in REFUSALS.items():
        refused = try_start(stopped_compute, **settings)
        assert (refused.code, says in refused.stderr.splitlines()[-1]) == (code, True), (what, refused)
        assert read_tree(state) == before, what
    nowhere = f'127.0.0.1:{free_port()}'
    for backend, section in {'etcd': {'endpoints': [nowhere]}, 'placement': {'endpoint': f'http://{nowhere}'}}.items():
        refused = try_start(stopped_compute, **{backend: section})
        assert (refused.code, f'{backend} at' in refused.stderr) == (7, True), refused
        assert read_tree(state) == before, backend
    # A presence key without a lease belongs to nobody: the uuid is still refused.
    cluster.etcd.put(keys.compute(stopped_compute.uuid), '{}')
    refused = try_start(stopped_compute, uuid=OTHER_UUID)
    cluster.etcd.delete(keys.compute(stopped_compute.uuid))
    assert (refused.code, f'set `uuid: {stopped_compute.uuid}`' in refused.stderr) == (5, True), refused
    for name, content in (('provider.json', '{"version": 99}'), ('etcd.json', 'x'), ('token', 'none\n')):
        path = state / name
        original = path.read_bytes()
        path.write_text(content)
        malformed = read_tree(state)
        refused = try_start(stopped_compute)
        assert (refused.code, str(path) in refused.stderr) == (2, True), refused
        assert read_tree(state) == malformed, name
        path.write_bytes(original)
    # Without `uuid:` in its configuration the compute is the same as before.
    stopped_compute.start()
    assert f'compute {stopped_compute.uuid}, ' in stopped_compute.tail_log()
