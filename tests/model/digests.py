"""Computes that answer an audit immediately, with the digest of what they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ecomp.model import keys
from ecomp.model.planes import to_pages
from ecomp.store.client import Delete, Put
from tests.kit.memory_etcd import Etcd

if TYPE_CHECKING:
    from tests.model.compute import Compute


def answer_audits(etcd: Etcd, computes: Mapping[str, Compute]) -> None:
    def answer(operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            audit = operation.key.removeprefix(keys.AUDIT)
            if not isinstance(operation, Put) or audit == operation.key or '/' in audit:
                continue
            for uuid, compute in computes.items():
                if compute.is_dead or keys.compute(uuid) not in etcd.entries:
                    continue
                pages = to_pages(compute.make_digest())
                parts = {'heard': '', **{str(number): page for number, page in enumerate(pages)}}
                puts = [Put(keys.digest(audit, uuid, part), value, operation.lease) for part, value in parts.items()]
                etcd.commit([], puts)

    etcd.listeners.append(answer)
