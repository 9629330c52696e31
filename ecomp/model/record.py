r"""An instance's record: what the key /instances/<compute>/<instance> holds, written by its ecompute.

JSON, versioned: {"version", "instance", "compute", "state", "image", "resources": {class: amount},
"query", "user_id", "project_id", "addresses": [{"network", "mac", "address", "source", "expected"}],
"console": "<host>:<file>" or null, "stages": {stage: ISO time}, each the first time it was reached, "boots": see
ecomp.model.boots (left out before the first), "error": {"stage", "reason", "cleaned"} or null,
"fault": text or null, "attempts": how often a worker died of it or failed in an unknown way, "name": text or null,
"group": its name or null, "why": {"weigh", "weight", "of"} (how it came to be on its compute) or null,
"power": see Power, "progress": {"stage", "done", "total"} in bytes, while that stage takes long, or null}.
Only where there is something to say, and by the guest's own first word: "host_keys": ["<type> <base64>"], its sshd's;
"cloud_init": {"stage", "reason"}, what failed of it: then `ready` is never reached, and the guest goes on.

    queued -> scheduled -> building -> active <-> stopped -> destroying -> gone
                                  \-> error                      (only before the first active)

Trouble after the first active is a fault, and nothing of the guest is removed. What is queued has no record yet; gone
without a compute is what was taken out of its queue. A record counts if it is of the compute that is asked for the
instance; of several, of the one that holds its claim (see ecomp.model.host). A uuid is never used twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ecomp.model import boots as of_boots
from ecomp.model import keys
from ecomp.model.allocation import LARGEST, Resources, is_amount
from ecomp.model.boots import Boot, Boots
from ecomp.model.choose import Why, why_from
from ecomp.model.group import Membership
from ecomp.model.guest import GuestFailure, failed, host_keys
from ecomp.model.json_object import dump, is_version, load_if_object, load_object
from ecomp.model.order import FIELDS, REASON_LIMIT, Invalid, Order, Request
from ecomp.model.text import printable

QUEUED, SCHEDULED, BUILDING, ACTIVE, STOPPED = 'queued', 'scheduled', 'building', 'active', 'stopped'
DESTROYING, GONE, ERROR = 'destroying', 'gone', 'error'
# No record says queued: what waits for a compute has none.
STATES = frozenset({SCHEDULED, BUILDING, ACTIVE, STOPPED, DESTROYING, GONE, ERROR})

STAGES = ('requested', 'scheduled', 'image', 'disk', 'started', 'addressed', 'ready')

KEPT = {GONE: 24 * 3600, ERROR: 7 * 24 * 3600}
"""Seconds a record stays after its end, on a lease."""


def timestamp(now: datetime) -> str:
    """ISO 8601, UTC, milliseconds."""
    return now.astimezone(UTC).isoformat(timespec='milliseconds').replace('+00:00', 'Z')


VERSION = 1


@dataclass(frozen=True)
class Interface:
    """One interface of a guest, on a network of libvirt's or a bridge of the host's.

    `address` is None until the guest has one; `source` is what said so (see Address). `expected` is what is reserved
    for it in the network's DHCP, known before the guest boots; None where nothing is.
    """

    network: str
    mac: str
    address: str | None = None
    source: str | None = None
    expected: str | None = None


@dataclass(frozen=True)
class Failure:
    """Why an instance is in error: the stage it broke in, a plain sentence, and what was cleaned up."""

    stage: str
    reason: str
    cleaned: str


@dataclass(frozen=True)
class Progress:
    """How far a stage is that takes long: bytes done, of a total that may not be known."""

    stage: str
    done: int
    total: int | None = None

    def __str__(self) -> str:
        """`image, 34 of 600 MB`."""
        of = '' if self.total is None else f' of {self.total / 1e6:.0f}'
        return f'{self.stage}, {self.done / 1e6:.0f}{of} MB'


@dataclass(frozen=True)
class Record(Order):
    """What is known of one instance, and of what was asked for what a record has. `compute` '': none has taken it."""

    compute: str
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
    why: Why | None = None
    host_keys: tuple[str, ...] = ()
    cloud_init: GuestFailure | None = None
    boots: Boots = ()

    def at(self, state: str, now: str, *stages: str) -> Record:
        """The record in another state, the stages reached at `now` (the first time counts)."""
        new = {stage: now for stage in stages if stage not in self.stages}
        console = None if state in KEPT else self.console  # that file is removed with it
        return replace(self, state=state, stages={**self.stages, **new}, progress=None, console=console)

    def on(self, reason: str, now: str) -> Record:
        """The record of a guest that was seen running at `now`: in a new boot, if it was off before."""
        before = self.off(now) if self.state == STOPPED else self  # an older ecompute writes no boots' ends
        begun = of_boots.begun(before.known_boots, reason, now)
        # In a new boot cloud-init runs again.
        failed = self.cloud_init if begun == self.known_boots else None
        return replace(before.at(ACTIVE, now), boots=begun, cloud_init=failed)

    def off(self, now: str) -> Record:
        """The record of a guest that was seen off at `now`."""
        return replace(self.at(STOPPED, now), boots=of_boots.reached(self.known_boots, of_boots.STOPPED, now))

    def has(self, stage: str, now: str) -> Record:
        """The record of a guest that reached a stage in its last boot."""
        return replace(self.at(self.state, now, stage), boots=of_boots.reached(self.known_boots, stage, now))

    @property
    def known_boots(self) -> Boots:
        """The boots, of which an older ecompute wrote the first alone, and among the stages."""
        return of_boots.of(self.boots, self.stages)

    @property
    def boot(self) -> Boot | None:
        """The last boot; None before the first."""
        return of_boots.numbered(self.known_boots, None)

    @property
    def reached(self) -> Mapping[str, str]:
        """The stages, with the times of the last boot for those that come with each."""
        boot = self.boot
        if boot is None:
            return self.stages
        return {**{name: time for name, time in self.stages.items() if name not in of_boots.STAGES}, **boot.stages}

    @property
    def address(self) -> str | None:
        """The first interface's address."""
        return self.addresses[0].address if self.addresses else None


