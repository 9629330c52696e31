"""Findings about a machine or a cluster, their messages, and ignored warnings."""

from __future__ import annotations

import json
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent import checking
from ecomp.cli.command import Context
from ecomp.cli.commands import COMMANDS, parse
from ecomp.cli.terminal import Terminal
from ecomp.compute_conf import ComputeConfig
from ecomp.conf import ScheduleConfig
from ecomp.model import health
from ecomp.model.audit import CHECKS
from ecomp.model.guest import Attachment
from ecomp.model.health import (
    MISSING,
    OFF,
    USABLE,
    Ailment,
    Backends,
    Certificate,
    LibvirtFacts,
    MachineFacts,
    StateDirectory,
    get_exit_code,
    read_certificate_end,
)
from ecomp.model.health import ComputeFacts as Facts
from ecomp.model.host import CLOSED, ORPHANED, SILENT, UP, Host
from ecomp.model.level import COMPUTE_WARNINGS, SCHEDULE_WARNINGS, WARNING, get_level
from ecomp.model.world import World
from ecomp.scheduler.operations.audit import Report
from ecomp.tls import ETCD_SENTENCES, SENTENCES, TlsFailure, classify_tls_error
from tests.kit.certificates import Authority
from tests.kit.transcript import compare_with_file
from tests.unit.audit_world import ONE, WorldBuilder

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
A = '0b5e55ed-0000-4000-8000-000000000000'
B = '5ca1ab1e-0000-4000-8000-000000000000'
HEALTHY = Backends(
    etcd='etcd at ds1:2379', placement='placement at http://ds1:8080', config_path='/etc/ecomp/schedule.yaml', now=NOW,
    etcd_version='3.5.33', placement_version='1.39', ahead_seconds=0.4,
    certificates=(Certificate('/c/client.crt', NOW + timedelta(days=90)),),
)  # fmt: skip
LIBVIRT = LibvirtFacts(
    version=11_003_000, library_version=11_003_000, qemu_user='libvirt-qemu',
    networks={Attachment('network', 'default'): USABLE},
)  # fmt: skip
STATE = StateDirectory('/var/lib/ecompute', 0, 0, A, True, 50 * 1024**3)
MACHINE = MachineFacts(state=STATE, libvirt=LIBVIRT)
WITHOUT_LIBVIRT = replace(MACHINE, libvirt=None, no_libvirt_reason='no socket')


def test_healthy_machine_and_cluster_have_no_finding() -> None:
    assert health.run_checks(health.BACKEND_CHECKS, HEALTHY) == []
    assert health.check_machine(MACHINE) == []
    up = Host(A, 'hv1', UP, (), {})
    assert health.run_checks(health.COMPUTE_CHECKS, Facts((up,), {A: '1.1.0'}, '1.1.0')) == []
    assert health.run_checks(health.COMPUTE_CHECKS, Facts((up,), {A: '1.1.0'}, '1.1.0+g01234567')) == []
    assert health.run_checks(health.COMPUTE_CHECKS, Facts((up,), {A: '1.1.0+g01234567'}, '1.1.0')) == []
    assert health.get_exit_code(HEALTHY, []) == 0
    assert health.summarize(HEALTHY, []) == (
        'no findings; etcd at ds1:2379 (3.5.33), placement at http://ds1:8080 (microversion 1.39); '
        'configuration: /etc/ecomp/schedule.yaml'
    )


# Errors about our own certificate: one of etcd and three of placement.
CERT_ERRORS = [
    ETCD_SENTENCES[TlsFailure.OWN_MISSING],
    *(SENTENCES[each] for each in (TlsFailure.OWN_REFUSED, TlsFailure.OWN_MISSING, TlsFailure.OWN_EXPIRED)),
]
NOT_YET_VALID = SENTENCES[TlsFailure.NOT_YET_VALID]
EXPIRED = SENTENCES[TlsFailure.EXPIRED]
HUNG_UP = SENTENCES[TlsFailure.HUNG_UP]


