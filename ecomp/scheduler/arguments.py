"""What eschedule was asked: words and options in, one Command out, or one UsageError. Pure, and light to import.

A command is one entry of FORMS here, and one function in RUNS of eschedule's front door. Named tuples, for a
dataclass takes ten times as long to make, and every command would wait for it.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from ecomp import __version__
from ecomp.errors import UsageError
from ecomp.model.names import PREFIX, check_name, is_name, uuid_prefix
from ecomp.model.record import STAGES

EXITS = """\
exit codes: 0 done, 1 failed, 2 usage, 3 no capacity, 4 not found, 5 exists or conflict,
            6 time-out (it goes on), 7 a backend cannot be reached, 8 the audit found something
"""

ID = f'<id>: an instance by its name, its uuid, or the beginning of its uuid ({PREFIX} digits or more)'


class Options(NamedTuple):
    """The options, None or False where not given. `wait` is '' for --wait alone; `uuid` is canonical.

    `stage` is --for's.
    """

    uuid: str | None = None
    name: str | None = None
    ssh_key: Sequence[str] | None = None
    user_data: str | None = None
    wait: str | None = None
    stage: str | None = None
    timeout: float | None = None
    format: str | None = None
    all: bool = False
    fix: bool = False
    config: str | None = None


class Command(NamedTuple):
    """One command: its name in FORMS, its own words, its options. Whole uuids are canonical."""

    name: str
    words: tuple[str, ...]
    options: Options


class Form(NamedTuple):
    """How a command is written, what it does, which words follow its name, and the options it takes beside --config."""

    usage: str
    help: str
    words: Callable[[str, Sequence[str]], tuple[str, ...]]
    options: frozenset[str] = frozenset()


def parse(argv: Sequence[str]) -> Command:
    """The command in the arguments. UsageError says what is wrong; --help and --version print and raise SystemExit."""
    # argparse would take the word after a bare --wait for its value.
    given = vars(parser().parse_intermixed_args(['--wait=' if word == '--wait' else word for word in argv]))
    name, words = _command(given.pop('words'))
    options = Options(**given)
    _check_options(name, options)
    return Command(name, words, options)


def parser() -> argparse.ArgumentParser:
    """argparse's part of it: the options and the help."""
    usage = ["eschedule [options] 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256' [IMAGE_URL]"]
    usage += [f'       eschedule {form.usage}' for name, form in FORMS.items() if name != CREATE]
    lines = [f'  {form.usage:26} {form.help}' for form in FORMS.values()]
    parser = _Parser(
        'eschedule',
        usage='\n'.join(usage),
        epilog='\n'.join([*lines, '', ID, '', EXITS]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('words', nargs='*', help=argparse.SUPPRESS)
    again = 'the new instance gets this uuid; asked again, nothing is made twice'
    parser.add_argument('--uuid', type=_uuid, help=again)
    parser.add_argument('--name', help="its host name, unique among the living; then stands for its uuid")
    keys = "a file of OpenSSH public keys, in place of schedule.yaml's; may be said again for more"
    parser.add_argument('--ssh-key', metavar='FILE', action='append', help=keys)
    data = 'what its cloud-init is told: cloud-config, a script, multipart or gzip, at most 256 KiB; - is stdin'
    parser.add_argument('--user-data', metavar='FILE', help=data)
    then = 'wait for a stage of the new one (alone: addressed), or until what was asked for is done'
    parser.add_argument('--wait', metavar='[=STAGE]', help=then)
    parser.add_argument('--for', dest='stage', metavar='STAGE', help=f'wait: one of {", ".join(STAGES)}')
    parser.add_argument('--timeout', type=float, metavar='S', help='seconds to wait at most (300); the guest goes on')
    parser.add_argument('-f', '--format', choices=('table', 'json'), help='table (default) or json')
    parser.add_argument('--all', action='store_true', help='list: also what is gone')
    mend = 'audit: mend what is safe to mend, after two looks a minute apart'
    parser.add_argument('--fix', action='store_true', help=mend)
    parser.add_argument('--config', metavar='FILE', help='instead of schedule.yaml in the current directory')
    parser.add_argument('--version', action='version', version=f'eschedule {__version__}')
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f'{message}; --help shows all')


def _uuid(word: str) -> str:
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
    if len(words) > 2:
        raise UsageError(f'one query and one image URL, and then comes {words[2]!r}: is the query in quotes?')
    return tuple(words)


def _one_instance(_: str, words: Sequence[str]) -> tuple[str, ...]:
    if len(words) > 1:
        raise UsageError(f'{words[0]!r} is not a command; --help shows all')
    return (_instance(words[0]),)


def _one_host(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if len(words) != 1:
        raise UsageError(f'{name}: which compute? Give one uuid')
    return (_uuid(words[0]),)


CREATE, QUERY = 'create', 'query'
"""The forms of 2019: told by what they look like, not by a name."""

FORMS = {
    CREATE: Form(
        "'resources=…' [IMAGE_URL]",
        'place one instance; the first argument is a placement query, handed on as it is',
        _query_and_image,
        frozenset({'uuid', 'name', 'ssh_key', 'user_data', 'wait', 'timeout'}),
    ),
    QUERY: Form('<id>', "the instance's address", _one_instance),
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
    'host forget': Form('host forget <uuid>', 'remove a compute that is dead for good, with its leftovers', _one_host),
}
"""Every command, in the order of the help. A name may have two words; no name has a = in it or is a uuid.

The first word of each is in model.names.RESERVED: no instance is called so.
"""


def _command(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    if not words:
        raise UsageError('nothing to do: give a placement query, a uuid or a command; --help shows all')
    for count in (2, 1):
        name = ' '.join(words[:count])
        if name in FORMS and name not in (CREATE, QUERY):
            return name, FORMS[name].words(name, words[count:])
    name = CREATE if '=' in words[0] else QUERY
    return name, FORMS[name].words(name, words)


def _check_options(name: str, options: Options) -> None:
    given = {each for each, value in options._asdict().items() if value not in (None, False)} - {'config'}
    wrong = sorted(given - FORMS[name].options)
    if wrong:
        option = 'for' if wrong[0] == 'stage' else wrong[0].replace('_', '-')
        raise UsageError(f'--{option} does not go with this form; --help shows all')
    if options.name is not None:
        try:
            check_name(options.name)
        except ValueError as error:
            raise UsageError(f'--name: {error}') from error
    if name != CREATE and options.wait:
        raise UsageError(f'{name} waits for one thing: --wait alone')
    if options.timeout is not None:
        if options.wait is None and name != 'wait':
            raise UsageError('--timeout goes with --wait')
        if not 0 <= options.timeout < 10**9:
            raise UsageError('--timeout: seconds, not negative')
    for option, stage in (('wait', options.wait or None), ('for', options.stage)):
        if stage not in (None, *STAGES):
            known = f'{", ".join(STAGES[:-1])} or {STAGES[-1]}'
            raise UsageError(f'--{option}={stage}: there is no such stage; say {known}')