def recorded(order: Order) -> dict[str, Any]:
    """The fields of an order that a record has, by name. Of its group that is the name."""
    group = Membership(order.group.name) if order.group else None
    fields = {each.name: getattr(order, each.name) for each in FIELDS if each.recorded}
    return {'instance': order.instance, **fields, 'group': group}


def new_record(compute: str, request: Request, now: str) -> Record:
    """The first record of a request: it has reached its compute."""
    record = Record(compute=compute, state=SCHEDULED, resources=request.resources, why=request.why, **recorded(request))
    return record.at(SCHEDULED, now, 'scheduled')


def refused_record(compute: str, wish: Invalid, now: str) -> Record:
    """The first record of a request that is not understood: with what it shares, for its end to let go of."""
    shares = wish.shares
    return Record(
        instance=wish.instance,
        compute=compute,
        state=SCHEDULED,
        resources=shares.resources,
        project_id=shares.project_id,
        stages={'scheduled': now},
        name=shares.name,
        group=Membership(shares.group) if shares.group else None,
    )


_WRITTEN = (
    *('version', 'instance', 'compute', 'state', 'image', 'resources', 'query', 'user_id', 'project_id', 'addresses'),
    *('console', 'stages', 'error', 'fault', 'attempts', 'name', 'power', 'progress', 'group', 'why'),
)
"""The fields that each record has, in the order in which it is shown; any other follows where it has a value."""


def to_dict(record: Record) -> dict[str, Any]:
    """The record as the JSON object that users and etcd see."""
    left_out = {each.name for each in FIELDS if not each.recorded}
    values = {name: value for name, value in asdict(record).items() if name not in left_out}
    # What has no value is left out, but for what 1.0 wrote; 0 is a value.
    values = {name: value for name, value in values.items() if name in _WRITTEN or value not in (None, ())}
    named = {'version': VERSION, 'group': record.group_name, 'why': record.why._asdict() if record.why else None}
    return dict.fromkeys(_WRITTEN) | values | named


def to_json(record: Record) -> str:
    """The record as etcd holds it."""
    return dump(to_dict(record))


def from_json(value: bytes, instance: str | None = None, compute: str | None = None) -> Record:
    """The record in an etcd value. ValueError for one of a newer version, or none at all.

    So also for one of another `instance` or `compute` than its key says; None: whichever. Fields that are not known
    here are passed over.
    """
    try:
        record = _record(load_object(value))
    except ValueError as error:
        raise ValueError(printable(str(error))[:REASON_LIMIT]) from error
    except RecursionError as error:  # a reason quotes what is wrong
        raise ValueError('not a record: nested too deeply') from error
    if instance not in (None, record.instance):
        raise ValueError(f'a record of instance {record.instance}, not of {instance}')
    if compute not in (None, record.compute):
        raise ValueError(f'a record of compute {record.compute or "none"}, not of {compute or "none"}')
    return record


def is_newer(value: bytes) -> bool:
    """True for what says of itself that a newer ecomp wrote it: whoever does not know its fields leaves it alone."""
    version = load_if_object(value).get('version')
    return type(version) is int and version > VERSION


def _record(data: Mapping[str, Any]) -> Record:
    version = data.get('version')
    if not is_version(version, VERSION):
        raise ValueError(f'a record of version {version!r}: this ecomp reads up to {VERSION}, install a newer one')
    state, error = _take(data, 'state', str), _take(data, 'error', dict | None, None)
    if state not in STATES:
        raise ValueError(f'not a record: state is {state!r}')
    return Record(
        _uuid(data, 'instance'),
        _compute(data, state),
        state,
        **_asked(data),
        resources=_resources(data),
        addresses=tuple(_interface(each) for each in _take(data, 'addresses', list, [])),
        console=_take(data, 'console', str | None, None),
        error=Failure(*(_take(error, name, str) for name in ('stage', 'reason', 'cleaned'))) if error else None,
        fault=_take(data, 'fault', str | None, None),
        attempts=_attempts(data),
        power=_take(data, 'power', str | None, None),
        progress=_progress(data.get('progress')),
        why=why_from(data.get('why')),
        host_keys=host_keys(data.get('host_keys')),
        cloud_init=_cloud_init(data.get('cloud_init')),
        boots=of_boots.parse(data.get('boots')),
    )


