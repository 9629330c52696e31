"""Why an instance is where it is: what was asked for, what was weighed, and who it is with or apart from."""

from __future__ import annotations

from dataclasses import dataclass

from ecomp.model.choose import FIRST, PACK, QUEUE, RANDOM, SPREAD, Why
from ecomp.model.group import AFFINITY, Group
from ecomp.model.json_object import dump
from ecomp.model.record import Record
from ecomp.model.text import printable
from ecomp.scheduler.find import Found
from ecomp.scheduler.hosts import alive
from ecomp.store.client import Store
from ecomp.store.sharing import group

MEANINGS = {
    SPREAD: 'the emptiest first',
    PACK: 'the fullest that it fits on first',
    RANDOM: 'any of them',
    FIRST: "in placement's own order",
}


@dataclass(frozen=True)
class Told:
    """What is known of it. `host` is the compute's name while it is up, `group` the group as it is now."""

    record: Record
    host: str | None
    weighed: Why | None
    group: Group | None


def why(store: Store, found: Found) -> Told:
    """Why the instance is on its compute. Errors: those of etcd."""
    record, request, name = found.record, found.request, found.group
    weighed = record.why or (request.why if request else None)
    return Told(record, alive(store).get(record.compute), weighed, group(store, name)[0] if name else None)


def as_why(found: Told, form: str) -> str:
    """Sentences, a line each, or a JSON object."""
    record, weighed, theirs = found.record, found.weighed, found.group
    others = {} if theirs is None else {each: on for each, on in theirs.members.items() if each != record.instance}
    if form == 'json':
        told = {
            'instance': record.instance,
            'compute': record.compute,
            'query': record.query,
            'why': weighed._asdict() if weighed else None,
            'group': None if theirs is None else {**theirs.membership._asdict(), 'others': others},
        }
        return dump(told, indent=2)
    host = f'{found.host} ({record.compute})' if found.host else record.compute
    lines = [f'{record.name or record.instance} is on {host}, since {record.stages.get("scheduled", "some time")}']
    if record.query:
        lines.append(f'it asked for {record.query}')
    lines.append(_weighed(weighed))
    if theirs is not None:
        rule = 'with' if theirs.policy == AFFINITY else 'apart from'
        where = ', '.join(f'{each} on {on or "none yet"}' for each, on in others.items()) or 'nobody else is in it'
        lines.append(f'it is in group {theirs.name} ({theirs.rule}), {rule} its others: {where}')
    return '\n'.join(map(printable, lines))


def _weighed(weighed: Why | None) -> str:
    if weighed is None:
        return 'how its compute was chosen is not known: an older or another client asked for it'
    if weighed.weigh == QUEUE:
        return 'it waited in a queue, and this compute took it by itself: of those with room the idlest goes first'
    meaning = MEANINGS.get(weighed.weigh, '')
    could = f'{weighed.of} compute{" could" if weighed.of == 1 else "s could"} have taken it then'
    if weighed.weight is None:
        return f'{could}; {weighed.weigh} ({meaning}) was asked for'
    return f'{could}; {weighed.weigh} ({meaning}) was asked for, and this one weighed {weighed.weight:g}'
