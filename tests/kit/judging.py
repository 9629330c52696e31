"""A pytest plugin that judges the history of each scenario and fault test that passes.

A test that breaks the history on purpose is marked `@pytest.mark.history_broken('etcd is wiped')`. A marked test whose
history is intact fails.
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
from tests.kit.witness import CompactedError, Witness, require_clean

JUDGED_PARTS = {'scenario', 'faults'}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    if JUDGED_PARTS & set(item.path.parts):
        JOURNAL.begin()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    # The servers of the test still exist here.
    if not JUDGED_PARTS & set(item.path.parts):
        return (yield)
    for witness in _list_shared_witnesses(item):
        JOURNAL.add_witness(witness)
    try:
        result = yield
        witnesses = list(JOURNAL.witnesses)
        mark = item.get_closest_marker('history_broken')
        if mark is None:
            for watched in witnesses:
                require_clean(watched)
        else:
            (reason,) = mark.args
            assert any(is_broken(watched) for watched in witnesses), f'its history is whole, and it says: {reason}'
        return result
    finally:
        JOURNAL.end()


def is_broken(witness: Witness) -> bool:
    witness.restore_servers()
    try:
        verdict = judge(witness.history())
    except CompactedError:
        return True
    return bool(verdict.permanent or verdict.pending)


def _list_shared_witnesses(item: pytest.Item) -> list[Witness]:
    arguments: dict[str, Any] = getattr(item, 'funcargs', {})
    labs_and_hosts = [fixture for fixture in arguments.values() if isinstance(fixture, Lab | Hypervisor)]
    labs = {fixture.lab if isinstance(fixture, Hypervisor) else fixture for fixture in labs_and_hosts}
    controls = [fixture for fixture in arguments.values() if isinstance(fixture, Control)]
    witnesses: list[Witness] = [fixture.witness for fixture in [*labs, *controls]]
    return [fixture for fixture in witnesses if fixture not in JOURNAL.witnesses]
