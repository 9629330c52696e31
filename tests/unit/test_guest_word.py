"""What a guest says of itself: what is well formed is kept, all else is as if it had not been said."""

from __future__ import annotations

import base64
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from mdserver import metadata

from docs.shapes import RECORD
from ecomp.model.guest import MOST_KEYS, GuestFailure, GuestWord, host_keys, parse_word
from ecomp.model.record import ACTIVE, Record, from_json, to_dict, to_json

INSTANCE, COMPUTE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a', 'b8756be5-a30d-4311-920c-0ad996367a8e'
ED25519 = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMFV1lU4QkKTl41OFhKPkXdPpyDUP5IcpuvkBH6fDYeg'
OTHER = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBPSN1VPPvPFEgvkXqQWEXGXNNS8vZQzU0wPYpM3sXhR'
FAILED = GuestFailure('modules-final', "('scripts-user', RuntimeError('1 failures (part-001)'))")


def test_what_is_posted_is_what_is_kept() -> None:
    key = ED25519.replace('+', '%2B')
    form = f'instance_id=i&pub_key_ed25519={key}+root%40web1%0A&stage=modules-final&error=it+failed'
    assert parse_word(metadata.word(form.encode())) == GuestWord((ED25519,), GuestFailure('modules-final', 'it failed'))


@pytest.mark.parametrize(
    'form', [b'', b'instance_id=i', b'pub_key_ed25519=N%2FA&pub_key_dsa=ssh-dss+AAAA', b'\xff&=&&%']
)
def test_without_keys_and_without_an_error_it_went_well(form: bytes) -> None:
    assert parse_word(metadata.word(form)) == GuestWord()


def test_a_form_of_many_fields_is_refused() -> None:
    with pytest.raises(ValueError, match='[Mm]ax'):
        metadata.word(b'&'.join(b'a=b' for _ in range(metadata.FIELDS + 1)))


@given(st.binary(max_size=300))
def test_no_form_breaks_it(form: bytes) -> None:
    try:
        assert parse_word(metadata.word(form)).host_keys == ()
    except ValueError as error:
        assert 'fields' in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ('said', 'kept'),
    [
        ([ED25519, f'{ED25519} root@web1', OTHER], (ED25519, OTHER)),
        ([f'{ED25519}\n@cert-authority * {OTHER}'], (ED25519,)),
        ([f'@cert-authority {ED25519}', f'* {ED25519}', 'ssh-dss AAAA', 'ssh-ed25519', '', 'ssh-ed25519 AAAA'], ()),
        (['ssh-rsa ' + 3000 * 'A'], ()),
        ([17, None, [ED25519]], ()),
        ({'ssh-ed25519': 1}, ()),
        (None, ()),
    ],
)
def test_host_keys(said: object, kept: tuple[str, ...]) -> None:
    assert host_keys(said) == kept


def test_there_are_a_few_at_most() -> None:
    def key(number: int) -> str:
        parts = (b'ssh-ed25519', bytes(31) + bytes([number]))
        blob = b''.join(struct.pack('>I', len(each)) + each for each in parts)
        return f'ssh-ed25519 {base64.b64encode(blob).decode()}'

    assert host_keys([key(number) for number in range(9)]) == tuple(key(number) for number in range(MOST_KEYS))


@pytest.mark.parametrize(
    'value', [b'', b'[]', b'{"host_keys": 1}', b'[' * 9999, b'\xff', b'{"stage": "", "error": "x"}']
)
def test_a_word_that_cannot_be_read_says_that_it_is_ready_and_no_more(value: bytes) -> None:
    assert parse_word(value) == GuestWord()


def test_words_are_cut_and_made_fit_for_a_terminal() -> None:
    word = parse_word(json.dumps({'stage': 99 * 's', 'error': '\x1b[2J' + 9999 * 'e'}).encode())
    assert word.failed is not None
    assert word.failed.stage == 40 * 's' + '…'
    assert word.failed.reason.startswith('\\x1b[2Jeee')
    assert len(word.failed.reason) < 510


def test_a_record_keeps_it_and_an_older_one_has_none() -> None:
    record = Record(INSTANCE, COMPUTE, ACTIVE, host_keys=(ED25519,), cloud_init=FAILED)
    assert from_json(to_json(record).encode()) == record
    older = {name: value for name, value in to_dict(record).items() if name not in ('host_keys', 'cloud_init')}
    assert from_json(json.dumps(older).encode()) == Record(INSTANCE, COMPUTE, ACTIVE)
    strange = {**older, 'host_keys': [f'* {OTHER}', 7], 'cloud_init': 'x'}
    assert from_json(json.dumps(strange).encode()) == Record(INSTANCE, COMPUTE, ACTIVE)


def test_what_show_prints_of_it_has_the_shape_that_is_documented() -> None:
    for said in ({}, {'host_keys': (ED25519,)}, {'cloud_init': FAILED}):
        record = json.loads(to_json(Record(INSTANCE, COMPUTE, ACTIVE, **said)))  # type: ignore[arg-type]
        shown = {**record, 'host': None}
        assert list(Draft202012Validator(RECORD).iter_errors(shown)) == []
