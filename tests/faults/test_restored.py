"""After a restore of etcd, of placement, or of both (rules: familiar-etcd, claim-stays)."""

from __future__ import annotations

import json
import socket
import uuid
from collections import Counter

import pytest

from ecomp.model import keys
from tests.faults.etcds import SavedSnapshot
from tests.faults.etcds import restore_placement as restore
from tests.faults.etcds import save_placement as save
from tests.kit.audit import run_audit
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import (
    check_settled,
    read_guests,
    restart_accepting_etcd,
)
from tests.kit.servers import wait_until
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    boot,
    find_log_lines,
    parse_notice,
    place,
    require_record,
    wait_address,
    wait_log_lines,
    wait_state,
)

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:16'


def count_domains(*computes: Ecompute) -> dict[str, int]:
    return dict(Counter(instance for compute in computes for instance in read_guests(compute)))


def format_compute_label(compute: Ecompute) -> str:
    """Return the label that messages use for one of several computes of this machine."""
    return f'{socket.gethostname()} ({compute.uuid})'


def queue_request(control: Control, *words: str) -> str:
    assert control.eschedule('flavor', 'set', 'small', QUERY).code == 0
    instance = str(uuid.uuid4())
    result = control.eschedule('--flavor', 'small', '--queue', IMAGE, '--uuid', instance, *words)
    assert result.code == 0, result
    return instance


def stop_compute(compute: Ecompute) -> Ecompute:
    assert compute.stop() == 0
    return compute


def create_with_uuid(control: Control, instance: str, *words: str) -> Result:
    return control.eschedule(QUERY, IMAGE, '--uuid', instance, *words)


# After a restore of etcd, or of etcd and placement, no instance is built a second time.


STRANGE_ETCD_MESSAGE = 'is not the one that this compute used before'
BROKEN_HISTORY = pytest.mark.history_broken('etcd is restored from an older copy')


@BROKEN_HISTORY
def test_compute_without_history_takes_no_running_instance(own_control: Control) -> None:
    """R1: U waits in the restored queue and runs: another compute leaves it alone (fake)."""
    first = stop_compute(own_control.ecompute(queues=True))
    instance = queue_request(own_control)
    older = SavedSnapshot(own_control.etcd)
    first.start()
    wait_state(own_control, instance, 'active')
    older.restore()
    second = own_control.ecompute(queues=True)
    wait_log_lines(second, 'requests are not taken', first.uuid)
    wait_until(lambda: find_log_lines(first, STRANGE_ETCD_MESSAGE), 30, 'the first compute sees what happened')
    wait_until(lambda: own_control.etcd.list_keys(f'/computes/{first.uuid}') == [], 60, 'its lease ends')
    assert count_domains(first, second) == {instance: 1}
    explanation = own_control.eschedule('why', instance)
    assert f'claimed on {format_compute_label(first)}, which is silent' in explanation.stdout, explanation
    for command in (['list', '-f', 'csv'], ['show', instance], ['wait', instance, '--timeout', '1']):
        result = own_control.eschedule(*command)
        assert f'claimed on {format_compute_label(first)}' in result.stdout + result.stderr, result
    audit = own_control.eschedule('check', '-f', 'json')
    assert audit.code == 8, audit
    codes = [finding['code'] for finding in json.loads(audit.stdout) if finding['level'] == 'error']
    assert codes == ['compute-silent'], audit
    restart_accepting_etcd(first)
    wait_state(own_control, instance, 'active')
    assert count_domains(first, second) == {instance: 1}
    assert own_control.etcd.get(f'/accepted/{first.uuid}')
    check_settled(own_control, first, second)


@pytest.mark.parametrize(
    'waits', [pytest.param(False, id='at-once'), pytest.param(True, id='silent', marks=pytest.mark.slow)]
)
@BROKEN_HISTORY
def test_repeated_command_places_no_running_instance(own_control: Control, waits: bool) -> None:
    """R2: the command with --uuid, repeated after the restore, reports the claim (fake)."""
    first, second = own_control.ecompute(), own_control.ecompute()
    stop_compute(second)
    older = SavedSnapshot(own_control.etcd)
    instance = str(uuid.uuid4())
    parse_notice(create_with_uuid(own_control, instance))
    wait_state(own_control, instance, 'active')
    older.restore()
    second.start()
    if waits:
        wait_until(
            lambda: own_control.etcd.list_keys(f'/computes/{first.uuid}') == [], 60, 'the lease of the first ends'
        )
    result = create_with_uuid(own_control, instance)
    if waits:
        assert result.code == 5, result
        message = result.stderr
        order = ['silent and may be running it', 'wait', 'accept-new-etcd', 'another uuid', 'host forget']
        assert [message.find(phrase) for phrase in order] == sorted(message.find(phrase) for phrase in order), message
        assert min(message.find(phrase) for phrase in order) >= 0, message
        audit = own_control.eschedule('check')
        assert audit.code == 8, audit
        refused = own_control.eschedule('host', 'forget', first.uuid)
        assert refused.code == 5, refused
        assert '--fenced' in refused.stderr, refused
    else:  # its presence is in the snapshot: it gets the request and keeps it
        assert parse_notice(result)[0] == first.uuid, result
    assert count_domains(first, second) == {instance: 1}
    restart_accepting_etcd(first)
    wait_state(own_control, instance, 'active')
    repeated = create_with_uuid(own_control, instance)
    assert parse_notice(repeated)[0] == first.uuid, repeated
    assert count_domains(first, second) == {instance: 1}
    check_settled(own_control, first, second)