BACKEND_FAULTS = [
    replace(HEALTHY, etcd_failure='etcd … cannot be reached'),
    replace(HEALTHY, etcd_failure='away', config_path=None),
    replace(HEALTHY, placement_failure='it is too old'),
    replace(HEALTHY, etcd_failure=NOT_YET_VALID),
    replace(HEALTHY, etcd_failure=EXPIRED),
    replace(HEALTHY, placement_failure=NOT_YET_VALID),
    replace(HEALTHY, placement_failure=EXPIRED),
    replace(HEALTHY, etcd_failure=CERT_ERRORS[0]),
    replace(HEALTHY, placement_failure=CERT_ERRORS[1]),
    replace(HEALTHY, placement_failure=CERT_ERRORS[2]),
    replace(HEALTHY, placement_failure=CERT_ERRORS[3]),
    replace(HEALTHY, placement_failure=HUNG_UP),
    replace(HEALTHY, etcd_version='3.4.23'),
    replace(HEALTHY, placement_version='1.30'),
    replace(HEALTHY, placement_version='new'),
    replace(HEALTHY, ahead_seconds=3600.2),
    replace(HEALTHY, ahead_seconds=-3600.2),
    replace(HEALTHY, certificates=(Certificate('/c', NOW),)),
    replace(HEALTHY, certificates=(Certificate('/c', NOW + timedelta(1)),)),
    replace(HEALTHY, certificates=(Certificate('/c', None),)),
    replace(HEALTHY, open_secrets=('/c',)),
]


COMPUTE_FAULTS = [
    Facts((Host(A, None, SILENT, (A,), {}),)),
    Facts((Host(A, 'hv1', CLOSED, (A,), {}),)),
    Facts((Host(A, None, ORPHANED, (), {}),)),
    Facts((Host(A, 'hv1', UP, (), {}),), {A: '1.9.0'}, '1.10.0'),
    Facts((Host(A, 'hv1', UP, (), {}),), {A: '1.10.0'}, '1.9.0'),
    Facts((Host(A, 'hv1', UP, (), {}),), {A: '1.9.0+g01234567'}, '1.9.0+g89abcdef'),
    Facts(unserved_reason='web1 waits. Fix: set `queues: True`'),
]


def make_machine(**changed: object) -> MachineFacts:
    return replace(MACHINE, libvirt=replace(LIBVIRT, **changed))


BRIDGE = Attachment('bridge', 'br0')
NETWORK = Attachment('network', 'default')
OTHER = Attachment('network', 'web')


MACHINE_FAULTS = [
    replace(MACHINE, state=STATE._replace(caller_uid=1000, owner_uid=1000)),
    replace(MACHINE, state=STATE._replace(owner_uid=1000)),
    replace(MACHINE, state=STATE._replace(free_bytes=7 * 1024**2)),
    replace(MACHINE, state=STATE._replace(uuid='x', has_valid_uuid=False)),
    make_machine(computes=frozenset({A, B})),
    replace(make_machine(computes=frozenset({A})), configured_uuid=B),
    replace(MACHINE, proxy_variables=('http_proxy',)),
    replace(MACHINE, refused_settings=('traits: CUSTOM',)),
    replace(MACHINE, missing_image_directory='/no such'),
    replace(MACHINE, metrics_problem='no metrics are written: /gone is bad. Fix: create it'),
    WITHOUT_LIBVIRT,
    replace(WITHOUT_LIBVIRT, has_libvirtd=False),
    replace(WITHOUT_LIBVIRT, no_libvirt_reason='', no_library_reason='it is away. Fix: pip it'),
    make_machine(version=8000000, library_version=8000000),
    make_machine(version=8000000),
    make_machine(version=11002001),
    make_machine(no_qemu_reason='no QEMU. Fix: apt-get install it'),
    make_machine(has_kvm_device=True, is_kvm_closed=True, no_kvm_reason='closed'),
    replace(make_machine(no_kvm_reason='no flag'), virt_type='kvm'),
    make_machine(blocked_directory='/a b'),
    make_machine(foreign_pool_directory='/other'),
    make_machine(networks={BRIDGE: MISSING}),
    make_machine(networks={NETWORK: MISSING}),
    make_machine(networks={OTHER: MISSING}),
    make_machine(networks={OTHER: OFF}),
    make_machine(network_problems=('web has no <range>. Fix: virsh net-update',)),
    make_machine(has_bridge=False),
    replace(MACHINE, is_metadata_port_taken=True),
    make_machine(no_filters_reason='ebtables is not installed'),
]


