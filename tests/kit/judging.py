"""A plugin of pytest: every scenario and fault test that has passed is judged by its history before it may end.

A test that breaks the history on purpose says so: `@pytest.mark.history_broken('etcd is wiped')`. A test that says so
and whose history is whole has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.commands import Control
from tests.kit.history import judge
from tests.kit.hypervisor import Hypervisor
from tests.kit.journal import JOURNAL
from tests.kit.lab import Lab
from tests.kit.witness import Compacted, Watched, judged

PARTS = {'scenario', 'faults'}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Begin to write down what the test does, and its fixtures for it."""
    if PARTS & set(item.path.parts):
        JOURNAL.begin()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Judge what it has done, while all of it is still there."""
    if not PARTS & set(item.path.parts):
        return (yield)
    for witness in _shared(item):
        JOURNAL.made(witness)
    try:
        result = yield
        watched = list(JOURNAL.witnesses)
        mark = item.get_closest_marker('history_broken')
        if mark is None:
            for each in watched:
                judged(each)
        else:
            (reason,) = mark.args
            assert any(is_broken(each) for each in watched), f'its history is whole, and it says: {reason}'
        return result
    finally:
        JOURNAL.end()


def is_broken(watched: Watched) -> bool:
    """Whether its history shows that others than ecomp had their hands in it, as the test says."""
    watched.mend()
    try:
        found = judge(watched.history())
    except Compacted:
        return True
    return bool(found.never or found.still)


def _shared(item: pytest.Item) -> list[Watched]:
    """What the test uses that was made for more tests than this one."""
    arguments: dict[str, Any] = getattr(item, 'funcargs', {})
    made = [each for each in arguments.values() if isinstance(each, Lab | Hypervisor)]
    labs = {each.lab if isinstance(each, Hypervisor) else each for each in made}
    controls = [each for each in arguments.values() if isinstance(each, Control)]
    found: list[Watched] = [each.watched for each in [*labs, *controls]]
    return [each for each in found if each not in JOURNAL.witnesses]
