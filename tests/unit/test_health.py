"""Findings about a machine or a cluster, and their messages."""

from __future__ import annotations

import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ecomp.model import health
from ecomp.model.canary import CHECKED, CURES, ENTERED, Canary, check_names_no_host, how_far, line, of_canaries
from ecomp.model.guest import Attachment
from ecomp.model.health import (
    MISSING,
    OFF,
    THERE,
    Ailment,
    Backends,
    Certificate,
    Libvirt,
    Machine,
    StateDirectory,
    ends,
)
from ecomp.model.health import ComputeFacts as Facts
from ecomp.model.host import CLOSED, ORPHANED, SILENT, UP, Host
from ecomp.model.record import ACTIVE, BUILDING, ERROR, SCHEDULED, STAGES, Failure, Record
from ecomp.tls import ETCD_SENTENCES, SENTENCES, TlsFailure, tls_failure
from tests.kit.certificates import Authority

# Findings of a machine and a cluster, one for each fact that is wrong.


NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
A = '0b5e55ed-0000-4000-8000-000000000000'
B = '5ca1ab1e-0000-4000-8000-000000000000'
WELL = Backends(
    etcd='etcd at ds1:2379', placement='placement at http://ds1:8080', told='/etc/ecomp/schedule.yaml', now=NOW,
    etcd_version='3.5.33', placement_version='1.39', ahead=0.4,
    certificates=(Certificate('/c/client.crt', NOW + timedelta(days=90)),),
)  # fmt: skip
LIBVIRT = Libvirt(
    version=11_003_000, library=11_003_000, qemu=True, qemu_user='libvirt-qemu',
    networks={Attachment('network', 'default'): THERE},
)  # fmt: skip
STATE = StateDirectory('/var/lib/ecompute', 0, 0, A, True, 50 * 1024**3)
MACHINE = Machine(state=STATE, libvirt=LIBVIRT)
AWAY = replace(MACHINE, libvirt=None, no_libvirt='no socket')


def test_what_is_well_has_nothing() -> None:
    assert health.of_backends(WELL) == []
    assert health.of_machine(MACHINE) == []
    up = Host(A, 'hv1', UP, 0, {})
    assert health.of_computes(Facts((up,), {A: '1.1.0'}, '1.1.0')) == []
    assert health.of_computes(Facts((up,), {A: '1.1.0'}, '1.1.0+g01234567')) == []
    assert health.of_computes(Facts((up,), {A: '1.1.0+g01234567'}, '1.1.0')) == []
    assert health.exit_code(WELL, []) == 0
    assert health.summary(WELL, []) == (
        'nothing is wrong; etcd at ds1:2379 (3.5.33), placement at http://ds1:8080 (microversion 1.39), '
        'by /etc/ecomp/schedule.yaml'
    )


# Errors about our own certificate: one of etcd and three of placement.
NOT_OURS = [
    ETCD_SENTENCES[TlsFailure.OWN_MISSING],
    *(SENTENCES[each] for each in (TlsFailure.OWN_REFUSED, TlsFailure.OWN_MISSING, TlsFailure.OWN_EXPIRED)),
]
NOT_YET_VALID = SENTENCES[TlsFailure.NOT_YET_VALID]
EXPIRED = SENTENCES[TlsFailure.EXPIRED]
HUNG_UP = SENTENCES[TlsFailure.HUNG_UP]


