"""The JSON schema of the output of each command with -f json (and -f yaml).

The reference shows the schemas, and the tests validate every command's output against its own. Where a command takes
several words, its output is an object for one word and an array for several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecomp.model.boots import REASONS
from ecomp.model.canary import ENTERED
from ecomp.model.choose import STRATEGIES
from ecomp.model.events import KINDS
from ecomp.model.group import POLICIES
from ecomp.model.host import CLOSED, DISABLED, ORPHANED, SILENT, UP
from ecomp.model.record import QUEUED, STATES

Schema = Mapping[str, Any]


def _is(kind: str, description: str = '', null: bool = False, **more: Any) -> Schema:
    return {'type': [kind, 'null'] if null else kind, 'description': description, **more}


def _fields(
    fields: Mapping[str, Schema], description: str = '', null: bool = False, needs: str = '', may: str = ''
) -> Schema:
    """Make a schema of an object with only these fields.

    `needs` are the fields that are always present; '' means all but those in `may`.
    """
    required = needs.split() or [name for name in fields if name not in may.split()]
    return _is('object', description, null, properties=fields, required=required, additionalProperties=False)


def _object(description: str = '', null: bool = False, **fields: Schema) -> Schema:
    """Make a schema of an object that always has these fields and no others."""
    return _fields(fields, description, null)


def _map(description: str, item: Schema) -> Schema:
    """Make a schema of an object with arbitrary keys."""
    return _is('object', description, additionalProperties=item)


def many(of: Schema, description: str = '') -> Schema:
    return _is('array', description, items=of)


def one_or_many(of: Schema) -> Schema:
    """Make a schema of one object for one word, an array for several."""
    return {'anyOf': [of, many(of)]}


def _text(description: str, null: bool = False, **more: Any) -> Schema:
    return _is('string', description, null, **more)


UUID = '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
_INSTANCE = _text('the uuid of the instance', pattern=UUID)
_COMPUTE = _text("the compute's uuid", pattern=UUID)
_ON = _text("its host's name, where that is known", null=True)
_NAME = _text("the instance's name", null=True)
_STATE = _text('its state', enum=sorted({QUEUED, *STATES}))
_ADDRESS = _text("its first interface's address", null=True)
_ERROR = _object(
    'why nothing came of it: the exit code it means, and the line on stderr', null=True,
    code=_is('integer', 'an exit code'), said=_text('the line'),
)  # fmt: skip
_AMOUNTS = _map('by resource class', _is('integer'))


def _outcome(**extra_fields: Schema) -> Schema:
    """Make a schema of the outcome of each word, for a command that changes or waits."""
    fields = {
        'word': _text('what was typed'),
        **extra_fields,
        'said': many(_text(''), 'what stderr says of it, line by line'),
    }
    return one_or_many(_fields({**fields, 'error': _ERROR}))


_WEIGHED = _object(
    'how it was chosen', null=True,
    weigh=_text(f'{", ".join(STRATEGIES)}, or queue'), weight=_is('number', 'its own', null=True),
    of=_is('integer', 'how many could have taken it'),
)  # fmt: skip
_INTERFACE = _object(
    network=_text('a network of libvirt, or a bridge'), mac=_text(''), address=_text('as it is', null=True),
    source=_text('what said so', null=True), expected=_text('as it is reserved', null=True),
)  # fmt: skip
_BOOT = _object(
    number=_is('integer', '1 is the one it was created with'), reason=_text('', enum=list(REASONS)),
    stages=_map('when it reached each', _text('ISO 8601, UTC')),
)  # fmt: skip
RECORD = _fields({
    'version': _is('integer', 'of the record'), 'instance': _INSTANCE,
    'compute': _text("the compute's uuid; '' while it waits in a queue"), 'host': _ON, 'state': _STATE,
    'image': _text('its URL', null=True), 'resources': _AMOUNTS, 'query': _text('what was asked for', null=True),
    'user_id': _text('who asked', null=True), 'project_id': _text('whose it is', null=True),
    'addresses': many(_INTERFACE, 'its interfaces'), 'console': _text("host:file of its console's log", null=True),
    'stages': _map('when it reached each', _text('ISO 8601, UTC')),
    'error': _object('why it failed', null=True, stage=_text('where'), reason=_text('why'),
                  cleaned=_text('what of it is left')),
    'fault': _text('what is wrong with it now', null=True),
    'attempts': _is('integer', 'how often building it failed in an unknown way'), 'name': _NAME,
    'power': _text('the last stop, start or reboot', null=True),
    'progress': _object('of a stage that takes long', null=True, stage=_text(''), done=_is('integer', 'bytes'),
                     total=_is('integer', 'bytes', null=True)),
    'group': _text("its group's name", null=True), 'why': _WEIGHED,
    'boots': many(_BOOT, 'the last five'),
    'host_keys': many(_text('type and base64'), 'those of its sshd, by its own word'),
    'cloud_init': _object('what failed of it, by its own word', stage=_text(''), reason=_text('')),
}, may='boots host_keys cloud_init')  # fmt: skip
_WHY = _object(
    instance=_INSTANCE, compute=_text("the compute's uuid, '' for none"), host=_ON,
    query=_text('what it asked for', null=True), why=_WEIGHED,
    group=_object('the one it is in', null=True, name=_text(''), policy=_text('', enum=sorted(POLICIES)),
                  strict=_is('boolean'), others=_map('the other members', _text("its compute's uuid, '' for none"))),
    waits=_object(
        'while it is in a queue', null=True, flavor=_text('whose queue'), since=_text('ISO 8601, UTC', null=True),
        before=_is('integer', 'how many wait longer there'), taker=_text('the compute that is taking it', null=True),
        computes=many(_object(compute=_COMPUTE, host=_ON, lacks=_text('what it lacks')), 'that take from queues'),
    ),
)  # fmt: skip
_ROOM = _object(
    used=_is('integer', 'what is given'), free=_is('integer', 'what can still be given'),
    capacity=_is('integer', 'what there is'), over=_is('integer', 'how much more is given than there is'),
)  # fmt: skip
_HOST = _object(
    compute=_COMPUTE, host=_ON, hostname=_text('the same', null=True),
    version=_text('of its ecompute, while it is up', null=True), kind=_text('kvm, qemu or fake', null=True),
    queues=_is('boolean', 'it takes from queues; null: it does not say', null=True),
    state=_text('', enum=[UP, DISABLED, CLOSED, SILENT, ORPHANED]),
    disabled=_is('boolean', 'an operator has disabled it'), instances=_is('integer', 'how many'),
    resources=_map('by resource class', _ROOM),
)  # fmt: skip
_RANKED = _object(
    compute=_COMPUTE, host=_ON, hostname=_text('the same', null=True),
    weight=_is('number', 'the largest is tried first', null=True),
    asked=_AMOUNTS, resources=_map('by resource class', _object(used=_is('integer'), capacity=_is('integer'))),
    instances=_is('integer', 'how many would be placed there'),
)  # fmt: skip
_STAGE = _object(
    stage=_text(''), time=_text('when'), at=_is('number', 'seconds after the first stage'),
    seconds=_is('number', 'seconds it took', null=True),
)  # fmt: skip
_TIMELINE = _object(
    instances=many(_object(instance=_INSTANCE, state=_STATE, boot=_is('integer', 'its number', null=True),
                           reason=_text('why it was booted', null=True), stages=many(_STAGE, 'in their order'))),
    percentiles=_map('by stage', _object(instances=_is('integer', 'how many reached it'), p50=_is('number', 'seconds'),
                                         p95=_is('number', 'seconds'))),
)  # fmt: skip
_FLAVOR = _object(
    name=_text(''), resources=_AMOUNTS, required=many(_text('a trait')), forbidden=many(_text('a trait')),
    source=_text('where it is kept', enum=['etcd', 'schedule.yaml']),
)  # fmt: skip
_GROUP = _object(
    name=_text(''), policy=_text('', enum=sorted(POLICIES)), strict=_is('boolean', 'a condition, not a preference'),
    members=many(_object(
        instance=_INSTANCE, name=_NAME, compute=_text("the compute's uuid; null while it waits", null=True), host=_ON,
    )),
)  # fmt: skip
_QUOTA = _object(project=_text('its id'), limits=_AMOUNTS, used=_AMOUNTS)
_FINDING = _object(
    code=_text('see audit.md'), subject=_text('an instance, a compute or a name'),
    name=_NAME, compute=_text("the compute's uuid, '' for none"), host=_ON, sentence=_text('which plane says what'),
    fix=_text("what --fix does, '' for nothing"), how=_text("the manual fix, '' where --fix has one"),
)  # fmt: skip
_EVENT = _object(
    'a line each', revision=_is('integer', "etcd's"), time=_text('where somebody wrote it down', null=True),
    kind=_text('', enum=list(KINDS)), instance=_text('its uuid', null=True), name=_NAME,
    compute=_text("the compute's uuid", null=True), says=_text('what happened'),
)  # fmt: skip
_CANARY = _object(
    compute=_COMPUTE, host=_ON, instance=_text('its uuid; null: none was placed there', null=True),
    name=_text('the same', null=True),
    reached=_text(f'how far it came, a stage or {ENTERED}; null: none was placed there', null=True),
    seconds=_is('number', 'how long that took; null: it broke, or was interrupted', null=True),
    said=_text('why it came no further', null=True),
    gone=_is('boolean', 'nothing of it is left; null: none was placed there', null=True),
)  # fmt: skip
_HEALTH = _fields({
    'findings': many(_object(check=_text('which one'), what=_text('what is wrong'), cure=_text('what mends it'))),
    'configuration': _text('the file that told where both are', null=True),
    'etcd': _object('', name=_text(''), version=_text('', null=True)),
    'placement': _object('', name=_text(''), microversion=_text('its newest', null=True)),
    'certificates': _map('by file', _text('when it ends', null=True)),
    'computes': _map('by uuid, those alive', _text('which ecomp')),
    'canaries': many(_CANARY, 'with --canary: of every compute'),
}, may='canaries')  # fmt: skip
_NEW = _fields({
    'instance': _INSTANCE, 'compute': _COMPUTE, 'host': _ON, 'name': _NAME,
    'flavor': _text('with --queue: in place of a compute'),
    'state': _text('with --wait', null=True), 'address': _text('with --wait', null=True), 'error': _ERROR,
}, needs='instance name')  # fmt: skip
_ADDRESSED = _object(
    instance=_INSTANCE, name=_NAME, state=_STATE, address=_ADDRESS, said=_text('why it has none', null=True)
)
_REACHED = {'instance': _text('its uuid', null=True), 'state': _text('once it was waited for', null=True)}
REFUSED = _object(
    refused=_object(reason=_text('in a line'), details=many(_text(''), 'what each compute lacks, and what would fit')),
)  # fmt: skip

# By command. `create` and `plan` print REFUSED if there is no room, or no quota (exit code 3).
SHAPES: Mapping[str, Schema] = {
    'create': many(_NEW),
    'plan': many(_RANKED),
    'query': _ADDRESSED,
    'list': many(RECORD),
    'show': one_or_many(RECORD),
    'why': one_or_many(_WHY),
    'timeline': _TIMELINE,
    'wait': _outcome(**{**_REACHED, 'state': _text('the last that is known', null=True)}, name=_NAME, address=_ADDRESS),
    'events': _EVENT,
    'destroy': _outcome(**_REACHED),
    'stop': _outcome(**_REACHED),
    'start': _outcome(**_REACHED),
    'reboot': _outcome(**_REACHED),
    'clear': _object(removed=many(_object(instance=_INSTANCE, state=_text('', enum=['gone', 'error'])))),
    'flavor list': many(_FLAVOR),
    'flavor show': one_or_many(_FLAVOR),
    'flavor set': _outcome(),
    'flavor delete': _outcome(),
    'group list': many(_GROUP),
    'group show': one_or_many(_GROUP),
    'quota list': many(_QUOTA),
    'quota show': one_or_many(_QUOTA),
    'quota set': _outcome(),
    'hosts': many(_HOST),
    'host list': many(_HOST),
    'host show': one_or_many(_HOST),
    'host disable': _outcome(compute=_text("the compute's uuid", null=True)),
    'host drain': _outcome(compute=_text("the compute's uuid", null=True)),
    'host enable': _outcome(compute=_text("the compute's uuid", null=True)),
    'host forget': _outcome(compute=_text("the compute's uuid", null=True)),
    'audit': many(_FINDING),
    'doctor': _HEALTH,
}