def _asked(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a record has of the order."""
    group = _take(data, 'group', str | None, None)
    values: dict[str, Any] = {'group': Membership(group) if group else None}
    for each in FIELDS:
        if each.recorded and each.name not in values:
            refusal = ValueError(f'not a record: {each.name} is {data.get(each.name)!r}')
            try:
                values[each.name] = each.parse(data, each.name)
            except ValueError:
                raise refusal from None
            if data.get(each.name, '') is None and values[each.name] is not None:
                raise refusal
    return values


def _take(data: Mapping[str, Any], name: str, kind: Any, *default: Any) -> Any:
    """A field of this kind, or its default; ValueError if it is something else, or must be there."""
    if name not in data and default:
        return default[0]
    value = data.get(name)
    # True is an int to Python.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f'not a record: {name} is {value!r}')
    return value


def _resources(data: Mapping[str, Any]) -> dict[str, int]:
    there = _take(data, 'resources', dict, {})
    values = {name: _take(there, name, int) for name in there}
    if not all(map(is_amount, values.values())):
        raise ValueError(f'not a record: resources is {values!r}')
    return values


def _attempts(data: Mapping[str, Any]) -> int:
    attempts: int = _take(data, 'attempts', int, 0)
    if not is_amount(attempts, LARGEST):
        raise ValueError(f'not a record: attempts is {attempts}')
    return attempts


def _uuid(data: Mapping[str, Any], name: str) -> str:
    if not keys.is_uuid(text := _take(data, name, str)):
        raise ValueError(f'not a record: {name} is {text!r}')
    return str(text)


def _compute(data: Mapping[str, Any], state: str) -> str:
    """What is gone may never have had one: it was taken out of its queue."""
    return '' if state == GONE and data.get('compute') == '' else _uuid(data, 'compute')


def _interface(data: Any) -> Interface:
    if not isinstance(data, dict):
        raise ValueError(f'not a record: an address is {data!r}')
    known = (_take(data, name, str | None, None) for name in ('address', 'source', 'expected'))
    return Interface(_take(data, 'network', str), _take(data, 'mac', str), *known)


def _cloud_init(data: Any) -> GuestFailure | None:
    """A guest's own words: what is not understood is passed over."""
    return failed(data.get('stage'), data.get('reason')) if isinstance(data, dict) else None


def _progress(data: Any) -> Progress | None:
    """It is gone in a second, and nothing depends on it: what is not understood is passed over."""
    if not isinstance(data, dict):
        return None
    try:
        found = Progress(_take(data, 'stage', str), _take(data, 'done', int), _take(data, 'total', int | None, None))
    except ValueError:
        return None
    return found if all(0 <= each < 2**63 for each in (found.done, found.total or 0)) else None


WAITS_FOR = {
    'requested': 'its compute to take it',
    'scheduled': 'its compute to take it',
    'image': 'its image',
    'disk': 'its disk',
    'started': 'its domain to start',
    'addressed': 'DHCP lease',
    'ready': 'cloud-init to finish',
}
"""What an instance that is on its way to a stage waits for, in its user's words."""
IN_QUEUE = 'a compute to take it'
"""What one in a queue waits for."""


def waits_for(record: Record | None) -> str:
    """What an instance is waiting for now, and how far that is if it is known: `image, 34 of 600 MB`."""
    if record is not None and record.state == QUEUED:
        return f'{IN_QUEUE}: {record.fault}' if record.fault else IN_QUEUE
    if record is not None and record.state == STOPPED:
        return 'somebody to start it: it is stopped'
    reached = record.reached if record else {}
    stage = next((stage for stage in STAGES if stage not in reached), STAGES[-1])
    progress = record.progress if record else None
    what = str(progress) if progress is not None and progress.stage == stage else WAITS_FOR[stage]
    return f'{what} ({printable(record.fault)})' if record is not None and record.fault else what


def failure(record: Record) -> str:
    """Why an instance is in error, in one line."""
    if record.error is None:
        return f'{record.instance}: failed'
    error = record.error
    return f'{record.instance}: failed at stage ' + printable(f'{error.stage}: {error.reason} ({error.cleaned})')


def not_ready(instance: str, failed: GuestFailure) -> str:
    """Why a guest will never be ready, in one line: cloud-init's own words."""
    return printable(f'{instance}: cloud-init failed at stage {failed.stage}: {failed.reason}') + '; the guest goes on'
