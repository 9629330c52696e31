"""When a compute reports that it cannot build, and when that ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from ecomp.agent.host import troubles as watched
from ecomp.agent.host.troubles import CHECK_INTERVAL_SECONDS, CONFIRMATION_SECONDS, Troubles
from ecomp.agent.jobs import Loop
from ecomp.errors import Conflict, EcompError, Unreachable
from ecomp.model.record import Failure
from ecomp.virt.fake import FakeHypervisor

FULL = Failure('disk', 'the file system is full', '')
NOT_FOUND = Failure('image', 'the server answers 404', '')
FAILED_BUILDS = ['builds of different images fail at stage disk']


class SilentHypervisor(FakeHypervisor):
    error: EcompError | None = None

    def find_troubles(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return super().find_troubles()


class Host:
    """The troubles of one compute on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.published = 1000.0, list[Sequence[str]]()
        self.hypervisor = SilentHypervisor()
        monkeypatch.setattr(Loop, 'schedule', lambda *_: None)
        monkeypatch.setattr(watched, 'time', SimpleNamespace(monotonic=lambda: self.now))
        self.troubles = Troubles(self.hypervisor, self.published.append)

    def check(self, seconds_later: float = 0.0) -> float:
        """Check after this time, and return the seconds until the next check."""
        self.now += seconds_later
        return self.troubles.check() - self.now


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_troubles_are_published_only_when_they_change(host: Host) -> None:
    assert host.check() == pytest.approx(CHECK_INTERVAL_SECONDS, rel=0.11)
    assert host.published == []
    for found in (['network default is off'], ['network default is off'], ['network default is off', 'disk'], [], []):
        host.hypervisor.troubles = found
        host.check(60)
    assert host.published == [['network default is off'], ['network default is off', 'disk'], []]


@pytest.mark.parametrize(
    ('error', 'reason'),
    [
        (Unreachable('libvirt qemu:///system: no answer', 'libvirt'), 'libvirt does not answer'),
        (Conflict('the pool is in /x. Fix: correct `state:`'), 'the pool is in /x'),
    ],
)
def test_silent_hypervisor_is_a_trouble_only_if_it_lasts(host: Host, error: EcompError, reason: str) -> None:
    for _ in range(2):  # a restart of libvirtd
        host.hypervisor.error = error
        assert host.check(1) == CONFIRMATION_SECONDS
        host.check(CONFIRMATION_SECONDS - 1)
        host.hypervisor.error = None
        host.check(1)
    assert host.published == []
    host.hypervisor.error = error
    host.check(60)
    host.check(CONFIRMATION_SECONDS)
    host.check(CONFIRMATION_SECONDS)
    assert host.published == [[reason]]
    host.hypervisor.error = None
    host.check(CONFIRMATION_SECONDS)
    assert host.published == [[reason], []]


def test_hypervisor_that_is_silent_for_long_is_a_trouble_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_in_vain() -> list[str]:
        host.now += CONFIRMATION_SECONDS
        raise Unreachable('no answer', 'libvirt')

    monkeypatch.setattr(host.hypervisor, 'find_troubles', wait_in_vain)
    host.check()
    assert host.published == [['libvirt does not answer']]


def test_known_trouble_stays_while_the_hypervisor_is_silent_for_a_moment(host: Host) -> None:
    host.hypervisor.troubles = ['network default is off']
    host.check()
    host.hypervisor.error = Unreachable('no answer', 'libvirt')
    host.check(60)
    assert host.published == [['network default is off']]


def test_failed_builds_of_two_images_count_until_one_succeeds_or_for_ten_minutes(host: Host) -> None:
    host.troubles.note_build('a', FULL)
    host.troubles.note_build('a', FULL)
    host.troubles.note_build('b', NOT_FOUND)
    assert host.published == []
    host.troubles.note_build('b', FULL)
    assert host.published == [FAILED_BUILDS]
    host.troubles.note_build('a', None)
    host.troubles.note_build('b', FULL)
    assert host.published == [FAILED_BUILDS, []]
    host.troubles.note_build('a', FULL)
    host.check(599)
    assert host.published == [FAILED_BUILDS, [], FAILED_BUILDS]
    host.check(1)
    assert host.published == [FAILED_BUILDS, [], FAILED_BUILDS, []]


@pytest.mark.parametrize(
    ('stage', 'is_host_fault', 'counts'),
    [('disk', False, True), ('started', False, True), ('image', True, True)]
    + [('image', False, False), ('scheduled', False, False)],
)
def test_only_failures_that_the_host_may_have_caused_count(
    host: Host, stage: str, is_host_fault: bool, counts: bool
) -> None:
    for image in ('a', 'b'):
        host.troubles.note_build(image, Failure(stage, 'the reason', '', is_host_fault))
    assert bool(host.published) is counts


def test_failed_builds_come_after_what_the_hypervisor_finds(host: Host) -> None:
    host.troubles.note_build('a', FULL)
    host.troubles.note_build('b', FULL)
    host.hypervisor.troubles = ['storage pool ecompute is off']
    host.check()
    assert host.published[-1] == ['storage pool ecompute is off', *FAILED_BUILDS]
