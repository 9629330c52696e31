"""What a compute tells an audit survives the pages it is cut into, however much it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.guest import Guest, mac_address
from ecomp.model.planes import (
    PAGE_BYTES,
    Digest,
    Leftover,
    clearance_from_json,
    clearance_to_json,
    failed,
    from_pages,
    to_pages,
)

COMPUTE = 'aaaaaaaa-0000-4000-8000-000000000000'
INSTANCES = [f'{number:08d}-0000-4000-8000-000000000000' for number in range(10_000)]
names = st.text(max_size=40)
guests = st.builds(Guest, names, names | st.none(), st.booleans(), st.booleans(), st.booleans())
words = st.dictionaries(names, names, max_size=20)
digests = st.builds(
    lambda found, *rest: Digest({each.instance: each for each in found}, *rest), st.lists(guests), *[words] * 7
)


def pages(digest: Digest) -> list[bytes]:
    return [each.encode() for each in to_pages(digest)]


@given(digests)
def test_there_and_back_and_no_page_is_longer_than_a_page_and_one_entry(digest: Digest) -> None:
    cut = pages(digest)
    assert from_pages(cut) == digest
    assert max(map(len, cut)) < PAGE_BYTES + 1000


def test_ten_thousand_guests_fit_etcd() -> None:
    digest = Digest(
        {each: Guest(each, COMPUTE, True, True, True) for each in INSTANCES},
        dict.fromkeys(INSTANCES, '/var/lib/ecompute/images/base-0123456789abcdef0123456789abcdef.qcow2'),
        {mac_address(each, number): each for each in INSTANCES for number in (0, 1)},
        {mac_address(each, 0): f'{each} 192.168.122.200' for each in INSTANCES},
    )
    cut = pages(digest)
    assert from_pages(cut) == digest
    assert max(map(len, cut)) <= 512 * 1024
    assert len(cut) <= 20


def test_what_is_no_whole_digest() -> None:
    cut = pages(Digest({each: Guest(each, COMPUTE, True, True, True) for each in INSTANCES}))
    assert len(cut) > 2
    for wrong in ([], cut[:-1], cut[1:], [*cut, cut[-1]], [b'', *cut[1:]], [b'{}'], [b'{"version": 2}']):
        with pytest.raises(ValueError, match='.'):
            from_pages(wrong)
    for value in ([1], [{}], [{'instance': []}], {'a': 1}):
        with pytest.raises(ValueError, match='not a digest'):
            from_pages([json.dumps({'version': 1, 'pages': 1, 'guests': value}).encode()])
    with pytest.raises(ValueError, match='libvirt is away'):
        from_pages([failed('libvirt is away').encode()])


def test_a_clearance() -> None:
    leftovers = [Leftover('disk', 'x'), Leftover('seed', '52:54:00:00:00:00', 'y'), Leftover('part', 'a.part', '1/2')]
    assert clearance_from_json(clearance_to_json(leftovers).encode()) == leftovers
    for wrong in ('', '{}', '{"version": 1}', '{"version": 1, "leftovers": [1]}', '{"version": 2, "leftovers": []}'):
        with pytest.raises(ValueError, match='.'):
            clearance_from_json(wrong.encode())


@pytest.mark.parametrize(
    'page', [{'pages': 'a\nb\x1b[2J'}, {'pages': 1, 'error': 'a\nb\x1b[2J'}, {'pages': 1, 'guests': [{'a\nb': 1}]}]
)
def test_what_is_said_of_one_that_is_none_is_one_line(page: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r'a\\nb') as raised:
        from_pages([json.dumps({'version': 1, **page}).encode()])
    assert str(raised.value).isprintable()
