"""An ecompute that is refused at its start leaves the state directory as it was: the next one is who it was."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from ecomp.model import keys
from tests.kit.commands import Control, Ecompute, Result, run, write_config
from tests.kit.servers import free_port
from tests.kit.story import addressed, one_line, place

OTHER = '0b5e55ed-0000-4000-8000-000000000000'
INVENTORY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


def everything_in(directory: Path) -> dict[str, tuple[int, bytes]]:
    """What is in a directory and below: mode and content of each path, a directory's own mode included."""
    paths = [directory, *sorted(directory.rglob('*'))]
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b'') for path in paths}


def start(compute: Ecompute, **settings: object) -> Result:
    """What becomes of a start over the state directory of `compute` with these settings in place of its own."""
    own = yaml.safe_load(compute.config.read_text())
    fake = str(settings.pop('fake', INVENTORY))
    merged = {key: value for key, value in {**own, **settings}.items() if value is not None}
    config = compute.directory / 'refused.yaml'
    config.write_text(yaml.safe_dump(merged))
    words = ('--config', str(config), '--fake', fake)
    return run('ecomp.compute', *words, directory=compute.directory)


@pytest.fixture
def stopped(cluster: Control) -> Ecompute:
    """An ecompute that is stopped, with an instance and a state directory that somebody has put half a file in."""
    compute = cluster.ecompute(traits=['CUSTOM_OURS'])
    addressed(cluster, place(cluster)[1])
    compute.stop()
    (compute.directory / 'state/.etcd.json.part').write_text('half')
    return compute


REFUSALS: Mapping[str, tuple[dict[str, object], int, str]] = {
    'a typo in uuid:': ({'uuid': OTHER}, 5, 'put `uuid: '),
    'a trait that placement does not know': ({'traits': ['HW_CPU_NO_SUCH']}, 2, 'HW_CPU_NO_SUCH'),
    'a ratio of what there is not': ({'allocation_ratios': {'SRIOV_NET_VF': 2.0}}, 2, 'SRIOV_NET_VF'),
    'a class that placement does not know': ({'fake': 'VCPU:4,MEMORY:512,DISK_GB:10'}, 2, 'resource class MEMORY (did'),
    'KVM for what is pretended': ({'virt_type': 'kvm'}, 2, 'only pretended'),
    'both': ({'uuid': OTHER, 'virt_type': 'kvm'}, 2, 'only pretended'),
}


@pytest.mark.parametrize('what', REFUSALS)
def test_nothing_of_it_is_changed(stopped: Ecompute, what: str) -> None:
    settings, code, says = REFUSALS[what]
    before = everything_in(stopped.directory / 'state')
    refused = start(stopped, **settings)
    assert (refused.code, says in refused.stderr.splitlines()[-1]) == (code, True), refused
    assert everything_in(stopped.directory / 'state') == before
    # And who has no uuid: any more is who it was.
    stopped.start()
    assert f'compute {stopped.uuid}, ' in stopped.last_words()


def test_nor_where_the_other_one_is_alive_by_a_key_on_no_lease(stopped: Ecompute, cluster: Control) -> None:
    cluster.etcd.put(keys.compute(stopped.uuid), '{}')
    try:
        refused = start(stopped, uuid=OTHER)
    finally:
        cluster.etcd.delete(keys.compute(stopped.uuid))
    assert (refused.code, f'put `uuid: {stopped.uuid}`' in refused.stderr) == (5, True), refused


@pytest.mark.parametrize('backend', ['etcd', 'placement'])
def test_nor_where_nobody_answers(stopped: Ecompute, backend: str) -> None:
    nowhere = f'127.0.0.1:{free_port()}'
    section = {'endpoints': [nowhere]} if backend == 'etcd' else {'endpoint': f'http://{nowhere}'}
    before = everything_in(stopped.directory / 'state')
    refused = start(stopped, uuid=OTHER, **{backend: section})
    assert (refused.code, f'{backend} at' in refused.stderr) == (7 if backend == 'etcd' else 5, backend == 'etcd')
    assert everything_in(stopped.directory / 'state') == before
    refused = start(stopped, **{backend: section})
    assert (refused.code, f'{backend} at' in refused.stderr) == (7, True)
    assert everything_in(stopped.directory / 'state') == before


def test_nor_where_another_ecompute_is_this_one(stopped: Ecompute, cluster: Control) -> None:
    stopped.start()
    second = write_config(
        cluster.directory / 'second.yaml', cluster.etcd.endpoint, cluster.placement.url,
        state=str(cluster.directory / 'second'), uuid=stopped.uuid,
    )  # fmt: skip
    there = cluster.directory / 'second'
    there.mkdir()
    for name in ('uuid', 'token'):
        (there / name).write_text(f'{uuid.uuid4()}\n')
    (there / 'lock').touch(0o600)
    before = everything_in(there)
    refused = run('ecomp.compute', '--config', str(second), '--fake', INVENTORY, directory=cluster.directory)
    assert (refused.code, 'is held by another ecompute' in refused.stderr) == (5, True), refused
    assert everything_in(there) == before


def test_nor_where_another_ecompute_has_it(stopped: Ecompute) -> None:
    stopped.start()
    files = ('lock', 'uuid', 'token', 'fake.json', 'provider.json')
    before = {name: (stopped.directory / 'state' / name).read_bytes() for name in files}
    refused = start(stopped, uuid=OTHER)
    one_line(refused, 5, f'is used by the ecompute with pid {stopped.pid}', command='ecompute')
    assert {name: (stopped.directory / 'state' / name).read_bytes() for name in files} == before


def test_nor_where_what_it_remembers_cannot_be_understood(stopped: Ecompute) -> None:
    for name, kept in (('provider.json', '{"version": 99}'), ('etcd.json', 'x'), ('token', 'none\n')):
        path = stopped.directory / 'state' / name
        there = path.read_bytes()
        path.write_text(kept)
        before = everything_in(stopped.directory / 'state')
        refused = start(stopped)
        assert (refused.code, str(path) in refused.stderr) == (2, True), refused
        assert everything_in(stopped.directory / 'state') == before
        path.write_bytes(there)