def test_each_fault_is_found_with_its_cure() -> None:
    lines = []
    for check, faults in (
        (partial(health.run_checks, health.BACKEND_CHECKS), BACKEND_FAULTS),
        (partial(health.run_checks, health.COMPUTE_CHECKS), COMPUTE_FAULTS),
        (health.check_machine, MACHINE_FAULTS),
    ):
        for facts in faults:
            (finding,) = check(facts)  # type: ignore[operator]
            code = health.get_exit_code(facts, [finding]) if isinstance(facts, Backends) else 8
            lines.append(f'{code} {health.format_lines([finding])[0]}')
    assert all(line.isprintable() for line in lines)
    compare_with_file(Path(__file__).parent / 'golden/findings.txt', '\n'.join(lines) + '\n')


@pytest.mark.parametrize(
    'facts',
    [
        replace(make_machine(no_kvm_reason='no flag'), virt_type='auto'),  # auto means emulation then
        replace(MACHINE, proxy_variables=('http_proxy',), has_image_proxy=True),
        replace(MACHINE, state=STATE._replace(owner_uid=None, uuid='', has_valid_uuid=False)),  # before the first start
        replace(MACHINE, state=STATE._replace(uuid='x', has_valid_uuid=False), configured_uuid=A),
        replace(make_machine(has_bridge=False), metadata_mode='iso'),
        replace(MACHINE, metadata_mode='iso', is_metadata_port_taken=True),
        make_machine(version=12_000_000),  # newer than our library, with the same protocol
    ],
)
def test_acceptable_machine_has_no_finding(facts: MachineFacts) -> None:
    assert health.check_machine(facts) == []


def test_every_check_is_covered_by_a_case() -> None:
    """Each check of the product has a case above that makes it report a finding."""
    expected = {*health.BACKEND_CHECKS, *health.COMPUTE_CHECKS, *health.MACHINE_CHECKS, *health.LIBVIRT_CHECKS}
    found = [finding.check for facts in BACKEND_FAULTS for finding in health.run_checks(health.BACKEND_CHECKS, facts)]
    found += [finding.check for facts in COMPUTE_FAULTS for finding in health.run_checks(health.COMPUTE_CHECKS, facts)]
    found += [finding.check for facts in MACHINE_FAULTS for finding in health.check_machine(facts)]
    assert set(found) == expected
    assert Ailment._fields == ('check', 'what', 'cure')


OLD_ETCD = Ailment('etcd-version', 'etcd is old', 'upgrade etcd')
OLD_LIBVIRT = Ailment('libvirt-version', 'libvirt is old', 'install 9')
WRONG_CLOCK = Ailment('clock', 'it is wrong', 'set it')


@pytest.mark.parametrize(
    ('findings', 'code', 'summary'),
    [
        ([OLD_ETCD], 0, 'no findings, 1 warning; '),
        ([OLD_ETCD, OLD_LIBVIRT], 0, 'no findings, 2 warnings; '),
        ([OLD_ETCD, WRONG_CLOCK], 8, '1 finding, 1 warning; '),
        ([WRONG_CLOCK, WRONG_CLOCK], 8, '2 findings; '),
    ],
)
def test_warning_is_counted_separately_and_does_not_change_the_exit_code(
    findings: list[Ailment], code: int, summary: str
) -> None:
    assert health.get_exit_code(HEALTHY, findings) == code
    assert health.summarize(HEALTHY, findings).startswith(summary)
    assert health.get_exit_code(replace(HEALTHY, etcd_failure='away'), findings) == 7


def test_every_warning_is_a_check_or_an_audit_code() -> None:
    """A misspelled code would make no finding a warning, and `ignore_warnings` would accept it."""
    machine_checks = {*health.BACKEND_CHECKS, *health.MACHINE_CHECKS, *health.LIBVIRT_CHECKS}
    assert set(COMPUTE_WARNINGS) <= machine_checks
    assert set(SCHEDULE_WARNINGS) <= {*health.BACKEND_CHECKS, *health.COMPUTE_CHECKS, *CHECKS}
    assert {code for code in (*machine_checks, *health.COMPUTE_CHECKS, *CHECKS) if get_level(code) == WARNING} == {
        *COMPUTE_WARNINGS,
        *SCHEDULE_WARNINGS,
    }


def test_ends_reads_the_expiry_of_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / 'ca')
    for days in (10, -1, 20_000):
        certificate, key = authority.issue(tmp_path, f'client{days}', 'localhost', days=days)
        remaining = read_certificate_end(certificate.read_bytes()) - datetime.now(UTC)
        assert abs(remaining - timedelta(days=days)) < timedelta(hours=2)
        # A private key before the certificate in the same file is skipped.
        assert read_certificate_end(key.read_bytes() + certificate.read_bytes()) == read_certificate_end(
            certificate.read_bytes()
        )


