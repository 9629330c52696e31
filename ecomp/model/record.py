r"""The record of an instance, /instances/<compute>/<instance>, written by its ecompute.

`stages` has the first time of each stage. `attempts` counts builds in which a worker died or failed in an unknown way.
`console` is <host>:<file>. The guest reports its `host_keys` and, in `cloud_init`, a failure of cloud-init. After such
a failure it runs, but is never `ready`.

    queued -> scheduled -> building -> active <-> stopped -> destroying -> gone
                                  \-> error                      (only before the first active)

A problem after the first active is a fault, and nothing of the guest is removed. A queued instance has no record yet. A
record in state gone with compute '' belongs to a request that was removed from its queue. A record is trusted if its
compute has a request for the instance. A uuid is never used twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

from ecomp.errors import put_before_fix
from ecomp.model import boots as of_boots
from ecomp.model import keys
from ecomp.model.allocation import MAX_AMOUNT, MAX_SUM, Resources
from ecomp.model.boots import Boot
from ecomp.model.choose import PlacementReason
from ecomp.model.group import Membership
from ecomp.model.order import (
    DRAIN,
    ORDER_FIELDS,
    RECORDED_FIELDS,
    STOP,
    InvalidRequest,
    Order,
    PowerAction,
    Request,
    Resize,
    parse_request,
)
from ecomp.model.parsers import TEXT, UUID, check, dict_of, list_of, number, one_of, text
from ecomp.model.states import ACTIVE, ERROR, GONE, QUEUED, RETENTION_SECONDS, SCHEDULED, STAGES, STATES, STOPPED
from ecomp.model.stored import Field, decode, lenient, nested, optional, require_same, sparse, stored, to_dict
from ecomp.model.text import make_printable
from ecomp.model.user_data import GuestFailure, parse_host_keys

# The fault of an instance whose destroy `host forget` completes: if the host was only cut off, its domain still runs.
UNSEEN_END_FAULT = 'its host was forgotten: the end of its guest was not observed'

_OPTIONAL = optional(TEXT)
# The `rebuilt` of a record is the number of a rebuild that is done or has failed, or, with this, of one under way.
BEGUN = ':begun'
_REBUILT = check('a number', lambda value: isinstance(value, str) and re.fullmatch(f'[0-9]{{1,16}}({BEGUN})?', value))


@stored(network=TEXT, mac=TEXT, address=_OPTIONAL, source=_OPTIONAL, reservation=optional(TEXT, name='expected'))
class Interface(NamedTuple):
    """An interface of a guest on a libvirt network or a bridge of the host.

    `address` is None until it is known. `source` is where it was seen: lease, arp or agent. `reservation`, in the
    JSON `expected`, is the address that the network's DHCP reserves before the guest boots, or None.
    """

    network: str
    mac: str
    address: str | None = None
    source: str | None = None
    reservation: str | None = None


@stored(stage=TEXT, reason=TEXT, cleaned=TEXT)
@dataclass(frozen=True)
class Failure:
    """Why an instance is in error: the stage that failed, the reason, what was cleaned up."""

    stage: str
    reason: str
    cleaned: str
    # That of BuildFailed, which is not stored.
    is_host_fault: bool = field(default=False, compare=False)

    @property
    def cause_and_subject(self) -> tuple[str, str]:
        """The cause in `reason`, and the URL or file before it, which is long and so printed last."""
        subject, _, cause = self.reason.partition(': ')
        return (cause, subject) if cause and '/' in subject and ' ' not in subject else (self.reason, '')

    def __str__(self) -> str:
        cause, subject = self.cause_and_subject
        remarks = '; '.join(filter(None, (self.cleaned, subject)))
        return f'{self.stage}: {put_before_fix(cause, f" ({remarks})")}'


@stored(stage=TEXT, done=number(0, 2**63 - 1), total=optional(number(0, 2**63 - 1)))
class Progress(NamedTuple):
    """The bytes of a long stage, done and in total: `image, 34 of 600 MB`, or `image, 34 MB`."""

    stage: str
    done: int
    total: int | None = None

    def __str__(self) -> str:
        total = '' if self.total is None else f' of {self.total / 1e6:.0f}'
        return f'{self.stage}, {self.done / 1e6:.0f}{total} MB'


# Fields that every record has, in this order; others follow if they have a value.
_ALWAYS_WRITTEN = (
    *('instance', 'compute', 'state', 'image', 'resources', 'query', 'user_id', 'project_id', 'addresses', 'console'),
    *('stages', 'error', 'fault', 'attempts', 'name', 'power', 'progress', 'group', 'why'),
)
_FIELDS = dict.fromkeys(_ALWAYS_WRITTEN, _OPTIONAL) | {name: ORDER_FIELDS[name] for name in RECORDED_FIELDS}
_FIELDS |= {
    'instance': Field(UUID),
    'compute': Field(check("a uuid or ''", lambda compute: compute == '' or keys.is_uuid(compute))),
    'state': Field(one_of(sorted(STATES))),
    'resources': optional(dict_of(number(0, MAX_SUM))),
    'addresses': optional(list_of(nested(Interface))),
    'error': optional(nested(Failure)),
    'attempts': optional(number(0, MAX_AMOUNT)),
    'name': ORDER_FIELDS['name']._replace(is_sparse=False),
    'progress': lenient(nested(Progress)),
    'group': optional(text(lambda name: Membership(name) if name else None), write=lambda group: group.name),
    'why': lenient(nested(PlacementReason)),
    'host_keys': sparse(parse_host_keys),
    'cloud_init': lenient(nested(GuestFailure), is_sparse=True),
    'resize': sparse(nested(Resize)),
    'rebuilt': sparse(_REBUILT),
    'last_boot': sparse(of_boots.parse_last, name='boots', write=lambda boot: [to_dict(boot)]),
}


@stored(1, 'record', **_FIELDS)
@dataclass(frozen=True)
class Record(Order):
    """The state of an instance, and the fields of its order that are recorded."""

    compute: str  # '' if none has it
    state: str
    _: KW_ONLY
    resources: Resources = field(default_factory=dict)
    addresses: tuple[Interface, ...] = ()
    console: str | None = None
    error: Failure | None = None
    fault: str | None = None
    attempts: int = 0
    power: str | None = None
    progress: Progress | None = None
    why: PlacementReason | None = None
    host_keys: tuple[str, ...] = ()
    cloud_init: GuestFailure | None = None
    last_boot: Boot | None = None
    resize: Resize | None = None  # what its domain is defined for, until the guest has started with it; {} if unknown
    rebuilt: str | None = None

    def enter_state(self, state: str, now: str, *stages: str) -> Record:
        """Return the record in another state, without progress, and with new `stages` at `now`."""
        new_stages = {stage: now for stage in stages if stage not in self.stages}
        console = None if state in RETENTION_SECONDS else self.console  # that file is removed with it
        return replace(self, state=state, stages={**self.stages, **new_stages}, progress=None, console=console)

    def mark_running(self, reason: str, now: str) -> Record:
        """Return the record as active, with a new boot if the guest did not run before."""
        record, last = self.enter_state(ACTIVE, now), self.last_boot
        if last is not None and of_boots.STOPPED not in last.stages:
            return record
        stages, previous_stop = {of_boots.STARTED: now}, last.stages[of_boots.STOPPED] if last else ''
        boot = Boot(last.number + 1 if last else 1, reason, stages, previous_stop)
        # In a new boot cloud-init runs again.
        return replace(record, last_boot=boot, cloud_init=None)

    def mark_off(self, now: str) -> Record:
        """Return the record as stopped, with the stop of its last boot at `now` unless it has one."""
        boot = self.last_boot and self.last_boot.with_stage(of_boots.STOPPED, now)
        return replace(self.enter_state(STOPPED, now), last_boot=boot)

    def mark_stage(self, stage: str, now: str) -> Record:
        """Return the record with a stage at `now`, also in its last boot, unless it is there."""
        boot = self.last_boot and self.last_boot.with_stage(stage, now)
        return replace(self.enter_state(self.state, now, stage), last_boot=boot)

    @property
    def reached_stages(self) -> Mapping[str, str]:
        """The ISO time of each reached stage, where those of a boot are from the last boot only."""
        boot = self.last_boot
        if boot is None:
            return self.stages
        return {**{name: time for name, time in self.stages.items() if name not in of_boots.STAGES}, **boot.stages}

    @property
    def sizes(self) -> list[Resources]:
        """The sizes that its domain may have: the current one, and that of a pending resize."""
        return [self.resources, *([self.resize.resources] if self.resize else [])]

    @property
    def address(self) -> str | None:
        return self.addresses[0].address if self.addresses else None

    def has_resize_failed(self, resize: Resize | None) -> bool:
        return resize is not None and self.resize == resize._replace(resources={})

    def has_rebuilt(self, number: int) -> bool:
        """Return whether the rebuild of this number, or a later one, is done or has failed."""
        done, begun, _ = (self.rebuilt or '0').partition(BEGUN)
        return number < int(done) + (not begun)


# What a user may change of an instance that exists. Its compute copies it into the record.
CHANGEABLE = ('name', 'is_protected', 'query')


def copy_changes(record: Record, request: Request) -> Record:
    """Return the record with the request's values of the CHANGEABLE fields."""
    # A request of 2019 has neither name nor query.
    changes = {name: value for name in CHANGEABLE if (value := getattr(request, name)) is not None}
    # Each plan asks this of each instance, and a copy takes twenty times as long.
    is_same = all(getattr(record, name) == value for name, value in changes.items())
    return record if is_same else replace(record, **changes)


