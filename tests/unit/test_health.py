"""Findings about a machine or a cluster, and their messages."""

from __future__ import annotations

import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ecomp.model import health
from ecomp.model.audit import CODES
from ecomp.model.canary import (
    CURES,
    DEFAULT_CURE,
    ENTERED,
    Canary,
    check_names_no_host,
    diagnose_canaries,
    find_stages,
    format_line,
)
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
    read_certificate_end,
)
from ecomp.model.health import ComputeFacts as Facts
from ecomp.model.host import CLOSED, ORPHANED, SILENT, UP, Host
from ecomp.model.level import COMPUTE_WARNINGS, SCHEDULE_WARNINGS, WARNING, get_level
from ecomp.model.record import ACTIVE, BUILDING, ERROR, SCHEDULED, STAGES, Failure, Record
from ecomp.tls import ETCD_SENTENCES, SENTENCES, TlsFailure, classify_tls_error
from tests.kit.certificates import Authority

# Findings of a machine and a cluster, one for each fact that is wrong.


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
    assert health.check_backends(HEALTHY) == []
    assert health.check_machine(MACHINE) == []
    up = Host(A, 'hv1', UP, (), {})
    assert health.check_computes(Facts((up,), {A: '1.1.0'}, '1.1.0')) == []
    assert health.check_computes(Facts((up,), {A: '1.1.0'}, '1.1.0+g01234567')) == []
    assert health.check_computes(Facts((up,), {A: '1.1.0+g01234567'}, '1.1.0')) == []
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


@pytest.mark.parametrize(
    ('facts', 'check', 'message', 'cure'),
    [
        (
            replace(HEALTHY, etcd_failure='etcd … cannot be reached'),
            'etcd',
            'cannot be reached',
            'in /etc/ecomp/schedule.yaml',
        ),
        (
            replace(HEALTHY, etcd_failure='away', config_path=None),
            'etcd',
            'away',
            'no schedule.yaml was found, so the address is localhost',
        ),
        (replace(HEALTHY, placement_failure='it is too old'), 'placement', 'too old', 'correct `placement:`'),
        (replace(HEALTHY, etcd_failure=NOT_YET_VALID), 'etcd', 'not valid yet', 'set-ntp true` here and on the'),
        (
            replace(HEALTHY, etcd_failure=EXPIRED),
            'etcd',
            'has expired',
            'elab certs DIR` on the control host, and check',
        ),
        (replace(HEALTHY, placement_failure=NOT_YET_VALID), 'placement', 'not valid yet', 'set-ntp true'),
        (replace(HEALTHY, placement_failure=EXPIRED), 'placement', 'has expired', 'elab certs DIR` on the'),
        (
            replace(HEALTHY, etcd_failure=CERT_ERRORS[0]),
            'etcd',
            'refuses our',
            'copy the new files here, and name them in `etcd:`',
        ),
        (replace(HEALTHY, placement_failure=CERT_ERRORS[1]), 'placement', 'refuses our', 'name them in `placement:`'),
        (
            replace(HEALTHY, placement_failure=CERT_ERRORS[2]),
            'placement',
            'wants a certificate of',
            'name them in `placement:`',
        ),
        (
            replace(HEALTHY, placement_failure=CERT_ERRORS[3]),
            'placement',
            'that our certificate',
            'name them in `placement:',
        ),
        (
            replace(HEALTHY, placement_failure=HUNG_UP),
            'placement',
            'it may refuse our certificate',
            'start placement at this address, or correct',
        ),
        (replace(HEALTHY, etcd_version='3.4.23'), 'etcd-version', 'end-of-life', '3.5.33'),
        (
            replace(HEALTHY, placement_version='1.30'),
            'placement-version',
            '1.30, but ecomp needs 1.39',
            'openstack-placement>=',
        ),
        (
            replace(HEALTHY, placement_version='new'),
            'placement-version',
            'new, but ecomp needs 1.39',
            'openstack-placement>=',
        ),
        (replace(HEALTHY, ahead_seconds=3600.2), 'clock', '3600 s ahead of', 'timedatectl set-ntp true'),
        (replace(HEALTHY, ahead_seconds=-3600.2), 'clock', '3600 s behind', 'timedatectl set-ntp true'),
        (replace(HEALTHY, certificates=(Certificate('/c', NOW),)), 'certificate', '/c expired at', 'elab certs'),
        (replace(HEALTHY, certificates=(Certificate('/c', NOW + timedelta(1)),)), 'certificate', 'soon', 'elab certs'),
        (
            replace(HEALTHY, certificates=(Certificate('/c', None),)),
            'certificate',
            '/c is not a readable certificate',
            'elab certs',
        ),
        (replace(HEALTHY, open_secrets=('/c',)), 'secret', '/c can be read or changed by every user', 'chmod o= /c'),
    ],
)
def test_fault_of_the_control_plane_is_found(facts: Backends, check: str, message: str, cure: str) -> None:
    (finding,) = health.check_backends(facts)
    assert (finding.check, message in finding.what, cure in finding.cure) == (check, True, True), finding
    is_warning = check == 'etcd-version'
    code = 7 if facts.etcd_failure or facts.placement_failure else 0 if is_warning else 8
    assert health.get_exit_code(facts, [finding]) == code
    (line,) = health.format_lines([finding])
    assert line == f'{check}: {"warning: " * is_warning}{finding.what}. Fix: {finding.cure}'
    assert health.summarize(facts, [finding]).startswith('no findings, 1 warning; ' if is_warning else '1 finding; ')


