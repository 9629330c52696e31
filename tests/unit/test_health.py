"""Findings about a machine or a cluster, their messages, and ignored warnings."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent import checking
from ecomp.backends import explain_failure, read_certificate_end
from ecomp.cli.command import Context
from ecomp.cli.commands import COMMANDS, parse
from ecomp.cli.terminal import Terminal
from ecomp.compute_conf import ComputeConfig
from ecomp.conf import ScheduleConfig
from ecomp.errors import EcompError, Problem, Unreachable
from ecomp.model import audit
from ecomp.model.finding import COMPUTES, MACHINE, SERVERS, Finding, get_exit_code, run_checks
from ecomp.model.guest import Attachment
from ecomp.model.health import CHECKS, Backends, ComputeFacts, LibvirtFacts, MachineFacts, StateDirectory
from ecomp.model.host import CLOSED, NO_COMPUTES, ORPHANED, SILENT, UP, Host, PresenceFacts
from ecomp.model.warning_codes import COMPUTE_WARNINGS, SCHEDULE_WARNINGS
from ecomp.model.world import World
from ecomp.scheduler.operations.audit import Report
from ecomp.tls import ETCD_SENTENCES, SENTENCES, TlsFailure, classify_tls_error
from ecomp.virt import libvirt_host, networks
from tests.kit.certificates import Authority
from tests.kit.transcript import compare_with_file
from tests.unit.audit_world import ONE, WorldBuilder

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
A = '0b5e55ed-0000-4000-8000-000000000000'
B = '5ca1ab1e-0000-4000-8000-000000000000'
HEALTHY = Backends(
    etcd='etcd at ds1:2379', placement='placement at http://ds1:8080', configuration='/etc/ecomp/schedule.yaml',
    now=NOW, etcd_version='3.5.33', placement_version='1.39', ahead_seconds=0.4,
    certificates={'/c/client.crt': NOW + timedelta(days=90)},
)  # fmt: skip
LIBVIRT = LibvirtFacts(version=11_003_000, library_version=11_003_000)
STATE = StateDirectory('/var/lib/ecompute', 0, 0, A, 50 * 1024**3)
FACTS = MachineFacts(state=STATE, libvirt=LIBVIRT)


def make_host(state: str = UP, hostname: str | None = 'hv1', version: str | None = None) -> Host:
    return Host(A, hostname, state, (), {}, facts=PresenceFacts(version=version))


def test_healthy_machine_and_cluster_have_no_finding() -> None:
    assert run_checks(CHECKS, SERVERS, HEALTHY) == []
    assert run_checks(CHECKS, MACHINE, FACTS) == []
    for version, own_version in (('1.1.0', '1.1.0'), ('1.1.0', '1.1.0+g01234567'), ('1.1.0+g01234567', '1.1.0')):
        assert run_checks(CHECKS, COMPUTES, ComputeFacts((make_host(version=version),), own_version)) == []
    assert get_exit_code([]) == 0
    assert HEALTHY.summarize([]) == (
        'no findings; etcd at ds1:2379 (3.5.33), placement at http://ds1:8080 (microversion 1.39); '
        'configuration: /etc/ecomp/schedule.yaml'
    )


def fail(section: str, error: EcompError, path: Path | None = Path('/etc/ecomp/schedule.yaml')) -> Backends:
    problem = explain_failure(section, error, path, 'schedule.yaml')
    return replace(HEALTHY, **{f'{section}_failure': problem})


def fail_tls(section: str, failure: TlsFailure) -> Backends:
    sentence = (ETCD_SENTENCES if section == 'etcd' else SENTENCES)[failure]
    return fail(section, Unreachable(sentence, tls_failure=failure))


BACKEND_FAULTS = [
    fail('etcd', EcompError('etcd … cannot be reached. Fix: another')), fail('etcd', Unreachable('away'), None),
    fail('placement', EcompError('it is too old')),
    *(fail_tls(each, TlsFailure[name]) for each in ('etcd', 'placement') for name in ('NOT_YET_VALID', 'EXPIRED')),
    fail_tls('etcd', TlsFailure.OWN_MISSING),
    *(fail_tls('placement', TlsFailure[name]) for name in ('OWN_REFUSED', 'OWN_MISSING', 'OWN_EXPIRED', 'HUNG_UP')),
    replace(HEALTHY, etcd_version='3.4.23'), replace(HEALTHY, placement_version='1.30'),
    replace(HEALTHY, placement_version='new'), replace(HEALTHY, ahead_seconds=3600.2),
    replace(HEALTHY, ahead_seconds=-3600.2), replace(HEALTHY, certificates={'/c': NOW}),
    replace(HEALTHY, certificates={'/c': NOW + timedelta(1)}), replace(HEALTHY, certificates={'/c': None}),
    replace(HEALTHY, open_secrets=('/c',)),
]  # fmt: skip


COMPUTE_FAULTS = [
    ComputeFacts((make_host(SILENT, None),)), ComputeFacts((make_host(CLOSED),)),
    ComputeFacts((make_host(ORPHANED, None),)), ComputeFacts((make_host(version='1.9.0'),), '1.10.0'),
    ComputeFacts((make_host(version='1.10.0'),), '1.9.0'),
    ComputeFacts((make_host(version='1.9.0+g01234567'),), '1.9.0+g89abcdef'),
    ComputeFacts(unserved=Problem('web1 waits', 'set `queues: True`')),
]  # fmt: skip


def test_finding_without_a_cure_promises_none() -> None:
    (finding,) = run_checks(CHECKS, COMPUTES, ComputeFacts(unserved=Problem('no compute takes queued requests')))
    assert str(finding) == 'queue: no compute takes queued requests'


def make_machine(**changed: object) -> MachineFacts:
    return replace(FACTS, libvirt=replace(LIBVIRT, **changed))


def make_faulty(code: str, problem: Problem | None) -> MachineFacts:
    return make_machine(problems={code: [problem]})


MACHINE_FAULTS = [
    replace(FACTS, state=STATE._replace(caller_uid=1000, owner_uid=1000)),
    replace(FACTS, state=STATE._replace(owner_uid=1000)),
    replace(FACTS, state=STATE._replace(free_bytes=7 * 1024**2)),
    replace(FACTS, state=STATE._replace(uuid='x')),
    make_machine(computes=frozenset({A, B})),
    replace(make_machine(computes=frozenset({A})), configured_uuid=B),
    replace(FACTS, proxy_variables=('http_proxy',)),
    replace(FACTS, problems={'configuration': [Problem('ecompute cannot start: traits: CUSTOM')]}),
    replace(FACTS, problems={'images': [checking.explain_missing_images(ComputeConfig(images=Path('/no such')))]}),
    replace(FACTS, problems={'metrics': [None, Problem('no metrics are written: /gone is bad', 'create it')]}),
    replace(FACTS, libvirt=None, problems={'libvirt': [Problem('it is away', 'pip it')]}),
    make_machine(version=8000000, library_version=8000000),
    make_machine(version=8000000),
    make_machine(version=11002001),
    make_faulty('qemu', Problem('no QEMU', 'apt-get install it')),
    make_faulty('kvm', Problem('QEMU cannot open /dev/kvm', 'chmod it')),
    make_faulty('way', Problem('QEMU cannot enter it', 'chmod it')),
    make_faulty('pool', Problem('the storage pool is elsewhere', 'correct `state:`')),
    make_faulty('network', networks.explain_state(Attachment('bridge', 'br0'), networks.MISSING)),
    make_faulty('network', networks.explain_state(Attachment('network', 'default'), networks.MISSING)),
    make_faulty('network', networks.explain_state(Attachment('network', 'web'), networks.MISSING)),
    make_faulty('network', networks.explain_state(Attachment('network', 'web'), networks.OFF)),
    make_faulty('network', Problem('web has no <range>', 'virsh net-update')),
    make_machine(has_bridge=False),
    replace(FACTS, is_metadata_port_taken=True),
    make_faulty('filters', libvirt_host.explain_no_filters('ebtables is not installed')),
]
FAULTS: list[tuple[frozenset[str], Sequence[object]]] = [
    (SERVERS, BACKEND_FAULTS), (COMPUTES, COMPUTE_FAULTS), (MACHINE, MACHINE_FAULTS),
]  # fmt: skip


def test_each_fault_is_found_with_its_cure() -> None:
    """Each check of the product has a case above that makes it report a finding."""
    found = [finding for scope, faults in FAULTS for facts in faults for finding in run_checks(CHECKS, scope, facts)]
    lines = [f'{get_exit_code([finding])} {finding}' for finding in found]
    assert len(lines) == sum(len(faults) for _, faults in FAULTS)
    assert all(line.isprintable() for line in lines)
    compare_with_file(Path(__file__).parent / 'golden/findings.txt', '\n'.join(lines) + '\n')
    assert {finding.code for finding in found} == set(CHECKS)


@pytest.mark.parametrize(
    'facts',
    [
        replace(FACTS, proxy_variables=('http_proxy',), has_image_proxy=True),
        replace(FACTS, state=STATE._replace(owner_uid=None, uuid='')),  # before the first start
        replace(FACTS, state=STATE._replace(uuid='x'), configured_uuid=A),
        replace(make_machine(has_bridge=False), metadata_mode='iso'),
        replace(FACTS, metadata_mode='iso', is_metadata_port_taken=True),
        make_machine(version=12_000_000),  # newer than our library, with the same protocol
    ],
)
def test_acceptable_machine_has_no_finding(facts: MachineFacts) -> None:
    assert run_checks(CHECKS, MACHINE, facts) == []


@pytest.mark.parametrize(
    ('is_installed', 'cure'), [(True, 'systemctl start libvirtd'), (False, 'apt-get install libvirt-daemon-system')]
)
def test_unreachable_libvirt_is_started_or_installed(
    is_installed: bool, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(*_: object, **__: object) -> LibvirtFacts:
        raise Unreachable('no socket. Fix: another')

    monkeypatch.setattr(libvirt_host, 'probe_libvirt', probe)
    monkeypatch.setattr('shutil.which', lambda *_, **__: '/usr/sbin/libvirtd' if is_installed else None)
    facts = checking._read_machine(ComputeConfig(state=tmp_path), False)
    assert (facts.libvirt, facts.problems['libvirt']) == (None, [Problem('no socket', cure)])


OLD_ETCD = Finding('etcd-version', '', 'etcd is old')
OLD_LIBVIRT = Finding('libvirt-version', '', 'libvirt is old')
WRONG_CLOCK = Finding('clock', '', 'it is wrong')
NO_ETCD = Finding('etcd', '', 'it is away')


@pytest.mark.parametrize(
    ('findings', 'code', 'summary'),
    [
        ([OLD_ETCD], 0, 'no findings, 1 warning; '),
        ([OLD_ETCD, OLD_LIBVIRT], 0, 'no findings, 2 warnings; '),
        ([OLD_ETCD, WRONG_CLOCK], 8, '1 finding, 1 warning; '),
        ([WRONG_CLOCK, WRONG_CLOCK], 8, '2 findings; '),
        ([NO_ETCD, WRONG_CLOCK], 7, '2 findings; '),
    ],
)
def test_warning_is_counted_separately_and_does_not_change_the_exit_code(
    findings: list[Finding], code: int, summary: str
) -> None:
    assert get_exit_code(findings) == code
    assert HEALTHY.summarize(findings).startswith(summary)


def test_every_warning_is_a_check_or_an_audit_code() -> None:
    """A misspelled code would make no finding a warning, and `ignore_warnings` would accept it."""
    assert CHECKS.keys().isdisjoint(audit.CHECKS)
    assert {CHECKS[code].scope for code in COMPUTE_WARNINGS} <= {SERVERS, MACHINE}
    assert MACHINE not in {{**CHECKS, **audit.CHECKS}[code].scope for code in SCHEDULE_WARNINGS}


def test_expiry_of_a_certificate_is_read(tmp_path: Path) -> None:
    authority = Authority(tmp_path / 'ca')
    for days in (10, -1, 20_000):
        certificate, key = authority.issue(tmp_path, f'client{days}', 'localhost', days=days)
        end = read_certificate_end(certificate)
        assert end is not None
        assert abs(end - datetime.now(UTC) - timedelta(days=days)) < timedelta(hours=2)
        # A private key before the certificate in the same file is skipped.
        key.write_bytes(key.read_bytes() + certificate.read_bytes())
        assert read_certificate_end(key) == end
    assert read_certificate_end(authority.certificate) is not None


def test_malformed_certificate_has_no_expiry(tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path / 'ca').issue(tmp_path, 'client', 'localhost')
    lines, found = certificate.read_bytes().splitlines(), []
    for count in range(1, len(lines) - 1):
        certificate.write_bytes(b'\n'.join([*lines[:count], lines[-1]]))
        found.append(read_certificate_end(certificate))
    assert set(found) == {None}
    for wrong in (b'', b'x', b'-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n'):
        certificate.write_bytes(wrong)
        assert read_certificate_end(certificate) is None
    assert read_certificate_end(tmp_path / 'missing') is None


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


# Warnings of `eschedule check` and `ecompute --check`, and `ignore_warnings`.


BACKENDS_WITH_OLD_ETCD = Backends(
    etcd='etcd at ds1:2379', placement='placement at ds1', configuration='no schedule.yaml',
    now=datetime(2026, 11, 23, tzinfo=UTC), etcd_version='3.4.23', placement_version='1.39',
)  # fmt: skip
MACHINE_WITH_OLD_LIBVIRT = MachineFacts(
    state=StateDirectory('/var/lib/ecompute', 0, 0, ONE, 50 * 1024**3),
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
    monkeypatch.setattr('ecomp.cli.check.read_names_by_instance', lambda _: {})
    monkeypatch.setattr('ecomp.scheduler.queries.hosts.read_hosts', lambda *_: ([], []))
    monkeypatch.setattr('ecomp.scheduler.queries.find.list_records', lambda *_: ([], []))
    monkeypatch.setattr(Context, 'computes', NO_COMPUTES)
    backends = replace(BACKENDS_WITH_OLD_ETCD, etcd_version='3.5.33')
    monkeypatch.setattr('ecomp.backends.probe_backends', lambda *_: backends)
    return world


def test_check_with_a_warning_alone_exits_with_0(opened: WorldBuilder) -> None:
    assert opened.facts[ONE].open_dhcp
    answer = Answer(ScheduleConfig(), 'check')
    assert answer.code == 0
    assert 'all were compared' in answer.messages
    assert answer.messages[-1].startswith('no findings, 1 warning; ')
    assert 'dhcp-open' in answer.data
    assert 'warning: the DHCP of network default' in answer.data
    (finding,) = json.loads(Answer(ScheduleConfig(), 'check', '-f', 'json').data)
    assert (finding['code'], finding['level']) == ('dhcp-open', 'warning')
    assert finding['sentence'].startswith('the DHCP of network default'), 'only people need the mark'


def test_check_does_not_report_an_ignored_warning(opened: WorldBuilder) -> None:
    assert opened.facts[ONE].open_dhcp
    config = ScheduleConfig(ignore_warnings=('dhcp-open',))
    answer = Answer(config, 'check')
    assert (answer.code, answer.data, answer.messages[-1].partition(';')[0]) == (0, '', 'no findings')
    assert json.loads(Answer(config, 'check', '-f', 'json').data) == []


def read_check(config: ScheduleConfig, facts: Backends, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    monkeypatch.setattr('ecomp.backends.probe_backends', lambda *_: facts)
    answer = Answer(config, 'check', '-f', 'json')
    assert answer.code == 7
    return json.loads(answer.data), answer.messages[-1]


def test_check_shows_levels_and_leaves_out_ignored_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(BACKENDS_WITH_OLD_ETCD, placement_failure=Problem('it is away'))
    findings, summary = read_check(ScheduleConfig(), facts, monkeypatch)
    assert [(each['code'], each['level']) for each in findings] == [('placement', 'error'), ('etcd-version', 'warning')]
    assert summary.startswith('1 finding, 1 warning; ')
    findings, summary = read_check(ScheduleConfig(ignore_warnings=('etcd-version',)), facts, monkeypatch)
    assert [finding['code'] for finding in findings] == ['placement']
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
    _, findings = checking.probe_machine(ComputeConfig(ignore_warnings=ignored))
    assert [finding.code for finding in findings] == expected
    assert get_exit_code(findings) == 0