def copy_holdings(record: Record, request: Request) -> Record:
    """Return the record with the request's name and resources, for the end to release them."""
    return replace(copy_changes(record, request), resources=request.resources or record.resources)


def make_record(compute: str, request: Request, now: str) -> Record:
    """Make a request's first record, in state scheduled, since `now` if the request has no time."""
    fields = request.copy_recorded_fields(resources=request.resources, why=request.why)
    # It is built from what is requested now. Of a guest that is there, a lost record does not tell what was done.
    fields |= {'rebuilt': str(request.rebuild)} if request.rebuild else {}
    return Record(compute=compute, state=SCHEDULED, **fields).enter_state(SCHEDULED, now, 'scheduled')


def make_refused_record(compute: str, request: InvalidRequest, now: str) -> Record:
    """Make the first record of a malformed request, with what has to be released."""
    name, group, project, resources = request.holdings
    membership = Membership(group) if group else None
    holdings: dict[str, Any] = {'name': name, 'group': membership, 'project_id': project, 'resources': resources}
    return Record(request.instance, compute, SCHEDULED, stages={'scheduled': now}, **holdings)


def make_scheduled_record(key: str, value: bytes) -> Record:
    """Make the record to show until a compute writes it, with a fault for a malformed request."""
    compute, instance = key.split('/')[-2:]
    request = parse_request(compute, key, value)
    if isinstance(request, InvalidRequest):
        return replace(make_refused_record(compute, request._replace(instance=instance), ''), fault=request.reason)
    return make_record(compute, request, '')


