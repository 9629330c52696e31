"""What a failed call to etcd means: whether it may work elsewhere, whether it was sent, and why, in plain words.

A CallFailure has one of gRPC's codes (https://grpc.io/docs/guides/status-codes/) by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ecomp.model.text import printable

UNAVAILABLE, DEADLINE_EXCEEDED, NOT_FOUND = 'UNAVAILABLE', 'DEADLINE_EXCEEDED', 'NOT_FOUND'
INVALID_ARGUMENT, FAILED_PRECONDITION = 'INVALID_ARGUMENT', 'FAILED_PRECONDITION'
RESOURCE_EXHAUSTED, PERMISSION_DENIED = 'RESOURCE_EXHAUSTED', 'PERMISSION_DENIED'
_REFUSED = {
    *('UNAUTHENTICATED', PERMISSION_DENIED, INVALID_ARGUMENT, FAILED_PRECONDITION, 'UNIMPLEMENTED', NOT_FOUND),
    'OUT_OF_RANGE',
}

NAMED = 3
"""Keys that are named in one line."""

_NOBODY = 'etcdserver: user name not found'
_NO_LEASE = 'etcdserver: requested lease not found'
_LEARNER = 'etcdserver: rpc not supported for learner'
_ROLES_CHANGED = 'etcdserver: revision of auth store is old'


class CallFailure(Exception):
    """A call that failed: the code, and etcd's words or ours in one line.

    `unsent`: it certainly never left. Where that is False the code and the words may say so all the same.
    """

    def __init__(self, code: str, details: str | None, unsent: bool = False) -> None:
        super().__init__(code, details)
        self.code = code
        self.details = ' '.join((details or '').split())
        self.unsent = unsent


def is_full(error: CallFailure) -> bool:
    """Whether etcd is out of space. https://etcd.io/docs/v3.4/op-guide/maintenance/#space-quota"""
    return error.code == RESOURCE_EXHAUSTED and 'space exceeded' in error.details


def is_too_long(error: CallFailure) -> bool:
    """Whether it is our own side that takes no message as long as the answer."""
    exhausted = error.code == RESOURCE_EXHAUSTED
    return exhausted and 'Received message larger than max' in error.details


def is_refusal(error: CallFailure) -> bool:
    """Whether etcd understood the call and says no."""
    too_large = error.code == RESOURCE_EXHAUSTED and 'larger than max' in error.details
    return too_large or error.code in _REFUSED


def advice(error: CallFailure) -> str:
    """Say what to do about a refusal that the same command does not meet again; '' for any other."""
    if error.details != _NO_LEASE:
        return ''
    return ': its lease has ended (was this suspended?), and this is not written. Try: the same command again'


def is_denied(error: CallFailure) -> bool:
    """Whether it is etcd's roles that say no. https://etcd.io/docs/v3.4/op-guide/authentication/"""
    nobody = error.code == FAILED_PRECONDITION and error.details == _NOBODY
    return nobody or error.code == PERMISSION_DENIED


def denied(certificate: Path | None, about: Sequence[str], read: bool) -> str:
    """Whom it does not let do what, and why. Of several keys etcd does not say which."""
    who = str(certificate) if certificate else 'whoever has no certificate (cert_cert)'
    named = [printable(each, 200) for each in about[:NAMED]]
    more = [f'{len(about) - NAMED} more'] if len(about) > NAMED else []
    what = f'{"read" if read else "write"} {", ".join([*named, *more])}' if about else 'do that'
    return f'{who} {what}: it is for another certificate, or `elab certs DIR --enable` has to run again'


def is_passing(error: CallFailure) -> bool:
    """Whether etcd did nothing, and soon will: it has no leader just now, or its roles were changed meanwhile."""
    electing = error.code == UNAVAILABLE and error.details == 'etcdserver: no leader'
    changed = error.code == INVALID_ARGUMENT and error.details == _ROLES_CHANGED
    return electing or changed


def is_learner(error: CallFailure) -> bool:
    """Whether the member has no vote yet, and did nothing for it. The code differs between versions of etcd.

    https://etcd.io/docs/v3.4/learning/design-learner/
    """
    return error.details == _LEARNER


def was_not_sent(error: CallFailure) -> bool:
    """Whether the call never left, or was not passed on, so that nothing was changed."""
    return error.unsent or is_passing(error) or is_learner(error)


def may_work_elsewhere(error: CallFailure, repeatable: bool) -> bool:
    """Whether to try the next endpoint. What is not `repeatable` is tried again only if it never left."""
    if not repeatable:
        return was_not_sent(error)
    return error.code in (UNAVAILABLE, DEADLINE_EXCEEDED) or is_learner(error)
