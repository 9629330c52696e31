"""Accept a destroy: the request's key is rewritten as a tombstone, which its compute carries out."""

from __future__ import annotations

from dataclasses import replace

from ecomp.errors import Conflict, NotFound, UnknownOutcome, Unreachable
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.instance import Request, to_json
from ecomp.model.record import ERROR
from ecomp.scheduler.find import Found, living
from ecomp.store.client import Delete, Put, Store, Unchanged
from ecomp.store.names import freed

TRIES = 5


def destroy(store: Store, instance: str) -> str:
    """Accept the destroy; what was done, in one sentence. NotFound if it is gone or unknown.

    An instance in error has nothing left but its record, which is removed here. Asked again while it is
    being destroyed: says so and changes nothing.
    """
    asked = False
    for _ in range(TRIES):
        try:
            found = living(store, instance)
            if found.is_destroying:
                return f'{instance}: is being destroyed on {found.record.compute} already'
            conditions, operations, done = _transaction(store, found)
            if store.commit(conditions, operations) is not None:
                failpoint('tombstoned')
                return done
        except UnknownOutcome:
            asked = True  # the next look says what became of it
        except NotFound:
            if not asked:
                raise
            return f'{instance}: gone'  # of an unknown outcome that was one
        except Unreachable as error:
            if not asked:
                raise type(error)(f'{error}; the destroy of {instance} is not accepted', error.backend) from error
            unknown = f'whether the destroy of {instance} is accepted is not known: the same command again says so'
            raise UnknownOutcome(f'{error}; {unknown}', error.backend) from error
    raise Conflict(f'{instance}: changed by somebody else all the time; try again')


def _transaction(store: Store, found: Found) -> tuple[list[Unchanged], list[Put | Delete], str]:
    record, compute = found.record, found.record.compute
    record_key, host_key = keys.instance(record.instance), keys.host(compute, record.instance)
    record_revision = found.record_entry.revision if found.record_entry else 0
    if record.state == ERROR and found.request_entry is None:
        mine, change = freed(store, found.name, record.instance)
        return (
            [Unchanged(record_key, record_revision), Unchanged(host_key, 0), *mine],
            [Delete(record_key), *change],
            f'{record.instance}: its record is removed; nothing else was left of it',
        )
    tombstone = to_json(
        replace(
            Request(record.instance, {}, None, record.user_id, record.project_id, record.query),
            stages={name: time for name, time in record.stages.items() if time},
            name=found.name,  # a compute that has not seen the request yet is to free it all the same
        )
    )
    revision = found.request_entry.revision if found.request_entry else 0
    done = f'{record.instance}: destroy accepted, {compute} carries it out'
    if store.get(keys.compute(compute)) is None:
        done += ' when it is back: it is silent now'
    return [Unchanged(host_key, revision)], [Put(host_key, tombstone)], done
