"""`ecompute --fake … --count N`: many pretended computes in one process, each as good as one of its own."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.commands import Control, run
from tests.kit.invariants import check
from tests.kit.many import Many
from tests.kit.servers import until
from tests.kit.story import SMALL, addressed, notified, one_line, reached, record, reserved

TOY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


def test_five_in_one_process(cluster: Control) -> None:
    many = Many(cluster, 5)
    many.start()
    computes = many.computes
    assert len(computes) == 5
    log = many.log.read_text()
    assert set(re.findall(' ready: compute ([0-9a-f-]{36}), ', log)) == computes
    assert len(log.splitlines()) == 6  # a line for each, and one for all

    done = cluster.eschedule(SMALL, '--count', '20', '-f', 'json')
    assert done.code == 0, done
    placed = {each['instance']: each['compute'] for each in json.loads(done.stdout)}
    assert Counter(placed.values()) == dict.fromkeys(computes, 4)
    for instance, compute in placed.items():
        assert reached(cluster, instance, 'active')['compute'] == compute
        addressed(cluster, instance)
    refused = cluster.eschedule(SMALL)
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    check(cluster)
    assert cluster.eschedule('destroy', '--wait', *placed).code == 0

    assert many.stop() == 0
    assert many.computes == set()
    assert [reserved(cluster, compute) for compute in computes] == [4] * 5
    assert '5 computes are stopped' in many.last_words()
    assert list(cluster.directory.glob('ecompute-fake-*')) == []


@pytest.mark.slow
def test_killed_and_started_again_they_are_the_same(cluster: Control) -> None:
    many = Many(cluster, 5, state='state')
    many.start()
    computes = many.computes
    placed = dict(reversed(notified(cluster.eschedule(SMALL))) for _ in range(6))
    for instance in placed:
        addressed(cluster, instance)
    many.pause()
    # Asked of computes that are not there to hear it.
    meanwhile = notified(cluster.eschedule(SMALL))[1]
    doomed, *kept = placed
    assert cluster.eschedule('destroy', doomed).code == 0
    many.kill()
    many.start()
    assert many.computes == computes
    addressed(cluster, meanwhile)
    until(lambda: (found := record(cluster, doomed)) is None or found['state'] == 'gone', 20, f'{doomed} is gone')
    for instance in kept:
        assert reached(cluster, instance, 'active')['compute'] == placed[instance]
    assert {path.name for path in (cluster.directory / 'state').iterdir() if path.is_dir()} == set('12345')
    check(cluster)
    # Fewer are the first of them; and those that are left out come back.
    assert many.stop() == 0
    many.count = 2
    many.start()
    few = many.computes
    assert len(few) == 2
    assert few < computes
    assert many.stop() == 0
    many.count = 5
    many.start()
    assert many.computes == computes
    check(cluster)


@pytest.mark.slow
def test_they_take_from_queues(cluster: Control) -> None:
    many = Many(cluster, 5, queues=True)
    many.start()
    assert cluster.eschedule('flavor', 'set', 'small', SMALL).code == 0
    queued = [cluster.eschedule('--queue', '--flavor', 'small').stdout.split()[-1] for _ in range(15)]
    taken = Counter(reached(cluster, instance, 'active')['compute'] for instance in queued)
    assert taken.keys() <= many.computes
    assert max(taken.values()) <= 4
    check(cluster)
    assert cluster.eschedule('destroy', '--wait', *queued).code == 0


def test_two_processes_do_not_share_a_state(cluster: Control) -> None:
    many = Many(cluster, 2, state='state')
    many.start()
    second = run('ecomp.compute', '--fake', TOY, '--count', '2', directory=cluster.directory)
    one_line(second, 5, 'state', str(many.pid), command='ecompute')
    assert len(many.computes) == 2


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        (['--count', '2'], '--count goes with --fake'),
        (['--fake', TOY, '--count', '2'], '--count 2: `uuid:` in the configuration names one compute'),
        (['--fake', TOY, '--count', '0'], "'0' is no number from 1 to "),
        (['--fake', TOY, '--count', 'many'], "'many' is no number from 1 to "),
        (['--fake', TOY, '--count'], '--count'),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / 'compute.yaml').write_text('uuid: 5ca1ab1e-0000-4000-8000-000000000000\n')
    one_line(run('ecomp.compute', *words, directory=tmp_path), 2, says, command='ecompute')
