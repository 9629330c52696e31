"""The generation that a claim had when it was released, so that the next claim of the same instance gets a higher one.

Placement counts a consumer's generation from 1 again once it holds nothing. Somebody who read it before that, and
releases by it late, could meet the same number at another claim. So whoever releases a claim notes its generation
first, and whoever claims for an instance that others may have claimed for goes on until it is above what is noted.

Each note is a key of its own, on a lease of its own: nobody has to read or compare anything to write one. It has
{"version", "generations": {instance: number}}, of instances that begin with the key's 2 digits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from ecomp.errors import NoSpace, UnknownOutcome
from ecomp.model import keys
from ecomp.model.json_object import dump, load_object
from ecomp.store.client import Entry, Put, Store

SECONDS = 3600
"""How long it is noted. A release that was sent longer ago than this is not on its way any more."""
TRIES = 3
"""How often a note is sent of which no answer comes; then UnknownOutcome."""
MOST = 50
"""A generation above this counts as this one: each step up to it is a call to placement, and others wait for it.

Whoever writes a larger one by hand gets there, and who claims and releases one instance 50 times within the hour: from
then on a late release could meet the number of another claim again.
"""


def note(store: Store, generations: Mapping[str, int]) -> None:
    """Note that claims of these generations are released next: {instance: generation}, at most 128 of them.

    Nothing is noted in an etcd that is full: what is claimed may go all the same, and nobody can announce a new claim.
    Errors: Unreachable, UnknownOutcome: nothing may be released then.
    """
    if not generations:
        return
    with suppress(NoSpace):
        _write(store, generations)


def _write(store: Store, generations: Mapping[str, int]) -> None:
    lease = store.grant(SECONDS)
    by_key: dict[str, dict[str, int]] = {}
    for instance, generation in generations.items():
        by_key.setdefault(keys.released(instance, lease), {})[instance] = generation
    puts = [Put(key, to_json(theirs), lease) for key, theirs in by_key.items()]
    for left in reversed(range(TRIES)):
        try:
            store.commit([], puts)
            return
        except UnknownOutcome:  # written twice it says the same
            if not left:
                raise


def highest(store: Store, instances: Collection[str]) -> int:
    """The highest generation that is noted for any of these; 0 if none is. Asked after something was claimed."""
    prefixes = {keys.released_prefix(each) for each in instances}
    found = 0

    def look(noted: Entry) -> None:  # nothing is kept: somebody may have put as much there as etcd takes
        nonlocal found
        theirs = from_json(noted.value)
        found = max([found, *(theirs.get(name, 0) for name in instances)])

    store.snapshot(prefixes.pop() if len(prefixes) == 1 else keys.RELEASED, keep=look)
    return found


def to_json(generations: Mapping[str, int]) -> str:
    """The value of a key."""
    return dump({'version': 1, 'generations': dict(generations)})


def from_json(value: bytes) -> dict[str, int]:
    """What a key says: {instance: generation}; nothing where nobody of ours wrote it."""
    try:
        found = load_object(value).get('generations')
    except ValueError:
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {name: min(number, MOST) for name, number in entries if type(number) is int and number > 0}
