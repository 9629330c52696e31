"""How long an audit waits for the computes: for who goes on, however slowly, and not for ever for who says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ecomp.model import keys
from ecomp.model.order import name_to_json
from ecomp.model.planes import Digest, to_pages
from ecomp.scheduler.operating import audit as auditing
from ecomp.scheduler.operating.audit import Report, fix
from ecomp.store.client import Put
from tests.functional.cloud import Cloud, new


class Clock:
    """Time that passes where it is slept, and then the compute may answer."""

    def __init__(self, answers: Callable[[float], None]) -> None:
        self._answers = answers
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._answers(self.now)


@pytest.fixture
def compute(cloud: Cloud) -> Iterator[str]:
    """One that lives, and something that an audit finds and mends."""
    compute, name = new(), f'n{new()[:8]}'
    lease = cloud.store.grant(600)
    cloud.store.commit([], [Put(keys.compute(compute), '{}', lease), Put(keys.name(name), name_to_json(new()))])
    yield compute
    cloud.store.revoke(lease)
    cloud.etcd.delete(keys.name(name))


def codes(found: Report, compute: str) -> set[str]:
    return {each.code for each in found.findings if each.subject == compute}


def asked(cloud: Cloud) -> list[str]:
    """The audits under way."""
    return [keys.last(name) for name in cloud.store.snapshot(keys.AUDIT, keys_only=True).entries]


def test_who_says_that_it_heard_and_no_more_is_waited_for_once(
    cloud: Cloud, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four minutes each of the three audits of --fix."""

    def heard(_: float) -> None:
        for audit in asked(cloud):
            cloud.etcd.put(keys.digest(audit, compute, 'heard'), '')

    clock = Clock(heard)
    monkeypatch.setattr(auditing, 'time', clock)
    told: list[str] = []
    found = fix(cloud.store, cloud.placement, told.append, apart=0.1)
    assert 'compute-mute' in codes(found, compute)
    assert any(line.startswith('name-orphaned') for line in told)
    assert auditing.ANSWER_SECONDS < clock.now < 2 * auditing.ANSWER_SECONDS


def test_who_was_late_once_is_not_mute_for_telling_slowly(
    cloud: Cloud, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was starting when the audit first looked, and its ten thousand domains take libvirt a minute."""
    first: set[str] = set()
    since: dict[str, float] = {}

    def tells(now: float) -> None:
        for audit in asked(cloud):
            first.update([] if first else [audit])
            if audit in first:
                continue
            cloud.etcd.put(keys.digest(audit, compute, 'heard'), '')
            if now - since.setdefault(audit, now) > 60:
                for number, page in enumerate(to_pages(Digest())):
                    cloud.etcd.put(keys.digest(audit, compute, str(number)), page)

    monkeypatch.setattr(auditing, 'time', Clock(tells))
    found = auditing.audit(cloud.store, cloud.placement, 0.1)
    assert 'compute-mute' not in codes(found, compute)
    assert len(since) > 0
