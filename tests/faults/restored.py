"""Helpers for the tests of restored control planes: a query, its requests, counts of domains."""

from __future__ import annotations

import socket
import uuid
from collections import Counter

from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import read_guests
from tests.kit.story import IMAGE

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:16'


def count_domains(*computes: Ecompute) -> dict[str, int]:
    """Count the domains of each instance over the state directories of all computes."""
    return dict(Counter(instance for compute in computes for instance in read_guests(compute)))


def format_compute_label(compute: Ecompute) -> str:
    """Return the label that messages use for one of several computes of this machine."""
    return f'{socket.gethostname()} ({compute.uuid})'


def queue_request(control: Control, *words: str) -> str:
    """Queue a request for flavor small; return its uuid."""
    assert control.eschedule('flavor', 'set', 'small', QUERY).code == 0
    instance = str(uuid.uuid4())
    result = control.eschedule('--flavor', 'small', '--queue', IMAGE, '--uuid', instance, *words)
    assert result.code == 0, result
    return instance


def stop_compute(compute: Ecompute) -> Ecompute:
    """Stop a compute; launch() or start() starts it again."""
    assert compute.stop() == 0
    return compute


def create_with_uuid(control: Control, instance: str, *words: str) -> Result:
    """Run the idempotent create of this instance's uuid."""
    return control.eschedule(QUERY, IMAGE, '--uuid', instance, *words)
