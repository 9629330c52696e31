"""Ask computes what they and their guests use."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ecomp.model import keys
from ecomp.model.host import Computes
from ecomp.model.usage import Measurement, add_rates, parse_answer
from ecomp.scheduler.operations.audit import ask, wait_for_answers
from ecomp.scheduler.queries.computes import read_computes
from ecomp.store.client import Store

# Seconds in which a compute has to answer.
ANSWER_TIMEOUT_SECONDS = 5.0
# Seconds between two questions, and what each compute adds to them: its answer is three writes to etcd.
MIN_INTERVAL_SECONDS = 2.0
INTERVAL_SECONDS_PER_COMPUTE = 0.01


class Use(NamedTuple):
    """What computes use, with rates, or the `reasons` why that is not known."""

    computes: Computes
    measurements: Mapping[str, Measurement]
    reasons: Mapping[str, str]


class UseReader:
    """Asks these computes, or all if none is given, and knows rates from the second read() on."""

    def __init__(self, store: Store, computes: Collection[str]) -> None:
        self._store, self._selection = store, computes
        self._before, self._due = dict[str, Measurement](), 0.0

    def read(self) -> Use:
        """Wait until a question is due, ask each living compute, and wait for the answers."""
        time.sleep(max(0.0, self._due - time.monotonic()))
        began = time.monotonic()
        self._due = began + MIN_INTERVAL_SECONDS  # also if etcd refuses the connection
        known = read_computes(self._store)
        # Anything may stand below /computes/.
        computes = set(self._selection) or set(filter(keys.is_uuid, {*known.living, *known.stored_hostnames}))
        self._due = began + MIN_INTERVAL_SECONDS + INTERVAL_SECONDS_PER_COMPUTE * len(computes)
        reasons, answers = dict.fromkeys(computes, 'its ecompute is not alive. Try: eschedule hosts'), {}
        # A compute measures once for each question.
        with ask(self._store, keys.USAGE_QUESTION, value=' '.join(self._selection)) as revisions:
            asked = dict.fromkeys(computes & known.living.keys(), revisions[keys.USAGE_QUESTION])
            answered = wait_for_answers(self._store, keys.USAGE, asked, ANSWER_TIMEOUT_SECONDS)
            entries = self._store.read([keys.usage(compute) for compute in sorted(answered)])
        for compute in asked:
            try:
                answers[compute] = parse_answer(entries[keys.usage(compute)].value)
                del reasons[compute]
            except KeyError:
                reasons[compute] = 'its ecompute does not answer: it is frozen, was just killed, or is too old'
            except ValueError as error:
                reasons[compute] = str(error)
        used = {compute: add_rates(self._before.get(compute, {}), answers.get(compute, {})) for compute in computes}
        self._before = answers
        return Use(known, used, reasons)
