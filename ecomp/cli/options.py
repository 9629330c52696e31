"""Rows, parsers and checks of eschedule's options and words. Pure, and quick to import.

A parser of words returns them with whole uuids in canonical form. It raises UsageError, as checks do.
"""

# Without `from __future__ import annotations`, because OPTIONS reads the annotations of Options.
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

from ecomp.errors import UsageError
from ecomp.model import keys
from ecomp.model.choose import STRATEGIES
from ecomp.model.group import POLICIES, Membership, check_group_name
from ecomp.model.reach import check_user
from ecomp.model.states import SHOWN_STATES, STAGES
from ecomp.model.text import MIN_PREFIX_DIGITS, format_suggestion, is_name, parse_uuid_prefix

TABLE, JSON, YAML, CSV, VALUE = FORMS = ('table', 'json', 'yaml', 'csv', 'value')
# Printed by `top` only.
PROMETHEUS = 'prometheus'
# Instances of one create, without and with names: each takes one or two of the 128 operations of an etcd transaction.
MAX_SET_SIZE = 100
MAX_NAMED_SET_SIZE = 60
# Seconds that --wait and `wait` take at most, unless --timeout is given; then the exit code is 6.
DEFAULT_WAIT_SECONDS = 300.0
MAX_LOG_LINES = 1_000_000
# Characters of a project's id at most; placement's own limit.
MAX_PROJECT_LENGTH = 255
SHELLS = ('bash', 'zsh', 'fish')
# The second words of `flavor` and `quota`. A flavor, group or project with such a name would be hidden.
SUBCOMMANDS = ('set', 'delete')
Words = tuple[str, ...]
_INVALID_INSTANCE = (
    f'not a valid instance. Fix: give a name, a uuid, or at least the first {MIN_PREFIX_DIGITS} digits of a uuid'
)


@contextmanager
def convert_to_usage_error(subject: str = '') -> Iterator[None]:
    """Convert a ValueError of the block to a UsageError that begins with `subject`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f'{subject}: {error}' if subject else str(error)) from error


def parse_uuid(word: str) -> str:
    """Parse a uuid of an instance into canonical form, or raise UsageError."""
    if (canonical := _normalize_uuid(word)) is None:
        raise UsageError(f'{word!r} is not a valid uuid of an instance. Try: --help')
    return canonical


def parse_nothing(name: str, words: Sequence[str]) -> Words:
    """Return no words, or raise UsageError if there are any."""
    if words:
        raise UsageError(f'{name}: unexpected argument {" ".join(words)!r}')
    return ()


def parse_bare_instance(_: str, words: Sequence[str]) -> Words:
    """Parse the words of a line without a command, or raise UsageError for more than one."""
    if len(words) > 1:
        raise UsageError(f'{words[0]!r} is not a command')
    return (_parse_instance(words[0], 'neither a command nor an instance'),)


def parse_instance_and_command(name: str, words: Sequence[str]) -> Words:
    """Parse [USER@]INSTANCE, if any, and keep the words of a command for the guest unchecked."""
    if not words:
        return ()
    user, word = split_user(words[0])
    [instance] = parse_instances(name, [word])
    return (f'{user}@{instance}' if user else instance, *words[1:])


def split_user(word: str) -> tuple[str, str]:
    """Split `[USER@]<id>` into a valid user, '' for none, and the unchecked instance."""
    user, at, instance = word.rpartition('@')
    with convert_to_usage_error():
        return check_user(user) if at else '', instance


def _parse_instance(word: str, problem: str = _INVALID_INSTANCE) -> str:
    identifier = word if is_name(word) or parse_uuid_prefix(word) else _normalize_uuid(word)
    if identifier is None:
        raise UsageError(f'{word!r} is {problem}')
    return identifier


def _normalize_uuid(word: str) -> str | None:
    """Return a uuid of any form in canonical form, or None if no instance can have it."""
    if keys.is_uuid(word):
        return word
    import uuid  # parses other forms, but is slow to load

    try:
        canonical = str(uuid.UUID(word))
    except ValueError:
        return None
    return canonical if keys.is_uuid(canonical) else None


def parse_query_and_image(name: str, words: Sequence[str]) -> Words:
    """Return the query, '' for none, and the unchecked image, if there is one."""
    words = ['', *words] if not words or is_image(words[0]) else list(words)
    if len(words) > 2:
        problem = f'{name}: unexpected argument {words[2]!r} after query and image URL'
        raise UsageError(f'{problem}. Try: put the query in quotes')
    if words[0] and '=' not in words[0]:
        problem = f'{name}: {words[0]!r} is not a placement query'
        raise UsageError(f"{problem}. Try: 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'")
    return tuple(words)


def is_image(word: str) -> bool:
    """Return whether a word is a URL, as opposed to a query, which has :// only after a =."""
    return '://' in word.partition('=')[0]


