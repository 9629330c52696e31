"""Every error ecomp raises on purpose, and the exit code each one means.

    EcompError                 1  failed
    ├── UsageError             2  arguments or configuration are wrong
    │   └── PlacementRefusal   2  placement understood the query and says it is wrong (HTTP 400)
    ├── NoCapacity             3  nothing can take it now
    │   ├── TooFew             3  there is room for some of a set, and not for enough of them
    │   └── OverQuota          3  the project's quota does not allow it
    ├── NotFound               4  no such thing
    ├── Conflict               5  exists already, or somebody else changed it first
    │   └── GenerationConflict 5  placement's generation moved: read again, decide again
    │       └── ConsumerConflict  5  a consumer's: somebody else claimed or released for the same instance
    ├── ClaimedElsewhere       5  another attempt holds a claim on another compute, which may be running the instance
    ├── StillGoing             6  the time is up, the work goes on
    ├── Unreachable            7  a backend cannot be reached; unless it is an UnknownOutcome, nothing was changed
    │   ├── UnknownOutcome     7  a write was sent and no answer came: read back before anything else
    │   ├── NoSpace            7  etcd is full: it takes deletes and nothing else
    │   └── StrangeEtcd        7  etcd answers, and is not the one this compute knew
    ├── Denied                 1  etcd knows who we are, and does not let us do that
    ├── Unreadable             1  what a key of etcd holds cannot be understood
    └── BuildFailed            1  an instance could not be made: the stage and a plain reason

A message is one line for a person: what, where, what to do. Libraries raise these; only the
front doors turn them into an exit code.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class EcompError(Exception):
    """A failure ecomp understands; str() is one line for a person."""

    exit_code = 1


class UsageError(EcompError):
    exit_code = 2


class PlacementRefusal(UsageError):
    """Placement answered 400: the message is placement's own."""


class NoCapacity(EcompError):
    exit_code = 3


class TooFew(NoCapacity):
    """The message says for how many of a set there is room; `taken` are the candidates that those would take."""

    def __init__(self, message: str, taken: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.taken = taken


class OverQuota(NoCapacity):
    """The message names limit, used and asked of each."""


class NotFound(EcompError):
    exit_code = 4


class Conflict(EcompError):
    exit_code = 5


class GenerationConflict(Conflict):
    """placement.concurrent_update: GET before anything else is tried."""


class ConsumerConflict(GenerationConflict):
    """The generation that was sent is not the consumer's."""


class ClaimedElsewhere(EcompError):
    """Another attempt holds claims for these instances on other computes: `on` is {instance: compute} (rule 13)."""

    exit_code = 5

    def __init__(self, on: Mapping[str, str], message: str = '') -> None:
        instance, compute = next(iter(on.items()))
        super().__init__(message or f'{instance} is claimed on compute {compute}, which may be running it')
        self.on = on


class StillGoing(EcompError):
    exit_code = 6


class Unreachable(EcompError):
    """Nothing was changed, unless it is an UnknownOutcome or, after a write, StrangeEtcd.

    `backend` names what gives no answer, 'etcd at localhost:2379' for one; '' if it answers and cannot do this.
    """

    exit_code = 7

    def __init__(self, message: str, backend: str = '') -> None:
        super().__init__(message)
        self.backend = backend


class UnknownOutcome(Unreachable):
    """The request may or may not have been carried out."""


class NoSpace(Unreachable):
    """Etcd is full: puts and leases are refused, reads and transactions of deletes alone are not."""


class StrangeEtcd(Unreachable):
    """Etcd was wiped, restored or exchanged: nothing is written to it before an operator accepts it.

    It may be found by the answer to a write, which has been carried out then.
    """


class Denied(EcompError):
    """The message names the keys it was about, and the certificate."""


class Unreadable(EcompError):
    """The message names the key, and the cure."""

    def __init__(self, key: str, why: object) -> None:
        super().__init__(f'{key}: {why}; unless a newer ecomp wrote it: etcdctl del {key}')


class BuildFailed(EcompError):
    """An instance could not be made: `reason` says why, and `stage` the step that failed.

    That is scheduled (its request or its claim is wrong), image, disk or started.
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f'{stage}: {reason}')
        self.stage = stage
        self.reason = reason

    def __reduce__(self) -> tuple[type['BuildFailed'], tuple[str, str]]:
        # The default would call BuildFailed(message) when a worker's error is unpickled.
        return type(self), (self.stage, self.reason)