def plan_drain(
    records: Mapping[str, Record | None], powers: Mapping[str, PowerAction | None], stopped_before: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return which guests of a drained host to stop (not `stopped_before`), and which to await."""
    to_stop, to_await = [], []
    for instance, record in records.items():
        power = powers.get(instance)
        pending = power if record and power and not power.is_done(record.power) else None
        if record is None or record.state not in (ACTIVE, STOPPED, ERROR, GONE) or (pending and pending.action == STOP):
            to_await.append(instance)
        # One that was stopped before, and runs again, was started by its user, and is not waited for either.
        elif (record.state == ACTIVE or (record.state == STOPPED and pending)) and instance not in stopped_before:
            to_stop.append(instance)
    return to_stop, to_await


def is_stopped_by_drain(record: Record | None, power: PowerAction | None) -> bool:
    """Return whether a drain stopped the guest or is stopping it, as its latest power action."""
    if record is None or power is None or power.reason != DRAIN:
        return False
    return record.state == STOPPED or (record.state == ACTIVE and not power.is_done(record.power))


def from_json(value: bytes, instance: str | None = None, compute: str | None = None) -> Record:
    """Parse the record of this instance and compute (None: any), or raise ValueError."""
    record = decode(Record, value)
    if not record.compute and record.state != GONE:
        raise ValueError(f'compute: expected a uuid in state {record.state}')
    require_same('instance', record.instance, instance or record.instance)
    require_same('compute', record.compute, record.compute if compute is None else compute)
    return record


def parse_or_none(value: bytes | None, instance: str | None = None, compute: str | None = None) -> Record | None:
    """Parse a record as from_json() does, but return None if it is malformed or `value` is None."""
    try:
        return from_json(value, instance, compute) if value is not None else None
    except ValueError:
        return None


# What an instance waits for before each stage, in the user's words.
WAIT_REASONS = {
    'requested': 'its compute to accept the request',
    'scheduled': 'its compute to accept the request',
    'image': 'its image',
    'disk': 'its disk',
    'started': 'its domain to start',
    'addressed': 'its DHCP lease',
    'ready': 'cloud-init to finish',
}
QUEUE_WAIT_REASON = 'a compute to take the request'


def describe_wait(record: Record | None) -> str:
    if record is not None and record.state == QUEUED:
        return f'{QUEUE_WAIT_REASON}: {record.fault}' if record.fault else QUEUE_WAIT_REASON
    if record is not None and record.state == STOPPED:
        return 'a user to start it (it is stopped)'
    reached = record.reached_stages if record else {}
    stage = next((stage for stage in STAGES if stage not in reached), STAGES[-1])
    progress = record.progress if record else None
    text = str(progress) if progress is not None and progress.stage == stage else WAIT_REASONS[stage]
    return f'{text} ({make_printable(record.fault)})' if record is not None and record.fault else text


def describe_failure(record: Record) -> str:
    return f'{record.instance}: failed' + (f' at stage {make_printable(str(record.error))}' if record.error else '')


def describe_cloud_init_failure(instance: str, guest_failure: GuestFailure) -> str:
    failure = f'{instance}: cloud-init failed at stage {guest_failure.stage}: {guest_failure.reason}'
    return f'{make_printable(failure)}; the guest keeps running'
