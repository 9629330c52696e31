"""Rule 10: nothing is taken from, or written to, an etcd that is not the one we knew.

Shared by all connections of a process to one etcd. Every linearizable reply is compared with what had been seen before
its request was sent; a strange one raises StrangeEtcd, and so does every call from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from ecomp.errors import EcompError, StrangeEtcd
from ecomp.model import cluster, keys
from ecomp.model.cluster import Header, KnownCluster


class Guard:
    """What is known of etcd. `on_change` hears of everything new that is to be remembered, and must be quick."""

    def __init__(self, known: KnownCluster, on_change: Callable[[KnownCluster], None]) -> None:
        self._lock = threading.Lock()
        self._known = known
        self._on_change = on_change
        self._strange = ''
        self._when_strange: list[Callable[[str], None]] = []

    @property
    def known(self) -> KnownCluster:
        """What has been seen so far: take it before a request is sent, and look at the reply with it."""
        return self._known

    def when_strange(self, tell: Callable[[str], None]) -> None:
        """Have tell(why), too, called once it is strange, from any thread; now if it is already."""
        with self._lock:
            self._when_strange.append(tell)
            strange = self._strange
        if strange:
            tell(strange)

    def admit(self) -> None:
        """Raise StrangeEtcd if it is known to be strange."""
        if self._strange:
            raise StrangeEtcd(self._strange)

    def check(self, before: KnownCluster, header: Header, where: str) -> None:
        """Look at a linearizable reply; StrangeEtcd if it is none of the etcd we knew."""
        self.admit()
        reason = cluster.unfamiliar(before, header)
        if reason is not None:
            self._refuse(where, reason)
        with self._lock:
            self._learn(self._known.with_header(header))

    def observe(self, before: KnownCluster, header: Header) -> bool:
        """Look at any other reply; False if it is older than `before`: of a member that lags, or worse."""
        if cluster.unfamiliar(before, header) is not None:
            return False
        # Its term is that member's own: of one that has just stood for election it is higher than the leader's, who
        # answers on for a moment, and is no other etcd for that.
        with self._lock:
            self._learn(self._known.with_header(replace(header, term=0)))
        return True

    def recognise(self, value: bytes | None, where: str) -> None:
        """Look at what /cluster of the etcd at `where` has, None for no such key; StrangeEtcd if it is not ours."""
        reason = cluster.unlike(self._known, value)
        if reason is not None:
            self._refuse(where, reason)

    def adopt(self, value: bytes, where: str) -> None:
        """With nothing remembered, know the etcd at `where` by what its /cluster has.

        Raises EcompError if no identity can be read there.
        """
        try:
            identity = cluster.identity(value)
        except ValueError as error:
            raise EcompError(f'{keys.CLUSTER} in etcd at {where}: {error}: remove that key') from error
        with self._lock:
            known = self._known
            self._learn(KnownCluster(identity, known.cluster, known.revision, known.term))

    def _learn(self, known: KnownCluster) -> None:
        if known != self._known:
            self._known = known
            if known.identity:
                self._on_change(known)

    def _refuse(self, where: str, reason: str) -> None:
        text = (
            f'etcd at {where} is not the one this compute knew: {reason}. Was it wiped or restored, or is `etcd:` '
            'another one? Nothing is built, destroyed or published; if it is to be used: ecompute --accept-new-etcd'
        )
        with self._lock:
            first, self._strange = not self._strange, self._strange or text
            told = list(self._when_strange) if first else []
        for tell in told:
            tell(text)
        raise StrangeEtcd(text)
