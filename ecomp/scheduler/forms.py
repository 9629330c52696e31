"""Every form of eschedule's command line: how it is written, what it does, which words and options it takes. Pure.

A command is one entry of FORMS here, and one function in RUNS of commands.py or operators.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ecomp.errors import UsageError
from ecomp.model.names import PREFIX, is_name, uuid_prefix

LONGEST_PROJECT = 255
"""Characters: placement's own limit."""


class Form(NamedTuple):
    """How a command is written, what it does, which words follow its name, and the options it takes beside --config."""

    usage: str
    help: str
    words: Callable[[str, Sequence[str]], tuple[str, ...]]
    options: frozenset[str] = frozenset()


def parse_uuid(word: str) -> str:
    """A uuid in its canonical form; UsageError."""
    try:
        return str(uuid.UUID(word))
    except ValueError as error:
        raise UsageError(f'{word!r} is no uuid; --help shows all') from error


def _instance(word: str) -> str:
    """A word that may mean an instance: a whole uuid in its canonical form, anything else as it is."""
    if is_name(word) or uuid_prefix(word):
        return word
    try:
        return str(uuid.UUID(word))
    except ValueError as error:
        few = f' (of its uuid, {PREFIX} digits at least)' if len(word) < PREFIX else ''
        raise UsageError(f'{word!r} is neither a command nor an instance{few}; --help shows all') from error