@pytest.mark.parametrize(
    ('facts', 'check', 'says', 'cure'),
    [
        (replace(WELL, no_etcd='etcd … cannot be reached'), 'etcd', 'cannot be reached', 'schedule.yaml told'),
        (replace(WELL, no_etcd='away', told=None), 'etcd', 'away', 'no schedule.yaml was found, so localhost was'),
        (replace(WELL, no_placement='it is too old'), 'placement', 'too old', 'correct `placement:`'),
        (replace(WELL, no_etcd=NOT_YET_VALID), 'etcd', 'not valid yet', 'set-ntp true, here and on the'),
        (replace(WELL, no_etcd=EXPIRED), 'etcd', 'has expired', 'elab certs DIR, on the control host;'),
        (replace(WELL, no_placement=NOT_YET_VALID), 'placement', 'not valid yet', 'set-ntp true'),
        (replace(WELL, no_placement=EXPIRED), 'placement', 'has expired', 'elab certs DIR, on the'),
        (
            replace(WELL, no_etcd=NOT_OURS[0]), 'etcd', 'refuses our',
            'copy what it makes here, and name it in `etcd:`',
        ),
        (replace(WELL, no_placement=NOT_OURS[1]), 'placement', 'refuses our', 'and name it in `placement:`'),
        (
            replace(WELL, no_placement=NOT_OURS[2]), 'placement', 'wants a certificate of',
            'name it in `placement:`',
        ),
        (replace(WELL, no_placement=NOT_OURS[3]), 'placement', 'that our certificate', 'name it in `placement:'),
        (replace(WELL, no_placement=HUNG_UP), 'placement', 'does it take our', 'start it there, or correct'),
        (replace(WELL, etcd_version='3.4.23'), 'etcd-version', 'end-of-life', '3.5.33'),
        (replace(WELL, placement_version='1.30'), 'placement-version', '1.30, and 1.39 is', 'openstack-placement>='),
        (replace(WELL, placement_version='new'), 'placement-version', 'new, and 1.39 is', 'openstack-placement>='),
        (replace(WELL, ahead=3600.2), 'clock', '3600 s ahead of', 'timedatectl set-ntp true'),
        (replace(WELL, ahead=-3600.2), 'clock', '3600 s behind', 'timedatectl set-ntp true'),
        (replace(WELL, certificates=(Certificate('/c', NOW),)), 'certificate', '/c has expired', 'elab certs'),
        (replace(WELL, certificates=(Certificate('/c', NOW + timedelta(1)),)), 'certificate', 'soon', 'elab certs'),
        (replace(WELL, certificates=(Certificate('/c', None),)), 'certificate', 'cannot be read', 'elab certs'),
        (replace(WELL, open_secrets=('/c',)), 'secret', '/c can be read or changed by every user', 'chmod o= /c'),
    ],
)
def test_of_the_control_plane(facts: Backends, check: str, says: str, cure: str) -> None:
    (finding,) = health.of_backends(facts)
    assert (finding.check, says in finding.what, cure in finding.cure) == (check, True, True), finding
    assert health.exit_code(facts, [finding]) == (7 if facts.no_etcd or facts.no_placement else 8)
    (line,) = health.lines([finding])
    assert line == f'{check}: {finding.what}. Mend it: {finding.cure}'
    assert health.summary(facts, [finding]).startswith('1 finding; ')


@pytest.mark.parametrize(
    ('facts', 'found'),
    [
        (Facts((Host(A, None, SILENT, 1, {}),)), ('compute', f'compute {A} is silent', f'host forget {A}')),
        (Facts((Host(A, 'hv1', CLOSED, 1, {}),)), ('compute', 'compute hv1 is closed', 'systemctl start ecompute')),
        (Facts((Host(A, 'hv1', CLOSED, 1, {}),)), ('compute', 'or it only watches', 'journalctl -u ecompute')),
        (Facts((Host(A, None, ORPHANED, 0, {}),)), ('compute', 'is orphaned', f'host forget {A}')),
        (
            Facts((Host(A, 'hv1', UP, 0, {}),), {A: '1.9.0'}, '1.10.0'),
            ('version', 'runs ecomp 1.9.0', "stop ecompute; /opt/ecomp/bin/pip install '.[hypervisor]'; system"),
        ),
        (
            Facts((Host(A, 'hv1', UP, 0, {}),), {A: '1.9.0'}, '1.10.0'),
            ('version', 'runs ecomp 1.9.0', 'on its host, in a clone of ecomp 1.10.0: systemctl stop'),
        ),
        (
            Facts((Host(A, 'hv1', UP, 0, {}),), {A: '1.10.0'}, '1.9.0'),
            ('version', 'and this is 1.9.0', 'here, in a clone of ecomp 1.10.0: pipx install --force .'),
        ),
        (
            Facts((Host(A, 'hv1', UP, 0, {}),), {A: '1.9.0+g01234567'}, '1.9.0+g89abcdef'),
            ('version', 'and this is 1.9.0+g89abcdef', 'install the same commit on its host and here'),
        ),
        (Facts(unserved='web1 waits: `queues: True` does it'), ('queue', 'web1 waits', '`queues: True` does it')),
    ],
)
def test_of_the_computes(facts: Facts, found: tuple[str, str, str]) -> None:
    (finding,) = health.of_computes(facts)
    assert (finding.check, found[1] in finding.what, found[2] in finding.cure) == (
        found[0], True, True
    ), finding


