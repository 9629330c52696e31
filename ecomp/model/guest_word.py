"""What a guest says of itself when its cloud-init is through: its host keys, and what failed. Pure.

A guest is believed about itself alone, and as far as it is well formed: whatever else it says counts as not said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ecomp.model.guest_data import public_key
from ecomp.model.json_object import load_object
from ecomp.model.text import printable

KINDS = ('ssh-ed25519', 'ecdsa-sha2-nistp256', 'ecdsa-sha2-nistp384', 'ecdsa-sha2-nistp521', 'ssh-rsa')
"""Types of host keys that count; of another type none is kept."""
MOST_KEYS = 4
"""Host keys of a guest; further ones are left out."""
LARGEST_KEY = 3000
"""Characters of a host key, of RSA with 16384 bits; a longer one is left out."""
LONGEST_STAGE, LONGEST_REASON = 40, 500
"""Characters of what cloud-init says failed; what is longer ends in `…`."""


@dataclass(frozen=True)
class GuestFailure:
    """What went wrong in a guest's cloud-init: the stage, as cloud-init calls it, and cloud-init's own words."""

    stage: str
    reason: str


class GuestWord(NamedTuple):
    """What a guest said. `host_keys` are `<type> <base64>`; `failed` None: its cloud-init did all it was told to."""

    host_keys: tuple[str, ...] = ()
    failed: GuestFailure | None = None


def parse_word(data: bytes) -> GuestWord:
    """What the metadata server wrote down of a guest's word. What cannot be read is a word without anything in it.

    So is an empty one: an older metadata server writes that.
    """
    try:
        said = load_object(data)
    except (ValueError, RecursionError):
        return GuestWord()
    return GuestWord(host_keys(said.get('host_keys')), failed(said.get('stage'), said.get('error')))


def host_keys(value: object) -> tuple[str, ...]:
    """The OpenSSH public keys in a list, without comments, each once; what is none, or too large, is left out."""
    found: dict[str, None] = {}
    for text in value if isinstance(value, list) else ():
        fields = text.split()[:2] if isinstance(text, str) and len(text) <= LARGEST_KEY else ['']
        try:
            if fields and fields[0] in KINDS:
                found[public_key(fields)] = None
        except ValueError:
            continue
    return tuple(found)[:MOST_KEYS]


def failed(stage: object, reason: object) -> GuestFailure | None:
    """The failure that two words tell of; None unless both are texts, and the first is not empty."""
    if not isinstance(stage, str) or not isinstance(reason, str) or not stage:
        return None
    return GuestFailure(printable(stage, LONGEST_STAGE), printable(reason, LONGEST_REASON))
