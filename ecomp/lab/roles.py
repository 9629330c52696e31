"""`elab certs DIR --enable`: etcd asks who writes what, by the certificates that are in DIR.

What there is to change is looked up each time, so what was killed on the way is run again, and so is what was done
before a new machine had its certificate. Nothing is changed before all is read that may be refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ecomp.compute_conf import load_compute
from ecomp.conf import load_schedule
from ecomp.errors import Conflict, Denied, UnknownOutcome, UsageError
from ecomp.model import cluster, keys, roles
from ecomp.model.cluster import holes
from ecomp.model.record import timestamp
from ecomp.model.text import printable
from ecomp.store.client import Put, Snapshot, Store, Unchanged

if TYPE_CHECKING:
    from ecomp.store.roles import Accounts

COMPUTE, SCHEDULER, OPERATOR = roles.KINDS
NAMED = 5
"""How many records, or computes, a message names at most; `…` stands for the others."""


def enable(directory: Path, now: datetime, say: Callable[[str], None]) -> None:
    """Have etcd let each certificate in `directory` write what its role may; `say` gets a line for each step.

    UsageError where a compute's certificate has no uuid beside it, Conflict where computes of an earlier version run,
    EcompError.
    """
    wanted = roles.wanted(_computes(directory), named(directory, SCHEDULER), named(directory, OPERATOR))
    with _operator(directory) as (accounts, store):
        if warning := holes(store.version()):
            say(f'warning: {warning}. Roles hold mistakes off there, and not attackers')
        if earlier := _old_places(store.snapshot(keys.INSTANCES, keys_only=True)):
            cure = 'start those computes with this version first; `eschedule audit` says of what stays why'
            raise Conflict(f'{_listed(earlier)}: written by an earlier ecompute; {cure}')
        found = accounts.roles()
        alive = [keys.last(key) for key, each in store.snapshot(keys.COMPUTES).entries.items() if each.lease]
        if left_out := roles.without_role(alive, found, wanted):
            cure = 'say `uuid: …` in its compute.yaml there, and run this again'
            say(f'warning: no certificate in {directory} is for a compute that lives, {_listed(left_out)}: {cure}')
        for change in roles.changes(found, wanted):
            accounts.apply(change)
            say(roles.described(change))
        if _put_cluster(store, now):
            say(f'{keys.CLUSTER}: written, for no compute may')
        if not accounts.is_on():
            accounts.turn_on()
            end = f'elab certs {directory} --disable ends that'
            say(f'etcd at {accounts.where} holds each certificate to its role; {end}')
        if others := roles.unknown(found, wanted):
            names = [printable(each, 200) for each in others]
            cure = f'whose certificate is to count no more: etcdctl user delete {names[0]}'
            say(f'in etcd, and not in {directory}: {", ".join(names)}; {cure}')


def disable(directory: Path, say: Callable[[str], None]) -> None:
    """Have etcd let every certificate do everything again. Users and roles stay. EcompError."""
    with _operator(directory) as (accounts, _):
        was_on = accounts.is_on()
        if was_on:
            accounts.turn_off()
        now = 'lets every certificate do everything' + ('' if was_on else ', as it did')
        say(f'etcd at {accounts.where} {now}; its users and roles stay')


def named(directory: Path, kind: str) -> list[str]:
    """The names of the directories of a kind, `compute-` for one: they are also the certificates' common names."""
    return sorted(path.name for path in directory.glob(f'{kind}*') if (path / 'client.crt').exists())


def _computes(directory: Path) -> dict[str, str]:
    """The uuid of each compute by its user in etcd. UsageError for a compute.yaml without one, or with another's."""
    found: dict[str, str] = {}
    for name in named(directory, COMPUTE):
        path = directory / name / 'compute.yaml'
        if not path.exists():
            raise UsageError(f'{path} is not there: it has to say which compute this is, as `uuid: …`')
        compute = load_compute(path).uuid
        if compute is None:
            line = "`uuid: …`, with what is in that compute's /var/lib/ecompute/uuid"
            raise UsageError(f'{path} does not say which compute this is: add the line {line}')
        if compute in found.values():
            other = next(each for each, theirs in found.items() if theirs == compute)
            raise UsageError(f'{path}: uuid {compute} is that of {other}, too: each compute has one of its own')
        found[name] = compute
    return found


@contextmanager
def _operator(directory: Path) -> Iterator[tuple[Accounts, Store]]:
    """Connect to etcd with the certificate of the first operator whose role may do everything. UsageError."""
    from ecomp.store.roles import Accounts  # here, because the other commands run without etcd3

    paths = [directory / name / 'schedule.yaml' for name in named(directory, OPERATOR)]
    configs = [load_schedule(path).etcd for path in paths]
    if not configs:
        raise UsageError(f'{directory} has no certificate that may do this: elab certs {directory} --operator NAME')
    for number, config in enumerate(configs):
        with closing(Store(config)) as store, closing(Accounts(config)) as accounts:
            store.version()  # refuses a server that has only a common name, which gRPC would accept
            try:
                accounts.check()
            except Denied:  # of one who is new
                if number + 1 < len(configs):
                    continue
                raise
            yield accounts, store
            return


def _old_places(records: Snapshot) -> list[str]:
    """The keys of records right below /instances/, where earlier versions wrote them, of instances that live."""
    return [
        key
        for key, entry in sorted(records.entries.items())
        if not entry.lease and '/' not in key.removeprefix(keys.INSTANCES)
    ]


def _listed(words: list[str]) -> str:
    return ', '.join(printable(each, 200) for each in words[:NAMED]) + (' …' if len(words) > NAMED else '')


def _put_cluster(store: Store, now: datetime) -> bool:
    """Write /cluster if it is missing; whether it was."""
    value = cluster.new(str(uuid.uuid4()), timestamp(now))
    while store.get(keys.CLUSTER) is None:
        try:
            if store.commit([Unchanged(keys.CLUSTER, 0)], [Put(keys.CLUSTER, value)]) is not None:
                return True
        except UnknownOutcome:
            continue  # the next look says what became of it
    return False
