"""What eschedule was asked: words and options in, one Command out, or one UsageError. Pure, and light to import.

The forms of its commands are in forms.py. Named tuples, for a dataclass takes ten times as long to make, and every
command would wait for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from ecomp import __version__
from ecomp.arguments import Parser
from ecomp.errors import UsageError
from ecomp.model.choose import WEIGHS
from ecomp.model.group import POLICIES, Membership, check_group_name
from ecomp.model.names import PREFIX, check_name
from ecomp.model.record import STAGES
from ecomp.model.text import printable
from ecomp.scheduler.forms import CREATE, FORMS, QUERY, check_project, is_image, parse_uuid

EXITS = """\
exit codes: 0 done, 1 failed, 2 usage, 3 no capacity, 4 not found, 5 exists or conflict,
            6 time-out (it goes on), 7 a backend cannot be reached, 8 the audit found something
"""

LARGEST_SET, LARGEST_NAMED_SET = 100, 60
"""Each is one or two of the 128 operations that etcd takes in a transaction."""

ID = f'<id>: an instance by its name, its uuid, or the beginning of its uuid ({PREFIX} digits or more)'


class Options(NamedTuple):
    """The options, None or False where not given. `wait` is '' for --wait alone; `uuid` is canonical.

    `stage` is --for's, `size` --count's.
    """

    uuid: str | None = None
    name: str | None = None
    ssh_key: Sequence[str] | None = None
    user_data: str | None = None
    wait: str | None = None
    size: int | None = None
    min: int | None = None
    flavor: str | None = None
    weigh: str | None = None
    on: str | None = None
    group: str | None = None
    policy: str | None = None
    strictness: str | None = None
    project: str | None = None
    queue: bool = False
    stage: str | None = None
    timeout: float | None = None
    format: str | None = None
    all: bool = False
    fix: bool = False
    config: str | None = None

    @property
    def membership(self) -> Membership | None:
        """The group it is to be in, as far as that is said."""
        strict = None if self.strictness is None else self.strictness == 'strict'
        return None if self.group is None else Membership(self.group, self.policy, strict)

    @property
    def patience(self) -> float:
        """Seconds to wait at most."""
        return 300.0 if self.timeout is None else self.timeout


class Command(NamedTuple):
    """One command: its name in FORMS, its own words, its options. Whole uuids are canonical."""

    name: str
    words: tuple[str, ...]
    options: Options


def parse(argv: Sequence[str]) -> Command:
    """The command in the arguments. UsageError says what is wrong; --help and --version print and raise SystemExit."""
    try:
        return _parse(argv)
    except UsageError as error:
        raise UsageError(printable(str(error))) from error  # whatever was typed, it is quoted in one line


def _parse(argv: Sequence[str]) -> Command:
    # argparse would take the word after a bare --wait for its value.
    given = vars(parser().parse_intermixed_args(['--wait=' if word == '--wait' else word for word in argv]))
    words = given.pop('words')
    options = Options(**given)
    name, words = _command(words, options.flavor is not None)
    _check_query(name, words, options)
    _check_options(name, words, options)
    return Command(name, words, options)


def parser() -> argparse.ArgumentParser:
    """argparse's part of it: the options and the help."""
    usage = ["eschedule [options] 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256' [IMAGE_URL]"]
    usage += [f'       eschedule {form.usage}' for name, form in FORMS.items() if name != CREATE]
    lines = [f'  {form.usage:26} {form.help}' for form in FORMS.values()]
    parser = Parser(
        'eschedule',
        usage='\n'.join(usage),
        epilog='\n'.join([*lines, '', ID, '', EXITS]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('words', nargs='*', help=argparse.SUPPRESS)
    again = 'the new instance gets this uuid; asked again, nothing is made twice'
    parser.add_argument('--uuid', type=parse_uuid, help=again)
    parser.add_argument('--name', help="its host name, unique among the living; then stands for its uuid")
    keys = "a file of OpenSSH public keys, in place of schedule.yaml's; may be said again for more"
    parser.add_argument('--ssh-key', metavar='FILE', action='append', help=keys)
    data = 'what its cloud-init is told: cloud-config, a script, multipart or gzip, at most 256 KiB; - is stdin'
    parser.add_argument('--user-data', metavar='FILE', help=data)
    most = f'place so many, at most {LARGEST_SET}, all or none; names get -1, -2, …'
    parser.add_argument('--count', dest='size', type=int, metavar='N', help=most)
    parser.add_argument('--min', type=int, metavar='M', help='with --count: M of them at least, or none')
    add = 'what a flavor asks for, and the query, if there is one, on top'
    parser.add_argument('--flavor', metavar='NAME', help=add)
    parser.add_argument('--weigh', choices=WEIGHS, help='which computes are tried first (spread: the emptiest)')
    parser.add_argument('--group', metavar='NAME', help='it is to be with others of this name, or apart from them')
    first = 'what that means, which the first of a group says'
    parser.add_argument('--policy', choices=POLICIES, help=first)
    how = parser.add_mutually_exclusive_group()
    for each, said in (('strict', 'or else not at all (this, if the first says nothing)'), ('soft', 'if it can be')):
        how.add_argument(f'--{each}', dest='strictness', action='store_const', const=each, help=said)
    parser.add_argument('--project', metavar='ID', help="whose it is, in place of schedule.yaml's; its quota counts")
    parser.add_argument('--on', metavar='COMPUTE', help='only this compute: its uuid, or its host name')
    then = 'wait for a stage of the new one (alone: addressed), or until what was asked for is done'
    pull = 'put it into the queue of its --flavor: a compute that has room takes it, no scheduler places it'
    parser.add_argument('--queue', action='store_true', help=pull)
    parser.add_argument('--wait', metavar='[=STAGE]', help=then)
    parser.add_argument('--for', dest='stage', metavar='STAGE', help=f'wait: one of {", ".join(STAGES)}')
    parser.add_argument('--timeout', type=float, metavar='S', help='seconds to wait at most (300); the guest goes on')
    parser.add_argument('-f', '--format', choices=('table', 'json'), help='table (default) or json')
    parser.add_argument('--all', action='store_true', help='list: also what is gone')
    mend = 'audit: mend what is safe to mend, after two looks a minute apart'
    parser.add_argument('--fix', action='store_true', help=mend)
    config = 'in place of schedule.yaml in ./, ~/.config/ecomp/ or /etc/ecomp/'
    parser.add_argument('--config', metavar='FILE', help=config)
    parser.add_argument('--version', action='version', version=f'eschedule {__version__}')
    return parser


def _command(words: Sequence[str], flavored: bool) -> tuple[str, tuple[str, ...]]:
    if flavored and (not words or is_image(words[0])):
        return CREATE, FORMS[CREATE].words(CREATE, words)
    if not words:
        raise UsageError('nothing to do: give a placement query, a uuid or a command; --help shows all')
    for count in (2, 1):
        name = ' '.join(words[:count])
        if name in FORMS and name not in (CREATE, QUERY):
            return name, FORMS[name].words(name, words[count:])
    name = CREATE if '=' in words[0] else QUERY
    return name, FORMS[name].words(name, words)


def _check_set(options: Options) -> None:
    count = 1 if options.size is None else options.size
    most = LARGEST_SET if options.name is None else LARGEST_NAMED_SET
    if not 1 <= count <= most:
        named = '' if options.name is None else ' with names'
        raise UsageError(f'--count: 1 to {most}{named}, which one transaction of etcd takes')
    if options.min is not None and not 1 <= options.min <= count:
        raise UsageError(f'--min: 1 to {count}, the --count')
    if options.format == 'json' and options.wait is not None:
        raise UsageError('-f json does not go with --wait: eschedule wait waits for what it names')


def _check_group(options: Options) -> None:
    if options.group is None:
        if options.policy is not None or options.strictness is not None:
            raise UsageError('--policy, --strict and --soft go with --group')
        return
    try:
        check_group_name(options.group)
    except ValueError as error:
        raise UsageError(f'--group: {error}') from error


def _check_query(name: str, words: Sequence[str], options: Options) -> None:
    if name in (CREATE, 'plan') and not words[0] and options.flavor is None:
        raise UsageError(f'{name}: give a placement query, in quotes, or a --flavor; --help shows all')


def _check_queue(words: Sequence[str], options: Options) -> None:
    if options.flavor is None:
        raise UsageError('--queue: give a --flavor: each flavor has a queue of its own')
    if words[0]:
        raise UsageError('--queue: a flavor asks for what it says, and takes no query on top')
    for option, value in (('on', options.on), ('weigh', options.weigh), ('count', options.size), ('min', options.min)):
        if value is not None:
            raise UsageError(f'--{option} does not go with --queue: who takes it is not for eschedule to say')


def _check_options(name: str, words: Sequence[str], options: Options) -> None:
    given = {each for each, value in options._asdict().items() if value not in (None, False)} - {'config'}
    wrong = sorted(given - FORMS[name].options)
    if wrong:
        option = {'stage': 'for', 'size': 'count', 'strictness': options.strictness}.get(
            wrong[0], wrong[0].replace('_', '-')
        )
        raise UsageError(f'--{option} does not go with this form; --help shows all')
    _check_set(options)
    _check_group(options)
    if options.project is not None:
        check_project(options.project)
    if options.queue:
        _check_queue(words, options)
    if options.name is not None:
        try:
            check_name(options.name)
            check_name(f'{options.name}-{options.size}' if (options.size or 1) > 1 else options.name)
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
