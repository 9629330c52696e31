"""A host is evacuated exactly once, wherever the evacuation is killed, interrupted or repeated."""

from __future__ import annotations

import json
import signal

from ecomp.model import keys
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule
from tests.kit.invariants import check_invariants, read_allocations
from tests.kit.sharing import kill_and_lapse
from tests.kit.stacks import QUERY, list_instances
from tests.kit.story import IMAGE, wait_state

EVACUATION_FAILPOINTS = ('evacuation-announced', 'claimed-some', CLAIMED := 'evacuation-claimed', 'evacuated')
NAMES = {f'web-{number}' for number in range(1, 5)}


def prepare_dead_host(control: Control) -> tuple[Ecompute, Ecompute, dict[str, str]]:
    """Return a host that died with four guests, a living one, and {name: instance} of the guests."""
    dead = control.ecompute()
    assert control.eschedule(QUERY, IMAGE, '--name', 'web', '--count', '4').code == 0
    before = list_instances(control)
    for instance in before.values():
        wait_state(control, instance, 'active')
    other = control.ecompute()
    kill_and_lapse(control, dead)
    return dead, other, before


def test_killed_evacuation_is_continued_by_the_next(cluster: Control) -> None:
    dead, other, before = prepare_dead_host(cluster)
    words = ('evacuate', dead.uuid, '--fenced', '--yes')
    for step in EVACUATION_FAILPOINTS:
        with Eschedule(cluster, *words, failpoint=f'{step}:kill') as eschedule:
            eschedule.assert_killed_at(step)
    final = cluster.eschedule(*words, '-f', 'json')
    assert final.code == 0, final
    after = {name: json.loads(cluster.etcd.get(keys.name(name)) or b'')['instance'] for name in NAMES}
    assert before.keys() == NAMES
    assert not set(after.values()) & set(before.values())
    tombstones = [json.loads(cluster.etcd.get(keys.request(dead.uuid, each)) or b'') for each in before.values()]
    assert sorted(each['replaced_by'] for each in tombstones) == sorted(after.values())
    assert read_allocations(cluster).keys() == {*before.values(), *after.values()}
    dead.start()
    check_invariants(cluster, dead, other)
    assert list_instances(cluster) == after


def test_interrupted_evacuation_releases_what_it_claimed(cluster: Control) -> None:
    dead, other, before = prepare_dead_host(cluster)
    words = ('evacuate', dead.uuid, '--fenced', '--yes')
    with Eschedule(cluster, *words, failpoint=f'{CLAIMED}:stop') as eschedule:
        eschedule.wait_frozen_at(CLAIMED)
        second = cluster.eschedule(*words)
        assert second.code == 5
        assert f'another evacuation is in flight, process {eschedule.pid} on ' in second.stderr
        assert len(read_allocations(cluster)) == 2 * len(before)
        eschedule.send_signal(signal.SIGINT)
        eschedule.resume()
        interrupted = eschedule.wait()
    assert interrupted.code == 6, interrupted
    assert 'may not be evacuated yet. Try: eschedule' in interrupted.stderr
    assert read_allocations(cluster).keys() == set(before.values())
    assert list_instances(cluster) == before
    assert cluster.eschedule(*words).code == 0
    dead.start()
    check_invariants(cluster, dead, other)
