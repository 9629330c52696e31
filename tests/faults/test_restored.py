"""After a restore of etcd, of placement, or of both (rules: familiar-etcd, claim-stays)."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable

import pytest
import yaml

from ecomp.model import keys
from ecomp.model.order import make_member_uuid
from tests.faults.etcds import SavedSnapshot, Snapshot, restore_placement, save_placement
from tests.faults.etcds import restore_placement as restore
from tests.faults.etcds import save_placement as save
from tests.kit.audit import run_audit
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import (
    Eschedule,
    check_settled,
    count_losses,
    read_guests,
    restart_accepting_etcd,
)
from tests.kit.servers import Etcd, wait_until
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    boot,
    find_log_lines,
    parse_notice,
    place,
    read_log,
    read_reserved,
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


# After a restore: an attempt that fails, an etcd that restarts, a host that returns.


BROKEN_HISTORY = pytest.mark.history_broken('etcd is restored from an older copy')
APART = ('--group', 'g', '--policy', 'anti-affinity')


@pytest.mark.slow
@BROKEN_HISTORY
def test_claim_of_a_running_guest_is_not_moved_for_its_group(own_control: Control) -> None:
    """A member of its anti-affinity group joins A before the delivery: U stays there (fake)."""
    first, second = own_control.ecompute(), own_control.ecompute()
    stop_compute(second)
    older = SavedSnapshot(own_control.etcd)
    instance, other = str(uuid.uuid4()), str(uuid.uuid4())
    parse_notice(create_with_uuid(own_control, instance, *APART))
    wait_state(own_control, instance, 'active')
    older.restore()
    second.start()
    with Eschedule(own_control, QUERY, IMAGE, '--uuid', instance, *APART, failpoint='claimed:stop:1') as command:
        command.wait_frozen_at('claimed')
        assert own_control.eschedule('host', 'drain', second.uuid).code == 0
        create_with_uuid(own_control, other, *APART)
        assert own_control.eschedule('host', 'enable', second.uuid).code == 0
        command.resume()
        result = command.wait()
    assert own_control.placement.read_allocations(instance).keys() == {first.uuid}, result
    assert count_domains(first, second)[instance] == 1


@pytest.mark.slow
@BROKEN_HISTORY
def test_repeated_set_does_not_move_a_running_member(own_control: Control) -> None:
    """A member runs on A, which fills up before the other is claimed: the set stays (fake)."""
    first, second = own_control.ecompute(), own_control.ecompute()
    stop_compute(second)
    older = SavedSnapshot(own_control.etcd)
    set_uuid = str(uuid.uuid4())
    instance = make_member_uuid(set_uuid, 1)
    parse_notice(create_with_uuid(own_control, instance))
    wait_state(own_control, instance, 'active')
    older.restore()
    second.start()
    words = (QUERY, IMAGE, '--uuid', set_uuid, '--count', '2', '--group', 'g', '--policy', 'affinity')
    with Eschedule(own_control, *words, failpoint='claimed-some:stop:1') as command:
        command.wait_frozen_at('claimed-some')
        assert own_control.eschedule('host', 'drain', second.uuid).code == 0
        parse_notice(own_control.eschedule('resources=VCPU:3,DISK_GB:1,MEMORY_MB:16', IMAGE))
        assert own_control.eschedule('host', 'enable', second.uuid).code == 0
        command.resume()
        result = command.wait()
    assert result.code == 5, result
    assert own_control.placement.read_allocations(instance).keys() == {first.uuid}
    assert count_domains(first, second)[instance] == 1


@pytest.mark.slow
def test_restored_presence_key_proves_nothing_after_etcd_restarts(own_control: Control) -> None:
    """Etcd and placement are restored, and each restart of etcd renews A's lease (fake)."""
    first = own_control.ecompute()
    instance = queue_request(own_control)
    save_placement(own_control)
    older = SavedSnapshot(own_control.etcd)
    options = yaml.safe_load(first.config.read_text())
    first.config.write_text(yaml.safe_dump({**options, 'queues': True}))
    first.restart()
    wait_state(own_control, instance, 'active')
    older.restore()
    restore_placement(own_control)
    second = own_control.ecompute(queues=True)
    wait_log_lines(second, 'requests are not taken', first.uuid)
    began, restarts = time.monotonic(), [25.0, 50.0]
    while (spent := time.monotonic() - began) < 75.0:
        if restarts and spent > restarts[0]:
            restarts.pop(0)
            own_control.etcd.restart()
        assert count_domains(first, second) == {instance: 1}, spent
        time.sleep(0.5)


# After a restore of etcd, or of etcd and placement, no instance is built a second time.


STRANGE_ETCD_MESSAGE = 'is not the one this compute knew'
Kind = Callable[[Etcd], Snapshot]
NEVER_RAN = 'never ran'
OFF_SINCE_BACKUP = 'off since before the backup'
HISTORIES = pytest.mark.parametrize(
    ('kind', 'history'),
    [
        (SavedSnapshot, NEVER_RAN),
        pytest.param(SavedSnapshot, OFF_SINCE_BACKUP, marks=pytest.mark.slow),
        pytest.param(Snapshot, NEVER_RAN, marks=pytest.mark.slow),
        pytest.param(Snapshot, OFF_SINCE_BACKUP, marks=pytest.mark.slow),
    ],
)


