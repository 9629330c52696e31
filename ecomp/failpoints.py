"""Failpoints: named places between two steps at which a test can kill or freeze this process.

    ECOMP_FAILPOINT=claimed:kill            at every arrival: SIGKILL to this process
    ECOMP_FAILPOINT=disk-created:kill:1     at the first arrival only, counted in the file of ECOMP_FAILPOINT_FIRED
    ECOMP_FAILPOINT=claimed:stop            SIGSTOP instead: frozen until it gets SIGCONT

Separate several by commas. Before one fires, it adds a line `name pid` to the file in ECOMP_FAILPOINT_FIRED, so that a
test can assert that it did. The variables are read when a process first reaches a failpoint; unarmed, each costs one
lookup.
"""

from __future__ import annotations

import os
import threading
from functools import cache

from ecomp.errors import UsageError

# {name: the process that reaches it, and the state at that point}.
FAILPOINT_STATES = {
    'announced': 'eschedule: the attempt is put, placement has been asked, nothing is claimed',
    'claimed-some': 'eschedule: placement holds a part of what a set wants, nothing is delivered',
    'claimed': 'eschedule: placement holds the claim, nothing is delivered',
    'delivered': 'eschedule: the compute has the request, the user has no answer',
    'undone': 'eschedule: a claim that was not delivered is released, its attempt is still there',
    'tombstoned': 'eschedule: the destroy is written, the user has no answer',
    'queued': 'eschedule: the request is in its queue, the user has no answer',
    'unqueued': 'eschedule: a waiting request is taken out of its queue, the user has no answer',
    'power-asked': 'eschedule: a stop, start or reboot is written, the user has no answer',
    'host-released': 'eschedule: host forget released the claim of a destroyed instance, its keys are there',
    'host-emptied': 'eschedule: host forget has removed all leftovers, the provider is there',
    'host-unregistered': 'eschedule: host forget has removed all but the name of the host',
    'quota-counted': 'eschedule: what a project has is counted, its quota is not set',
    'quota-reckoned': 'eschedule: a quota is set, what was delivered at that moment is not counted yet',
    'host-disabled': 'eschedule: a compute is disabled, the user has no answer',
    'host-enabled': 'eschedule: a compute is enabled, the user has no answer',
    'registered': 'ecompute: the provider is there, its traits, aggregates and inventory are not set',
    'described-here': 'ecompute: which traits or aggregates are ours is written down anew, placement may not have them',
    'described': 'ecompute: traits and aggregates are set, the inventory is not',
    'republished': 'ecompute: a new etcd was told what runs here, and is not remembered as accepted yet',
    'published': 'ecompute: /computes says alive, nothing is followed yet',
    'remembered': 'ecompute: the state directory says building, nothing is reserved or made',
    'reserved': 'ecompute: an address is reserved for the guest, no record says so',
    'seeded': 'ecompute: the metadata server knows the guest, placement has not confirmed its claim',
    'confirmed': 'ecompute: placement confirms the claim, no record says so',
    'building': 'ecompute: the record says building, no worker was asked to make the guest',
    'built': 'ecompute: the guest runs, its record still says building',
    'active': 'ecompute: the record says active, its address is not known',
    'addressed': 'ecompute: /booted is written',
    'powering': 'ecompute: the record says how far a stop, start or reboot is, the step itself is not done',
    'powered': 'ecompute: a guest was asked to turn itself off, switched off or started, its record does not say so',
    'marked': 'ecompute: a request in a queue has our mark, nothing is claimed',
    'taken': 'ecompute: placement holds the claim of a request that is still in its queue',
    'moved': 'ecompute: a request from a queue is ours, nothing of it is begun',
    'failing': 'ecompute: why an instance is to end in error is remembered, nothing of it is removed',
    'destroying': 'ecompute: the record says destroying, nothing is removed',
    'removed': 'ecompute: domain and disk are gone, the metadata server still knows the guest',
    'forgotten': 'ecompute: the metadata server has forgotten the guest, its address is reserved, its claim held',
    'unreserved': 'ecompute: the address is free again, the claim is held',
    'released': 'ecompute: the claim is released, the request key is still there',
    'ended': 'ecompute: request and address are gone, the record says gone or error',
    'closing': 'ecompute: asked to stop, VCPU is not reserved yet',
    'closed': 'ecompute: VCPU is reserved, COMPUTE_STATUS_DISABLED is not set yet',
    'image-begun': 'worker: a download has its temporary name and its room, and nothing in it',
    'image-evicted': 'worker: a base volume is evicted, what is known of its URL is still there',
    'image-part': 'worker: the image is whole under its temporary name',
    'image-kept': 'worker: the base volume is there, nothing says which URL it is from',
    'image-ready': 'worker: the base volume is there, no disk',
    'disk-created': 'worker: the overlay volume is there, no domain',
    'seed-written': 'worker: the overlay volume and the seed disk are there, no domain',
    'domain-defined': 'worker: the domain is defined and off',
    'domain-started': 'worker: the domain runs, nobody has been told',
    'domain-destroyed': 'worker: the domain is off and still defined',
    'domain-undefined': 'worker: the domain is gone, its disk is there',
    'disk-deleted': 'worker: domain and disk are gone, nobody has been told',
}

ACTIONS = {'kill': 'SIGKILL', 'stop': 'SIGSTOP'}


def failpoint(name: str) -> None:
    """Kill or stop this process if a test armed this place. UsageError for an invalid setting."""
    if name in (armed := _read_armed()):
        _fire(name, *armed[name])


def _fire(name: str, action: str, max_count: int | None) -> None:
    """Record the arrival and signal this thread; no-op after `max_count` arrivals, unless None."""
    import signal  # late: commands do not need it otherwise

    fired_path = os.environ.get('ECOMP_FAILPOINT_FIRED')
    if fired_path is not None:
        # A single appending write, because several processes may arrive concurrently.
        with open(fired_path, 'a+b', buffering=0) as file:
            file.seek(0)
            fired_count = sum(line.split()[:1] == [name.encode()] for line in file.read().splitlines())
            if max_count is not None and fired_count >= max_count:
                return
            file.write(f'{name} {os.getpid()}\n'.encode())
    # Signal this thread: if another one receives it, this one continues for a moment.
    signal.pthread_kill(threading.get_ident(), signal.Signals[action])


@cache
def _read_armed() -> dict[str, tuple[str, int | None]]:
    """Read {name: (signal, maximum count or None)} from the environment, once; UsageError."""
    armed: dict[str, tuple[str, int | None]] = {}
    for setting in filter(None, os.environ.get('ECOMP_FAILPOINT', '').split(',')):
        name, _, rest = setting.partition(':')
        action, _, times = rest.partition(':')
        if name not in FAILPOINT_STATES or action not in ACTIONS or not (times or '1').isdecimal():
            raise UsageError(f'ECOMP_FAILPOINT: {setting!r} is not name:kill or name:stop of a place there is')
        if times and 'ECOMP_FAILPOINT_FIRED' not in os.environ:
            raise UsageError(f'ECOMP_FAILPOINT: {setting!r} is counted in a file, and ECOMP_FAILPOINT_FIRED names none')
        armed[name] = ACTIONS[action], int(times) if times else None
    return armed
