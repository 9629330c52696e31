"""What a failed call to etcd means: whether it may work elsewhere, whether it was sent, and why, in plain words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import grpc

from ecomp.model.text import printable

_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
}

NAMED = 3
"""Keys that are named in one line."""

_NOT_CONNECTED = 'failed to connect to all addresses; last error: '
_NOBODY = 'etcdserver: user name not found'
_ROLES_CHANGED = 'etcdserver: revision of auth store is old'
_NO_ADDRESS = ('DNS resolution failed', 'errors resolving ')

# What gRPC's TLS says, and what there is to do about it; the first that is found counts.
_TLS = (
    ('certificate has expired', 'its certificate has expired'),
    ('certificate is not yet valid', 'its certificate is not valid yet: is the clock right?'),
    ('Hostname Verification', 'its certificate is made out to another name'),
    ('CERTIFICATE_VERIFY_FAILED', 'its certificate is not signed by the authority in ca_cert (none: a public one)'),
    ('security handshaker', 'ca_cert, cert_cert or cert_key is no certificate or key, or they do not belong together'),
    ('TSI_DATA_CORRUPTED', 'it refuses our certificate: is cert_cert missing, expired, or not signed for it?'),
    ('TSI_PROTOCOL_FAILURE', 'it does not speak TLS as we do'),
    ('Handshake read failed', 'it hangs up on TLS: does it expect none (no ca_cert)?'),
)


def details(error: grpc.RpcError) -> str:
    """etcd's or gRPC's own words, in one line."""
    return ' '.join((error.details() or '').split())


def is_full(error: grpc.RpcError) -> bool:
    """Whether etcd is out of space. https://etcd.io/docs/v3.4/op-guide/maintenance/#space-quota"""
    return bool(error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and 'space exceeded' in details(error))


def is_too_long(error: grpc.RpcError) -> bool:
    """Whether it is our own side that takes no message as long as the answer."""
    exhausted = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    return bool(exhausted and 'Received message larger than max' in details(error))


def is_refusal(error: grpc.RpcError) -> bool:
    """Whether etcd understood the call and says no."""
    too_large = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and 'larger than max' in details(error)
    return too_large or error.code() in _REFUSED


def is_denied(error: grpc.RpcError) -> bool:
    """Whether it is etcd's roles that say no. https://etcd.io/docs/v3.4/op-guide/authentication/"""
    nobody = error.code() == grpc.StatusCode.FAILED_PRECONDITION and details(error) == _NOBODY
    return bool(nobody or error.code() == grpc.StatusCode.PERMISSION_DENIED)


def denied(certificate: Path | None, about: Sequence[str], read: bool) -> str:
    """Whom it does not let do what, and why. Of several keys etcd does not say which."""
    who = str(certificate) if certificate else 'whoever has no certificate (cert_cert)'
    named = [printable(each, 200) for each in about[:NAMED]]
    more = [f'{len(about) - NAMED} more'] if len(about) > NAMED else []
    what = f'{"read" if read else "write"} {", ".join([*named, *more])}' if about else 'do that'
    return f'{who} {what}: it is for another certificate, or `elab certs DIR --enable` has to run again'


def is_passing(error: grpc.RpcError) -> bool:
    """Whether etcd did nothing, and soon will: it has no leader just now, or its roles were changed meanwhile."""
    electing = error.code() == grpc.StatusCode.UNAVAILABLE and details(error) == 'etcdserver: no leader'
    changed = error.code() == grpc.StatusCode.INVALID_ARGUMENT and details(error) == _ROLES_CHANGED
    return bool(electing or changed)


def was_not_sent(error: grpc.RpcError) -> bool:
    """Whether the call never left, or was not passed on, so that nothing was changed."""
    unavailable = error.code() == grpc.StatusCode.UNAVAILABLE
    return bool(unavailable and details(error).startswith((_NOT_CONNECTED, *_NO_ADDRESS))) or is_passing(error)


def may_work_elsewhere(error: grpc.RpcError, repeatable: bool) -> bool:
    """Whether to try the next endpoint. What is not `repeatable` is tried again only if it never left."""
    if not repeatable:
        return was_not_sent(error)
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def why(error: grpc.RpcError, secure: bool) -> str:
    """Why nobody answered, in a few words. `secure`: we speak TLS."""
    words = details(error)
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return 'no answer in time'
    if not words.startswith(_NOT_CONNECTED):
        return words
    if secure:
        for sign, meaning in _TLS:
            if sign in words:
                return meaning
    elif 'Socket closed' in words:
        return 'the connection was closed (if that stays so: does it expect TLS, with ca_cert, cert_cert, cert_key?)'
    return re.sub(r'^[A-Z]+: (ipv[46]:\S+: )?', '', words.removeprefix(_NOT_CONNECTED))