def libvirt(**changed: object) -> Machine:
    return replace(MACHINE, libvirt=replace(LIBVIRT, **changed))


BRIDGE = Attachment('bridge', 'br0')
NETWORK = Attachment('network', 'default')
OTHER = Attachment('network', 'web')


@pytest.mark.parametrize(
    ('facts', 'check', 'says', 'cure'),
    [
        (replace(MACHINE, state=STATE._replace(caller=1000, owner=1000)), 'root', 'needs root', 'sudo ecompute'),
        (replace(MACHINE, state=STATE._replace(owner=1000)), 'state', 'to user 1000', 'chown 0 /var/lib/ecompute'),
        (replace(MACHINE, state=STATE._replace(free=7 * 1024**2)), 'disk', '7 MiB free', 'make room'),
        (replace(MACHINE, state=STATE._replace(uuid='x', uuid_is_right=False)), 'uuid', 'no uuid', 'ecompute/uuid'),
        (libvirt(computes=frozenset({A, B})), 'uuid', f'guests of compute {B}', f'put `uuid: {B}` into'),
        (replace(libvirt(computes=frozenset({A})), configured=B), 'uuid', f'this is compute {B}', f'`uuid: {A}`'),
        (replace(MACHINE, proxies=('http_proxy',)), 'proxy', 'http_proxy is in the', 'unset http_proxy'),
        (replace(MACHINE, refused=('traits: CUSTOM',)), 'configuration', 'traits: CUSTOM', 'in compute.yaml'),
        (replace(MACHINE, no_images='/no such'), 'images', '/no such is no directory', "mkdir -p '/no such'"),
        (AWAY, 'libvirt', 'no socket', 'systemctl start libvirtd'),
        (replace(AWAY, has_libvirtd=False), 'libvirt', 'no socket', 'apt install libvirt-daemon-system'),
        (replace(AWAY, no_libvirt='', no_library='it is away: pip it'), 'libvirt', 'it is away', 'pip it'),
        (libvirt(version=8_000_000), 'libvirt-version', 'libvirt 8.0.0 is older', '9.0.0'),
        (
            libvirt(version=11_002_001), 'libvirt-version', 'is 11.2.1 still, and 11.3.0',
            'systemctl restart libvirtd',
        ),
        (libvirt(qemu=False), 'qemu', 'no QEMU', 'apt install qemu-system-x86'),
        (libvirt(kvm_device=True, kvm_closed=True, kvm='closed'), 'kvm', 'up to a minute', 'chmod 660 /dev/kvm'),
        (replace(libvirt(kvm='no flag'), wanted='kvm'), 'kvm', 'cannot be had: no flag', 'virt_type: auto'),
        (libvirt(blocked='/a b'), 'way', 'libvirt-qemu, who cannot enter /a b', "chmod o+x '/a b'"),
        (libvirt(pool='/other'), 'pool', 'is over /other', 'virsh pool-undefine ecompute'),
        (libvirt(networks={BRIDGE: MISSING}), 'network', 'no bridge br0', 'ip link add br0 type bridge'),
        (libvirt(networks={NETWORK: MISSING}), 'network', 'no network default', 'virsh net-define'),
        (libvirt(networks={OTHER: MISSING}), 'network', 'no network web', 'virsh net-list --all'),
        (libvirt(networks={OTHER: OFF}), 'network', 'web is not active', 'virsh net-start web'),
        (
            libvirt(unfit=('web has no <range>. Fix: virsh net-update',)), 'network', 'no <range>',
            'virsh net-update',
        ),
        (libvirt(has_bridge=False), 'metadata', 'no metadata can be served', 'metadata: iso'),
        (replace(MACHINE, is_taken=True), 'metadata', 'port 80 is no metadata server', 'an address of its own'),
        (libvirt(filters='ebtables is not installed'), 'filters', 'ebtables', 'apt install iptables'),
    ],
)
def test_of_a_machine(facts: Machine, check: str, says: str, cure: str) -> None:
    (finding,) = health.of_machine(facts)
    assert (finding.check, says in finding.what, cure in finding.cure) == (check, True, True), finding
    assert '\n' not in health.lines([finding])[0]


