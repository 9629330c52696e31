"""Have a change of an instance accepted: read, decide, write, and once more where somebody else was faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ecomp.errors import Conflict, UnknownOutcome, Unreachable

TRIES = 5
"""Tries to write, each after a fresh look; who loses more of these races says so."""

Answer = TypeVar('Answer')


def until_accepted(instance: str, change: str, cure: str, look_and_write: Callable[[bool], Answer | None]) -> Answer:
    """The first answer of `look_and_write` that is not None: that is for what has changed since it looked.

    It is told whether an earlier write had no answer: then its look says what became of that. `change` is what is asked
    for (a destroy, say), `cure` what one does who is not told whether it is accepted.
    Errors: Conflict (somebody else changes the instance all the time), UnknownOutcome, Unreachable, those of the look.
    """
    is_unknown = False
    for _ in range(TRIES):
        try:
            answer = look_and_write(is_unknown)
        except UnknownOutcome:
            is_unknown = True
        except Unreachable as error:
            if not is_unknown:
                said = f'{error}; the {change} of {instance} is not accepted'
                raise type(error)(said, error.backend) from error
            unknown = f'whether the {change} of {instance} is accepted is not known: {cure}'
            raise UnknownOutcome(f'{error}; {unknown}', error.backend) from error
        else:
            if answer is not None:
                return answer
    raise Conflict(f'{instance}: changed by somebody else all the time; try again')
