"""What a failed call to etcd means: whether it may work elsewhere, whether it was sent, and why, in plain words."""

from __future__ import annotations

import re

import grpc

_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
}

_NOT_CONNECTED = 'failed to connect to all addresses; last error: '
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


def is_electing(error: grpc.RpcError) -> bool:
    """Whether the member has no leader just now; it did not pass the call on."""
    return bool(error.code() == grpc.StatusCode.UNAVAILABLE and details(error) == 'etcdserver: no leader')


def was_not_sent(error: grpc.RpcError) -> bool:
    """Whether the call never left, or was not passed on, so that nothing was changed."""
    unavailable = error.code() == grpc.StatusCode.UNAVAILABLE
    return bool(unavailable and (details(error).startswith((_NOT_CONNECTED, *_NO_ADDRESS)) or is_electing(error)))


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
