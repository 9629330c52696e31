"""F27: destroyed twice, by several at once, or without ever having been there: one release, and everyone is told."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, guests
from tests.kit.servers import until
from tests.kit.story import NOBODY, at_once, boot, boot_all, log_of, one_line, reached, record


def test_destroyed_again_and_destroy_of_nobody(cluster: Control, compute: Ecompute) -> None:
    """F27: the same destroy again, while it is carried out and after; and a destroy of an unknown uuid (fake)"""
    instance = boot(cluster)
    compute.pause()
    one_line(cluster.eschedule('destroy', instance), 0, 'destroy accepted')
    tombstone = cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}')
    one_line(cluster.eschedule('destroy', instance), 0, 'is being destroyed', 'already')
    assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') == tombstone
    compute.resume()
    reached(cluster, instance, 'gone')
    one_line(cluster.eschedule('destroy', instance), 4, 'gone since')
    one_line(cluster.eschedule('destroy', NOBODY), 4, NOBODY, 'no such instance')
    assert cluster.eschedule('destroy', instance, instance, NOBODY).code == 4
    assert record(cluster, NOBODY) is None
    assert one_destroy(log_of(compute), instance)


@pytest.mark.parametrize('by', [2, 10])
def test_destroyed_by_several_at_once(cluster: Control, compute: Ecompute, by: int) -> None:
    """F27: one instance destroyed by 2, and by 10, eschedules at once (fake)"""
    instance, other = boot_all(cluster, 2)
    results = at_once(cluster, [['destroy', '--wait', instance]] * by, width=by)
    # Whoever comes when it is gone already is told so.
    assert set(Counter(each.code for each in results)) <= {0, 4}, results
    accepted = [each for each in results if 'destroy accepted' in each.stderr]
    assert len(accepted) == 1, results
    for result in results:
        assert result.stdout == ''
        assert 'gone' in result.stderr.splitlines()[-1], result
    assert one_destroy(log_of(compute), instance)
    assert guests(compute).keys() == {other}
    assert cluster.placement.consumers(compute.uuid).keys() == {other}


def test_two_destroys_of_one_record(cluster: Control, compute: Ecompute) -> None:
    """F27: two destroys that read the same request: the second to write sees the first's tombstone (fake)"""
    instance = boot(cluster)
    compute.pause()
    with (
        Eschedule(cluster, 'destroy', instance, failpoint='tombstoned:stop') as first,
        Eschedule(cluster, 'destroy', instance, failpoint='tombstoned:stop') as second,
    ):
        # Only one of them can have written; the other has ended, or it has not looked yet and will find the tombstone.
        ended = until(lambda: next((each for each in (first, second) if each.has_ended), None), 30, 'one has ended')
        assert ended is not None
        one_line(ended.end(), 0, 'is being destroyed', 'already')
        frozen = second if ended is first else first
        frozen.stopped_at('tombstoned')
        compute.resume()
        reached(cluster, instance, 'gone')
        frozen.go_on()
        one_line(frozen.end(), 0, 'destroy accepted')
    assert one_destroy(log_of(compute), instance)


def one_destroy(lines: list[str], instance: str) -> bool:
    """Whether the compute went to destroy the instance once."""
    return sum(f'DESTROY INSTANCE {instance}' in line for line in lines) == 1
