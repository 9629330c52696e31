"""Notes of the generations of released claims, which no later claim may have again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from ecomp.errors import NoSpace, Unreachable
from ecomp.model import keys
from ecomp.model.json_object import dump, load_object_or_empty
from ecomp.store.client import Entry, Put, Store, retry_until_committed

# Seconds that the generation of a released claim is noted; no release sent earlier is still on its way.
NOTE_SECONDS = 3600

# Tries to write a note whose answer is lost.
MAX_NOTE_TRIES = 3

# A higher noted generation counts as this: each step up to it is a call to placement, for which others wait. It is
# reached by a manual write, or by 50 claims and releases of an instance within the hour; from then on a late release
# could meet the number of another claim again.
MAX_NOTED_GENERATION = 50


def note_released(store: Store, generations: Mapping[str, int]) -> None:
    """Note the generations of at most 128 claims before their release, unless etcd is full."""
    if not generations:
        return
    # A full etcd gets no notes. The claims may be released nevertheless, since no attempt can be announced there.
    with suppress(NoSpace):
        lease = store.grant(NOTE_SECONDS)
        by_key: dict[str, dict[str, int]] = {}
        for instance, generation in generations.items():
            by_key.setdefault(keys.released_claims(instance, lease), {})[instance] = generation
        puts = [Put(key, released_to_json(noted), lease) for key, noted in by_key.items()]
        # Writing the note twice does no harm.
        lost = Unreachable('the release of a claim could not be noted', 'etcd')
        retry_until_committed(lambda: store.commit([], puts), lost, MAX_NOTE_TRIES)


def read_highest_released(store: Store, instances: Collection[str]) -> int:
    """Return the highest released generation noted for these instances, or 0."""
    prefixes = {keys.released_claims_prefix(instance) for instance in instances}
    highest = 0

    def inspect(entry: Entry) -> None:  # returns None, so no entry is kept: each may be as large as etcd allows
        nonlocal highest
        generations = released_from_json(entry.value)
        highest = max([highest, *(generations.get(name, 0) for name in instances)])

    store.snapshot(prefixes.pop() if len(prefixes) == 1 else keys.RELEASED, transform=inspect)
    return highest


def released_to_json(generations: Mapping[str, int]) -> str:
    """Encode the generations of released claims, {instance: generation}, as a note.

    Placement counts the generation of a consumer from 1 again once the consumer has no allocation. A process that read
    the generation earlier, and releases late, could release a later claim with the same number. So the generation is
    noted before a claim is released, and a new claim for the instance is repeated until its generation is higher.
    Each note is a key on its own lease, so writing one needs no read and no comparison. It holds {"version",
    "generations"} for the instances whose uuids begin with the 2 digits in the key.
    """
    return dump({'version': 1, 'generations': dict(generations)})


def released_from_json(value: bytes) -> dict[str, int]:
    """Decode the valid generations of a note, capped at MAX_NOTED_GENERATION."""
    generations = load_object_or_empty(value).get('generations')
    entries = generations.items() if isinstance(generations, dict) else ()
    return {name: min(number, MAX_NOTED_GENERATION) for name, number in entries if type(number) is int and number > 0}