def _normalize_if_uuid(word: str) -> str:
    return _normalize_uuid(word) or word


def _make_parser(
    min_count: int, max_count: int | None, complaint: str, parse_word: Callable[[str], str] = str
) -> Callable[[str, Sequence[str]], Words]:
    """Make a parser that requires a number of words, and applies `parse_word` to each.

    `complaint` is a format string: {name} is the command, such as `group`, and {what} is what its words name.
    """

    def parse_words(name: str, words: Sequence[str]) -> Words:
        if not min_count <= len(words) <= (max_count or len(words)):
            what = name.partition(' ')[0].replace('quota', 'project')
            raise UsageError(f'{name}: ' + complaint.format(name=name, what=what))
        return tuple(map(parse_word, words))

    return parse_words


parse_any_instances = _make_parser(0, None, '', _parse_instance)
parse_instances = _make_parser(1, None, 'missing argument: one or more instances, by name or uuid', _parse_instance)
parse_one_instance = _make_parser(1, 1, 'needs exactly one instance, by name or uuid', _parse_instance)
parse_rename = _make_parser(
    2, 2, 'needs an instance, and its new name. Try: eschedule {name} web1 web-old', _normalize_if_uuid
)
parse_resize = _make_parser(
    2, 2, "needs an instance, and its amounts. Try: eschedule {name} web1 'resources=VCPU:2'", _normalize_if_uuid
)
parse_rebuild = _make_parser(1, 2, 'needs an instance, and may have an image', _normalize_if_uuid)
parse_any_computes = _make_parser(0, None, '', _normalize_if_uuid)
parse_computes = _make_parser(1, None, 'missing argument: one or more hosts, by name or uuid', _normalize_if_uuid)
parse_host_and_domains = _make_parser(1, None, 'missing argument: a host, by name or uuid', _normalize_if_uuid)
parse_any_names = _make_parser(0, None, '')
parse_names = _make_parser(1, None, 'missing argument: one or more {what}s, by name')
parse_file = _make_parser(1, 1, 'needs exactly one argument: a file, or - for standard input')
parse_flavor_and_query = _make_parser(
    2, 2, "needs a name and a quoted query. Try: eschedule {name} small 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'"
)


def parse_project_and_limits(name: str, words: Sequence[str]) -> Words:
    """Check the project, and return all words with the limits unparsed."""
    if len(words) < 2 or '=' in words[0]:
        problem = f'{name}: missing argument: a project and its limits'
        raise UsageError(f'{problem}. Try: eschedule {name} web VCPU=10 instances=5')
    require_project(words[0])
    return tuple(words)


def require_project(project: str) -> None:
    """Raise UsageError for a project name that is empty, too long or not printable."""
    if not 1 <= len(project) <= MAX_PROJECT_LENGTH or not project.isprintable():
        rule = f'a project has 1 to {MAX_PROJECT_LENGTH} printable characters'
        raise UsageError(f'{project[:80]!r} is not a valid project: {rule}')