@pytest.mark.parametrize(
    'facts',
    [
        replace(libvirt(kvm='no flag'), wanted='auto'),  # auto means emulation then
        replace(MACHINE, proxies=('http_proxy',), image_proxy=True),
        replace(MACHINE, state=STATE._replace(owner=None, uuid='', uuid_is_right=False)),  # before the first start
        replace(MACHINE, state=STATE._replace(uuid='x', uuid_is_right=False), configured=A),
        replace(libvirt(has_bridge=False), metadata='iso'),
        replace(MACHINE, metadata='iso', is_taken=True),
        libvirt(version=12_000_000),  # newer than our library, with the same protocol
    ],
)
def test_what_is_as_it_may_be(facts: Machine) -> None:
    assert health.of_machine(facts) == []


def test_every_check_finds_something_here() -> None:
    """Each check of the product has a case in a test above that makes it report a finding."""
    expected = {*health.OF_BACKENDS, *health.OF_COMPUTES, *health.OF_MACHINE, *health.OF_LIBVIRT}
    tests = [test_of_the_control_plane, test_of_a_machine]
    checks = {case[1] for test in tests for case in test.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    checks |= {
        case[1][0]
        for case in test_of_the_computes.pytestmark[0].args[1]  # type: ignore[attr-defined]
    }
    assert checks == expected
    assert Ailment._fields == ('check', 'what', 'cure')


def test_when_a_certificate_ends(tmp_path: Path) -> None:
    authority = Authority(tmp_path / 'ca')
    for days in (10, -1, 20_000):
        certificate, key = authority.issue(tmp_path, f'client{days}', 'localhost', days=days)
        remaining = ends(certificate.read_bytes()) - datetime.now(UTC)
        assert abs(remaining - timedelta(days=days)) < timedelta(hours=2)
        # A private key before the certificate in the same file is skipped.
        assert ends(key.read_bytes() + certificate.read_bytes()) == ends(certificate.read_bytes())


@pytest.mark.parametrize('wrong', [b'', b'x', b'-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n'])
def test_what_is_no_certificate(wrong: bytes) -> None:
    with pytest.raises(ValueError, match='certificate'):
        ends(wrong)


def test_half_a_certificate(tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path / 'ca').issue(tmp_path, 'client', 'localhost')
    lines = certificate.read_bytes().splitlines()
    for count in range(1, len(lines) - 1):
        try:
            ends(b'\n'.join([*lines[:count], lines[-1]]))
        except ValueError as error:
            assert 'certificate' in str(error)  # noqa: PT017  (no error if the date is before the cut)


# Canaries: their lines and findings.


HOST = 'c0000000-0000-4000-8000-000000000001'
INSTANCE = '1a5c0de0-0000-4000-8000-000000000001'
NONE = Canary(HOST, 'hv1', 'hv1', why='it is disabled')
CANARY = Canary(HOST, 'hv1', 'hv1', INSTANCE, 'canary-1a5c0de0', 'addressed', 4.25, 'no ssh key')
ENTERED_ONE = CANARY._replace(reached=ENTERED, why='')
BROKEN = CANARY._replace(reached='scheduled', seconds=None, why='no such image', broken='image')
LEFT = ENTERED_ONE._replace(left='etcd is away')


@pytest.mark.parametrize(
    ('canary', 'says'),
    [
        (NONE, 'no canary: it is disabled'),
        (CANARY, 'canary-1a5c0de0 booted after 4.2 s, not entered: no ssh key; gone'),
        (CANARY._replace(reached='disk'), 'canary-1a5c0de0 reached disk after 4.2 s, not entered: no ssh key; gone'),
        (ENTERED_ONE, 'canary-1a5c0de0 was entered after 4.2 s; gone'),
        (BROKEN, 'canary-1a5c0de0: no such image; gone'),
        (LEFT, 'canary-1a5c0de0 was entered after 4.2 s; it may be left: etcd is away'),
    ],
)
def test_each_is_a_line(canary: Canary, says: str) -> None:
    assert line(canary) == f'{HOST}: {says}'


def test_what_broke_is_found_and_what_is_left() -> None:
    assert of_canaries([NONE, CANARY, ENTERED_ONE], False) == []
    assert of_canaries([BROKEN, LEFT], False) == [
        Ailment('canary', 'on hv1 a canary did not come through: no such image', CURES['image']),
        Ailment('canary', 'canary-1a5c0de0 on hv1 may be left: etcd is away', f'eschedule destroy --wait {INSTANCE}'),
    ]
    assert of_canaries([BROKEN._replace(broken='disk')], False)[0].cure == CHECKED


def test_that_there_was_none_is_found_unless_somebody_ended_it() -> None:
    for canaries in ([], [NONE]):
        assert [finding.check for finding in of_canaries(canaries, False)] == ['canary']
        assert of_canaries(canaries, True) == []


def test_for_programs() -> None:
    fields = LEFT.to_dict()
    assert (fields['reached'], fields['seconds'], fields['said'], fields['gone']) == (ENTERED, 4.25, None, False)
    assert (CANARY.to_dict()['gone'], NONE.to_dict()['gone'], NONE.to_dict()['said']) == (
        True, None, 'it is disabled'
    )


def test_how_far_it_came() -> None:
    building = Record(INSTANCE, HOST, BUILDING, stages=dict.fromkeys(STAGES[:3], 'then'))
    assert how_far(None) == ('requested', 'requested')
    scheduled = replace(building, state=SCHEDULED, stages=dict.fromkeys(STAGES[:2], 'then'))
    assert how_far(scheduled) == ('scheduled', SCHEDULED)
    assert how_far(building) == ('image', 'disk')
    assert how_far(replace(building, state=ERROR, error=Failure('started', 'x', 'y'))) == ('image', 'started')
    assert how_far(replace(building, state=ACTIVE, stages=dict.fromkeys(STAGES, 'then'))) == ('ready', 'ready')


def test_a_query_names_no_host() -> None:
    check_names_no_host('resources=VCPU:1&required=in_tree')
    for key in ('in_tree', 'in_tree_1'):
        with pytest.raises(ValueError, match='--on'):
            check_names_no_host(f'resources=VCPU:1&{key}=')


# TLS failures are classified by OpenSSL's own reason, and each has a message.


def test_each_failure_has_a_sentence() -> None:
    assert SENTENCES.keys() == ETCD_SENTENCES.keys() == set(TlsFailure)


@pytest.mark.parametrize(
    ('kind', 'said', 'failure'),
    [
        *((ssl.SSLCertVerificationError, {'verify_code': code}, failure) for code, failure in (
            (9, TlsFailure.NOT_YET_VALID), (10, TlsFailure.EXPIRED), (20, TlsFailure.UNTRUSTED),
            (62, TlsFailure.OTHER_NAME), (64, TlsFailure.OTHER_ADDRESS), (66, TlsFailure.TOO_WEAK),
            (85, TlsFailure.NO_KEY_IDENTIFIER),
        )),
        (ssl.SSLCertVerificationError, {}, TlsFailure.UNTRUSTED),
        *((ssl.SSLError, {'reason': reason}, failure) for reason, failure in (
            ('SSLV3_ALERT_CERTIFICATE_EXPIRED', TlsFailure.OWN_EXPIRED),
            ('TLSV13_ALERT_CERTIFICATE_REQUIRED', TlsFailure.OWN_MISSING),
            ('TLSV1_ALERT_UNKNOWN_CA', TlsFailure.OWN_REFUSED),
            ('SSLV3_ALERT_BAD_CERTIFICATE', TlsFailure.OWN_REFUSED),
            ('TLSV1_ALERT_ACCESS_DENIED', TlsFailure.OWN_REFUSED),
            ('TLSV1_ALERT_PROTOCOL_VERSION', TlsFailure.OTHER),
            ('WRONG_VERSION_NUMBER', TlsFailure.PLAIN_TEXT),
            ('UNSUPPORTED_PROTOCOL', TlsFailure.OTHER),
        )),
        (ssl.SSLError, {}, TlsFailure.OTHER),
        *((kind, {}, TlsFailure.HUNG_UP) for kind in (ssl.SSLEOFError, ssl.SSLZeroReturnError)),
    ],
)
def test_failure_is_told_by_its_number_its_reason_or_its_kind(
    kind: type[ssl.SSLError], said: dict[str, object], failure: TlsFailure
) -> None:
    error = kind('whatever the server says')
    for name, value in said.items():
        setattr(error, name, value)
    assert tls_failure(error) is failure
