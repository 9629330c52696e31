"""The value of a trouble, and which failed builds are the host's."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.trouble import MALFORMED, MAX_BYTES, BuildFailure, encode_trouble, find_build_trouble, parse_trouble


@given(st.lists(st.text(min_size=1), max_size=40))
def test_a_published_trouble_is_small_and_has_its_first_reason(reasons: list[str]) -> None:
    value = encode_trouble(reasons)
    if not reasons:
        assert value is None
        return
    assert value is not None
    assert len(value.encode()) <= MAX_BYTES
    shown = parse_trouble(value.encode()).reasons
    assert shown != (MALFORMED,)
    assert 1 <= len(shown) <= len(reasons)
    assert all(each.isprintable() for each in shown)


def test_two_reasons_are_shown_in_one_line() -> None:
    value = encode_trouble(['no free address on network default', 'network blue is off'])
    assert value is not None
    assert str(parse_trouble(value.encode())) == 'no free address on network default; network blue is off'


@pytest.mark.parametrize('value', [
    b'', b'{', b'[]', b'{"reasons": []}', b'{"reasons": [""]}', b'{"reasons": "disk"}',
    b'{"version": 2, "reasons": ["disk"]}', b'{"reasons": ["a\\nb"]}', b'{"reasons": ["\\u001b[2J"]}',
    b'{"reasons": ["\\ud800"]}', json.dumps({'reasons': ['a' * MAX_BYTES]}).encode(),
    b'{"reasons": [' + b'"a", ' * 300 + b'"a"]}',
])  # fmt: skip
def test_a_malformed_trouble_is_a_trouble(value: bytes) -> None:
    assert str(parse_trouble(value)) == MALFORMED


@given(st.binary(max_size=2 * MAX_BYTES))
def test_what_is_shown_of_any_value_is_one_printable_line(value: bytes) -> None:
    assert str(parse_trouble(value)).isprintable()


@pytest.mark.parametrize(('failures', 'now', 'is_trouble'), [
    ([], 0, False), ([(0, 'a'), (10, 'a'), (20, 'a')], 20, False), ([(0, 'a'), (10, 'b')], 10, True),
    ([(0, 'a'), (599, 'b')], 1198, True), ([(0, 'a'), (599, 'b')], 1199, False),
    ([(0, 'a'), (600, 'b')], 600, False), ([(0, 'a'), (10, 'b'), (500, 'a')], 1000, True),
])  # fmt: skip
def test_failures_of_two_images_within_ten_minutes_last_for_ten_more(
    failures: list[tuple[float, str]], now: float, is_trouble: bool
) -> None:
    found = find_build_trouble([BuildFailure(when, image, 'disk') for when, image in failures], now)
    assert found == ('builds of different images fail at stage disk' if is_trouble else None)