def _instances(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if not words:
        raise UsageError(f'{name}: which instance? Give one name or uuid, or more')
    return tuple(_instance(word) for word in words)


def _nothing(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if words:
        raise UsageError(f'{name} takes no further words: {" ".join(words)}')
    return ()


def _query_and_image(_: str, words: Sequence[str]) -> tuple[str, ...]:
    # With a flavor there need not be a query.
    words = ['', *words] if not words or is_image(words[0]) else list(words)
    if len(words) > 2:
        raise UsageError(f'one query and one image URL, and then comes {words[2]!r}: is the query in quotes?')
    return tuple(words)


def is_image(word: str) -> bool:
    """Whether it is an image's URL rather than a query: both may have a = in them."""
    return '://' in word.partition('=')[0]


def _planned(name: str, words: Sequence[str]) -> tuple[str, ...]:
    # The words of the command that is planned; the image decides nothing.
    query, *image = _query_and_image(name, words)
    if (query and '=' not in query) or not all(is_image(word) for word in image):
        raise UsageError(f'{name}: give one placement query, in quotes, and at most one image URL')
    return (query,)


def _flavor_and_query(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if len(words) != 2:
        raise UsageError(f"{name}: give a name and what it asks for: {name} small 'resources=VCPU:1,…&required=…'")
    return tuple(words)


def _names(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if not words:
        raise UsageError(f'{name}: which {name.partition(" ")[0]}? Give one name, or more')
    return tuple(words)


def _quota(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if len(words) < 2 or '=' in words[0]:
        raise UsageError(f'{name}: give a project and its limits: {name} web VCPU=10 instances=5')
    check_project(words[0])
    return tuple(words)


def _one_instance(_: str, words: Sequence[str]) -> tuple[str, ...]:
    if len(words) > 1:
        raise UsageError(f'{words[0]!r} is not a command; --help shows all')
    return (_instance(words[0]),)


def _one_host(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if len(words) != 1:
        raise UsageError(f'{name}: which compute? Give one uuid')
    return (parse_uuid(words[0]),)


def _host(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if len(words) != 1:
        raise UsageError(f'{name}: which compute? Give one uuid or host name')
    return tuple(words)


CREATE, QUERY = 'create', 'query'
"""The forms of 2019: told by what they look like, not by a name."""

FORMS = {
    CREATE: Form(
        "'resources=…' [IMAGE_URL]",
        'place one instance, or --count; the first argument is a placement query, handed on as it is',
        _query_and_image,
        frozenset(
            {
                *('uuid', 'name', 'ssh_key', 'user_data', 'size', 'min', 'flavor', 'weigh', 'on', 'project'),
                *('group', 'policy', 'strictness', 'queue', 'wait', 'timeout', 'format'),
            }
        ),
    ),
    QUERY: Form('<id>', "the instance's address", _one_instance),
    'plan': Form(
        "plan 'resources=…'",
        'which computes would be tried, in order, and how many each would get; nothing is claimed',
        _planned,
        frozenset({'size', 'min', 'flavor', 'weigh', 'on', 'project', 'group', 'policy', 'strictness', 'format'}),
    ),
    'destroy': Form(
        'destroy <id>…',
        "remove the domain, its DISK, its allocation (virsh's destroy only switches off)",
        _instances,
        frozenset({'wait', 'timeout'}),
    ),
    'stop': Form(
        'stop <id>…',
        'ask the guest to turn itself off; after a minute it is switched off. Nothing of it is removed',
        _instances,
        frozenset({'wait', 'timeout'}),
    ),
    'start': Form('start <id>…', 'start a guest that is stopped', _instances, frozenset({'wait', 'timeout'})),
    'reboot': Form('reboot <id>…', 'stop, then start', _instances, frozenset({'wait', 'timeout'})),
    'wait': Form(
        'wait <id>…',
        'until each has its address, and prints it; or until it has reached --for STAGE',
        _instances,
        frozenset({'stage', 'timeout'}),
    ),
    'list': Form(
        'list', 'the instances; --all shows those that are gone too', _nothing, frozenset({'format', 'all'})
    ),
    'show': Form('show <id>…', 'one instance whole', _instances, frozenset({'format'})),
    'why': Form('why <id>…', 'why an instance is where it is', _instances, frozenset({'format'})),
    'timeline': Form(
        'timeline <id>…',
        'how long each stage took: bars, and percentiles of several',
        _instances,
        frozenset({'format'}),
    ),
    'hosts': Form('hosts', 'the computes: state, instances, used and free', _nothing, frozenset({'format'})),
    'audit': Form(
        'audit [--fix]', 'where etcd, placement and the computes disagree', _nothing, frozenset({'fix', 'format'})
    ),
    'flavor list': Form('flavor list', "the flavors of schedule.yaml and etcd", _nothing, frozenset({'format'})),
    'flavor set': Form(
        "flavor set NAME 'resources=…[&required=…]'", 'keep a flavor in etcd, for everybody', _flavor_and_query
    ),
    'flavor delete': Form('flavor delete NAME…', 'remove flavors from etcd', _names),
    'group list': Form('group list', 'the groups, and what each is', _nothing, frozenset({'format'})),
    'group show': Form('group show GROUP…', 'where the members of a group are', _names, frozenset({'format'})),
    'quota list': Form('quota list', 'the projects that have limits', _nothing, frozenset({'format'})),
    'quota show': Form('quota show PROJECT…', 'what a project may have, and has', _names, frozenset({'format'})),
    'quota set': Form(
        'quota set PROJECT VCPU=…', 'limit VCPU, MEMORY_MB, DISK_GB, instances; =none for no limit', _quota
    ),
    'host disable': Form('host disable <host>', 'place nothing new on this compute: its uuid, or its host name', _host),
    'host drain': Form(
        'host drain <host>',
        'the same, and say what lives there; --wait until nothing does. Nothing is destroyed',
        _host,
        frozenset({'wait', 'timeout'}),
    ),
    'host enable': Form('host enable <host>', 'place there again', _host),
    'host forget': Form('host forget <uuid>', 'remove a compute that is dead for good, with its leftovers', _one_host),
}
"""Every command, in the order of the help. A name may have two words; no name has a = in it or is a uuid.

The first word of each is in model.names.RESERVED: no instance is called so.
"""


def check_project(project: str) -> None:
    """UsageError for what cannot be a project's id."""
    if not 1 <= len(project) <= LONGEST_PROJECT or not project.isprintable():
        raise UsageError(f'{project[:80]!r} is no project: it has 1 to {LONGEST_PROJECT} characters, all printable')
