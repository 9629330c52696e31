"""F39: groups and quotas while processes that change them are killed, frozen or raced: counted exactly once."""

from __future__ import annotations

import uuid

import pytest

from tests.kit.commands import Control
from tests.kit.hands import Eschedule, check_claims_twice, check_settled, expire_key, restart_unarmed, wait_killed_at
from tests.kit.sharing import ANTI_AFFINITY, LARGE_INVENTORY, read_members, read_usage
from tests.kit.story import SMALL_QUERY, assert_one_line, parse_notice, place, run_in_process, wait_address, wait_state
from tests.kit.tuned import make_tuned

FAILPOINTS = COUNTED_STEP, RECKONED_STEP = 'quota-counted', 'quota-reckoned'
CREATE_ARGUMENTS = (SMALL_QUERY, '--project', 'web', '--group', 'web', *ANTI_AFFINITY)


@pytest.mark.parametrize('step', ['announced', 'claimed', 'delivered'])
def test_eschedule_killed(cluster: Control, step: str) -> None:
    """F39: kill -9 of eschedule around its delivery: counted, and a member, only if it is delivered (fake)."""
    compute, instance = cluster.ecompute(LARGE_INVENTORY), str(uuid.uuid4())
    run_in_process(cluster, 'quota', 'set', 'web', 'instances=1')
    with Eschedule(cluster, *CREATE_ARGUMENTS, '--uuid', instance, failpoint=f'{step}:kill') as eschedule:
        eschedule.assert_killed_at(step)
    delivered = step == 'delivered'
    assert read_members(cluster, 'web') == ({instance: compute.uuid} if delivered else {})
    assert read_usage(cluster, 'web').get('instances', 0) == delivered
    if not delivered:
        expire_key(cluster, f'/requests/{instance}')
        check_claims_twice(cluster, compute)
        instance = place(cluster, *CREATE_ARGUMENTS)[1]  # its share of group and quota is free
    wait_address(cluster, instance)
    assert run_in_process(cluster, SMALL_QUERY, '--project', 'web').code == 3
    check_settled(cluster, compute)


@pytest.mark.parametrize('step', ['destroying', 'released', 'ended'])
def test_ecompute_killed(cluster: Control, step: str) -> None:
    """F39: kill -9 of ecompute in a destroy: the instance leaves its group and quota once (fake)."""
    run_in_process(cluster, 'quota', 'set', 'web', 'instances=2')
    compute = make_tuned(cluster, LARGE_INVENTORY, f'{step}:kill')
    _, surviving = place(cluster, SMALL_QUERY, '--project', 'web')
    _, doomed = place(cluster, *CREATE_ARGUMENTS)
    for name in (surviving, doomed):
        wait_address(cluster, name)
    assert_one_line(run_in_process(cluster, 'destroy', doomed), 0, 'destroy accepted')
    wait_killed_at(compute, step)
    restart_unarmed(compute)
    wait_state(cluster, doomed, 'gone')
    assert read_usage(cluster, 'web')['instances'] == 1
    assert read_members(cluster, 'web') == {}
    check_settled(cluster, compute)


def test_frozen_eschedule_releases_a_claim_on_a_taken_compute(cluster: Control) -> None:
    """F39: eschedule frozen with its claim while another takes the only compute: it releases the claim (fake)."""
    compute = cluster.ecompute(LARGE_INVENTORY)
    with Eschedule(cluster, *CREATE_ARGUMENTS, failpoint='claimed:stop:1') as frozen:
        frozen.wait_frozen_at('claimed')
        _, first = place(cluster, *CREATE_ARGUMENTS)
        frozen.resume()
        result = frozen.wait()
    assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), result
    assert 'group web has a member there' in result.stderr
    assert read_members(cluster, 'web') == {first: compute.uuid}
    assert cluster.placement.read_consumers(compute.uuid).keys() == {first}
    wait_address(cluster, first)
    check_settled(cluster, compute)


def test_frozen_eschedule_moves_to_another_compute(cluster: Control) -> None:
    """F39: eschedule frozen with its claim while another is placed there: it uses another compute (fake)."""
    first, other = cluster.ecompute(LARGE_INVENTORY), cluster.ecompute(LARGE_INVENTORY)
    with Eschedule(cluster, *CREATE_ARGUMENTS, failpoint='claimed:stop:1') as frozen:
        frozen.wait_frozen_at('claimed')
        (claimed,) = [candidate for candidate in (first, other) if cluster.placement.read_consumers(candidate.uuid)]
        place(cluster, *CREATE_ARGUMENTS, '--on', claimed.uuid)
        frozen.resume()
        result = frozen.wait()
    compute, instance = parse_notice(result)
    assert compute == ({first.uuid, other.uuid} - {claimed.uuid}).pop()
    assert read_members(cluster, 'web')[instance] == compute
    assert instance not in cluster.placement.read_consumers(claimed.uuid)
    wait_address(cluster, instance)
    check_settled(cluster, first, other)