def parse_period(text: str) -> float:
    """Convert a period to seconds, or raise ValueError if it is not as 90s, 15m, 2h or 1d."""
    if not re.fullmatch('[0-9]{1,5}[smhd]', text):
        raise ValueError(text)
    return float(text[:-1]) * {'s': 1, 'm': 60, 'h': 3600, 'd': 86400}[text[-1]]


class Option(NamedTuple):
    """The row of one option.

    `metavar` is '' for an option without a value. It begins with [ if the value is optional and given after a =.
    The typed text has to be one of any `choices`. `parse` converts it, or raises ValueError or UsageError.
    An option that `repeats` collects a list. An option without a value stores `const`.
    """

    flags: tuple[str, ...]
    metavar: str
    help: str
    parse: Callable[[str], Any] = str
    choices: Sequence[str] = ()
    repeats: bool = False
    const: str | bool = True


def _make(usage: str, help: str, **more: Any) -> Option:
    words = usage.split()
    flags = tuple(word for word in words if word.startswith('-'))
    return Option(flags, ''.join(words[len(flags) :]), help, **more)


# A NamedTuple is created ten times as fast as a dataclass.
class Options(NamedTuple):
    """The values of the options, None or False for those that are not given.

    `wait` is '' for --wait alone. Two options of one field exclude each other.
    """

    # fmt: off
    uuid: Annotated[str | None, _make('--uuid UUID', 'uuid of the new instance or, with --count, of the set. A '
        'repeated command with the same uuid creates no second instance: it continues the first command, or reports '
        'its result. Default: a random uuid', parse=parse_uuid)] = None
    name: Annotated[str | None, _make('--name NAME', 'name of the instance and host name of its guest: 1 to 63 '
        'lower-case letters, digits and -. No other existing instance can have this name. Commands accept the name '
        'instead of the uuid. Default: no name')] = None
    ssh_key: Annotated[Sequence[str] | None, _make('--ssh-key FILE', 'file of OpenSSH public keys that may log in; '
        'repeatable, at most 32 KiB in all. Default: ssh_keys of schedule.yaml', repeats=True)] = None
    user_data: Annotated[str | None, _make(
        '--user-data FILE', 'file for cloud-init in the guest: cloud-config, a script, MIME multipart, or one of these '
        'in gzip, at most 256 KiB; - is standard input. Default: user_data of schedule.yaml')] = None
    size: Annotated[int | None, _make(
        '--count N', f'create N instances, 1 to {MAX_SET_SIZE}: all of them or none. With --name, N is 1 to '
        f'{MAX_NAMED_SET_SIZE}, and they are named NAME-1, NAME-2, … Default: 1', parse=int)] = None
    min: Annotated[int | None, _make(
        '--min M', 'with --count: accept M or more instances if there is no room for N. Default: N', parse=int)] = None
    flavor: Annotated[str | None, _make('--flavor NAME', 'use the query of this flavor. If you give a query, too, its '
        'amounts replace those of the flavor, and its other conditions are added')] = None
    weigh: Annotated[str | None, _make(
        '--weigh HOW', 'order in which computes with room are tried: spread (the emptiest first), pack (the fullest '
        "first), random, or first (placement's own order). Default: spread", choices=STRATEGIES)] = None
    on: Annotated[str | None, _make('--on COMPUTE', 'place only on this compute: its host name, uuid, or the first '
        f'digits of its uuid, {MIN_PREFIX_DIGITS} or more')] = None
    group: Annotated[str | None, _make(
        '--group GROUP', 'add the instance to this group, whose members are all on one compute, or all on different '
        'ones. The group is created with its first member and removed with its last')] = None
    policy: Annotated[str | None, _make(
        '--policy POLICY', 'policy of the group: affinity (all members on one compute) or anti-affinity (no two on the '
        'same). Required for the first member; a later member with another policy is refused', choices=POLICIES)] = None
    strictness: Annotated[str | None,
        _make('--strict', "make the group's policy a condition: an instance that would break it is refused "
            '(exit 3). Default for a new group', const='strict'),
        _make('--soft', "make the group's policy a preference: computes that would break it are tried "
            'last', const='soft')] = None
    project: Annotated[str | None, _make('--project ID', 'project that owns the instance and whose quota counts it: 1 '
        'to 255 characters. Default: project_id of schedule.yaml')] = None
    queue: Annotated[bool, _make('--queue', 'put the request into the queue of its --flavor, from which a compute with '
        'room takes it, now or later. Not accepted with a query, --on, --weigh, --count or --min. Default: choose a '
        'compute now, and refuse the request if no compute has room')] = False
    wait: Annotated[str | None, _make('--wait [=STAGE]', 'return once the new instances have reached STAGE: '
        f"{', '.join(STAGES)}; without STAGE, addressed. For addressed and later stages, also print the addresses. "
        'Default: return once the instances are placed')] = None
    stage: Annotated[str | None, _make(
        '--for STAGE', f"stage to wait for: {', '.join(STAGES)}. Default: addressed")] = None
    timeout: Annotated[float | None, _make('--timeout SECONDS', 'wait at most this long in all, then exit with 6; the '
        f'operation continues. Default: {DEFAULT_WAIT_SECONDS:.0f}', parse=float)] = None
    format: Annotated[str | None, _make(
        '-f --format FORM', 'output format: table, json or yaml; commands with -c: also csv or value (tab-separated, - '
        'for a missing value); top: also prometheus. Default: table', choices=(*FORMS, PROMETHEUS))] = None
    columns: Annotated[Sequence[str] | None, _make(
        '-c --column COLUMN', 'print only this column; repeatable, or several with commas between them. A unique '
        'beginning of its name is enough, in upper or lower case. Default: all', repeats=True)] = None
    no_header: Annotated[bool, _make('--no-header', 'leave out the headings of a table, of csv or of details')] = False
    sort: Annotated[str | None, _make(
        '--sort COLUMN', 'sort by this column, numbers by value: web-2 before web-10. Default: not sorted')] = None
    wide: Annotated[bool, _make('--wide', 'print all columns in full. Default: on a terminal uuids are shortened, and '
        'columns that do not fit are cut or left out; in files and pipes columns are never cut')] = False
    state: Annotated[Sequence[str] | None, _make('--state STATE', 'list only instances in this state; repeatable, or '
        'several with commas between them. --state gone works without --all', repeats=True)] = None
    host: Annotated[str | None, _make(
        '--host COMPUTE', 'list only instances on this compute: its uuid or host name')] = None
    view: Annotated[str | None,
        _make('--timeline', 'draw how long each stage of the last boot took', const='timeline'),
        _make('--command', 'print the command that creates the instance again', const='command')] = None
    all: Annotated[bool, _make('--all', 'list also instances that are gone; their records are kept for a day')] = False
    foreign: Annotated[bool, _make('--foreign', 'list instead the guests on all hosts that ecomp did not create, as '
        '`eschedule adopt HOST` does')] = False
    watch: Annotated[bool, _make('--watch', 'continue with each change as it happens, until Ctrl-C (exit 0)')] = False
    since: Annotated[float | None, _make(
        '--since PERIOD', 'print only the events of the last PERIOD: 90s, 15m, 2h or 1d. An event without a time '
        'counts as the next one with a time. Default: all that are kept', parse=parse_period)] = None
    fenced: Annotated[bool, _make('--fenced', 'confirm that the machine never comes back and that none of its guests '
        'runs; release its claims')] = False
    each: Annotated[bool, _make(
        '--each', 'with --dry-run: list how many guests of each host would fit elsewhere if it died')] = False
    restart: Annotated[bool, _make(
        '--restart', 'reboot the guest, or start it, so that it gets its new size now')] = False
    include_protected: Annotated[bool, _make(
        '--include-protected', 'also move the instances that are protected. Default: they stay')] = False
    stop: Annotated[bool, _make(
        '--stop', 'also shut the guests down, as `eschedule stop` does, until `eschedule host enable --start`')] = False
    start: Annotated[bool, _make(
        '--start', 'also start the guests that `eschedule host drain --stop` stopped there')] = False
    fix: Annotated[bool, _make('--fix', 'repair what is safe to repair: only findings that two checks, a minute apart, '
        'both report. Running guests are not changed')] = False
    now: Annotated[bool, _make(
        '--now', 'have every host look at itself now, twice, and wait for that: at most 10 s')] = False
    follow: Annotated[bool, _make(
        '--follow', 'continue with new output of the guest, until Ctrl-C. Short form: -f')] = False
    lines: Annotated[int | None, _make(
        '-n --lines N', 'print only the last N lines. Default: all that are kept', parse=int)] = None
    accept_new: Annotated[bool, _make('--accept-new', 'if the guest has reported no host keys, accept at your own risk '
        'the first one that it shows, and only that one from then on')] = False
    identity: Annotated[str | None, _make(
        '-i --identity FILE', 'private key to log in with. Default: the keys that ssh tries')] = None
    print_config: Annotated[bool, _make(
        '--print-config', 'print entries for ~/.ssh/config, and connect to no guest')] = False
    dry_run: Annotated[bool, _make(
        '--dry-run', 'print what the command would do, and whether there is room; change nothing')] = False
    prune: Annotated[bool, _make('--prune', 'destroy the instances of the stack that the file no longer has')] = False
    replace: Annotated[Sequence[str] | None, _make(
        '--replace MEMBER', 'destroy and recreate the instances of this member that differ from the file or are in '
        'error, or one of them, such as web/2; repeatable, or several with commas between them', repeats=True)] = None
    replace_all: Annotated[bool, _make('--replace-all', 'do what --replace does, for all members of the file')] = False
    resize: Annotated[bool, _make('--resize', 'resize the instances of which only the amounts differ, and keep their '
        'disks: see `eschedule resize`. The new amounts take effect when a guest starts')] = False
    destroy_first: Annotated[bool, _make('--destroy-first', 'wait until a replaced instance is gone before its '
        'successor is created, if there is no room for both. Default: create first')] = False
    file: Annotated[str | None, _make(
        '--file FILE', 'destroy the instances of this file, as `eschedule apply` made them')] = None
    every: Annotated[bool, _make('--every', 'select all living instances')] = False
    yes: Annotated[bool, _make('-y --yes', 'destroy without a question; required without a terminal')] = False
    port: Annotated[int | None, _make(
        '--port N', 'port of the page, 1 to 65535. Default: any that is free', parse=int)] = None
    stack: Annotated[str | None, _make('--stack STACK', 'list only the instances of this stack')] = None
    config: Annotated[str | None, _make('--config FILE', 'configuration file. Default: schedule.yaml in $ECOMP_CONFIG, '
        'else the first in ./, ~/.config/ecomp/ or /etc/ecomp/')] = None
    # fmt: on

    @property
    def membership(self) -> Membership | None:
        """The group by --group, with `strict` None without --strict and --soft."""
        strict = None if self.strictness is None else self.strictness == 'strict'
        return None if self.group is None else Membership(self.group, self.policy, strict)

    @property
    def states(self) -> list[str] | None:
        return None if self.state is None else [state for text in self.state for state in text.split(',')]

    @property
    def wait_seconds(self) -> float:
        return DEFAULT_WAIT_SECONDS if self.timeout is None else self.timeout


