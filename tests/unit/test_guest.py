"""Data for and from a guest: user-data, ssh keys, network configuration, ready report."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from mdserver import metadata

from docs.shapes import RECORD
from ecomp.model import user_data
from ecomp.model.guest import make_mac_address, make_network_config
from ecomp.model.record import Record
from ecomp.model.states import ACTIVE
from ecomp.model.stored import encode
from ecomp.model.user_data import MAX_USER_DATA_BYTES, GuestFailure, GuestReport, SharedUserData, parse_guest_report


def read_reason(check: Callable[[bytes], object], data: bytes) -> str:
    try:
        check(data)
    except ValueError as error:
        return str(error)
    return ''


@given(st.binary(max_size=300))
def test_refusal_of_any_bytes_is_short(data: bytes) -> None:
    for check in (user_data.parse_public_keys, user_data.check_user_data):
        message = read_reason(check, data)
        assert len(message) < 200
        assert message.isprintable()


LARGE = SharedUserData.from_bytes(bytes(MAX_USER_DATA_BYTES + 1))


@pytest.mark.parametrize(
    ('value', 'sha256', 'why'),
    [
        (
            SharedUserData.from_bytes(b'a').text.encode(),
            SharedUserData.from_bytes(b'b').sha256,
            'its SHA-256 differs from the SHA-256 in its key',
        ),
        (LARGE.text.encode(), LARGE.sha256, f'has {MAX_USER_DATA_BYTES + 1} bytes'),
    ],
)
def test_invalid_shared_user_data_is_refused(value: bytes, sha256: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        user_data.parse_shared_user_data(value, sha256)


# A guest's report: well-formed parts are kept, all others are ignored.


INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
ED25519 = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMFV1lU4QkKTl41OFhKPkXdPpyDUP5IcpuvkBH6fDYeg'
FAILED = GuestFailure('modules-final', "('scripts-user', RuntimeError('1 failures (part-001)'))")


def test_posted_report_is_parsed() -> None:
    key = ED25519.replace('+', '%2B')
    form = f'instance_id=i&pub_key_ed25519={key}+root%40web1%0A&stage=modules-final&error=it+failed'
    assert parse_guest_report(metadata.parse_report(form.encode())) == GuestReport(
        (ED25519,), GuestFailure('modules-final', 'it failed')
    )


def test_form_with_too_many_fields_is_refused() -> None:
    with pytest.raises(ValueError, match='[Mm]ax'):
        metadata.parse_report(b'&'.join(b'a=b' for _ in range(metadata.MAX_FORM_FIELDS + 1)))


@given(st.binary(max_size=300))
def test_any_form_is_parsed_or_refused(form: bytes) -> None:
    try:
        assert parse_guest_report(metadata.parse_report(form)).host_keys == ()
    except ValueError as error:
        assert 'fields' in str(error)  # noqa: PT017


def test_number_of_host_keys_is_limited() -> None:
    def make_numbered_key(number: int) -> str:
        parts = (b'ssh-ed25519', bytes(31) + bytes([number]))
        blob = b''.join(struct.pack('>I', len(part)) + part for part in parts)
        return f'ssh-ed25519 {base64.b64encode(blob).decode()}'

    assert user_data.parse_host_keys([make_numbered_key(number) for number in range(9)]) == tuple(
        make_numbered_key(number) for number in range(user_data.MAX_HOST_KEYS)
    )


@pytest.mark.parametrize(
    'value', [b'', b'[]', b'{"host_keys": 1}', b'[' * 9999, b'\xff', b'{"stage": "", "error": "x"}']
)
def test_malformed_report_means_ready_without_details(value: bytes) -> None:
    assert parse_guest_report(value) == GuestReport()


def test_shown_record_matches_the_documented_schema() -> None:
    for fields in ({}, {'host_keys': (ED25519,)}, {'cloud_init': FAILED}):
        record = json.loads(encode(Record(INSTANCE, COMPUTE, ACTIVE, **fields)))  # type: ignore[arg-type]
        shown = {**record, 'host': None, 'host_state': None, 'stale': False, 'host_last_seen': None}
        assert list(Draft202012Validator(RECORD).iter_errors(shown)) == []


# The network configuration of a guest with several interfaces.


INTERFACES_INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'


def make_macs(count: int) -> tuple[str, ...]:
    return tuple(make_mac_address(INTERFACES_INSTANCE, number) for number in range(count))


def test_one_interface_needs_no_network_config() -> None:
    assert make_network_config(()) is None
    assert make_network_config(make_macs(1)) is None


def test_two_interfaces_are_configured_by_mac() -> None:
    first, second = make_macs(2)
    assert make_network_config((first, second)) == {
        'version': 2,
        'ethernets': {
            'eth0': {'match': {'macaddress': first}, 'dhcp4': True, 'dhcp4-overrides': {'route-metric': 100}},
            'eth1': {
                'match': {'macaddress': second},
                'dhcp4': True,
                'dhcp4-overrides': {'route-metric': 200},
                'optional': True,
            },
        },
    }