def test_frozen_eschedule_is_refused_by_an_exhausted_quota(cluster: Control) -> None:
    """F39: eschedule frozen with its claim while others exhaust the quota: refused, with the numbers (fake)."""
    compute = cluster.ecompute(LARGE_INVENTORY)
    run_in_process(cluster, 'quota', 'set', 'web', 'instances=1')
    with Eschedule(cluster, SMALL_QUERY, '--project', 'web', failpoint='claimed:stop:1') as frozen:
        frozen.wait_frozen_at('claimed')
        _, first = place(cluster, SMALL_QUERY, '--project', 'web')
        frozen.resume()
        assert_one_line(
            frozen.wait(),
            3,
            'the quota of project web does not allow this request: instances: limit 1, used 1, requested 1',
        )
    assert cluster.placement.read_consumers(compute.uuid).keys() == {first}
    check_settled(cluster, compute)


@pytest.mark.parametrize('killed', [False, True])
def test_quota_set_during_a_delivery(cluster: Control, killed: bool) -> None:
    """F39: a delivery while quota set counts: counted too or, if that is killed, found by the audit (fake)."""
    compute = cluster.ecompute(LARGE_INVENTORY)
    place(cluster, SMALL_QUERY, '--project', 'web')
    words = ('quota', 'set', 'web', 'instances=5')
    failpoint = f'{COUNTED_STEP}:stop:1' + (f',{RECKONED_STEP}:kill' if killed else '')
    with Eschedule(cluster, *words, failpoint=failpoint) as setting:
        setting.wait_frozen_at(COUNTED_STEP)
        place(cluster, SMALL_QUERY, '--project', 'web')
        setting.resume()
        if killed:
            setting.assert_killed_at(RECKONED_STEP)
        else:
            assert_one_line(setting.wait(), 0, 'instances 2/5')
    assert read_usage(cluster, 'web')['instances'] == (1 if killed else 2)
    if killed:
        audit = run_in_process(cluster, 'audit')
        assert (audit.code, audit.stdout.count('quota-differs')) == (8, 1), audit
        assert_one_line(run_in_process(cluster, *words), 0, 'instances 2/5')
    check_settled(cluster, compute)


@pytest.mark.parametrize('rubbish', ['not JSON', '[]', '{"version": 99}', b'\xff\xfe'])
def test_malformed_group_and_quota_affect_only_their_users(cluster: Control, rubbish: str | bytes) -> None:
    """F39: malformed keys of a group and a quota: reported to commands that need them, others work (fake)."""
    compute = cluster.ecompute(LARGE_INVENTORY)
    run_in_process(cluster, 'quota', 'set', 'web', 'instances=9')
    _, instance = place(cluster, *CREATE_ARGUMENTS)
    place(cluster, SMALL_QUERY, '--group', 'other', *ANTI_AFFINITY)
    run_in_process(cluster, 'quota', 'set', 'other', 'instances=9')
    wait_address(cluster, instance)
    broken = ('/groups/web', '/quotas/web')
    for key in broken:
        cluster.etcd.put(key, rubbish)
    assert_one_line(
        run_in_process(cluster, SMALL_QUERY, '--group', 'web', *ANTI_AFFINITY), 1, broken[0], f'etcdctl del {broken[0]}'
    )
    assert_one_line(run_in_process(cluster, SMALL_QUERY, '--project', 'web'), 1, broken[1], f'etcdctl del {broken[1]}')
    for words, key in ((('group', 'list'), broken[0]), (('quota', 'list'), broken[1])):
        listed = run_in_process(cluster, *words)
        assert_one_line(listed, 1, key)
        assert 'other' in listed.stdout, listed
    # The refused commands hold no claims; commands without these keys are placed, and existing instances can be
    # destroyed.
    assert len(cluster.placement.read_consumers(compute.uuid)) == 2
    wait_address(cluster, place(cluster, SMALL_QUERY, '--project', 'other')[1])
    assert_one_line(run_in_process(cluster, 'destroy', instance), 0, 'destroy accepted')
    wait_state(cluster, instance, 'gone')
    # The suggested fix works.
    for key in broken:
        assert cluster.etcd.get(key) == (rubbish if isinstance(rubbish, bytes) else rubbish.encode())
        cluster.etcd.delete(key)
    wait_address(cluster, place(cluster, *CREATE_ARGUMENTS)[1])
    check_settled(cluster, compute)
