"""Every error that ecomp raises deliberately, with its exit code.

    EcompError                 1  failed
    ├── UsageError             2  arguments or configuration are invalid
    │   └── PlacementRefusal   2  placement rejects the query as invalid (HTTP 400)
    ├── NoCapacity             3  no compute has room now
    │   ├── TooFew             3  there is room for some instances of a set, but for fewer than the minimum
    │   └── OverQuota          3  the project's quota does not allow it
    ├── NotFound               4  it does not exist
    ├── Conflict               5  it exists already, or another process changed it first
    │   └── GenerationConflict 5  placement's generation has changed: the caller reads and decides again
    │       └── ConsumerConflict  5  a consumer's generation: another process claimed or released for this instance
    ├── ClaimedElsewhere       5  another attempt holds a claim on another compute, which may be running the instance
    ├── StillGoing             6  the operation is not finished, and continues
    ├── Unreachable            7  a backend cannot be reached; unless it is an UnknownOutcome, nothing was changed
    │   ├── UnknownOutcome     7  a write was sent and not answered, and a read does not show its outcome
    │   ├── NoSpace            7  etcd is full: it accepts only reads and deletes
    │   └── StrangeEtcd        7  etcd answers, but is not the one this compute used before
    ├── Denied                 1  etcd accepts the certificate, but its role does not allow this
    ├── TooManyOperations      1  a transaction exceeds this etcd's --max-txn-ops
    ├── Unreadable             1  the value of an etcd key is malformed
    └── BuildFailed            1  an instance could not be made: the stage and the reason

A message is one line for a person: what failed, where, how to fix it. Only entry points turn it into an exit code.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A problem and its cure, '' if none is known."""

    what: str
    cure: str = ''

    def __str__(self) -> str:
        return f'{self.what}. Fix: {self.cure}' if self.cure else self.what


def split_fix(message: str) -> tuple[str, str]:
    """Split a message into its text and its `. Fix: …` or `. Try: …`, which may be ''."""
    text, *cure = re.split(r'(?=\. (?:Fix|Try): )', message, maxsplit=1)
    return text, ''.join(cure)


def put_before_fix(message: str, clause: str) -> str:
    """Insert `clause` before the fix of `message`, which then replaces a fix in `clause`."""
    text, cure = split_fix(message)
    return text + split_fix(clause)[0] + cure if cure else text + clause


class EcompError(Exception):
    """An expected failure, whose text is one line for a person."""

    exit_code = 1

    @property
    def problem(self) -> Problem:
        what, _, cure = str(self).partition('. Fix: ')
        return Problem(what, cure)


def explain_error(check: Callable[[], object]) -> Problem | None:
    """Return the problem if a check raises UsageError or Conflict, else None."""
    try:
        check()
    except (Conflict, UsageError) as error:
        return error.problem
    return None


class UsageError(EcompError):
    exit_code = 2


class PlacementRefusal(UsageError):
    """Placement answered 400: the message is placement's own."""


class NoCapacity(EcompError):
    exit_code = 3


class TooFew(NoCapacity):
    """Too few instances of a set fit: `candidates` has one for each that does."""

    def __init__(self, message: str, candidates: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.candidates = candidates


class OverQuota(NoCapacity):
    """The project's quota does not allow it."""


class NotFound(EcompError):
    exit_code = 4


class Conflict(EcompError):
    exit_code = 5


class GenerationConflict(Conflict):
    """Placement's error placement.concurrent_update: GET again before the next write."""


class ConsumerConflict(GenerationConflict):
    """The consumer generation has changed: another process claimed or released for it."""


class ClaimedElsewhere(EcompError):
    """Another attempt holds the claims on `computes`, {instance: compute} (rule: claim-stays)."""

    exit_code = 5

    def __init__(self, computes: Mapping[str, str], message: str = '') -> None:
        instance, compute = next(iter(computes.items()))
        super().__init__(message or f'{instance} has a claim on compute {compute}, which may be running it')
        self.computes = computes


class StillGoing(EcompError):
    exit_code = 6


class Unreachable(EcompError):
    """A backend does not answer.

    Nothing was changed, unless it is an UnknownOutcome or, after a write, a StrangeEtcd.
    `backend` is 'etcd at localhost:2379', or '' if it answers but cannot do this.
    `tls_failure` is an ecomp.tls.TlsFailure, or None if TLS did not fail.
    """

    exit_code = 7

    def __init__(self, message: str, backend: str = '', tls_failure: Enum | None = None) -> None:
        super().__init__(message)
        self.backend = backend
        self.tls_failure = tls_failure


class UnknownOutcome(Unreachable):
    """A write was sent and not answered, and a read does not show whether it was carried out."""


class NoSpace(Unreachable):
    """Etcd is full: it accepts only reads, and transactions of deletes alone."""


class StrangeEtcd(Unreachable):
    """Etcd was wiped, restored or replaced, which an operator must accept."""


class Denied(EcompError):
    """Etcd does not allow this to our role."""


class TooManyOperations(EcompError):
    """A transaction exceeds this etcd's --max-txn-ops, and has changed nothing."""


class Unreadable(EcompError):
    """The value of an etcd key is malformed."""

    def __init__(self, key: str, reason: object) -> None:
        super().__init__(f'{key}: {reason}. Fix: if no newer ecomp wrote it, `etcdctl del {key}`')


class BuildFailed(EcompError):
    """The step `stage` failed: scheduled (invalid request or claim), image, disk or started.

    `is_host_fault` means that an image failed for a reason that is this host's alone.
    """

    def __init__(self, stage: str, reason: str, is_host_fault: bool = False) -> None:
        super().__init__(f'{stage}: {reason}')
        self.stage = stage
        self.reason = reason
        self.is_host_fault = is_host_fault

    def __reduce__(self) -> tuple[type['BuildFailed'], tuple[str, str, bool]]:
        # Unpickling a worker's error would otherwise call BuildFailed(message).
        return type(self), (self.stage, self.reason, self.is_host_fault)