@pytest.mark.parametrize('wrong', [b'', b'x', b'-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n'])
def test_ends_refuses_an_invalid_certificate(wrong: bytes) -> None:
    with pytest.raises(ValueError, match='certificate'):
        read_certificate_end(wrong)


def test_ends_refuses_a_truncated_certificate(tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path / 'ca').issue(tmp_path, 'client', 'localhost')
    lines = certificate.read_bytes().splitlines()
    reasons = []
    for count in range(1, len(lines) - 1):
        try:
            read_certificate_end(b'\n'.join([*lines[:count], lines[-1]]))
        except ValueError as error:  # none if the date is before the cut
            reasons.append(str(error))
    assert reasons
    assert all('certificate' in reason for reason in reasons)


# TLS failures are classified by OpenSSL's own reason, and each has a message.


def test_each_tls_failure_has_a_message() -> None:
    assert SENTENCES.keys() == ETCD_SENTENCES.keys() == set(TlsFailure)


TLS_ERRORS: list[tuple[type[ssl.SSLError], dict[str, object], TlsFailure]] = [
    (ssl.SSLCertVerificationError, {'verify_code': 9}, TlsFailure.NOT_YET_VALID),
    (ssl.SSLCertVerificationError, {'verify_code': 10}, TlsFailure.EXPIRED),
    (ssl.SSLCertVerificationError, {'verify_code': 20}, TlsFailure.UNTRUSTED),
    (ssl.SSLCertVerificationError, {'verify_code': 62}, TlsFailure.OTHER_NAME),
    (ssl.SSLCertVerificationError, {'verify_code': 64}, TlsFailure.OTHER_ADDRESS),
    (ssl.SSLCertVerificationError, {'verify_code': 66}, TlsFailure.TOO_WEAK),
    (ssl.SSLCertVerificationError, {'verify_code': 85}, TlsFailure.NO_KEY_IDENTIFIER),
    (ssl.SSLCertVerificationError, {}, TlsFailure.UNTRUSTED),
    (ssl.SSLError, {'reason': 'SSLV3_ALERT_CERTIFICATE_EXPIRED'}, TlsFailure.OWN_EXPIRED),
    (ssl.SSLError, {'reason': 'TLSV13_ALERT_CERTIFICATE_REQUIRED'}, TlsFailure.OWN_MISSING),
    (ssl.SSLError, {'reason': 'TLSV1_ALERT_UNKNOWN_CA'}, TlsFailure.OWN_REFUSED),
    (ssl.SSLError, {'reason': 'SSLV3_ALERT_BAD_CERTIFICATE'}, TlsFailure.OWN_REFUSED),
    (ssl.SSLError, {'reason': 'TLSV1_ALERT_ACCESS_DENIED'}, TlsFailure.OWN_REFUSED),
    (ssl.SSLError, {'reason': 'TLSV1_ALERT_PROTOCOL_VERSION'}, TlsFailure.OTHER),
    (ssl.SSLError, {'reason': 'WRONG_VERSION_NUMBER'}, TlsFailure.PLAIN_TEXT),
    (ssl.SSLError, {'reason': 'UNSUPPORTED_PROTOCOL'}, TlsFailure.OTHER),
    (ssl.SSLError, {}, TlsFailure.OTHER),
    (ssl.SSLEOFError, {}, TlsFailure.HUNG_UP),
    (ssl.SSLZeroReturnError, {}, TlsFailure.HUNG_UP),
]


@pytest.mark.parametrize(('kind', 'attributes', 'failure'), TLS_ERRORS)
def test_tls_failure_is_classified_by_code_reason_or_type(
    kind: type[ssl.SSLError], attributes: dict[str, object], failure: TlsFailure
) -> None:
    error = kind('whatever the server says')
    for name, value in attributes.items():
        setattr(error, name, value)
    assert classify_tls_error(error) is failure


# Warnings of `eschedule audit`, `eschedule doctor` and `ecompute --check`, and `ignore_warnings`.


