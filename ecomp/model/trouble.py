"""Why a compute cannot build now, and which failed builds are its host's fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ecomp.model.parsers import check, list_of
from ecomp.model.stored import decode, encode, stored
from ecomp.model.text import make_printable

MAX_BYTES = 1024
# JSON needs up to 12 bytes for a character, so one reason always fits into MAX_BYTES.
MAX_REASON_CHARACTERS = 80
MALFORMED = 'it reports a trouble that is malformed'

_REASON = check('one line of text', lambda value: isinstance(value, str) and value and value.isprintable())


@stored(1, 'trouble', reasons=list_of(_REASON, range(1, MAX_BYTES)))
class Trouble(NamedTuple):
    """The value of a key below /troubles/: at least one reason."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return '; '.join(self.reasons)


def encode_trouble(reasons: Sequence[str]) -> str | None:
    """Return the value with as many of the reasons as fit into MAX_BYTES, or None without any."""
    value = encode(Trouble(tuple(make_printable(each)[:MAX_REASON_CHARACTERS] for each in reasons)))
    return (value if len(value) <= MAX_BYTES else encode_trouble(reasons[:-1])) if reasons else None


def parse_trouble(value: bytes) -> Trouble:
    """Parse a value, or return a trouble with the reason MALFORMED if it is malformed."""
    try:
        return decode(Trouble, value) if len(value) <= MAX_BYTES else Trouble((MALFORMED,))
    except ValueError:
        return Trouble((MALFORMED,))


# Stages that depend on the host. At others a claim, or an image or its server makes most builds fail; that no address
# is free the hypervisor finds itself.
HOST_STAGES = ('disk', 'started')
# Failures of two images within this time are the host's fault, and count for as long.
BUILD_FAILURE_SECONDS = 600.0


class BuildFailure(NamedTuple):
    failed_at: float  # monotonic
    image: str
    stage: str


def find_build_trouble(failures: Sequence[BuildFailure], now: float) -> str | None:
    """Return a reason if builds of two images failed within BUILD_FAILURE_SECONDS, or None."""
    for last in reversed([each for each in failures if now - each.failed_at < BUILD_FAILURE_SECONDS]):
        images = {each.image for each in failures if abs(each.failed_at - last.failed_at) < BUILD_FAILURE_SECONDS}
        if len(images) > 1:
            return f'builds of different images fail at stage {last.stage}'
    return None