@pytest.mark.parametrize(
    ('facts', 'expected'),
    [
        (Facts((Host(A, None, SILENT, (A,), {}),)), ('compute', f'compute {A} is silent', f'host forget {A}')),
        (Facts((Host(A, 'hv1', CLOSED, (A,), {}),)), ('compute', 'compute hv1 is closed', 'systemctl start ecompute')),
        (
            Facts((Host(A, 'hv1', CLOSED, (A,), {}),)),
            ('compute', 'or changes nothing because', 'journalctl -u ecompute'),
        ),
        (Facts((Host(A, None, ORPHANED, (), {}),)), ('compute', 'is orphaned', f'host forget {A}')),
        (
            Facts((Host(A, 'hv1', UP, (), {}),), {A: '1.9.0'}, '1.10.0'),
            ('version', 'runs ecomp 1.9.0', "uninstall -y ecomp; /opt/ecomp/bin/pip install '.[hypervisor]'; system"),
        ),
        (
            Facts((Host(A, 'hv1', UP, (), {}),), {A: '1.9.0'}, '1.10.0'),
            ('version', 'runs ecomp 1.9.0', 'systemctl start ecompute`, or its package ecomp-compute, as docs'),
        ),
        (
            Facts((Host(A, 'hv1', UP, (), {}),), {A: '1.9.0'}, '1.10.0'),
            ('version', 'runs ecomp 1.9.0', 'on its host, in a clone of ecomp 1.10.0: `systemctl stop'),
        ),
        (
            Facts((Host(A, 'hv1', UP, (), {}),), {A: '1.10.0'}, '1.9.0'),
            (
                'version',
                'but this eschedule is of version 1.9.0',
                'here, in a clone of ecomp 1.10.0: `pipx install --force .`',
            ),
        ),
        (
            Facts((Host(A, 'hv1', UP, (), {}),), {A: '1.10.0'}, '1.9.0'),
            (
                'version',
                'but this eschedule is of version 1.9.0',
                '`pip install .` in its virtual environment, or its package ecomp-client, as docs',
            ),
        ),
        (
            Facts((Host(A, 'hv1', UP, (), {}),), {A: '1.9.0+g01234567'}, '1.9.0+g89abcdef'),
            (
                'version',
                'but this eschedule is of version 1.9.0+g89abcdef',
                'install the same commit on its host and here',
            ),
        ),
        (
            Facts(unserved_reason='web1 waits. Fix: set `queues: True`'),
            ('queue', 'web1 waits', 'set `queues: True`'),
        ),
    ],
)
def test_fault_of_a_compute_is_found(facts: Facts, expected: tuple[str, str, str]) -> None:
    (finding,) = health.check_computes(facts)
    assert (finding.check, expected[1] in finding.what, expected[2] in finding.cure) == (expected[0], True, True), (
        finding
    )


def make_machine(**changed: object) -> MachineFacts:
    return replace(MACHINE, libvirt=replace(LIBVIRT, **changed))


BRIDGE = Attachment('bridge', 'br0')
NETWORK = Attachment('network', 'default')
OTHER = Attachment('network', 'web')


