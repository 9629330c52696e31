"""The layout of etcd, and which uuids may become a file's name."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys

COMPUTE, INSTANCE = 'b8756be5-a30d-4311-920c-0ad996367a8e', 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'


def test_the_keys_users_and_other_hosts_see() -> None:
    assert keys.request(COMPUTE, INSTANCE) == f'/hosts/{COMPUTE}/{INSTANCE}'
    assert keys.attempt(INSTANCE) == f'/requests/{INSTANCE}'
    assert keys.booted(INSTANCE) == f'/booted/{INSTANCE}'
    assert keys.record(COMPUTE, INSTANCE) == f'/instances/{COMPUTE}/{INSTANCE}'
    assert keys.record('', INSTANCE) == f'/instances/none/{INSTANCE}'
    assert keys.old_record(INSTANCE) == f'/instances/{INSTANCE}'
    assert keys.digest('a', COMPUTE, 3) == f'/digests/{COMPUTE}/a/3'
    assert keys.recorded(keys.record(COMPUTE, INSTANCE)) == (COMPUTE, INSTANCE)
    assert keys.recorded(keys.record('', INSTANCE)) == ('', INSTANCE)
    assert keys.recorded(keys.old_record(INSTANCE)) == (None, INSTANCE)
    assert keys.compute(COMPUTE) == f'/computes/{COMPUTE}'


def test_a_prefix_does_not_match_a_longer_name() -> None:
    assert keys.request(COMPUTE, INSTANCE).startswith(keys.request_prefix(COMPUTE))
    assert not keys.request(COMPUTE + '0', INSTANCE).startswith(keys.request_prefix(COMPUTE))


@given(st.uuids())
def test_a_key_says_what_it_is_about(instance: uuid.UUID) -> None:
    assert keys.last(keys.request(COMPUTE, str(instance))) == str(instance)
    assert keys.is_uuid(str(instance))


@pytest.mark.parametrize(
    'text',
    [
        '',
        '..',
        '../x',
        INSTANCE.upper(),
        INSTANCE[:-1],
        INSTANCE.replace('-', ''),
        f'{{{INSTANCE}}}',
        f'urn:uuid:{INSTANCE}',
        INSTANCE + '\n',
        '00000000-0000-0000-0000-000000000000',
        None,
        7,
        b'x',
        [],
    ],
)
def test_other_forms_of_a_uuid_are_none(text: Any) -> None:
    assert not keys.is_uuid(text)


@given(st.binary(min_size=16, max_size=16))
def test_a_new_uuid_is_as_python_makes_it(random: bytes) -> None:
    assert keys.new_uuid(random) == str(uuid.UUID(bytes=random, version=4))


LIKE_ONE = st.text('0123456789abcdefABCDEF-{}', min_size=30, max_size=40)


@given(LIKE_ONE | st.uuids().map(str) | st.uuids().map(lambda each: each.hex))
def test_a_uuid_is_told_as_python_tells_it(text: str) -> None:
    try:
        canonical = str(uuid.UUID(text)) == text
    except ValueError:
        canonical = False
    assert keys.is_uuid(text) is canonical