OPTIONS: Mapping[str, tuple[Option, ...]] = {field: row.__metadata__ for field, row in Options.__annotations__.items()}


def find_option_problems(name: str, options: Options, accepted_fields: Collection[str]) -> Iterator[str]:
    """Yield, or raise as UsageError, what breaks the rules that all commands have in common."""
    given_fields = {key for key, value in options._asdict().items() if value is not None and value is not False}
    for field in sorted(given_fields.difference(accepted_fields, {'config'})):
        rows = OPTIONS[field]
        flag = rows[0].flags[-1] if len(rows) == 1 else f'--{getattr(options, field)}'
        yield f'{flag} is not accepted by this command. Try: --help'
    if options.format == PROMETHEUS and name != 'top':
        yield f'-f {PROMETHEUS} is accepted only by top'
    yield from _find_form_problems(options, 'columns' in accepted_fields)
    if options.group is not None:
        with convert_to_usage_error('--group'):
            check_group_name(options.group)
        if options.group in SUBCOMMANDS and options.policy is not None:  # of the first member
            yield f'--group: {options.group!r} is not a valid name of a new group. Fix: choose another name'
    elif options.policy is not None or options.strictness is not None:
        yield '--policy, --strict and --soft need --group'
    if options.project is not None:
        require_project(options.project)
    if options.lines is not None and not 0 <= options.lines <= MAX_LOG_LINES:
        yield f'-n: must be 0 to {MAX_LOG_LINES}'
    yield from _find_wait_problems(name, options, accepted_fields)


