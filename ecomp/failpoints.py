"""Failpoints: named places between two steps where a test can kill or freeze this process.

    ECOMP_FAILPOINT=claimed:kill            at every arrival: SIGKILL to this process
    ECOMP_FAILPOINT=disk-created:kill:1     at the first arrival only, counted in the file of ECOMP_FAILPOINT_FIRED
    ECOMP_FAILPOINT=claimed:stop            SIGSTOP instead: frozen until it gets SIGCONT

Separate several by commas. Before one fires, it adds a line `name pid` to the file in ECOMP_FAILPOINT_FIRED.
"""

from __future__ import annotations

import os
import threading
from functools import cache

from ecomp.errors import UsageError

# {name: the process that reaches it, and the state at that point}.
FAILPOINT_STATES = {
    'announced': 'eschedule: the attempt is in etcd and placement has proposed candidates, but nothing is claimed',
    'claimed-some': 'eschedule: placement holds some of the claims of a set, but no request is delivered',
    'claimed': 'eschedule: placement holds the claim, but the request is not delivered',
    'delivered': 'eschedule: the request is delivered to the compute, but nothing is printed yet',
    'stack-begun': 'eschedule: the key of a new stack is written, but no attempt is announced',
    'stack-announced': 'eschedule: the attempt of an apply is in etcd, but nothing is claimed',
    'stack-claimed': 'eschedule: placement holds all claims of an apply, but nothing is delivered',
    'stack-delivered': 'eschedule: the changes of a stack are delivered, but nothing is printed yet',
    'stack-removed': 'eschedule: the requests to destroy instances of a stack are written, but nothing is printed yet',
    'evacuation-announced': 'eschedule: the attempt of an evacuation is in etcd, but nothing is claimed',
    'evacuation-claimed': 'eschedule: placement holds claims of an evacuation, but no guest of them is moved',
    'evacuated': 'eschedule: a guest of a dead host is moved to another host, but this is not printed yet',
    'adoption-announced': 'eschedule: the attempt of an adoption is in etcd, but its host is not disabled yet',
    'adoption-disabled': 'eschedule: a host is disabled for an adoption, but nothing is claimed',
    'adoption-claimed': 'eschedule: placement holds claims of an adoption, but their guests are not requested',
    'adoption-delivered': 'eschedule: guests are adopted, but not all that were named, or nothing is printed yet',
    'adoption-enabled': 'eschedule: all guests are adopted and the host is enabled again, but the attempt still exists',
    'undone': 'eschedule: a claim whose request was not delivered is released, but the attempt still exists',
    'tombstoned': 'eschedule: the request to destroy is written, but nothing is printed yet',
    'queued': 'eschedule: the request is in its queue, but nothing is printed yet',
    'unqueued': 'eschedule: a queued request is removed from its queue, but nothing is printed yet',
    'power-asked': 'eschedule: the request to stop, start or reboot is written, but nothing is printed yet',
    'changed': 'eschedule: a change of an instance is in its request, but nothing is printed yet',
    'resize-announced': 'eschedule: the attempt of a change of size is in etcd, but nothing is claimed',
    'resize-claimed': 'eschedule: placement holds the larger claim of a change of size, but it is not requested',
    'host-released': 'eschedule: host forget has released the claim of a destroyed instance, but not removed its keys',
    'host-emptied': 'eschedule: host forget has removed all leftovers of the host, but its provider still exists',
    'host-unregistered': 'eschedule: host forget has removed everything of the host except its name',
    'quota-counted': 'eschedule: the usage of a project is counted, but its quota is not set yet',
    'quota-reckoned': 'eschedule: a quota is set, but concurrent deliveries are not counted yet',
    'host-disabled': 'eschedule: a compute is disabled, but nothing is printed yet',
    'host-enabled': 'eschedule: a compute is enabled, but nothing is printed yet',
    'registered': 'ecompute: the provider exists, but its traits, aggregates and inventory are not set',
    'described-here': 'ecompute: the state directory lists our new traits or aggregates, but placement may lack them',
    'described': 'ecompute: traits and aggregates are set, but the inventory is not',
    'republished': 'ecompute: the instances are written to a new etcd, but that etcd is not recorded as accepted yet',
    'published': 'ecompute: the presence is written, but no key is watched yet',
    'remembered': 'ecompute: the instance is building in the state directory, but nothing is reserved or created',
    'reserved': 'ecompute: an address is reserved for the guest, but no record contains it',
    'seeded': 'ecompute: the metadata server knows the guest, but placement has not confirmed the claim',
    'confirmed': 'ecompute: placement has confirmed the claim, but no record is written',
    'building': 'ecompute: the instance is building in its record, but no worker has the job yet',
    'rebuilding': 'ecompute: the rebuild of a guest is begun in its record, but nothing of the guest is removed',
    'built': 'ecompute: the guest runs, but its instance is still building in its record',
    'active': 'ecompute: the instance is active in its record, but its address is unknown',
    'addressed': 'ecompute: the address of the instance is written to /booted',
    'powering': 'ecompute: the record has the next step of a stop, start or reboot, but this step is not done yet',
    'powered': 'ecompute: a guest is being shut down, or was switched off or started, but its record lacks this',
    'domain-resized': 'worker: a domain is defined for its new size, but no record has it',
    'resized': 'ecompute: a change of size has taken effect, but its claim is still the larger one',
    'adopted': 'ecompute: a domain has the adoption mark, but its instance has no record',
    'marked': 'ecompute: a queued request has our taker key, but nothing is claimed',
    'taken': 'ecompute: placement holds the claim of a request that is still in its queue',
    'moved': 'ecompute: a queued request was moved to this compute, but its build has not begun',
    'failing': 'ecompute: the reason of an error is in the state directory, but nothing of the instance is removed',
    'destroying': 'ecompute: the instance is destroying in its record, but nothing is removed',
    'removed': 'ecompute: domain and disk are deleted, but the metadata server still knows the guest',
    'forgotten': 'ecompute: the metadata server has forgotten the guest, but its address and its claim are still held',
    'unreserved': 'ecompute: the address is free again, but the claim is still held',
    'released': 'ecompute: the claim is released, but the request key still exists',
    'ended': 'ecompute: request and address are deleted, and the instance is gone or in error in its record',
    'closing': 'ecompute: it is stopping, but VCPU is not reserved yet',
    'closed': 'ecompute: VCPU is reserved, but COMPUTE_STATUS_DISABLED is not set yet',
    'image-begun': 'download: the temporary file of a download has its reserved size, but no content',
    'image-evicted': 'download: a base volume is evicted, but the note of its URL still exists',
    'image-part': 'worker: the image is complete under its temporary name',
    'image-kept': 'worker: the base volume exists, but its URL is not noted yet',
    'image-ready': 'worker: the base volume exists, but the disk does not',
    'disk-removed': 'worker: the guest to be rebuilt is off and its disk is deleted, but the new disk does not exist',
    'disk-created': 'worker: the overlay volume exists, but the domain does not',
    'seed-written': 'worker: the overlay volume and the seed exist, but the domain does not',
    'domain-defined': 'worker: the domain is defined, but not started yet',
    'domain-started': 'worker: the domain runs, but ecompute does not know it yet',
    'domain-destroyed': 'worker: the domain is off, but still defined',
    'domain-undefined': 'worker: the domain is deleted, but its disk still exists',
    'disk-deleted': 'worker: domain and disk are deleted, but ecompute does not know it yet',
}

