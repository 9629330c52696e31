"""The product's store over an etcd in memory. A call is one atomic step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

from ecomp.errors import EcompError, NoSpace, Unreachable
from ecomp.store.client import Exists, Fence, Store, Unchanged
from ecomp.store.messages import CallFailure, Range, Request, Transaction, is_full, suggest_remedy
from tests.kit.memory_etcd import Etcd, MemoryMember, decode_key
from tests.model.acting import Call
from tests.model.world import World

Value = TypeVar('Value')


def translate_refusal(function: Callable[[], Value]) -> Value:
    try:
        return function()
    except CallFailure as error:
        if is_full(error):
            raise NoSpace('etcd is full', 'etcd') from None
        raise EcompError(f'etcd refuses: {error.details}{suggest_remedy(error)}') from None


class ModelStore(Store):
    """The product's store, but what it sends is answered by the etcd in memory."""

    writer = 'ann'

    def __init__(self, etcd: Etcd) -> None:
        self.endpoints = 'memory'
        self.fence: Fence | None = None
        self._guard = None
        self._etcd = etcd
        self._member = MemoryMember(etcd, keeps_history=False)
        self._world = cast(World, etcd.world)

    def _ask(self, request: Request, _error: type[Unreachable], _linearizable: bool, _about: Sequence[str]) -> Any:
        """Answer in one step. In a story the answer of a writing transaction is its revision."""
        replies: list[Any] = []

        def answer() -> Any:
            replies[:] = [translate_refusal(lambda: self._member.answer(request))]
            if not call.writes:
                return replies[0]
            return replies[0].header.revision if replies[0].succeeded else None

        def make_fingerprint(_: object) -> Hashable:
            (reply,) = replies
            kvs = [
                *getattr(reply, 'kvs', ()),
                *(kv for each in getattr(reply, 'responses', ()) for kv in _list_kvs(each)),
            ]
            entries = tuple((kv.key, kv.value, self._etcd.writer_marks[kv.mod_revision], kv.lease) for kv in kvs)
            succeeded = getattr(reply, 'succeeded', None)
            mark = self._etcd.writer_marks.get(reply.header.revision, 0) if call.writes and succeeded else 0
            return entries, getattr(reply, 'count', 0), succeeded, mark

        call = Call('etcd', *self._describe(request))
        self._world.call(call, answer, make_fingerprint)
        return replies[0]

    def _describe(self, request: Request) -> tuple[tuple[Hashable, ...], bool]:
        """Return the operation of a request, and whether it writes."""
        if isinstance(request, Range):
            key = decode_key(request.key)
            kind = 'count' if request.count_only else 'list' if request.end else 'get'
            return (kind, key, *([request.min_mod_revision] if request.min_mod_revision else [])), False
        assert isinstance(request, Transaction)
        if request.success and all(isinstance(each, Range) for each in request.success):
            ranges = [each for each in request.success if isinstance(each, Range)]
            keys = tuple(decode_key(each.key) for each in ranges)
            return ('around', *keys, ranges[0].limit) if ranges[0].end else ('read', keys), False
        marks = tuple((condition.key, self._get_writer_mark(condition)) for condition in request.compare)
        return ('commit', marks, tuple(request.success)), bool(request.success)

    def grant(self, seconds: int) -> int:
        actor, name = self._world.current, 'the scene'
        if actor is not None:
            actor.leases += 1
            # The id must not depend on what other actors do.
            lease, name = 100_000 * (self._world.actors.index(actor) + 1) + actor.leases, actor.name
        else:
            self._etcd.scene_leases += 1
            lease = self._etcd.scene_leases

        return self._world.call(
            Call('etcd', ('grant', seconds)), lambda: translate_refusal(lambda: self._etcd.grant(seconds, name, lease))
        )

    def keep_alive(self, lease: int) -> int:
        def keep() -> int:
            return self._etcd.leases[lease].seconds if lease in self._etcd.leases else 0

        return self._world.call(Call('etcd', ('keep', lease)), keep, repr)

    def revoke(self, lease: int) -> None:
        # To revoke an expired lease is not an error, as in Store.
        self._world.call(Call('etcd', ('revoke', lease)), lambda: self._etcd.end_lease(lease))

    def require_identity(self) -> None:
        """Do nothing: this is always the known etcd."""

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _get_writer_mark(self, condition: Unchanged | Exists) -> int:
        return -1 if isinstance(condition, Exists) else self._etcd.writer_marks.get(condition.revision, -2)


def _list_kvs(response: Any) -> Sequence[Any]:
    return response.response_range.kvs  # type: ignore[no-any-return]