def _find_form_problems(options: Options, has_columns: bool) -> Iterator[str]:
    form = options.format or TABLE
    for state in options.states or ():
        yield from _find_choice_problems('--state', state, 'state', sorted(SHOWN_STATES))
    if options.watch and has_columns and form != TABLE:
        yield f'-f {form} is not accepted with --watch, which draws a table'
    if form in (CSV, VALUE) and not has_columns:
        yield f'-f {form} needs columns, which this command does not print. Fix: give table, json or yaml'
    given = {'-c': options.columns, '--no-header': options.no_header, '--wide': options.wide}
    if form in (JSON, YAML):
        yield from (f'{flag} is not accepted with -f {form}, which prints everything' for flag in given if given[flag])
    for flag, texts in (('-c', options.columns or ()), ('--sort', [options.sort] if options.sort is not None else ())):
        if not all(name.strip() for text in texts for name in text.split(',')):
            yield f'{flag}: needs the name of a column'


def find_table_problems(options: Options, problem: str) -> Iterator[str]:
    """Yield `<option> <problem>` for each given option of tables, as which csv and value count."""
    given = {f'-f {options.format}': options.format in (CSV, VALUE), '-c': options.columns, '--sort': options.sort}
    given |= {'--no-header': options.no_header, '--wide': options.wide}
    yield from (f'{flag} {problem}' for flag, value in given.items() if value)


