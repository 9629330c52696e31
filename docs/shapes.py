"""Parse the output of eschedule: the fields that each command prints with `-f json` or `-f yaml`.

`events` has no `-f yaml`: it prints one JSON object per line. The tests validate the output of every command against
the schema of that command.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from ecomp.cli.commands import FAMILIES, load_rows
from ecomp.model.apply import ACTIONS
from ecomp.model.boots import REASONS
from ecomp.model.choose import STRATEGIES
from ecomp.model.events import KINDS
from ecomp.model.finding import ERROR, WARNING
from ecomp.model.group import POLICIES
from ecomp.model.host import CLOSED, DISABLED, ORPHANED, SILENT, UP
from ecomp.model.order import USER_TEXTS
from ecomp.model.record import Record
from ecomp.model.states import QUEUED, STATES
from ecomp.model.stored import CODECS

Schema = Mapping[str, Any]


def _is(kind: str, description: str = '', **more: Any) -> Schema:
    # The description of what may be null says when it is.
    return {'type': [kind, 'null'] if 'null' in description else kind, 'description': description, **more}


def _fields(fields: Mapping[str, Schema], description: str = '', needs: str = '', may: str = '') -> Schema:
    """Make a schema of an object with only these fields.

    `needs` are the fields that are always present; '' means all but those in `may`.
    """
    required = needs.split() or [name for name in fields if name not in may.split()]
    return _is('object', description, properties=fields, required=required, additionalProperties=False)


def _object(description: str = '', **fields: Schema) -> Schema:
    """Make a schema of an object that always has these fields and no others."""
    return _fields(fields, description)


def _map(description: str, item: Schema) -> Schema:
    return _is('object', description, additionalProperties=item)


def many(of: Schema, description: str = '') -> Schema:
    return _is('array', description, items=of)


def one_or_many(of: Schema) -> Schema:
    return {'anyOf': [of, many(of)]}


def _text(description: str, **more: Any) -> Schema:
    return _is('string', description, **more)


UUID = '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
_INSTANCE = _text('uuid of the instance', pattern=UUID)
_COMPUTE = _text('uuid of the compute', pattern=UUID)
_ON = _text('host name of the compute; null if unknown')
_SAME = {**_ON, 'description': 'same as `host`'}
_NAME = _text('name of the instance; null if it has none')
_STATE = _text('state of the instance', enum=sorted({QUEUED, *STATES}))
_ADDRESS = _text('address of the first interface; null if none is known')
_ERROR = _object(
    'reason of the failure; null without a failure',
    code=_is('integer', 'exit code of this failure'), said=_text('line that stderr reports'),
)  # fmt: skip
_AMOUNTS = _map('amounts by resource class', _is('integer', 'amount (memory in MiB, disk in GiB)'))
_POLICY = _text('policy of the group', enum=sorted(POLICIES))
_STRICT = _is(
    'boolean', 'true: an instance that would break the policy is refused; false: computes where it would are tried last'
)


def _single_outcome(**extra_fields: Schema) -> Schema:
    fields = {
        'word': _text('argument as typed'),
        **extra_fields,
        'said': many(_text('line that stderr reports'), 'what stderr reports about this argument, except `error`'),
    }
    return _fields({**fields, 'error': _ERROR})


def _outcome(**extra_fields: Schema) -> Schema:
    return one_or_many(_single_outcome(**extra_fields))


_WEIGHED = _fields({
    'weigh': _text(
        f'order in which computes were tried: {", ".join(STRATEGIES)}, or queue (a compute took the request)'),
    'weight': _is('number', 'weight of the chosen compute, 1 is the best; null without weights'),
    'of': _is('integer', 'number of computes that had room for the instance'),
    'troubled': _is('boolean', 'true if it reported that it could not build, and no other compute had room'),
    'has_image': _is('boolean', 'true if it was preferred to equal ones because it had the image'),
}, 'how the compute was chosen; null if unknown', may='troubled has_image')  # fmt: skip
_INTERFACE = _object(
    network=_text('libvirt network, or bridge'), mac=_text('MAC address'),
    address=_text('address that the guest uses; null if none is known'),
    source=_text('where that address was seen: lease, arp or agent; null without address'),
    expected=_text('address that DHCP reserves for the interface; null if none'),
)  # fmt: skip
_STAGE_TIMES = _map('time at which each stage was reached', _text('time, ISO 8601, UTC'))
_BOOT = _fields({
    'number': _is('integer', 'number of the boot; the first has 1'),
    'reason': _text('why the guest was started', enum=list(REASONS)), 'stages': _STAGE_TIMES,
    'previous_stop': _text('time at which the boot before it ended; absent if unknown'),
}, may='previous_stop')  # fmt: skip
_PLACE = _object(
    'stack of the instance; absent if none', name=_text('name of the stack'), member=_text('member of the file'),
    number=_is('integer', 'number among the instances of the member, from 1'),
    epoch=_text('random uuid of the stack, from which the uuids of its instances are made', pattern=UUID),
    incarnation=_is('integer', 'number among the instances that were delivered for this place'),
)  # fmt: skip
_STORED = CODECS[Record].fields
RECORD = _fields({
    'version': _is('integer', "version of the record's format"), 'instance': _INSTANCE,
    'compute': _text("uuid of the compute; '' if no compute ever had the instance"), 'host': _ON,
    'state': _text('state that its host reported last', enum=sorted({QUEUED, *STATES})),
    'host_state': _text('state of the host (up: also if disabled); null if the instance is queued, gone or in error',
                        enum=[UP, CLOSED, SILENT, None]),
    'host_last_seen': _text('time of the last sign of life of a silent host, ISO 8601, UTC; null if it is not silent, '
                            'or if the time is unknown'),
    'stale': _is('boolean', 'the host is closed or silent, so the record is old; a table then shows the state as '
                            '`unknown` if the host is silent, and as `destroying` if a destroy waits for the host'),
    'image': _text('URL of the image; null if unknown'), 'resources': _AMOUNTS,
    'query': _text('query that was requested; null if unknown'),
    'user_id': _text('user who requested the instance; null if unknown'),
    'project_id': _text('project that owns the instance; null if unknown'),
    'addresses': many(_INTERFACE, 'interfaces of the guest'),
    'console': _text("host and path of the console's log, as host:file; null if there is none"),
    'stages': _STAGE_TIMES,
    'error': _object('failure of an instance in state error; else null',
                     stage=_text('stage that failed'), reason=_text('why it failed'),
                     cleaned=_text('what was cleaned up')),
    'fault': _text('problem of an instance that was active before; null if none'),
    'attempts': _is('integer', 'number of builds that failed for an unknown reason (not of attempts to place it)'),
    **{name: _text(f'{name} of the instance; {"absent" if _STORED[name].is_sparse else "null"} if it has none')
       for name in USER_TEXTS},
    'power': _text('id of the last stop, start or reboot; null before the first'),
    'progress': _object('progress of a long stage; else null', stage=_text('stage'),
                        done=_is('integer', 'bytes done'),
                        total=_is('integer', 'bytes in total; null if unknown')),
    'group': _text('name of its group; null without a group'), 'why': _WEIGHED,
    'boots': many(_BOOT, 'the last boot; absent before the first boot'),
    'host_keys': many(_text('type and base64'), 'ssh host keys that the guest reported; absent until it reports them'),
    'stack': _PLACE,
    'replaces': _text('uuid of the instance that it was evacuated from; absent if none', pattern=UUID),
    'replaced_by': _text('uuid of the instance to which it was evacuated; absent if none', pattern=UUID),
    'adopted': _is('boolean', 'true if ecomp did not create its domain, but adopted it; otherwise absent'),
    'resize': _object('the size that its guest gets when it starts; absent if it has it',
                      number=_is('integer', 'number of the change'), resources=_AMOUNTS),
    'protected': _is('boolean', 'true if it is protected from its removal; otherwise absent'),
    'cloud_init': _object('failure of cloud-init that the guest reported; absent if none',
                          stage=_text('stage of cloud-init'), reason=_text('why it failed')),
}, may=' '.join(field.name for field in _STORED.values() if field.is_sparse))  # fmt: skip
_WHY = _object(
    instance=_INSTANCE, compute=_text("uuid of the compute; '' if there is none"), host=_ON,
    query=_text('query that was requested; null if unknown'), why=_WEIGHED,
    group=_object('group of the instance; null if none', name=_text('name of the group'), policy=_POLICY,
                  strict=_STRICT, others=_map('compute of each other member, by uuid of the instance',
                                              _text("uuid of the compute; '' if the member is in a queue"))),
    waits=_object(
        'how the request waits; null if it is in no queue',
        flavor=_text('flavor whose queue has the request'),
        since=_text('time of the request, ISO 8601, UTC; null if unknown'),
        before=_is('integer', 'number of older requests in this queue'),
        taker=_text('uuid of the compute that is taking the request; null if none'),
        claimed_on=_text('uuid of the only compute that may take the request, because the claim is on it; null if '
                         'none'),
        computes=many(_object(compute=_COMPUTE, host=_ON, lacks=_text('what the compute lacks for the request')),
                      'computes that take queued requests'),
    ),
)  # fmt: skip
_ROOM = _object(
    'usage of the class',
    used=_is('integer', 'amount that is allocated'), free=_is('integer', 'amount that can still be allocated'),
    capacity=_is('integer', '(total - reserved) × allocation ratio'),
    over=_is('integer', 'allocated amount beyond the capacity; 0 if none'),
)  # fmt: skip
_FOREIGN = _object(
    instance=_text('uuid of the domain', pattern=UUID), name=_text('name of the domain'),
    state=_text('running or off, and whether it is transient'), compute=_COMPUTE, host=_ON, resources=_AMOUNTS,
    disks=many(_text('file or device'), 'its disks'), adopted=_is('boolean', 'whether it is adopted'),
    fits=_is('boolean', 'whether it can be adopted now; null if it is adopted'),
)
_HOST = _object(
    compute=_COMPUTE, host=_ON, hostname=_SAME,
    version=_text('version of its ecompute; null while the compute is not up'),
    kind=_text('kind of its guests: kvm, qemu or fake; null while the compute is not up'),
    queues=_is('boolean', 'whether it takes queued requests; null if unknown'),
    state=_text('state of the compute (see `eschedule hosts --help`)', enum=[UP, DISABLED, CLOSED, SILENT, ORPHANED]),
    trouble=_text('why it cannot build now, so that others are preferred; null if it reports nothing'),
    last_seen=_text('time of the last sign of life of a silent or orphaned compute, ISO 8601, UTC; null for others, or '
                    'if unknown'),
    disabled=_is('boolean', 'whether it is disabled, also while it is not up'),
    instances=_is('integer', 'number of instances there, also of those being destroyed'),
    resources=_map('usage by resource class', _ROOM),
)  # fmt: skip
_RANKED = _object(
    compute=_COMPUTE, host=_ON, hostname=_SAME,
    weight=_is('number', 'weight of the compute, the largest is tried first; null with --weigh random or first'),
    asked=_map('amounts that one instance requests, by resource class', _is('integer', 'amount')),
    resources=_map('usage by resource class', _object(
        'usage of the class', used=_is('integer', 'amount that is allocated'),
        capacity=_is('integer', '(total - reserved) × allocation ratio'))),
    instances=_is('integer', 'number of instances that would be placed there'),
)  # fmt: skip
_STAGE = _object(
    stage=_text('name of the stage'), time=_text('time at which it was reached'),
    at=_is('number', 'seconds from the first stage to this one'),
    seconds=_is('number', 'duration in seconds; null for the first stage'),
)  # fmt: skip
_TIMELINE = _object(
    instance=_INSTANCE, state=_STATE, boot=_is('integer', 'number of the boot; null before the first'),
    reason=_text('why the guest was started; null before the first boot'),
    stages=many(_STAGE, 'reached stages, in order'),
)  # fmt: skip
_FLAVOR = _object(
    name=_text('name of the flavor'), resources=_AMOUNTS, required=many(_text('trait'), 'traits that are required'),
    forbidden=many(_text('trait'), 'traits that are forbidden'),
)  # fmt: skip
_GROUP = _object(
    name=_text('name of the group'), policy=_POLICY, strict=_STRICT,
    members=many(_object(
        instance=_INSTANCE, name=_NAME,
        compute=_text('uuid of the compute; null while the member is in a queue'), host=_ON,
    ), 'members of the group'),
)  # fmt: skip
_QUOTA = _object(
    project=_text('id of the project'),
    limits=_map('limits by resource class, and of `instances`', _is('integer', 'limit')),
    used=_map('usage by resource class, and of `instances`', _is('integer', 'usage')),
)  # fmt: skip
_IMAGE = _object(
    name=_text('name of the image in schedule.yaml'), image=_text('URL of the image'),
    hosts=many(_object(
        compute=_COMPUTE, host=_ON,
        cached=_is('boolean', 'whether the image is in the cache of the compute; null if unknown'),
    ), 'living computes'),
)  # fmt: skip
_LEVEL = _text('`warning`, if nobody has to act, or `error`', enum=[ERROR, WARNING])
_FINDING = _object(
    code=_text('code of the finding (see [audit codes](audit.md))'), level=_LEVEL,
    subject=_text('instance, compute, name, group, project or stack that it is about'), name=_NAME,
    compute=_text("uuid of the compute where it was found; '' if none"), host=_ON,
    sentence=_text('sentence about what placement, etcd and the compute report'),
    fix=_text("what --fix does; '' if nothing"), how=_text("manual fix; '' if --fix repairs it"),
)  # fmt: skip
_EVENT = _object(
    'one object per line', revision=_is('integer', 'revision of the change in etcd'),
    time=_text('time of the event, by the clock of its writer; null if unknown'),
    kind=_text('what the event is about', enum=list(KINDS)),
    instance=_text('uuid of the instance; null if the event is about no instance'), name=_NAME,
    compute=_text('uuid of the compute; null if the event is about no compute'), says=_text('what happened'),
    by=_text('who asked for it: the name in the certificate of the client, else user@host; null if unknown'),
)  # fmt: skip
_NEW = _fields({
    'instance': _INSTANCE,
    'compute': _text('uuid of the compute; absent while the request is in a queue', pattern=UUID),
    'host': _text('host name of the compute; null if unknown, absent like `compute`'), 'name': _NAME,
    'flavor': _text('flavor whose queue has the request; absent if there is a compute'),
    'state': _text('last known state, null if none; absent without --wait'),
    'address': _text('address, null if none is known; absent without --wait'),
    'error': {**_ERROR, 'description': 'reason why the wait failed, else null; absent without --wait'},
}, needs='instance name')  # fmt: skip
_ADDRESSED = _object(
    instance=_INSTANCE, name=_NAME, state=_STATE, address=_ADDRESS,
    said=_text('why there is no address, or that the guest is off; else null'),
)  # fmt: skip
_FOUND = _text('uuid of the instance; null if it was not found')
_REACHED = {'instance': _FOUND, 'state': _text('state at the end of --wait; null without --wait')}
_TARGET = _text('uuid of the compute; null if it was not found')
REFUSED = _object(
    refused=_object('refusal', reason=_text('reason, in one line'),
                    details=many(_text('line that stderr reports'), 'what each compute lacks, and what would fit')),
)  # fmt: skip

_STEP = _object(
    'instance of the file, or one of the stack that the file no longer has',
    member=_text('member of the file'), number=_is('integer', 'number among the instances of the member, from 1'),
    name=_NAME, action=_text('what is done, or why nothing is', enum=list(ACTIONS)),
    instance=_text('uuid; null before a dry run of a new stack, and if the name is taken'),
    replaced=_text('uuid of the instance that is replaced; else null'),
    state=_text('state, after --wait the state then; null for an instance that is created'),
    address=_ADDRESS, compute=_text('uuid of the compute; null if none is chosen'), host=_ON,
    reasons=many(_text('sentence'), 'what differs, why the instance failed, or who has its name'),
)  # fmt: skip
_MOVE = _fields({
    'compute': _COMPUTE, 'host': _ON,
    'instance': _text('without --each: uuid of the guest', pattern=UUID),
    'name': _text('without --each: name of the guest; null if none'),
    'new_compute': _text('without --each: uuid of the compute where it would go; null if it has no place'),
    'new_host': _text('without --each: host name of that compute; null if it has no place or no name'),
    'fits': _is('boolean', 'without --each: whether it has a place; null if that is not known'),
    'guests': _is('integer', 'with --each: number of guests on the compute'),
    'fit': _is('integer', 'with --each: number of guests that would have a place elsewhere'),
    'unknown': _is('integer', 'with --each: number of guests of which that is not known'),
    'reason': _text('why the guest, or the first guest of the compute, has no place; null if each has one'),
}, 'one object per guest; with --each, one per compute', needs='compute host reason')  # fmt: skip
_EVACUATED = _fields({
    'instance': _text('uuid of the guest that was on the host', pattern=UUID),
    'name': _text('its name, which the new instance has now; null if none'),
    'replaced_by': _text('uuid of the new instance; null if the guest stays'),
    'compute': _text('uuid of the compute of the new instance; null if the guest stays'),
    'host': _text('host name of that compute; null if the guest stays or the name is unknown'),
    'address': _text('with --wait: address of the new instance; null if not known'),
    'reason': _text('why the guest stays; null if it does not'),
}, 'one object per guest')  # fmt: skip
_PERCENT = _is('number', 'use of CPU, 100 is one CPU; null if unknown')
_USE = _object(
    hosts=many(_object(
        compute=_COMPUTE, host=_ON, cpu_percent=_PERCENT,
        cpus=_is('integer', 'number of CPUs; null if unknown'),
        load=_is('number', 'average load of the last minute; null if unknown'),
        memory_used_bytes=_is('integer', 'memory that is not available; null if unknown'),
        memory_bytes=_is('integer', 'memory; null if unknown'),
        disk_used_bytes=_is('integer', 'use of the disk with the state directory; null if unknown'),
        disk_bytes=_is('integer', 'size of that disk; null if unknown'),
        guests=_is('integer', 'number of guests that run there; null if unknown'),
    ), 'hosts'),
    guests=many(_object(
        instance=_INSTANCE, name=_NAME, compute=_COMPUTE, host=_ON, cpu_percent=_PERCENT,
        memory_used_bytes=_is('integer', 'memory of the host that its QEMU uses; null if unknown'),
        memory_bytes=_is('integer', 'memory that it was given; null if unknown'),
        disk_read_bytes_per_second=_is('number', 'bytes read from its disks; null if unknown'),
        disk_written_bytes_per_second=_is('number', 'bytes written to its disks; null if unknown'),
    ), 'guests that run, and active ones of which that is not known'),
)  # fmt: skip
_LISTED_STACK = _object(
    name=_text('name of the stack'),
    instances=_is('object', 'number of its instances in each state that one of them has'),
    members=many(_text('member'), 'members that have an instance'),
    applied_from=_text('who applied the last file, where, and its path, as `user@host:file`; null if unknown'),
    applied_at=_text('time of that; null if unknown'),
)  # fmt: skip
_STACK = _object(stack=_text('name of the stack'), instances=many(_STEP, 'instances of the file, then others'))

# By command. `create` prints REFUSED if there is no room, or a quota is exceeded (exit code 3).
SHAPES: dict[str, Schema] = {
    'create': many(_NEW),
    'create --dry-run': many(_RANKED),
    'apply': _STACK,
    'stack': one_or_many(_LISTED_STACK),
    'query': _ADDRESSED,
    'list': many(RECORD),
    'show': one_or_many(RECORD),
    'show --timeline': _TIMELINE,
    'show --command': _object(
        command=many(_text('word'), 'command line'),
        files=many(_text('file'), 'files that were written, in the current directory'),
        unknown=many(_text('line that stderr reports'), 'what the command lacks'),
    ),
    'why': one_or_many(_WHY),
    'wait': _outcome(instance=_FOUND, state=_text('last known state; null if none'), name=_NAME, address=_ADDRESS),
    'events': _EVENT,
    'adopt': many(_FOREIGN),
    'list --foreign': many(_FOREIGN),
    'adopt --all': _outcome(instance=_FOUND),
    'flavor': one_or_many(_FLAVOR),
    'flavor set': _single_outcome(),
    'flavor delete': _outcome(),
    'image': many(_IMAGE),
    'group': one_or_many(_GROUP),
    'quota': one_or_many(_QUOTA),
    'quota set': _single_outcome(),
    # An object for one argument, an array without and with several.
    'hosts': one_or_many(_HOST),
    'evacuate': many(_EVACUATED),
    'evacuate --dry-run': many(_MOVE),
    'top': _USE,
    'check': many(_FINDING),
}
# Any other command reports an outcome for each instance or host of its usage.
for _row in chain.from_iterable(map(load_rows, chain.from_iterable(FAMILIES.values()))):
    if _row.name not in SHAPES and 'format' in _row.options and '<host>' in _row.usage:
        SHAPES[_row.name] = _outcome(compute=_TARGET)
    elif _row.name not in SHAPES and 'format' in _row.options and '<id>' in _row.usage:
        SHAPES[_row.name] = _outcome(**(_REACHED if 'wait' in _row.options else {'instance': _FOUND}))
