"""F39: groups and quotas while processes that change them are killed, frozen or raced: counted exactly once."""

from __future__ import annotations

import uuid

import pytest

from tests.kit.commands import Control
from tests.kit.hands import Eschedule, killed_at, lapse, look_twice, settled, start_again
from tests.kit.sharing import APART, ROOMY, members, used
from tests.kit.story import SMALL, addressed, called, notified, one_line, place, reached
from tests.kit.tuned import tuned

FAILPOINTS = COUNTED, RECKONED = 'quota-counted', 'quota-reckoned'
WORDS = (SMALL, '--project', 'web', '--group', 'web', *APART)


@pytest.mark.parametrize('step', ['announced', 'claimed', 'delivered'])
def test_eschedule_killed(cluster: Control, step: str) -> None:
    """F39: kill -9 of eschedule around its delivery: counted, and a member, only if it is delivered (fake)."""
    compute, instance = cluster.ecompute(ROOMY), str(uuid.uuid4())
    called(cluster, 'quota', 'set', 'web', 'instances=1')
    with Eschedule(cluster, *WORDS, '--uuid', instance, failpoint=f'{step}:kill') as eschedule:
        eschedule.killed_at(step)
    delivered = step == 'delivered'
    assert members(cluster, 'web') == ({instance: compute.uuid} if delivered else {})
    assert used(cluster, 'web').get('instances', 0) == delivered
    if not delivered:
        lapse(cluster, f'/requests/{instance}')
        look_twice(cluster, compute)
        instance = place(cluster, *WORDS)[1]  # its share of group and quota is free
    addressed(cluster, instance)
    assert called(cluster, SMALL, '--project', 'web').code == 3
    settled(cluster, compute)


@pytest.mark.parametrize('step', ['destroying', 'released', 'ended'])
def test_ecompute_killed(cluster: Control, step: str) -> None:
    """F39: kill -9 of ecompute in a destroy: the instance leaves its group and quota once (fake)."""
    called(cluster, 'quota', 'set', 'web', 'instances=2')
    compute = tuned(cluster, ROOMY, f'{step}:kill')
    _, surviving = place(cluster, SMALL, '--project', 'web')
    _, doomed = place(cluster, *WORDS)
    for name in (surviving, doomed):
        addressed(cluster, name)
    one_line(called(cluster, 'destroy', doomed), 0, 'destroy accepted')
    killed_at(compute, step)
    start_again(compute)
    reached(cluster, doomed, 'gone')
    assert used(cluster, 'web')['instances'] == 1
    assert members(cluster, 'web') == {}
    settled(cluster, compute)


def test_frozen_with_a_claim_where_another_is_by_then(cluster: Control) -> None:
    """F39: eschedule frozen with its claim while another takes the only compute: it releases the claim (fake)."""
    compute = cluster.ecompute(ROOMY)
    with Eschedule(cluster, *WORDS, failpoint='claimed:stop:1') as frozen:
        frozen.stopped_at('claimed')
        _, first = place(cluster, *WORDS)
        frozen.go_on()
        result = frozen.end()
    assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), result
    assert 'group web has a member there' in result.stderr
    assert members(cluster, 'web') == {first: compute.uuid}
    assert cluster.placement.consumers(compute.uuid).keys() == {first}
    addressed(cluster, first)
    settled(cluster, compute)


def test_frozen_with_a_claim_and_moved(cluster: Control) -> None:
    """F39: eschedule frozen with its claim while another is placed there: it uses another compute (fake)."""
    first, other = cluster.ecompute(ROOMY), cluster.ecompute(ROOMY)
    with Eschedule(cluster, *WORDS, failpoint='claimed:stop:1') as frozen:
        frozen.stopped_at('claimed')
        (claimed,) = [candidate for candidate in (first, other) if cluster.placement.consumers(candidate.uuid)]
        place(cluster, *WORDS, '--on', claimed.uuid)
        frozen.go_on()
        result = frozen.end()
    compute, instance = notified(result)
    assert compute == ({first.uuid, other.uuid} - {claimed.uuid}).pop()
    assert members(cluster, 'web')[instance] == compute
    assert instance not in cluster.placement.consumers(claimed.uuid)
    addressed(cluster, instance)
    settled(cluster, first, other)


