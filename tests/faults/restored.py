"""What the tests of restored control planes share: one query, requests for it, and the domains that come of them."""

from __future__ import annotations

import socket
import uuid
from collections import Counter

from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import guests
from tests.kit.story import IMAGE

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:16'


def domains(*computes: Ecompute) -> dict[str, int]:
    """Count the domains of each instance over all state directories."""
    return dict(Counter(instance for each in computes for instance in guests(each)))


def called(compute: Ecompute) -> str:
    """What people call one of several computes of this machine."""
    return f'{socket.gethostname()} ({compute.uuid})'


def queue(control: Control, *words: str) -> str:
    """Put a request into the queue of flavor small; its uuid."""
    assert control.eschedule('flavor', 'set', 'small', QUERY).code == 0
    instance = str(uuid.uuid4())
    done = control.eschedule('--flavor', 'small', '--queue', IMAGE, '--uuid', instance, *words)
    assert done.code == 0, done
    return instance


def stopped(compute: Ecompute) -> Ecompute:
    """Stop a compute; it is started again by launch() or start()."""
    assert compute.stop() == 0
    return compute


def ask(control: Control, instance: str, *words: str) -> Result:
    """The idempotent command."""
    return control.eschedule(QUERY, IMAGE, '--uuid', instance, *words)