def _find_wait_problems(name: str, options: Options, accepted_fields: Collection[str]) -> Iterator[str]:
    # Only a command that makes instances has stages to choose from; the others wait for one thing.
    if options.wait and not {'size', 'dry_run'}.intersection(accepted_fields):
        yield f'{name}: --wait takes no value. Fix: leave out ={options.wait[:MAX_QUOTED_CHARACTERS]}'
    if options.timeout is not None and options.wait is None and 'wait' in accepted_fields:
        yield '--timeout needs --wait'
    if options.timeout is not None and not 0 <= options.timeout < 10**9:
        yield '--timeout: must be 0 to 999999999 seconds'
    for flag, stage in (('--wait', options.wait or None), ('--for', options.stage)):
        if stage is not None:
            yield from _find_choice_problems(flag, stage, 'stage', STAGES)


def _find_choice_problems(flag: str, text: str, noun: str, choices: Sequence[str]) -> Iterator[str]:
    if text not in choices:
        problem = f'{text[:MAX_QUOTED_CHARACTERS]!r} is not a valid {noun}{format_suggestion(text, choices)}'
        yield f'{flag}: {problem}. Fix: give one of {", ".join(choices)}'


# Fields of the options that may replace a command on any line.
HELP = 'help'
VERSION = 'version'

_INFO = {HELP: (Option(('-h', '--help'), '', ''),), VERSION: (Option(('--version',), '', ''),)}
FLAGS: Mapping[str, tuple[str, Option]] = {
    flag: (field, option) for field, rows in {**_INFO, **OPTIONS}.items() for option in rows for flag in option.flags
}

# What each number parser expects, for its error message.
NUMBER_KINDS: Mapping[Callable[[str], Any], str] = {
    int: 'whole number',
    float: 'number of seconds',
    parse_period: 'period, as 90s, 15m, 2h or 1d',
}
MAX_QUOTED_CHARACTERS = 80
_NEGATIVE = r'-\d*\.?\d+'