@pytest.mark.parametrize(
    ('facts', 'check', 'message', 'cure'),
    [
        (
            replace(MACHINE, state=STATE._replace(caller_uid=1000, owner_uid=1000)),
            'root',
            'needs root',
            'sudo ecompute',
        ),
        (replace(MACHINE, state=STATE._replace(owner_uid=1000)), 'state', 'to user 1000', 'chown 0 /var/lib/ecompute'),
        (replace(MACHINE, state=STATE._replace(free_bytes=7 * 1024**2)), 'disk', '7 MiB free', 'free space'),
        (replace(MACHINE, state=STATE._replace(uuid='x', has_valid_uuid=False)), 'uuid', 'no uuid', 'ecompute/uuid'),
        (make_machine(computes=frozenset({A, B})), 'uuid', f'guests of compute {B}', f'set `uuid: {B}` in'),
        (
            replace(make_machine(computes=frozenset({A})), configured_uuid=B),
            'uuid',
            f'this is compute {B}',
            f'`uuid: {A}`',
        ),
        (replace(MACHINE, proxy_variables=('http_proxy',)), 'proxy', '(http_proxy)', '`unset http_proxy`'),
        (replace(MACHINE, refused_settings=('traits: CUSTOM',)), 'configuration', 'traits: CUSTOM', 'in compute.yaml'),
        (
            replace(MACHINE, missing_image_directory='/no such'),
            'images',
            '/no such is not a directory',
            "mkdir -p '/no such'",
        ),
        (
            replace(MACHINE, metrics_problem='no metrics are written: /gone is bad. Fix: create it'),
            'metrics',
            'no metrics are written: /gone is bad',
            'create it',
        ),
        (WITHOUT_LIBVIRT, 'libvirt', 'no socket', 'systemctl start libvirtd'),
        (replace(WITHOUT_LIBVIRT, has_libvirtd=False), 'libvirt', 'no socket', 'apt-get install libvirt-daemon-system'),
        (
            replace(WITHOUT_LIBVIRT, no_libvirt_reason='', no_library_reason='it is away. Fix: pip it'),
            'libvirt',
            'it is away',
            'pip it',
        ),
        (
            make_machine(version=8_000_000, library_version=8_000_000),
            'libvirt-version',
            'libvirt 8.0.0 is older',
            '9.0.0',
        ),
        (make_machine(version=8_000_000), 'libvirt-restart', 'still runs version 8.0.0', 'systemctl restart libvirtd'),
        (
            make_machine(version=11_002_001),
            'libvirt-restart',
            'still runs version 11.2.1, but 11.3.0',
            'systemctl restart libvirtd',
        ),
        (make_machine(no_qemu_reason='no QEMU. Fix: apt-get install it'), 'qemu', 'no QEMU', 'apt-get install it'),
        (
            make_machine(has_kvm_device=True, is_kvm_closed=True, no_kvm_reason='closed'),
            'kvm',
            'up to a minute',
            'chmod 660 /dev/kvm',
        ),
        (
            replace(make_machine(no_kvm_reason='no flag'), virt_type='kvm'),
            'kvm',
            'virt_type: kvm is not available: no flag',
            'virt_type: auto',
        ),
        (make_machine(blocked_directory='/a b'), 'way', 'libvirt-qemu, which cannot enter /a b', "chmod o+x '/a b'"),
        (make_machine(foreign_pool_directory='/other'), 'pool', 'is in /other', 'virsh pool-undefine ecompute'),
        (make_machine(networks={BRIDGE: MISSING}), 'network', 'no bridge br0', 'ip link add br0 type bridge'),
        (make_machine(networks={NETWORK: MISSING}), 'network', 'no network named default', 'virsh net-define'),
        (make_machine(networks={OTHER: MISSING}), 'network', 'no network named web', 'virsh net-list --all'),
        (make_machine(networks={OTHER: OFF}), 'network', 'web is not active', 'virsh net-start web'),
        (
            make_machine(network_problems=('web has no <range>. Fix: virsh net-update',)),
            'network',
            'no <range>',
            'virsh net-update',
        ),
        (make_machine(has_bridge=False), 'metadata', 'no metadata can be served', 'metadata: iso'),
        (
            replace(MACHINE, is_metadata_port_taken=True),
            'metadata',
            'another service, not a metadata server, listens on port 80',
            'bind it to another address',
        ),
        (
            make_machine(no_filters_reason='ebtables is not installed'),
            'filters',
            'ebtables',
            'apt-get install iptables',
        ),
    ],
)
def test_fault_of_a_machine_is_found(facts: MachineFacts, check: str, message: str, cure: str) -> None:
    (finding,) = health.check_machine(facts)
    assert (finding.check, message in finding.what, cure in finding.cure) == (check, True, True), finding
    assert '\n' not in health.format_lines([finding])[0]


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
    """Each check of the product has a case in a test above that makes it report a finding."""
    expected = {*health.BACKEND_CHECKS, *health.COMPUTE_CHECKS, *health.MACHINE_CHECKS, *health.LIBVIRT_CHECKS}
    tests = [test_fault_of_the_control_plane_is_found, test_fault_of_a_machine_is_found]
    checks = {case[1] for test in tests for case in test.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    checks |= {
        case[1][0]
        for case in test_fault_of_a_compute_is_found.pytestmark[0].args[1]  # type: ignore[attr-defined]
    }
    assert checks == expected
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


def test_warning_is_shown_as_such() -> None:
    assert health.format_lines([OLD_ETCD, WRONG_CLOCK]) == [
        'etcd-version: warning: etcd is old. Fix: upgrade etcd',
        'clock: it is wrong. Fix: set it',
    ]


def test_every_warning_is_a_check_or_an_audit_code() -> None:
    """A misspelled code would make no finding a warning, and `ignore_warnings` would accept it."""
    machine_checks = {*health.BACKEND_CHECKS, *health.MACHINE_CHECKS, *health.LIBVIRT_CHECKS}
    assert set(COMPUTE_WARNINGS) <= machine_checks
    assert set(SCHEDULE_WARNINGS) <= {*health.BACKEND_CHECKS, *health.COMPUTE_CHECKS, *CODES}
    assert {code for code in (*machine_checks, *health.COMPUTE_CHECKS, *CODES) if get_level(code) == WARNING} == {
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


# Canaries: their lines and findings.


HOST = 'c0000000-0000-4000-8000-000000000001'
INSTANCE = '1a5c0de0-0000-4000-8000-000000000001'
NO_CANARY = Canary(HOST, 'hv1', 'hv1', reason='it is disabled')
CANARY = Canary(HOST, 'hv1', 'hv1', INSTANCE, 'canary-1a5c0de0', 'addressed', 4.25, 'no ssh key')
ENTERED_CANARY = CANARY._replace(reached=ENTERED, reason='')
BROKEN_CANARY = CANARY._replace(reached='scheduled', seconds=None, reason='no such image', failed_stage='image')
LEFT_CANARY = ENTERED_CANARY._replace(leftover_reason='etcd is away')


@pytest.mark.parametrize(
    ('canary', 'text'),
    [
        (NO_CANARY, 'no canary: it is disabled'),
        (CANARY, 'canary-1a5c0de0 booted after 4.2 s, and no login was tried (gone): no ssh key'),
        (
            CANARY._replace(reached='disk'),
            'canary-1a5c0de0 reached disk after 4.2 s, and no login was tried (gone): no ssh key',
        ),
        (ENTERED_CANARY, 'canary-1a5c0de0 accepted a login after 4.2 s; gone'),
        (BROKEN_CANARY, 'canary-1a5c0de0 (gone): no such image'),
        (LEFT_CANARY, 'canary-1a5c0de0 accepted a login after 4.2 s; it may still exist: etcd is away'),
    ],
)
def test_canary_is_reported_in_one_line(canary: Canary, text: str) -> None:
    assert format_line(canary) == f'{HOST}: {text}'


def test_broken_and_leftover_canaries_are_findings() -> None:
    assert diagnose_canaries([NO_CANARY, CANARY, ENTERED_CANARY], False) == []
    assert diagnose_canaries([BROKEN_CANARY, LEFT_CANARY], False) == [
        Ailment('canary', 'the canary on hv1 failed: no such image', CURES['image']),
        Ailment(
            'canary', 'canary-1a5c0de0 on hv1 may still exist: etcd is away', f'eschedule destroy --wait {INSTANCE}'
        ),
    ]
    assert diagnose_canaries([BROKEN_CANARY._replace(failed_stage='disk')], False)[0].cure == DEFAULT_CURE


def test_missing_canary_is_a_finding_unless_interrupted() -> None:
    for canaries in ([], [NO_CANARY]):
        assert [finding.check for finding in diagnose_canaries(canaries, False)] == ['canary']
        assert diagnose_canaries(canaries, True) == []


def test_canary_to_dict() -> None:
    fields = LEFT_CANARY.to_dict()
    assert (fields['reached'], fields['seconds'], fields['said'], fields['gone']) == (ENTERED, 4.25, None, False)
    assert (CANARY.to_dict()['gone'], NO_CANARY.to_dict()['gone'], NO_CANARY.to_dict()['said']) == (
        True,
        None,
        'it is disabled',
    )


def test_how_far_returns_the_stage_reached_and_the_next() -> None:
    building = Record(INSTANCE, HOST, BUILDING, stages=dict.fromkeys(STAGES[:3], 'then'))
    assert find_stages(None) == ('requested', 'requested')
    scheduled = replace(building, state=SCHEDULED, stages=dict.fromkeys(STAGES[:2], 'then'))
    assert find_stages(scheduled) == ('scheduled', SCHEDULED)
    assert find_stages(building) == ('image', 'disk')
    assert find_stages(replace(building, state=ERROR, error=Failure('started', 'x', 'y'))) == ('image', 'started')
    assert find_stages(replace(building, state=ACTIVE, stages=dict.fromkeys(STAGES, 'then'))) == ('ready', 'ready')


def test_canary_query_must_not_name_a_host() -> None:
    check_names_no_host('resources=VCPU:1&required=in_tree')
    for key in ('in_tree', 'in_tree_1'):
        with pytest.raises(ValueError, match='--on'):
            check_names_no_host(f'resources=VCPU:1&{key}=')


# TLS failures are classified by OpenSSL's own reason, and each has a message.


def test_each_tls_failure_has_a_message() -> None:
    assert SENTENCES.keys() == ETCD_SENTENCES.keys() == set(TlsFailure)


@pytest.mark.parametrize(
    ('kind', 'attributes', 'failure'),
    [
        *(
            (ssl.SSLCertVerificationError, {'verify_code': code}, failure)
            for code, failure in (
                (9, TlsFailure.NOT_YET_VALID),
                (10, TlsFailure.EXPIRED),
                (20, TlsFailure.UNTRUSTED),
                (62, TlsFailure.OTHER_NAME),
                (64, TlsFailure.OTHER_ADDRESS),
                (66, TlsFailure.TOO_WEAK),
                (85, TlsFailure.NO_KEY_IDENTIFIER),
            )
        ),
        (ssl.SSLCertVerificationError, {}, TlsFailure.UNTRUSTED),
        *(
            (ssl.SSLError, {'reason': reason}, failure)
            for reason, failure in (
                ('SSLV3_ALERT_CERTIFICATE_EXPIRED', TlsFailure.OWN_EXPIRED),
                ('TLSV13_ALERT_CERTIFICATE_REQUIRED', TlsFailure.OWN_MISSING),
                ('TLSV1_ALERT_UNKNOWN_CA', TlsFailure.OWN_REFUSED),
                ('SSLV3_ALERT_BAD_CERTIFICATE', TlsFailure.OWN_REFUSED),
                ('TLSV1_ALERT_ACCESS_DENIED', TlsFailure.OWN_REFUSED),
                ('TLSV1_ALERT_PROTOCOL_VERSION', TlsFailure.OTHER),
                ('WRONG_VERSION_NUMBER', TlsFailure.PLAIN_TEXT),
                ('UNSUPPORTED_PROTOCOL', TlsFailure.OTHER),
            )
        ),
        (ssl.SSLError, {}, TlsFailure.OTHER),
        *((kind, {}, TlsFailure.HUNG_UP) for kind in (ssl.SSLEOFError, ssl.SSLZeroReturnError)),
    ],
)
def test_tls_failure_is_classified_by_code_reason_or_type(
    kind: type[ssl.SSLError], attributes: dict[str, object], failure: TlsFailure
) -> None:
    error = kind('whatever the server says')
    for name, value in attributes.items():
        setattr(error, name, value)
    assert classify_tls_error(error) is failure
