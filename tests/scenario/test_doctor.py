"""The doctor and its canaries."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from ecomp.model.cluster import describe_vulnerabilities
from tests.kit.commands import Control, Ecompute, Result, run_eschedule_process, write_config
from tests.kit.hands import Eschedule
from tests.kit.lab import Lab
from tests.kit.servers import free_port, wait_until

# `eschedule doctor` on real servers: no findings in a healthy cluster, otherwise each with its cure.


def read_findings(control: Control) -> dict[str, Any]:
    """Run the doctor; return its findings by check and validate the rest of its report.

    A finding about etcd's version depends on the machine and is left out.
    """
    result = control.eschedule('doctor', '-f', 'json')
    report = json.loads(result.stdout)
    findings_by_check = {finding['check']: finding for finding in report['findings']}
    warning = findings_by_check.pop('etcd-version', None)
    assert (warning is not None) == (describe_vulnerabilities(report['etcd']['version']) is not None)
    assert warning is None or warning['level'] == 'warning'
    assert {finding['level'] for finding in findings_by_check.values()} <= {'error'}
    assert result.code == (8 if findings_by_check else 0)
    assert report['configuration'] == str(control.schedule_yaml)
    assert report['placement'] == {'name': f'placement at {control.placement.url}', 'microversion': '1.39'}
    return findings_by_check


def test_stopped_compute_is_a_finding_with_its_cure(cluster: Control) -> None:
    compute = cluster.ecompute()
    assert read_findings(cluster) == {}
    compute.stop()
    closed = read_findings(cluster)
    assert list(closed) == ['compute']
    assert closed['compute']['what'].endswith(
        ' is closed: its ecompute was stopped, or changes nothing because etcd is not the one that it knows'
    )
    assert closed['compute']['cure'] == (
        'run `systemctl start ecompute` on its host; if it runs, `journalctl -u ecompute` shows the reason'
    )
    table = cluster.eschedule('doctor')
    assert table.code == 8
    assert table.stdout.splitlines()[-1] == (f'compute: {closed["compute"]["what"]}. Fix: {closed["compute"]["cure"]}')
    assert f'; configuration: {cluster.schedule_yaml}' in table.stderr
    compute.start()
    assert read_findings(cluster) == {}


def test_unreachable_backend_is_a_finding(cluster: Control) -> None:
    for etcd, placement, away in (
        (f'127.0.0.1:{free_port()}', cluster.placement.url, 'etcd'),
        (cluster.etcd.endpoint, f'http://127.0.0.1:{free_port()}', 'placement'),
    ):
        config = write_config(cluster.directory / 'away.yaml', etcd, placement)
        result = run_eschedule_process(config, 'doctor', '-f', 'json')
        assert (result.code, f'{away} at' in result.stderr) == (7, True)
        cures = {finding['check']: finding['cure'] for finding in json.loads(result.stdout)['findings']}
        assert cures[away] == f'start {away} at this address, or correct `{away}:` in {config}'


# `eschedule doctor --canary`: its report for hosts of every kind; no canary is left behind.


SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
NO_KEY = 'no ssh key was given (--ssh-key)'
KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@laptop\n'


def read_report(result: Result) -> dict[str, Any]:
    """Return the document of a doctor, whose exit code must match its findings."""
    document: dict[str, Any] = json.loads(result.stdout)
    assert result.code == (8 if has_errors(document) else 0), result
    return document


def has_errors(report: dict[str, Any]) -> bool:
    """Return True if the report of a doctor has a finding that is no warning."""
    return any(finding['level'] == 'error' for finding in report['findings'])


def list_canary_findings(result: Result) -> list[tuple[str, str]]:
    """Return problem and cure of each finding of the canaries."""
    return [
        (finding['what'], finding['cure'])
        for finding in read_report(result)['findings']
        if finding['check'] == 'canary'
    ]


def run_canaries(control: Control, *words: str) -> Result:
    return control.eschedule('doctor', '--canary', '-f', 'json', *words)


def start_canaries(control: Control, *words: str) -> Eschedule:
    """Start a doctor with canaries, a process that runs on."""
    return Eschedule(control, 'doctor', '--canary', '-f', 'json', *words)


def list_canary_keys(control: Control) -> list[str]:
    prefixes = ('/hosts/', '/instances/', '/names/', '/requests/', '/booted/', '/groups/')
    return [key for prefix in prefixes for key in control.etcd.list_keys(prefix)]


def expect_nothing_left(control: Control, *computes: Ecompute) -> None:
    assert list_canary_keys(control) == []
    assert [control.placement.read_consumers(compute.uuid) for compute in computes] == [{} for _ in computes]


def wait_until_requested(control: Control, *computes: Ecompute) -> None:
    prefixes = [f'/hosts/{compute.uuid}/' for compute in computes]
    wait_until(lambda: all(map(control.etcd.list_keys, prefixes)), 30, 'each host is asked for a canary')


def test_every_up_host_gets_a_canary_and_others_a_reason(cluster: Control) -> None:
    first, second, disabled, closed = (cluster.ecompute() for _ in range(4))
    full = cluster.ecompute('VCPU:1,DISK_GB:1,MEMORY_MB:128')
    assert cluster.eschedule('host', 'disable', disabled.uuid).code == 0
    closed.stop()
    result = run_canaries(cluster)
    assert list_canary_findings(result) == []
    outcomes = {outcome['compute']: outcome for outcome in read_report(result)['canaries']}
    for compute in (first, second):
        outcome = outcomes.pop(compute.uuid)
        assert outcome['name'] == f'canary-{outcome["instance"][:8]}'
        assert (outcome['reached'], outcome['seconds'] > 0, outcome['gone']) == ('addressed', True, True)
        assert outcome['said'] == NO_KEY
        assert f'{outcome["name"]} booted after ' in result.stderr
    assert {compute: outcome['said'] for compute, outcome in outcomes.items()} == {
        disabled.uuid: 'the host is disabled',
        closed.uuid: 'the host is closed',
        full.uuid: 'MEMORY_MB short by 128 (free 128 of 128)',
    }
    assert {(outcome['instance'], outcome['reached'], outcome['gone']) for outcome in outcomes.values()} == {
        (None, None, None)
    }
    assert result.stderr.count(': no canary: ') == 3
    expect_nothing_left(cluster, first, second, full)
    # In a table only findings are data.
    table = cluster.eschedule('doctor', '--canary', SMALL)
    assert not [line for line in table.stdout.splitlines() if line.startswith('canary:')]
    assert table.stderr.count(' booted after ') == 2


def test_canary_that_never_becomes_ready_is_a_finding(cluster: Control, compute: Ecompute) -> None:
    """With a key the canary must become ready, because the doctor logs in to it."""
    (cluster.directory / 'key.pub').write_text(KEY)
    result = run_canaries(cluster, '--ssh-key', str(cluster.directory / 'key.pub'), '--timeout', '1')
    [(problem, cure)] = list_canary_findings(result)
    assert problem.startswith('the canary on ')
    assert problem.endswith(' failed: timed out after 1 s, still waiting for cloud-init to finish')
    assert '--for addressed' in cure
    [outcome] = read_report(result)['canaries']
    assert (outcome['reached'], outcome['seconds'], outcome['gone']) == ('addressed', None, True)
    expect_nothing_left(cluster, compute)


def test_frozen_host_is_a_finding_and_the_other_passes(cluster: Control) -> None:
    well, frozen = cluster.ecompute(), cluster.ecompute()
    frozen.pause()
    result = run_canaries(cluster, '--timeout', '2')
    timed_out, remains = list_canary_findings(result)
    assert timed_out[0].endswith(': timed out after 2 s, still waiting for its compute to accept it')
    assert timed_out[1].startswith('run `systemctl restart ecompute`')
    outcomes = {outcome['compute']: outcome for outcome in read_report(result)['canaries']}
    name, instance = outcomes[frozen.uuid]['name'], outcomes[frozen.uuid]['instance']
    assert remains[0].startswith(f'{name} on ')
    assert remains[1] == f'eschedule destroy --wait {instance}'
    assert (outcomes[well.uuid]['gone'], outcomes[frozen.uuid]['gone']) == (True, False)
    # The frozen compute destroys its canary as soon as it runs again.
    frozen.resume()
    assert cluster.eschedule(*remains[1].split()[1:]).code in (0, 4)
    assert cluster.eschedule('clear').code == 0
    expect_nothing_left(cluster, well, frozen)


@pytest.mark.parametrize('number', [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_interrupt_destroys_all_canaries(cluster: Control, number: int) -> None:
    """Both computes are frozen; the doctor requests their canaries concurrently."""
    computes = [cluster.ecompute(), cluster.ecompute()]
    for compute in computes:
        compute.pause()
    with start_canaries(cluster) as doctor:
        wait_until_requested(cluster, *computes)
        doctor.send_signal(number)
        doctor.send_signal(signal.SIGINT)  # as timeout(1) does: a second signal changes nothing
        wait_until(lambda: 'are being destroyed' in doctor.stderr, 30, 'it heard')
        for compute in computes:
            compute.resume()
        result = doctor.wait()
    report = json.loads(result.stdout)
    assert result.code == (8 if has_errors(report) else 1)
    assert [finding['check'] for finding in report['findings'] if finding['check'] == 'canary'] == []
    assert {(outcome['said'], outcome['gone']) for outcome in report['canaries']} == {('interrupted', True)}
    expect_nothing_left(cluster, *computes)


def test_repeated_interrupt_names_the_canary_that_may_be_left(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    with start_canaries(cluster) as doctor:
        wait_until_requested(cluster, compute)

        def interrupt() -> bool:
            doctor.send_signal(signal.SIGINT)
            return doctor.has_ended

        wait_until(interrupt, 60, 'it does not wait any more')
        result = doctor.wait()
    [(problem, cure)] = list_canary_findings(result)
    assert problem.endswith(' may still exist: interrupted')
    compute.resume()
    assert cluster.eschedule(*cure.split()[1:]).code in (0, 4)
    assert cluster.eschedule('clear').code == 0
    expect_nothing_left(cluster, compute)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('image', 'stage'), [('idle.raw', 'started'), pytest.param('guest.qcow2', 'ready', marks=pytest.mark.slow)]
)
def test_canaries_run_on_all_hosts_and_are_destroyed(lab: Lab, image: str, stage: str) -> None:
    """A missing image is a finding for each host."""
    records = lab.read_etcd('/instances/')  # of guests of other tests, which are gone
    words = ('doctor', '--canary', '-f', 'json', SMALL)
    result = lab.eschedule(*words, lab.make_url(image), '--for', stage)
    assert list_canary_findings(result) == []
    assert {(outcome['host'], outcome['reached'], outcome['gone']) for outcome in read_report(result)['canaries']} == {
        (host, stage, True) for host in lab.hosts
    }
    assert not any(map(lab.list_domains, lab.hosts))
    assert not any(map(lab.list_disks, lab.hosts))
    failed_result = lab.eschedule(*words, lab.make_url('nowhere.qcow2'))
    assert len(list_canary_findings(failed_result)) == len(lab.hosts)
    for problem, cure in list_canary_findings(failed_result):
        assert 'failed at stage image' in problem
        assert 'nowhere.qcow2' in problem
        assert 'IMAGE_URL' in cure
    assert {outcome['gone'] for outcome in read_report(failed_result)['canaries']} == {True}
    assert lab.read_etcd('/instances/').keys() <= records.keys()
