"""Which etcd this is: values in, words out."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import cluster
from ecomp.model.cluster import Header, KnownCluster

IDENTITY, OTHER = 'b8756be5-a30d-4311-920c-0ad996367a8e', 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
numbers = st.integers(0, 2**64 - 1)
headers = st.builds(Header, st.integers(1, 3), st.integers(1, 50), st.integers(1, 9))


@given(st.lists(headers, max_size=20), headers)
def test_nothing_that_has_been_seen_is_seen_to_go_back(before: list[Header], header: Header) -> None:
    known = KnownCluster(IDENTITY)
    for each in before:
        known = known.with_header(each)
    goes_back = any(header.revision < each.revision or header.term < each.term for each in before)
    moved = bool(before) and header.cluster != before[-1].cluster
    assert (cluster.unfamiliar(known, header) is not None) == (goes_back or moved)


def test_who_knows_nothing_takes_any() -> None:
    assert cluster.unfamiliar(KnownCluster(), Header(7, 1, 1)) is None


def test_the_words_say_what_is_and_what_was_expected() -> None:
    known = KnownCluster(IDENTITY, 0xABC, 345, 7)
    assert cluster.unfamiliar(known, Header(0xABC, 12, 7)) == 'it is at revision 12, and 345 was seen'
    assert cluster.unfamiliar(known, Header(0xABC, 400, 2)) == 'it is at raft term 2, and 7 was seen'
    assert cluster.unfamiliar(known, Header(0xDEF, 400, 7)) == 'its cluster id is def, and abc was known'
    assert cluster.unlike(known, None) == f'/cluster is not there, and identity {IDENTITY} was known'
    other = cluster.new(OTHER, 'now').encode()
    assert cluster.unlike(known, other) == f'its identity is {OTHER}, and {IDENTITY} was known'
    assert cluster.unlike(known, cluster.new(IDENTITY, 'later').encode()) is None


@pytest.mark.parametrize(
    'value', [b'', b'x', b'[]', b'{}', b'{"identity": 7}', b'{"identity": "me"}', b'{"identity": null}', b'\xff']
)
def test_a_value_without_an_identity(value: bytes) -> None:
    with pytest.raises(ValueError, match='.'):
        cluster.identity(value)
    assert 'cannot be read' in (cluster.unlike(KnownCluster(IDENTITY), value) or '')


def test_what_is_written_once() -> None:
    assert json.loads(cluster.new(IDENTITY, 'T')) == {'version': 1, 'identity': IDENTITY, 'since': 'T'}


@given(st.builds(KnownCluster, st.uuids().map(str), numbers, numbers, numbers))
def test_the_file_says_what_is_known(known: KnownCluster) -> None:
    assert cluster.from_json(cluster.to_json(known).encode()) == known


@given(st.dictionaries(st.sampled_from(['version', 'identity', 'cluster', 'revision', 'term']), st.none() | numbers))
def test_any_other_file_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match='.'):
        cluster.from_json(json.dumps(data).encode())


class Written(NamedTuple):
    """A key of etcd's, as far as this is about it."""

    value: bytes
    revision: int
    created: int = 1
    lease: int = 0


def test_the_highest_acceptance_counts_and_none_is_above_its_own_key() -> None:
    assert cluster.accepted_in([]) == 0
    assert cluster.accepted_in([Written(b'5', 9), Written(b'8', 9), Written(b'7', 9)]) == 8
    assert cluster.accepted_in([Written(b'9' * 19, 4), Written(b'9' * 5000, 6)]) == 4
    rubbish = b'', b'x', b'-1', b'1.5', '٣'.encode(), b'\xff', b'{}'
    assert cluster.accepted_in([Written(each, 9) for each in rubbish]) == 0
