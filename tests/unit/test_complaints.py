"""A loss is logged once, and so is its return, whoever meets them and however late."""

from __future__ import annotations

import logging
import time

import pytest

from ecomp.agent.turns import Complaints
from ecomp.errors import EcompError, Unreachable

LIBVIRT = Unreachable('libvirt is gone while building', 'libvirt')


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged."""
    caplog.set_level(logging.INFO)
    return caplog


def test_a_backend_is_lost_once_and_back_once_for_all(said: pytest.LogCaptureFixture) -> None:
    """Whatever else fails for want of it is the same loss; the first that works again speaks for all."""
    complaints = Complaints()
    complaints.complain('one', LIBVIRT)
    complaints.complain('two', Unreachable('libvirt does not answer', 'libvirt'))
    assert said.messages == ['libvirt is gone while building; trying again until it is back']
    assert complaints.settle('two')
    assert not complaints.settle('one')
    assert said.messages[1:] == ['libvirt is back']


def test_a_file_of_ours_is_another_loss_than_the_backend_it_is_for(said: pytest.LogCaptureFixture) -> None:
    """Whoever mends placement must not look for ever at a log that calls it unreachable, and keeps the token back."""
    complaints = Complaints()
    complaints.complain('one', Unreachable('no connection', 'placement'))
    complaints.complain('one', Unreachable('token_file /t: must hold one word', 'placement (token_file /t)'))
    complaints.complain('two', Unreachable('token_file /t: must hold one word', 'placement (token_file /t)'))
    assert said.messages[1:] == ['token_file /t: must hold one word; trying again until it is back']
    complaints.settle('one')
    assert said.messages[2:] == ['placement (token_file /t) is back']


def test_what_began_before_the_return_proves_no_new_loss(said: pytest.LogCaptureFixture) -> None:
    """A worker frozen throughout the outage finds its connection broken; what begins later and fails is a loss."""
    complaints, began = Complaints(), time.monotonic()
    complaints.complain('one', LIBVIRT, began)
    assert complaints.settle('one')
    said.clear()
    complaints.complain('frozen', LIBVIRT, began)
    assert not complaints.settle('frozen')
    assert said.messages == []
    complaints.complain('frozen', LIBVIRT, time.monotonic())
    assert len(said.messages) == 1


def test_another_backend_is_another_loss(said: pytest.LogCaptureFixture) -> None:
    """That libvirt came back says nothing of placement."""
    complaints, began = Complaints(), time.monotonic()
    complaints.complain('one', LIBVIRT, began)
    complaints.settle('one')
    complaints.complain('two', Unreachable('placement cannot be reached', 'placement'), began)
    assert said.messages[-1] == 'placement cannot be reached; trying again until it is back'


def test_what_is_no_backend_is_said_once_for_its_text(said: pytest.LogCaptureFixture) -> None:
    """The same failure again is not said again; another is."""
    complaints = Complaints()
    for text in ('no', 'no', 'never'):
        complaints.complain('one', EcompError(text), time.monotonic())
    assert said.messages == ['no; trying again until it works', 'never; trying again until it works']
    assert complaints.settle('one')
    assert said.messages[-1] == 'what failed before works again: never'


def test_what_is_attempted_says_whether_it_works(said: pytest.LogCaptureFixture) -> None:
    """What nobody needs any more when it fails is not said: what it speaks with was closed under it."""
    complaints, returns = Complaints(), list[str]()
    complaints.on_return = lambda: returns.append(said.messages[-1])

    def fails(error: Exception) -> float:
        raise error

    assert complaints.attempt('one', lambda: fails(LIBVIRT), lambda: True) is None
    assert complaints.attempt('one', lambda: fails(MemoryError('none')), lambda: True) is None
    assert said.messages == []
    assert complaints.attempt('looking', lambda: fails(LIBVIRT)) is None
    assert complaints.attempt('looking', lambda: 5.0) == 5.0
    assert said.messages[1:] == returns == ['libvirt is back']
    assert complaints.attempt('looking', lambda: fails(MemoryError('none'))) is None
    assert said.messages[2:] == ['unexpected error while looking; trying again']
    assert complaints.attempt('looking', lambda: 6.0) == 6.0
    assert len(returns) == 1


def test_handed_over_to_what_needs_the_same(said: pytest.LogCaptureFixture) -> None:
    """What is not tried any more leaves its loss to another, which says when the backend is back."""
    complaints = Complaints()
    complaints.complain('one', LIBVIRT)
    complaints.hand_over('one', 'looking')
    assert not complaints.settle('one')
    assert complaints.settle('looking')
    assert said.messages[-1] == 'libvirt is back'