def prepare_second_compute(control: Control, history: str) -> Callable[[], Ecompute]:
    if history == NEVER_RAN:
        return lambda: control.ecompute(queues=True)
    second = stop_compute(control.ecompute(queues=True))

    def start_again() -> Ecompute:
        second.start()
        return second

    return start_again


def run_after_snapshot(
    control: Control, kind: Kind, history: str
) -> tuple[str, Ecompute, Callable[[], Ecompute], Snapshot]:
    """Run an instance on one compute after taking a snapshot of etcd in which it still waits.

    Returns:
        The instance, its compute, a function that starts another one, and the snapshot.
    """
    first = stop_compute(control.ecompute(queues=True))
    begin_second = prepare_second_compute(control, history)
    instance = queue_request(control)
    older = kind(control.etcd)
    first.start()
    wait_state(control, instance, 'active')
    assert count_domains(first) == {instance: 1}
    return instance, first, begin_second, older


@HISTORIES
@pytest.mark.history_broken('etcd is restored from an older copy')
def test_compute_without_history_takes_no_running_instance(own_control: Control, kind: Kind, history: str) -> None:
    """R1: U waits in the restored queue and runs: another compute leaves it alone (fake)."""
    instance, first, begin_second, older = run_after_snapshot(own_control, kind, history)
    older.restore()
    second = begin_second()
    words = (
        ('requests are not taken', first.uuid)
        if history == NEVER_RAN
        else (instance, f'is claimed on compute {first.uuid}')
    )
    wait_log_lines(second, *words)
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
@pytest.mark.history_broken('etcd is restored from an older copy')
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


@pytest.mark.slow
@pytest.mark.history_broken('etcd and placement are restored from older copies')
def test_new_compute_waits_after_both_are_restored(own_control: Control) -> None:
    """Neither etcd nor placement has a trace of U: a new compute waits for silent ones (fake)."""
    first = stop_compute(own_control.ecompute(queues=True))
    instance = queue_request(own_control)
    save_placement(own_control)
    older = SavedSnapshot(own_control.etcd)
    first.start()
    wait_state(own_control, instance, 'active')
    older.restore()
    restore_placement(own_control)
    second = own_control.ecompute(queues=True)
    wait_log_lines(second, 'requests are not taken', first.uuid)
    second.restart()
    wait_log_lines(second, 'requests are not taken', first.uuid, number=2)
    assert count_domains(first, second) == {instance: 1}
    explanation = own_control.eschedule('why', instance)
    assert f'{format_compute_label(first)} is silent' in explanation.stdout, explanation
    later = queue_request(own_control)  # a compute that saw a request arrive may take it
    wait_state(own_control, later, 'active')
    restart_accepting_etcd(first)
    wait_state(own_control, instance, 'active')
    assert count_domains(first, second) == {instance: 1, later: 1}
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


@pytest.mark.parametrize('kind', [SavedSnapshot, pytest.param(Snapshot, marks=pytest.mark.slow)])
@pytest.mark.parametrize('sees_claim', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.history_broken('etcd is restored from an older copy')
def test_instance_destroyed_in_a_restored_queue_vanishes(own_control: Control, kind: Kind, sees_claim: bool) -> None:
    """R3: an instance destroyed in a restored queue vanishes when its compute is back (fake)."""
    first = own_control.ecompute(queues=True)
    assert own_control.eschedule('quota', 'set', 'q', 'instances=3').code == 0
    stop_compute(first)
    instance = queue_request(own_control, '--name', 'web', '--project', 'q')
    older = kind(own_control.etcd)
    first.start()
    wait_state(own_control, instance, 'active')
    stop_compute(first)
    older.restore()
    if not sees_claim:
        own_control.placement.stop()
    result = own_control.eschedule('destroy', instance)
    assert result.code == 0, result
    if sees_claim:
        assert 'holds a claim for it' in result.stderr, result
        assert 'once this compute is no longer silent' in result.stderr, result
    else:
        assert 'it is unknown whether' in result.stderr, result
        own_control.placement.start()
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


@pytest.mark.slow
def test_missing_provider_is_recreated_within_a_minute(own_control: Control) -> None:
    """F17: placement restored from before this compute: soon its provider is back (fake)."""
    save(own_control)
    compute = own_control.ecompute()
    _, instance = place(own_control)
    address = wait_address(own_control, instance)
    restore(own_control)
    wait_until(lambda: own_control.placement.read_inventory(compute.uuid), 80, 'its inventory is there')
    assert own_control.placement.read_inventory(compute.uuid)['VCPU']['reserved'] == 0
    check_unharmed(own_control, compute, instance, address)
    assert len(wait_log_lines(compute, 'registering again')) == 1
    lost, _ = count_losses(compute, '')  # its provider, and placement itself if it was queried while away
    wait_until(lambda: count_losses(compute, '') == (lost, lost), 20, 'each return is logged')
    assert 1 <= lost <= 2, read_log(compute)
    assert own_control.eschedule('destroy', '--wait', instance).code == 0
    assert compute.stop() == 0
    assert read_reserved(own_control, compute.uuid) == 4
    compute.start()
    check_settled(own_control, compute)
