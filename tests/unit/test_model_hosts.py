"""What is asked of many computes, told apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys
from ecomp.model.host import changed_hosts
from ecomp.store.client import Entry

KEYS = st.tuples(st.sampled_from('abc'), st.sampled_from('uvw')).map(lambda each: keys.request(*each))
STATES = st.dictionaries(KEYS, st.integers(1, 3))


def state(revisions: dict[str, int]) -> dict[str, Entry]:
    return {key: Entry(key, b'', revision) for key, revision in revisions.items()}


@given(STATES, STATES)
def test_who_is_told_is_told_all_and_nobody_is_forgotten(before: dict[str, int], after: dict[str, int]) -> None:
    known = state(before)
    of_each = changed_hosts({}, known, {})
    kept = {compute: dict(each) for compute, each in of_each.items()}
    told = changed_hosts(known, state(after), of_each)
    assert of_each == kept, 'what was told before is never changed'
    for compute in 'abc':
        was, now = (
            {key: each for key, each in revisions.items() if key.startswith(keys.request_prefix(compute))}
            for revisions in (before, after)
        )
        assert (compute in told) == (was != now)
        if compute in told:
            assert told[compute] == state(now)


def test_a_value_that_is_kept_by_now_is_told() -> None:
    key = keys.request('a', 'u')
    long, kept = Entry(key, b'', 7, dropped=2000), Entry(key, b'{}', 7)
    assert changed_hosts({key: long}, {key: kept}, {'a': {key: long}}) == {'a': {key: kept}}
    assert changed_hosts({key: kept}, {key: Entry(key, b'{}', 7)}, {'a': {key: kept}}) == {}
