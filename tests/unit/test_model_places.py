"""Which record of an instance is believed, where several keys speak of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ecomp.model import keys
from ecomp.model.host import Places, by_instance
from ecomp.model.record import ACTIVE, GONE, Record, to_json

pytestmark = pytest.mark.fast

INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
ONE, TWO = 'b8756be5-a30d-4311-920c-0ad996367a8e', '5ca1ab1e-0000-4000-8000-000000000000'


@dataclass
class Value:
    value: bytes
    created: int
    revision: int = 0


def record(compute: str, state: str, created: int) -> Value:
    return Value(to_json(Record(INSTANCE, compute, state)).encode(), created)


def found(*pairs: tuple[str, Value]) -> Places[Value]:
    return by_instance(pairs)[INSTANCE]


@pytest.mark.parametrize('rubbish', [b'', b'null', b'{"version": 2}', b'[' * 100])
def test_what_cannot_be_read_at_the_older_place_hides_no_record(rubbish: bytes) -> None:
    """Else an instance that has ended looks for ever as if it had not: its request, which would tell, is gone."""
    ended = record(ONE, GONE, created=9)
    pairs = [(keys.old_record(INSTANCE), Value(rubbish, 1)), (keys.record(ONE, INSTANCE), ended)]
    assert found(*pairs).record is found(*reversed(pairs)).record is ended
    alone = Value(rubbish, 1)
    assert found((keys.old_record(INSTANCE), alone)).record is alone, 'it is all there is'


def test_of_several_that_can_be_read_the_oldest_key_is_believed() -> None:
    first, later = record(ONE, ACTIVE, created=2), record(TWO, ACTIVE, created=5)
    assert found((keys.record(TWO, INSTANCE), later), (keys.record(ONE, INSTANCE), first)).compute == ONE
    # What was taken out of its queue is gone, whatever a compute writes of it later.
    nobody_s = record('', GONE, created=2)
    assert found((keys.record(TWO, INSTANCE), later), (keys.record('', INSTANCE), nobody_s)).record is nobody_s


def test_who_is_asked_is_believed_before_who_has_a_record() -> None:
    pairs = [(keys.record(TWO, INSTANCE), record(TWO, ACTIVE, 1)), (keys.request(ONE, INSTANCE), Value(b'{}', 7))]
    assert (found(*pairs).compute, found(*pairs).record) == (ONE, None)


def test_of_several_that_are_asked_the_one_that_holds_the_claim_is_believed() -> None:
    """Whoever wants to be taken for it may write before it is delivered: its uuid is public by then."""
    forged, right = Value(b'{}', 3), Value(b'{}', 7)
    pairs = [(keys.request(ONE, INSTANCE), forged), (keys.request(TWO, INSTANCE), right)]
    pairs += [(keys.record(ONE, INSTANCE), record(ONE, GONE, 4)), (keys.record(TWO, INSTANCE), record(TWO, ACTIVE, 8))]
    for claims, compute, asked in (
        ({TWO: [INSTANCE]}, TWO, [ONE, TWO]),
        ({ONE: [INSTANCE]}, ONE, [ONE]),
        ({ONE: [INSTANCE], TWO: [INSTANCE]}, ONE, [ONE]),
        ({ONE: ['another']}, ONE, [ONE, TWO]),
    ):
        at, told = found(*pairs), []

        def claims_of(each: str, claims: dict[str, list[str]] = claims, told: list[str] = told) -> list[str]:
            told.append(each)
            return claims.get(each, [])

        at.judge(INSTANCE, claims_of)
        assert (at.compute, told) == (compute, asked)
        assert at.record is dict(pairs)[keys.record(compute, INSTANCE)]


def test_of_one_that_is_asked_nobody_asks_placement() -> None:
    pairs = [(keys.request(ONE, INSTANCE), Value(b'{}', 3)), (keys.record(TWO, INSTANCE), record(TWO, ACTIVE, 1))]
    at = found(*pairs)
    at.judge(INSTANCE, lambda _: pytest.fail('asked'))
    assert at.compute == ONE