def find_info(argv: Sequence[str]) -> str:
    """Return HELP or VERSION if a word before `--` asks for it, else ''."""
    for word in _cut_before_end_marker(argv):
        flags = _find_flags(word)
        if len(flags) == 1 and (field := FLAGS[flags[0]][0]) in (HELP, VERSION):
            return field
    return ''


def parse_line(argv: Sequence[str]) -> tuple[list[str], Options]:
    """Parse a command line without --help and --version into words and options.

    Options may stand anywhere before `--`. A unique beginning of a long option is enough.
    What stands after `--` is a word, as are - and negative numbers. After the first word `log`, -f is --follow.
    """
    words: list[str] = []
    values: dict[str, Any] = {}
    before = _cut_before_end_marker(argv)
    remaining = iter(before)
    for word in remaining:
        if not _is_option(word):
            words.append(word)
            continue
        flag, value = _split_option(word)
        if (flag, value, words[:1]) == ('-f', None, ['log']):
            flag = '--follow'
        field, option = FLAGS[flag]
        if not option.metavar:
            _set_const(values, flag, value)
            continue
        if value is None:
            value = '' if option.metavar.startswith('[') else next(remaining, None)
            if value is None or _is_option(value):
                raise UsageError(f'{flag} needs a value. Fix: write {flag} {option.metavar}')
        parsed = _parse_value(flag, option, value)
        if option.repeats:
            values.setdefault(field, []).append(parsed)
        elif field in values:
            raise UsageError(f'{option.flags[-1]} is given more than once')
        else:
            values[field] = parsed
    return [*words, *argv[len(before) + 1 :]], Options(**values)


def _cut_before_end_marker(argv: Sequence[str]) -> Sequence[str]:
    return argv[: argv.index('--')] if '--' in argv else argv


def _is_option(word: str) -> bool:
    return word.startswith('-') and word != '-' and not re.fullmatch(_NEGATIVE, word)


def _find_flags(word: str) -> list[str]:
    typed = word.partition('=')[0]
    if typed in FLAGS:
        return [typed]
    return [flag for flag in FLAGS if len(typed) > 2 and typed.startswith('--') and flag.startswith(typed)]


def _split_option(word: str) -> tuple[str, str | None]:
    """Return the flag of a word, an abbreviated one in full, and its value (=20, -n20) or None."""
    flags = _find_flags(word)
    typed, equals, value = word.partition('=')
    if len(flags) > 1:
        choices = f'{", ".join(flags[:-1])} or {flags[-1]}'
        raise UsageError(f'{typed} is ambiguous: it may be {choices}. Fix: write the whole option')
    if flags:
        return flags[0], value if equals else None
    short, attached = word[:2], word[2:]
    if short in FLAGS and FLAGS[short][1].metavar:
        return short, attached
    raise UsageError(f'{typed} is not a valid option{format_suggestion(typed, FLAGS)}. Try: --help')


def _set_const(values: dict[str, Any], flag: str, value: str | None) -> None:
    field, option = FLAGS[flag]
    if value is not None:
        raise UsageError(f'{flag} takes no value. Fix: leave out ={value[:MAX_QUOTED_CHARACTERS]}')
    if values.setdefault(field, option.const) != option.const:
        other = next(row.flags[-1] for row in OPTIONS[field] if row.const == values[field])
        raise UsageError(f'{flag} cannot be combined with {other}. Fix: give one of them')


def _parse_value(flag: str, option: Option, text: str) -> Any:
    try:
        value = option.parse(text)
    except ValueError as error:
        problem = f'{text[:MAX_QUOTED_CHARACTERS]!r} is not a {NUMBER_KINDS[option.parse]}'
        raise UsageError(f'{option.flags[0]}: {problem}') from error
    if option.choices:
        for problem in _find_choice_problems(flag, text, option.metavar, option.choices):
            raise UsageError(problem)
    return value
