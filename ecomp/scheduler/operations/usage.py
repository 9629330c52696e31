"""Ask computes what they and their guests use. A compute measures once for each question."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ecomp.model import keys
from ecomp.model.host import Computes
from ecomp.model.usage import Measurement, compute_use, parse_answer
from ecomp.scheduler.operations.audit import open_audit_session, wait_for_answers
from ecomp.scheduler.queries.hosts import read_computes
from ecomp.store.client import Put, Store

# Seconds between two questions, and what each compute adds to them: its answer is three writes to etcd.
MIN_INTERVAL_SECONDS = 2.0
INTERVAL_SECONDS_PER_COMPUTE = 0.01


class Use(NamedTuple):
    """What computes use, with rates, {} if that is not known; `reasons` say why."""

    computes: Computes
    used: Mapping[str, Measurement]
    reasons: Mapping[str, str]


class UseReader:
    """Asks the `selected` computes, all if it is empty; rates are known from the second read() on."""

    def __init__(self, store: Store, selected: Collection[str]) -> None:
        self._store, self._selected = store, selected
        self._before, self._due = dict[str, Measurement](), 0.0

    def read(self) -> Use:
        """Wait until a question is due, ask each living compute, and wait for the answers; raise etcd's errors."""
        time.sleep(max(0.0, self._due - time.monotonic()))
        began = time.monotonic()
        self._due = began + MIN_INTERVAL_SECONDS  # also if etcd refuses the connection
        known = read_computes(self._store)
        # Anything may stand below /computes/.
        computes = set(self._selected) or set(filter(keys.is_uuid, {*known.living, *known.stored_hostnames}))
        self._due = began + MIN_INTERVAL_SECONDS + INTERVAL_SECONDS_PER_COMPUTE * len(computes)
        reasons, answers = dict.fromkeys(computes, 'its ecompute is not alive. Try: eschedule hosts'), {}
        with open_audit_session(self._store) as (name, lease):
            self._store.commit([], [Put(keys.clearance(name, keys.USAGE), ' '.join(self._selected), lease)])
            asked = {keys.digest(name, compute, keys.USAGE): compute for compute in computes & known.living.keys()}
            wait_for_answers(self._store, name, set(asked.values()), keys.USAGE, keys.USAGE)
            entries = self._store.read(list(asked))
        for key, compute in asked.items():
            try:
                answers[compute] = parse_answer(entries[key].value)
                del reasons[compute]
            except KeyError:
                reasons[compute] = 'its ecompute does not answer: it is frozen, was just killed, or is too old'
            except ValueError as error:
                reasons[compute] = str(error)
        used = {compute: compute_use(self._before.get(compute, {}), answers.get(compute, {})) for compute in computes}
        self._before = answers
        return Use(known, used, reasons)
