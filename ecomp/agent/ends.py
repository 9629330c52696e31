"""At the start: what ended here is remembered as ended, also where etcd alone was told of its end.

The last transaction comes before the state directory: killed in between, or with a full disk, the directory says that
the instance lives. Believed, its address would be reserved again at every start, and nobody could mend it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from ecomp.agent.memory import Memory
from ecomp.model import keys
from ecomp.model.record import ERROR, GONE, from_json
from ecomp.store.client import Entry, Store

log = logging.getLogger(__name__)


def note_ends(compute: str, store: Store, memory: Memory, here: Collection[str]) -> None:
    """Remember as ended what nobody asks for, of which nothing is `here` and whose record says no other.

    Only with the etcd that we know. Errors: those of etcd.
    """
    asked = {keys.last(key) for key in store.snapshot(keys.host_prefix(compute), keys_only=True).entries}
    for instance in memory.all().keys() - asked - set(here):
        # Read after the requests were: its end takes both in one transaction, so what lives has one of them.
        places = keys.record(compute, instance), keys.old_record(instance)
        if all(_has_ended(compute, each) for each in store.read(places).values()):
            memory.ended(instance)
            log.info('instance %s had ended, and this compute had not written that down', instance)


def _has_ended(compute: str, entry: Entry) -> bool:
    try:
        record = from_json(entry.value)
    except ValueError:
        return False  # a newer ecomp's, perhaps
    return record.state in (GONE, ERROR) or record.compute != compute
