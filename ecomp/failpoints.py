"""Failpoints: named places between two steps at which a test can kill or freeze this process.

    ECOMP_FAILPOINT=claimed:kill            at every arrival: SIGKILL to this process
    ECOMP_FAILPOINT=disk-created:kill:1     at the first arrival only, counted in the file of ECOMP_FAILPOINT_FIRED
    ECOMP_FAILPOINT=claimed:stop            SIGSTOP instead: frozen until it gets SIGCONT

Separate several by commas. Before one fires, it adds a line `name pid` to the file in ECOMP_FAILPOINT_FIRED. A process
reads the variables once; an unarmed failpoint costs one lookup.
"""

from __future__ import annotations

import os
import threading
from functools import cache

from ecomp.errors import UsageError

# {name: the process that reaches it, and the state at that point}.
FAILPOINT_STATES = {
    'announced': 'eschedule: the attempt is in etcd, placement has proposed candidates, nothing is claimed',
    'claimed-some': 'eschedule: placement holds a part of the claims of a set, nothing is delivered',
    'claimed': 'eschedule: placement holds the claim, nothing is delivered',
    'delivered': 'eschedule: the compute has the request, nothing is printed',
    'undone': 'eschedule: a claim that was not delivered is released, its attempt still exists',
    'tombstoned': 'eschedule: the destroy is written, nothing is printed',
    'queued': 'eschedule: the request is in its queue, nothing is printed',
    'unqueued': 'eschedule: a waiting request is removed from its queue, nothing is printed',
    'power-asked': 'eschedule: a stop, start or reboot is written, nothing is printed',
    'host-released': 'eschedule: host forget has released the claim of a destroyed instance, its keys still exist',
    'host-emptied': 'eschedule: host forget has removed all leftovers, the provider still exists',
    'host-unregistered': 'eschedule: host forget has removed all but the name of the host',
    'quota-counted': 'eschedule: the usage of a project is counted, its quota is not set',
    'quota-reckoned': 'eschedule: a quota is set, concurrent deliveries are not counted yet',
    'host-disabled': 'eschedule: a compute is disabled, nothing is printed',
    'host-enabled': 'eschedule: a compute is enabled, nothing is printed',
    'registered': 'ecompute: the provider exists, its traits, aggregates and inventory are not set',
    'described-here': 'ecompute: the state directory lists our new traits or aggregates, placement may lack them',
    'described': 'ecompute: traits and aggregates are set, the inventory is not',
    'republished': 'ecompute: the instances are published to a new etcd, which is not recorded as accepted yet',
    'published': 'ecompute: the presence is written, no key is watched yet',
    'remembered': 'ecompute: the state directory says building, nothing is reserved or created',
    'reserved': 'ecompute: an address is reserved for the guest, no record has it',
    'seeded': 'ecompute: the metadata server knows the guest, placement has not confirmed its claim',
    'confirmed': 'ecompute: placement has confirmed the claim, no record is written',
    'building': 'ecompute: the record says building, no worker has the job yet',
    'built': 'ecompute: the guest runs, its record still says building',
    'active': 'ecompute: the record says active, its address is unknown',
    'addressed': 'ecompute: /booted is written',
    'powering': 'ecompute: the record has the next step of a stop, start or reboot, which is not done yet',
    'powered': 'ecompute: a guest is being shut down, was switched off or started, its record does not have it yet',
    'marked': 'ecompute: a request in a queue has our taker key, nothing is claimed',
    'taken': 'ecompute: placement holds the claim of a request that is still in its queue',
    'moved': 'ecompute: a request from a queue is ours, its build has not begun',
    'failing': 'ecompute: the reason of an error is in the state directory, nothing of the instance is removed',
    'destroying': 'ecompute: the record says destroying, nothing is removed',
    'removed': 'ecompute: domain and disk are deleted, the metadata server still knows the guest',
    'forgotten': 'ecompute: the metadata server has forgotten the guest, its address is reserved, its claim held',
    'unreserved': 'ecompute: the address is free again, the claim is held',
    'released': 'ecompute: the claim is released, the request key still exists',
    'ended': 'ecompute: request and address are deleted, the record says gone or error',
    'closing': 'ecompute: it is stopping, VCPU is not reserved yet',
    'closed': 'ecompute: VCPU is reserved, COMPUTE_STATUS_DISABLED is not set yet',
    'image-begun': 'worker: the temporary file of a download has its reserved size, but no content',
    'image-evicted': 'worker: a base volume is evicted, the note of its URL still exists',
    'image-part': 'worker: the image is complete under its temporary name',
    'image-kept': 'worker: the base volume exists, its URL is not noted yet',
    'image-ready': 'worker: the base volume exists, the disk does not',
    'disk-created': 'worker: the overlay volume exists, the domain does not',
    'seed-written': 'worker: the overlay volume and the seed exist, the domain does not',
    'domain-defined': 'worker: the domain is defined and off',
    'domain-started': 'worker: the domain runs, but ecompute does not know it yet',
    'domain-destroyed': 'worker: the domain is off and still defined',
    'domain-undefined': 'worker: the domain is deleted, its disk still exists',
    'disk-deleted': 'worker: domain and disk are deleted, but ecompute does not know it yet',
}

ACTIONS = {'kill': 'SIGKILL', 'stop': 'SIGSTOP'}


def failpoint(name: str) -> None:
    """Kill or stop this process if a test armed this place. UsageError for an invalid setting."""
    if name in (armed := _read_armed()):
        _fire(name, *armed[name])


def _fire(name: str, action: str, max_count: int | None) -> None:
    """Record the arrival in the file, if any, and signal this thread; no-op if `max_count` arrivals are recorded."""
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
            raise UsageError(f'ECOMP_FAILPOINT: {setting!r} is not name:kill or name:stop with the name of a failpoint')
        if times and 'ECOMP_FAILPOINT_FIRED' not in os.environ:
            raise UsageError(f'ECOMP_FAILPOINT: {setting!r} needs ECOMP_FAILPOINT_FIRED, the file that counts it')
        armed[name] = ACTIONS[action], int(times) if times else None
    return armed