ACTIONS = {'kill': 'SIGKILL', 'stop': 'SIGSTOP'}


def failpoint(name: str) -> None:
    """Kill or stop this process if the environment arms this failpoint."""
    if name in (actions := _parse_environment()):
        _fire(name, *actions[name])


def _fire(name: str, action: str, max_count: int | None) -> None:
    """Record the arrival and send the signal `action`, but only `max_count` times."""
    import signal  # late: commands do not need it otherwise

    if (fired_path := os.environ.get('ECOMP_FAILPOINT_FIRED')) is not None:
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
def _parse_environment() -> dict[str, tuple[str, int | None]]:
    """Return {failpoint: (signal, for how many arrivals, None: all)}, or raise UsageError."""
    actions: dict[str, tuple[str, int | None]] = {}
    for setting in filter(None, os.environ.get('ECOMP_FAILPOINT', '').split(',')):
        name, _, rest = setting.partition(':')
        action, _, times = rest.partition(':')
        if name not in FAILPOINT_STATES or action not in ACTIONS or not (times or '1').isdecimal():
            rule = 'must be NAME:kill or NAME:stop with the name of a failpoint'
            raise UsageError(f'ECOMP_FAILPOINT: {rule}, not {setting!r}')
        if times and 'ECOMP_FAILPOINT_FIRED' not in os.environ:
            file = 'ECOMP_FAILPOINT_FIRED, the file where arrivals are counted'
            raise UsageError(f'ECOMP_FAILPOINT: {setting!r} needs {file}')
        actions[name] = ACTIONS[action], int(times) if times else None
    return actions