BACKENDS_WITH_OLD_ETCD = Backends(
    etcd='etcd at ds1:2379', placement='placement at ds1', config_path=None, now=datetime(2026, 11, 23, tzinfo=UTC),
    etcd_version='3.4.23', placement_version='1.39',
)  # fmt: skip
MACHINE_WITH_OLD_LIBVIRT = MachineFacts(
    state=StateDirectory('/var/lib/ecompute', 0, 0, ONE, True, 50 * 1024**3),
    libvirt=LibvirtFacts(version=8_000_000, library_version=8_000_000),
)


class Answer:
    """What a command of eschedule prints and returns."""

    def __init__(self, config: ScheduleConfig, *words: str) -> None:
        data: list[str] = []
        self.messages: list[str] = []
        context = Context(Terminal(data.append, data.append, self.messages.append), config, parse(words))
        self.code = COMMANDS[context.name].run(context)
        self.data = '\n'.join(data)


@pytest.fixture
def opened(world: WorldBuilder, monkeypatch: pytest.MonkeyPatch) -> WorldBuilder:
    """A world with open DHCP, which audits read."""
    world.facts[ONE] = replace(world.facts[ONE], open_dhcp=frozenset({'default'}))

    def read_report(*_: object, is_now: bool) -> Report:  # noqa: ARG001
        return Report([], world.audit(), 'all were compared', World(world.build_planes()))

    monkeypatch.setattr('ecomp.scheduler.operations.audit.audit', read_report)
    monkeypatch.setattr('ecomp.scheduler.queries.hosts.read_names_by_instance', lambda _: {})
    return world


def test_audit_with_a_warning_alone_exits_with_0(opened: WorldBuilder) -> None:
    assert opened.facts[ONE].open_dhcp
    answer = Answer(ScheduleConfig(), 'audit')
    assert (answer.code, answer.messages[-1]) == (0, 'all were compared: no findings, 1 warning')
    assert 'dhcp-open' in answer.data
    assert 'warning: the DHCP of network default' in answer.data
    (finding,) = json.loads(Answer(ScheduleConfig(), 'audit', '-f', 'json').data)
    assert (finding['code'], finding['level']) == ('dhcp-open', 'warning')
    assert finding['sentence'].startswith('the DHCP of network default'), 'only people need the mark'


def test_audit_does_not_report_an_ignored_warning(opened: WorldBuilder) -> None:
    assert opened.facts[ONE].open_dhcp
    config = ScheduleConfig(ignore_warnings=('dhcp-open',))
    answer = Answer(config, 'audit')
    assert (answer.code, answer.data, answer.messages[-1]) == (0, '', 'all were compared: no findings')
    assert json.loads(Answer(config, 'audit', '-f', 'json').data) == []


def read_doctor(config: ScheduleConfig, facts: Backends, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """Return the findings of a doctor without placement, whose computes are not checked, and its summary."""
    monkeypatch.setattr('ecomp.backends.probe_backends', lambda *_: facts)
    answer = Answer(config, 'doctor', '-f', 'json')
    assert answer.code == 7
    return json.loads(answer.data)['findings'], answer.messages[-1]


def test_doctor_shows_levels_and_leaves_out_ignored_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(BACKENDS_WITH_OLD_ETCD, placement_failure='it is away')
    findings, summary = read_doctor(ScheduleConfig(), facts, monkeypatch)
    assert [(finding['check'], finding['level']) for finding in findings] == [
        ('placement', 'error'),
        ('etcd-version', 'warning'),
    ]
    assert summary.startswith('1 finding, 1 warning; ')
    findings, summary = read_doctor(ScheduleConfig(ignore_warnings=('etcd-version',)), facts, monkeypatch)
    assert [finding['check'] for finding in findings] == ['placement']
    assert summary.startswith('1 finding; ')


@pytest.mark.parametrize(
    ('ignored', 'expected'),
    [
        ((), ['etcd-version', 'libvirt-version']),
        (('libvirt-version',), ['etcd-version']),
        (('etcd-version', 'libvirt-version'), []),
    ],
)
def test_check_leaves_out_ignored_warnings(
    ignored: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('ecomp.backends.probe_backends', lambda *_: BACKENDS_WITH_OLD_ETCD)
    monkeypatch.setattr(checking, '_read_machine', lambda *_: MACHINE_WITH_OLD_LIBVIRT)
    _, findings = checking.check_machine(ComputeConfig(ignore_warnings=ignored))
    assert [finding.check for finding in findings] == expected
    assert get_exit_code(BACKENDS_WITH_OLD_ETCD, findings) == 0
