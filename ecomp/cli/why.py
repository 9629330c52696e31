"""Why an instance is where it is: what was asked for, what was weighed, and who it is with or apart from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ecomp.model.choose import FIRST, PACK, QUEUE, RANDOM, SPREAD, Why
from ecomp.model.group import AFFINITY, Group
from ecomp.model.host import Computes, silent_cure
from ecomp.model.record import Record
from ecomp.model.text import printable
from ecomp.scheduler.looking.find import InstanceEntries
from ecomp.scheduler.looking.hosts import computes, read_names_by_instance
from ecomp.store.client import Store
from ecomp.store.sharing import group

if TYPE_CHECKING:
    from ecomp.placement.client import Placement
    from ecomp.scheduler.placing.enqueue import Waiting

MEANINGS = {
    SPREAD: 'the emptiest first',
    PACK: 'the fullest that it fits on first',
    RANDOM: 'any of them',
    FIRST: "in placement's own order",
}


@dataclass(frozen=True)
class Explanation:
    """What is known of it. `known` is what computes are called, `names` what instances are, `group` the group now."""

    record: Record
    known: Computes
    weighed: Why | None
    group: Group | None
    waiting: Waiting | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def why(store: Store, placement: Callable[[], Placement], found: InstanceEntries) -> Explanation:
    """Why the instance is on its compute or, while it waits in a queue, on none: then `placement` is asked.

    Errors: those of etcd.
    """
    record, request, name = found.record, found.request, found.group
    weighed = record.why or (request.why if request else None)
    theirs, known = group(store, name)[0] if name else None, computes(store)
    waits = None
    if found.queue_entry is not None:
        from ecomp.scheduler.placing.enqueue import waiting

        others = None if theirs is None else theirs.without(record.instance)
        waits = waiting(store, placement(), found.queue_entry, record.query, known, others)
    names = read_names_by_instance(store) if theirs is not None else {}
    return Explanation(record, known, weighed, theirs, waits, names)


def to_dict(found: Explanation) -> dict[str, Any]:
    """What is known of it, as users see it in JSON."""
    record, weighed, theirs = found.record, found.weighed, found.group
    told = {field: getattr(record, field) for field in ('instance', 'compute', 'query')}
    told['host'] = found.known.host(record.compute)
    membership = None if theirs is None else {**theirs.membership._asdict(), 'others': _others(found)}
    waits = _waits(found) if found.waiting else None
    return {**told, 'why': weighed._asdict() if weighed else None, 'group': membership, 'waits': waits}


def _others(found: Explanation) -> dict[str, str]:
    """The other members of its group, and where each is."""
    members = {} if found.group is None else found.group.members
    return {each: on for each, on in members.items() if each != found.record.instance}


def in_sentences(found: Explanation) -> str:
    """What is known of it, in sentences, a line each."""
    record, weighed, theirs, known = found.record, found.weighed, found.group, found.known
    name, since = record.name or record.instance, 'requested' if found.waiting else 'scheduled'
    at = f'since {record.stages.get(since, "some time")}'
    if record.error is not None:
        error = record.error
        where = f'on {known.called(record.compute)} ' if record.compute else ''
        lines = [f'{name} is in error {where}at stage {error.stage}: {error.reason} ({error.cleaned})']
    elif found.waiting is None:
        lines = [f'{name} is on {known.called(record.compute)}, {at}']
    else:
        before = found.waiting.before
        behind = f'behind {before} other{"s" * (before > 1)}' if before else 'and is the next of it'
        lines = [f'{name} waits in the queue of flavor {found.waiting.flavor} {at}, {behind}']
    if record.query:
        lines.append(f'it asked for {record.query}')
    lines += [_weighed(weighed)] if found.waiting is None else _lacking(found.waiting, known)
    if theirs is not None:
        rule = 'with' if theirs.policy == AFFINITY else 'apart from'
        others = ((found.names.get(each, each), known.called(on) or 'none yet') for each, on in _others(found).items())
        where = ', '.join(f'{name} on {host}' for name, host in others) or 'nobody else is in it'
        lines.append(f'it is in group {theirs.name} ({theirs.rule}), {rule} its others: {where}')
    return '\n'.join(map(printable, lines))


def _lacking(waits: Waiting, known: Computes) -> list[str]:
    """Who could take it, and why nobody does."""
    if waits.taker is not None:
        return [f'{known.called(waits.taker)} is taking it']
    if waits.is_flavorless:
        return ['its flavor is not there, and nobody takes it: eschedule flavor set it again, or eschedule destroy it']
    if waits.claimed_on is not None:
        host = known.called(waits.claimed_on)
        if waits.claimed_on in known.living:
            return [f'{host} has the claim of a dead attempt: in 2 minutes {host} takes this, or releases that claim']
        return [f'claimed on {host}, which is silent and may be running it. Fix: {silent_cure(host)}']
    lines = [f'{known.called(compute)}: {lacks}' for compute, lacks in waits.lacks.items()]
    for host in sorted(map(known.called, known.remembered.keys() - known.living.keys())):
        left = 'until it is back or forgotten, a compute that did not see this request come leaves it alone'
        lines.append(f'{host} is silent: {left}')
    if waits.unknown is not None:
        lines.append(f'what each compute that takes from queues lacks could not be found out: {waits.unknown}')
    return [known.no_taker] if known.no_taker else lines


def _waits(found: Explanation) -> dict[str, object]:
    waits, known = found.waiting, found.known
    assert waits is not None
    lacks = [{'compute': each, 'host': known.host(each), 'lacks': said} for each, said in waits.lacks.items()]
    since = found.record.stages.get('requested')
    told = {name: getattr(waits, name) for name in ('flavor', 'before', 'taker', 'claimed_on')}
    return {**told, 'since': since, 'computes': lacks}


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