@pytest.mark.unaudited('one of its hosts is a provider that no ecompute keeps')
def test_acceptance_by_one_compute_counts_for_one_that_was_off(cluster: Control) -> None:
    """The compute knows the etcd from before the request, maybe taken before a restore (fake)."""
    compute = stop_compute(cluster.ecompute(queues=True))
    queue_request(cluster)
    silent = cluster.placement.make_provider(VCPU=1, MEMORY_MB=64, DISK_GB=1)
    cluster.etcd.put(keys.acceptance(silent), str(10**9))
    compute.start()
    wait_log_lines(compute, 'requests are not taken', silent)
    later = queue_request(cluster)
    wait_state(cluster, later, 'active')
    assert count_domains(compute) == {later: 1}


@BROKEN_HISTORY
def test_instance_destroyed_in_a_restored_queue_vanishes(own_control: Control) -> None:
    """R3: an instance destroyed in a restored queue vanishes when its compute is back (fake)."""
    first = own_control.ecompute(queues=True)
    assert own_control.eschedule('quota', 'set', 'q', 'instances=3').code == 0
    stop_compute(first)
    instance = queue_request(own_control, '--name', 'web', '--project', 'q')
    older = SavedSnapshot(own_control.etcd)
    first.start()
    wait_state(own_control, instance, 'active')
    stop_compute(first)
    older.restore()
    result = own_control.eschedule('destroy', instance)
    assert result.code == 0, result
    assert 'holds a claim for it' in result.stderr, result
    assert 'once this compute is no longer silent' in result.stderr, result
    restart_accepting_etcd(first)
    wait_state(own_control, instance, 'gone')
    wait_until(lambda: count_domains(first) == {}, 30, 'its guest is gone')
    assert json.loads(own_control.etcd.get('/quotas/q') or b'')['used'] == {}
    assert own_control.etcd.list_keys('/names/') == []
    check_settled(own_control, first)


# F17: placement's database is replaced by an older copy: newer claims are missing, or old ones are too many.
#
# Guests run in either case. ecompute recreates its provider and inventory and releases claims without a request; the
# audit reports missing claims.


def check_unharmed(control: Control, compute: Ecompute, instance: str, address: str) -> None:
    status = require_record(control, instance)
    assert (status['state'], status['addresses'][0]['address']) == ('active', address)
    assert read_guests(compute)[instance]['running']


def test_missing_claim_is_found_by_the_audit(own_control: Control, compute: Ecompute) -> None:
    """F17: placement restored to before a create: the audit reports it, a destroy works (fake)."""
    before = boot(own_control)
    save(own_control)
    _, since = place(own_control)
    address = wait_address(own_control, since)
    restore(own_control)
    assert own_control.placement.read_consumers(compute.uuid).keys() == {before}
    audit_findings = run_audit(own_control)
    assert [finding['subject'] for finding in audit_findings] == [since], audit_findings
    assert 'placement has no claim for it' in str(audit_findings), audit_findings
    compute.stop()
    compute.start()  # a restart does no harm, either
    check_unharmed(own_control, compute, since, address)
    assert own_control.eschedule('destroy', since, before).code == 0
    for instance in (since, before):
        wait_state(own_control, instance, 'gone')


def test_missing_provider_is_recreated_at_start(own_control: Control) -> None:
    """F17: placement restored from before this compute: its start makes a provider (fake)."""
    save(own_control)
    compute = own_control.ecompute()
    _, instance = place(own_control)
    address = wait_address(own_control, instance)
    restore(own_control)
    assert own_control.placement.read_inventory(compute.uuid) == {}
    check_unharmed(own_control, compute, instance, address)
    compute.stop()
    compute.start()
    assert own_control.placement.read_inventory(compute.uuid)['VCPU']['total'] == 4
    check_unharmed(own_control, compute, instance, address)
    assert own_control.eschedule('destroy', '--wait', instance).code == 0
    assert parse_notice(own_control.eschedule(SMALL_QUERY))[0] == compute.uuid
    check_settled(own_control, compute)