def test_frozen_while_the_quota_is_used_up(cluster: Control) -> None:
    """F39: eschedule frozen with its claim while others exhaust the quota: refused, with the numbers (fake)."""
    compute = cluster.ecompute(ROOMY)
    called(cluster, 'quota', 'set', 'web', 'instances=1')
    with Eschedule(cluster, SMALL, '--project', 'web', failpoint='claimed:stop:1') as frozen:
        frozen.stopped_at('claimed')
        _, first = place(cluster, SMALL, '--project', 'web')
        frozen.go_on()
        one_line(frozen.end(), 3, 'the quota of project web does not allow it: instances: limit 1, used 1, asked 1')
    assert cluster.placement.consumers(compute.uuid).keys() == {first}
    settled(cluster, compute)


@pytest.mark.parametrize('killed', [False, True])
def test_quota_set_while_one_is_delivered(cluster: Control, killed: bool) -> None:
    """F39: a delivery while quota set counts: counted too or, if that is killed, found by the audit (fake)."""
    compute = cluster.ecompute(ROOMY)
    place(cluster, SMALL, '--project', 'web')
    words = ('quota', 'set', 'web', 'instances=5')
    failpoint = f'{COUNTED}:stop:1' + (f',{RECKONED}:kill' if killed else '')
    with Eschedule(cluster, *words, failpoint=failpoint) as setting:
        setting.stopped_at(COUNTED)
        place(cluster, SMALL, '--project', 'web')
        setting.go_on()
        if killed:
            setting.killed_at(RECKONED)
        else:
            one_line(setting.end(), 0, 'instances 2/5')
    assert used(cluster, 'web')['instances'] == (1 if killed else 2)
    if killed:
        audit = called(cluster, 'audit')
        assert (audit.code, audit.stdout.count('quota-differs')) == (8, 1), audit
        one_line(called(cluster, *words), 0, 'instances 2/5')
    settled(cluster, compute)


@pytest.mark.parametrize('rubbish', ['not JSON', '[]', '{"version": 99}', b'\xff\xfe'])
def test_rubbish_in_a_group_and_in_a_quota(cluster: Control, rubbish: str | bytes) -> None:
    """F39: malformed keys of a group and a quota: reported to commands that need them, others work (fake)."""
    compute = cluster.ecompute(ROOMY)
    called(cluster, 'quota', 'set', 'web', 'instances=9')
    _, instance = place(cluster, *WORDS)
    place(cluster, SMALL, '--group', 'other', *APART)
    called(cluster, 'quota', 'set', 'other', 'instances=9')
    addressed(cluster, instance)
    broken = ('/groups/web', '/quotas/web')
    for key in broken:
        cluster.etcd.put(key, rubbish)
    one_line(called(cluster, SMALL, '--group', 'web', *APART), 1, broken[0], f'etcdctl del {broken[0]}')
    one_line(called(cluster, SMALL, '--project', 'web'), 1, broken[1], f'etcdctl del {broken[1]}')
    for words, key in ((('group', 'list'), broken[0]), (('quota', 'list'), broken[1])):
        listed = called(cluster, *words)
        one_line(listed, 1, key)
        assert 'other' in listed.stdout, listed
    # The refused commands hold no claims; commands without these keys are placed, and existing instances can be
    # destroyed.
    assert len(cluster.placement.consumers(compute.uuid)) == 2
    addressed(cluster, place(cluster, SMALL, '--project', 'other')[1])
    one_line(called(cluster, 'destroy', instance), 0, 'destroy accepted')
    reached(cluster, instance, 'gone')
    # The suggested fix works.
    for key in broken:
        assert cluster.etcd.get(key) == (rubbish if isinstance(rubbish, bytes) else rubbish.encode())
        cluster.etcd.delete(key)
    addressed(cluster, place(cluster, *WORDS)[1])
    settled(cluster, compute)
