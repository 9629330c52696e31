"""Rows, parsers and checks of eschedule's options and words. Pure, and quick to import.

A parser of words takes a command's name and words and returns the words checked, whole uuids in canonical form, or
raises UsageError. Options is a NamedTuple: a dataclass takes ten times as long to create, in every command. Its
annotations are used at run time, so there is no `from __future__ import annotations`.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

from ecomp.errors import UsageError
from ecomp.model import boots, keys
from ecomp.model.choose import WEIGHS
from ecomp.model.group import POLICIES, Membership, check_group_name
from ecomp.model.reach import check_user
from ecomp.model.record import QUEUED, STAGES, STATES
from ecomp.model.text import did_you_mean, is_name, uuid_prefix

TABLE, JSON, YAML, CSV, VALUE = FORMS = ('table', 'json', 'yaml', 'csv', 'value')

# Instances of one create, without and with names: each takes one or two of the 128 operations of an etcd transaction.
LARGEST_SET = 100
LARGEST_NAMED_SET = 60

# Seconds that --wait and `wait` take at most, unless --timeout is given; then the exit code is 6.
PATIENCE = 300.0

MOST_LINES = 1_000_000

# Characters of a project's id at most; placement's own limit.
LONGEST_PROJECT = 255

SHELLS = ('bash', 'zsh', 'fish')


@contextmanager
def refuse_as_usage(what: str = '') -> Iterator[None]:
    """Convert a ValueError of the block to a UsageError that begins with `subject`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f'{what}: {error}' if what else str(error)) from error


# The words behind a command


Words = tuple[str, ...]


def parse_uuid(word: str) -> str:
    """Return a uuid in canonical form; UsageError if no instance can have it."""
    canonical = _canonical_uuid(word)
    if canonical is None:
        raise UsageError(f'{word!r} is not a uuid that an instance can have; --help shows all')
    return canonical


def nothing(name: str, words: Sequence[str]) -> Words:
    if words:
        raise UsageError(f'{name} takes no further words: {" ".join(words)}')
    return ()


def instances(name: str, words: Sequence[str]) -> Words:
    """Parse one instance or more: names, uuids, or beginnings of uuids."""
    if not words:
        raise UsageError(f'{name}: which instance? Give one name or uuid, or more')
    problem = 'no instance: give its name, its uuid or the beginning of its uuid'
    return tuple(_instance(word, problem) for word in words)


def any_instances(name: str, words: Sequence[str]) -> Words:
    return instances(name, words) if words else ()


def one_instance(_: str, words: Sequence[str]) -> Words:
    """Parse the instance of a line without a command; the caller may suggest a command."""
    if len(words) > 1:
        raise UsageError(f'{words[0]!r} is not a command')
    return (_instance(words[0], 'neither a command nor an instance'),)


def just_one_instance(name: str, words: Sequence[str]) -> Words:
    if len(words) != 1:
        raise UsageError(f'{name}: which instance? Give one name or uuid')
    return instances(name, words)


def instance_and_command(name: str, words: Sequence[str]) -> Words:
    """Parse [USER@]INSTANCE and the words of a command for the guest, which are not checked."""
    if not words:
        raise UsageError(f'{name}: which instance? Give one name or uuid')
    user, word = user_and_instance(words[0])
    [instance] = instances(name, [word])
    return (f'{user}@{instance}' if user else instance, *words[1:])


def user_and_instance(word: str) -> tuple[str, str]:
    """Split `[USER@]<id>` into user, '' for none, and instance; UsageError for an invalid user."""
    user, at, instance = word.rpartition('@')
    with refuse_as_usage():
        return check_user(user) if at else '', instance


def _instance(word: str, wrong: str) -> str:
    identifier = word if is_name(word) or uuid_prefix(word) else _canonical_uuid(word)
    if identifier is None:
        raise UsageError(f'{word!r} is {wrong}')
    return identifier


def _canonical_uuid(word: str) -> str | None:
    if keys.is_uuid(word):
        return word
    import uuid  # parses other forms, but is slow to load

    try:
        canonical = str(uuid.UUID(word))
    except ValueError:
        return None
    return canonical if keys.is_uuid(canonical) else None


def query_and_image(name: str, words: Sequence[str]) -> Words:
    """Parse a query, '' if there is none, and an optional image URL."""
    words = ['', *words] if not words or is_image(words[0]) else list(words)
    if len(words) > 2:
        raise UsageError(f'one query and one image URL, and then comes {words[2]!r}: is the query in quotes?')
    if words[0] and '=' not in words[0]:
        problem = f'{name}: {words[0]!r} is not a placement query'
        raise UsageError(f"{problem}. Try: 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'")
    return tuple(words)


def is_image(word: str) -> bool:
    """Return True for a URL, False for a query; a query may contain :// only after a =."""
    return '://' in word.partition('=')[0]


def planned(name: str, words: Sequence[str]) -> Words:
    """Parse the words of `plan` and return only the query, as the image does not matter."""
    return perhaps_query_and_image(name, words)[:1]


def perhaps_query_and_image(name: str, words: Sequence[str]) -> Words:
    """Parse an optional query and image behind the name of a command."""
    query, *image = query_and_image(name, words)
    if not all(is_image(word) for word in image):
        raise UsageError(f'{name}: give one placement query, in quotes, and at most one image URL')
    return (query, *image)


def _canonical(word: str) -> str:
    return _canonical_uuid(word) or word


def _words(least: int, most: int, says: str, read: Callable[[str], str] = str) -> Callable[[str, Sequence[str]], Words]:
    """Make a parser for a number of words; `complaint` is the message for another number."""

    def take(name: str, words: Sequence[str]) -> Words:
        if not least <= len(words) <= most:
            raise UsageError(f'{name}: ' + says.format(name=name, what=name.partition(' ')[0]))
        return tuple(map(read, words))

    return take


flavor_and_query = _words(2, 2, "give a name and what it asks for: {name} small 'resources=VCPU:1,…&required=…'")
names = _words(1, 10**9, 'which {what}? Give one name, or more')
compute = _words(1, 1, 'which compute? Give one host name or uuid', _canonical)
computes = _words(1, 10**9, 'which compute? Give one host name or uuid, or more', _canonical)


def project_and_limits(name: str, words: Sequence[str]) -> Words:
    if len(words) < 2 or '=' in words[0]:
        raise UsageError(f'{name}: give a project and its limits: {name} web VCPU=10 instances=5')
    check_project(words[0])
    return tuple(words)


def check_project(project: str) -> None:
    if not 1 <= len(project) <= LONGEST_PROJECT or not project.isprintable():
        raise UsageError(f'{project[:80]!r} is no project: it has 1 to {LONGEST_PROJECT} characters, all printable')


# The options


class Option(NamedTuple):
    """The row of one option.

    `metavar` names its value: '' if it has none, in brackets if the value is optional and given after a =. `parse`
    converts the text, which has to be one of any `choices`. One that `repeats` collects a list; one without a value
    means `const`.
    """

    flags: tuple[str, ...]
    metavar: str
    help: str
    parse: Callable[[str], Any] = str
    choices: Sequence[str] = ()
    repeats: bool = False
    const: str | bool = True


def _option(flags: str, metavar: str, help: str, **more: Any) -> Option:
    return Option(tuple(flags.split()), metavar, help, **more)


class Options(NamedTuple):
    """The given options; one that is not given is None or False.

    `wait` is '' for --wait alone, `stage` is --for, `size` is --count, and `uuid` is canonical. Two options of one
    field exclude each other.
    """

    uuid: Annotated[str | None, _option(
        '--uuid', 'UUID', 'the uuid of the new instance, or of the set with --count. The same command with the same '
        'uuid makes nothing twice: it goes on, or says what became of it. Without: a new one', parse=parse_uuid)] = None
    name: Annotated[str | None, _option(
        '--name', 'NAME', "the instance's name and its guest's host name: 1 to 63 lower-case letters, digits and -. "
        'No two living instances have the same; it stands wherever the uuid may. Without: it has no name')] = None
    ssh_key: Annotated[Sequence[str] | None, _option(
        '--ssh-key', 'FILE', 'a file of OpenSSH public keys that may log in, 32 KiB in all; may be given several '
        'times. Without: ssh_keys of schedule.yaml', repeats=True)] = None
    user_data: Annotated[str | None, _option(
        '--user-data', 'FILE', 'what cloud-init in the guest is given: cloud-config, a script, MIME multipart, or any '
        'of them in gzip, at most 256 KiB. - reads standard input. Without: user_data of schedule.yaml')] = None
    size: Annotated[int | None, _option(
        '--count', 'N', f'how many instances, 1 to {LARGEST_SET} ({LARGEST_NAMED_SET} with --name, where they are '
        'called NAME-1, NAME-2, …): all of them are placed, or none. Without: 1', parse=int)] = None
    min: Annotated[int | None, _option(
        '--min', 'M', 'with --count: be content with M instances or more where there is no room for N. Without: N',
        parse=int)] = None
    flavor: Annotated[str | None, _option(
        '--flavor', 'NAME', 'ask for what this flavor asks for. A query beside it is laid on top: its amounts take '
        "the place of the flavor's, and all else is added")] = None
    weigh: Annotated[str | None, _option(
        '--weigh', 'HOW', 'in which order computes with room are tried: spread (the emptiest first), pack (the '
        "fullest first), random, or first (placement's own order). Without: spread", choices=WEIGHS)] = None
    on: Annotated[str | None, _option(
        '--on', 'COMPUTE', 'place it on this compute or nowhere: its host name, its uuid, or the beginning of its '
        'uuid')] = None
    group: Annotated[str | None, _option(
        '--group', 'GROUP', 'make the instance a member of this group, whose members share one compute or avoid each '
        "other's. The first member creates it, and with the last one it is gone")] = None
    policy: Annotated[str | None, _option(
        '--policy', 'POLICY', 'what the group means: affinity (all members on one compute) or anti-affinity (no two '
        'on the same). The first member has to say it; later ones may leave it out, and are refused if they say '
        'otherwise', choices=POLICIES)] = None
    strictness: Annotated[
        str | None,
        _option(
            '--strict', '', "the group's policy is a condition: an instance is not placed where it would break it "
            '(exit 3). So it is where the first member says neither --strict nor --soft',
            const='strict'),
        _option(
            '--soft', '', "the group's policy is a preference: computes where it would be broken are tried last, and "
            'are taken if no other has room', const='soft'),
    ] = None
    project: Annotated[str | None, _option(
        '--project', 'ID', 'the project the instance belongs to, whose quota counts it: 1 to 255 characters. Without: '
        'project_id of schedule.yaml')] = None
    queue: Annotated[bool, _option(
        '--queue', '', 'put the request into the queue of its --flavor, where a compute with room takes it by itself, '
        'now or later. Without: eschedule chooses a compute at once, or says that there is no room')] = False
    wait: Annotated[str | None, _option(
        '--wait', '[=STAGE]', 'return once the new instances have their addresses, and print those; or once they have '
        f'reached STAGE: {", ".join(STAGES)}. Without: return once they are placed')] = None
    stage: Annotated[str | None, _option(
        '--for', 'STAGE', f'the stage to wait for: {", ".join(STAGES)}. Without: addressed')] = None
    timeout: Annotated[float | None, _option(
        '--timeout', 'SECONDS', 'how long to wait in all; then the exit code is 6, and what was begun goes on. '
        f'Without: {PATIENCE:.0f}', parse=float)] = None
    boot: Annotated[int | None, _option(
        '--boot', 'N', f'the boot of this number: 1 is the one it was made with, and the last {boots.KEPT} are kept. '
        'Without: the last one', parse=int)] = None
    format: Annotated[str | None, _option(
        '-f --format', 'FORM', 'table, json or yaml, or, of what has columns, csv or value: bare values, a tab between '
        'two, and - for what is not there. Without: table', choices=FORMS)] = None
    columns: Annotated[Sequence[str] | None, _option(
        '-c --column', 'COLUMN', 'only this column; several with commas between them or -c again. The beginning of its '
        'name will do, in small letters, too. Without: all', repeats=True)] = None
    no_header: Annotated[bool, _option(
        '--no-header', '', 'of a table, csv or details the values alone, without their headings')] = False
    sort: Annotated[str | None, _option(
        '--sort', 'COLUMN', 'by this column, and numbers as such: web-2 before web-10. Without: as they come')] = None
    wide: Annotated[bool, _option(
        '--wide', '', 'all columns, and all of each. Without: on a terminal uuids are short, and what does not fit is '
        'cut or left out; what goes to a file or a program has whole columns')] = False
    state: Annotated[Sequence[str] | None, _option(
        '--state', 'STATE', 'only those in this state; several with commas between them or --state again. gone shows '
        'those that are, as --all does', repeats=True)] = None
    host: Annotated[str | None, _option(
        '--host', 'COMPUTE', 'only those on this compute: its uuid, or its host name')] = None
    all: Annotated[bool, _option(
        '--all', '', 'also the instances that are gone: their records are kept for a day')] = False
    watch: Annotated[bool, _option(
        '--watch', '', 'go on with each change as it happens, until Ctrl-C, which is exit 0')] = False
    fenced: Annotated[bool, _option(
        '--fenced', '', 'the machine is off for good, and none of its guests runs any more: release what it holds'
        )] = False
    fix: Annotated[bool, _option(
        '--fix', '', 'mend what is safe to mend. It looks twice, a minute apart, and changes only what both looks '
        'found; nothing that runs is touched')] = False
    canary: Annotated[bool, _option(
        '--canary', '', 'boot, enter and destroy a small guest on every host, on all of them at once')] = False
    follow: Annotated[bool, _option(
        '--follow', '', 'go on with what the guest writes, as it comes; Ctrl-C ends it. -f for short')] = False
    lines: Annotated[int | None, _option(
        '-n --lines', 'N', 'the last N lines. Without: all that is kept', parse=int)] = None
    accept_new: Annotated[bool, _option(
        '--accept-new', '', 'of a guest that has not said its host keys: take the one that it shows first, on your '
        'own word, and no other from then on')] = False
    identity: Annotated[str | None, _option(
        '-i --identity', 'FILE', "the private key to log in with. Without: ssh's own choice")] = None
    config: Annotated[str | None, _option(
        '--config', 'FILE', "the configuration. Without: $ECOMP_CONFIG's, else schedule.yaml in ./, ~/.config/ecomp/ "
        'or /etc/ecomp/, the first that is there')] = None

    @property
    def membership(self) -> Membership | None:
        strict = None if self.strictness is None else self.strictness == 'strict'
        return None if self.group is None else Membership(self.group, self.policy, strict)

    @property
    def states(self) -> list[str] | None:
        """The states of --state, None if it is not given."""
        return None if self.state is None else [state for text in self.state for state in text.split(',')]

    @property
    def patience(self) -> float:
        return PATIENCE if self.timeout is None else self.timeout


OPTIONS: Mapping[str, tuple[Option, ...]] = {
    field: each.__metadata__ for field, each in Options.__annotations__.items()
}


def find_given(options: Options) -> set[str]:
    """Return the fields that are given, except --config, which every command accepts."""
    return {key for key, value in options._asdict().items() if value is not None and value is not False} - {'config'}


def check_taken(options: Options, takes: Iterable[str]) -> None:
    """Raise UsageError for a given option that is not among the accepted fields."""
    unaccepted = sorted(find_given(options).difference(takes))
    if unaccepted:
        rows = OPTIONS[unaccepted[0]]
        flag = rows[0].flags[-1] if len(rows) == 1 else f'--{getattr(options, unaccepted[0])}'
        raise UsageError(f'{flag} does not go with this form; --help shows all')


def check(name: str, options: Options, takes: Container[str]) -> None:
    """Raise UsageError for invalid or incompatible options; Command.check covers the rest."""
    _check_form(options, 'columns' in takes)
    _check_group(options)
    if options.project is not None:
        check_project(options.project)
    if options.boot is not None and options.boot < 1:
        raise UsageError('--boot: 1 or more; eschedule show names those that are kept')
    if options.lines is not None and not 0 <= options.lines <= MOST_LINES:
        raise UsageError(f'-n: 0 to {MOST_LINES} lines')
    _check_waiting(name, options, takes)


def _check_form(options: Options, has_columns: bool) -> None:
    for state in options.states or ():
        if state not in (QUEUED, *STATES):
            like, states = did_you_mean(state, (QUEUED, *STATES)), ', '.join(sorted({QUEUED, *STATES}))
            raise UsageError(f'--state: there is no such state{like}; say {states}')
    if options.watch and has_columns and options.format not in (None, TABLE):
        raise UsageError(f'--watch draws a table: -f {options.format} does not go with it')
    if options.format in (CSV, VALUE) and not has_columns:
        raise UsageError(f'-f {options.format} goes with what has columns: say table, json or yaml')
    if options.format in (JSON, YAML):
        for flag, is_given in (('-c', options.columns), ('--no-header', options.no_header), ('--wide', options.wide)):
            if is_given:
                raise UsageError(f'{flag} does not go with -f {options.format}, which has all there is')
    for option, texts in (('-c', options.columns), ('--sort', None if options.sort is None else [options.sort])):
        if texts is not None and not all(name.strip() for text in texts for name in text.split(',')):
            raise UsageError(f'{option}: give the name of a column')


def _check_group(options: Options) -> None:
    if options.group is not None:
        with refuse_as_usage('--group'):
            check_group_name(options.group)
    elif options.policy is not None or options.strictness is not None:
        raise UsageError('--policy, --strict and --soft go with --group')


def _check_waiting(name: str, options: Options, takes: Container[str]) -> None:
    if options.wait and 'size' not in takes:
        raise UsageError(f'{name} waits for one thing: --wait alone')
    if options.timeout is not None:
        if options.wait is None and 'wait' in takes:
            raise UsageError('--timeout goes with --wait')
        if not 0 <= options.timeout < 10**9:
            raise UsageError('--timeout: 0 to 999999999 seconds')
    for option, stage in (('wait', options.wait or None), ('for', options.stage)):
        if stage not in (None, *STAGES):
            choices = f'{", ".join(STAGES[:-1])} or {STAGES[-1]}'
            like = did_you_mean(stage, STAGES)
            raise UsageError(f'--{option}={stage}: there is no such stage{like}; say {choices}')


# Parsing a command line


# Fields of the options that may replace a command on any line.
HELP = 'help'
VERSION = 'version'

FLAGS: Mapping[str, tuple[str, Option]] = {
    flag: (field, option)
    for field, rows in {
        HELP: [Option(('-h', '--help'), '', '')],
        VERSION: [Option(('--version',), '', '')],
        **OPTIONS,
    }.items()
    for option in rows
    for flag in option.flags
}

# What each number parser expects, for its error message.
NUMBERS: Mapping[Callable[[str], Any], str] = {int: 'whole number', float: 'number of seconds'}

MOST_QUOTED = 80

_NEGATIVE = re.compile(r'-\d*\.?\d+')


def find_info_option(argv: Sequence[str]) -> str:
    """Return HELP or VERSION if any word asks for it, even in an invalid line, else ''."""
    for word in _before_end(argv):
        flags = _flags_like(word)
        if len(flags) == 1 and (field := FLAGS[flags[0]][0]) in (HELP, VERSION):
            return field
    return ''


def read(argv: Sequence[str]) -> tuple[list[str], Options]:
    """Parse a command line into words and options; UsageError if it is invalid.

    Options may stand anywhere before `--`, and everything after it is a word. A long option may be cut if it stays
    unique.
    """
    words: list[str] = []
    values: dict[str, Any] = {}
    before = _before_end(argv)
    remaining = iter(before)
    for word in remaining:
        if not _is_option(word):
            words.append(word)
            continue
        flag, value = _split(word)
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
        parsed = _parse(flag, option, value)
        if option.repeats:
            values.setdefault(field, []).append(parsed)
        elif field in values:
            raise UsageError(f'{option.flags[-1]} is given twice')
        else:
            values[field] = parsed
    return [*words, *argv[len(before) + 1 :]], Options(**values)


def _before_end(argv: Sequence[str]) -> Sequence[str]:
    return argv[: argv.index('--')] if '--' in argv else argv


def _is_option(word: str) -> bool:
    return word.startswith('-') and word != '-' and not _NEGATIVE.fullmatch(word)


def _flags_like(word: str) -> list[str]:
    """Return the flag of a word, or all long flags that begin with it."""
    typed = word.partition('=')[0]
    if typed in FLAGS:
        return [typed]
    return [flag for flag in FLAGS if len(typed) > 2 and typed.startswith('--') and flag.startswith(typed)]


def _split(word: str) -> tuple[str, str | None]:
    """Return the full flag of a word, and the value in the same word, None if there is none."""
    flags = _flags_like(word)
    typed, equals, value = word.partition('=')
    if len(flags) > 1:
        choices = f'{", ".join(flags[:-1])} or {flags[-1]}'
        raise UsageError(f'{typed} is ambiguous: it may be {choices}. Fix: write the whole option')
    if flags:
        return flags[0], value if equals else None
    short, attached = word[:2], word[2:]
    if short in FLAGS and FLAGS[short][1].metavar:
        return short, attached
    raise UsageError(f'{typed} is no option{did_you_mean(typed, FLAGS)}; --help shows all')


def _set_const(found: dict[str, Any], flag: str, value: str | None) -> None:
    field, option = FLAGS[flag]
    if value is not None:
        raise UsageError(f'{flag} takes no value. Fix: leave out ={value[:MOST_QUOTED]}')
    if found.setdefault(field, option.const) != option.const:
        other = next(row.flags[-1] for row in OPTIONS[field] if row.const == found[field])
        raise UsageError(f'{flag} cannot be combined with {other}. Fix: give one of them')


def _parse(flag: str, option: Option, text: str) -> Any:
    """Convert the text of an option to its value; UsageError if it is invalid."""
    try:
        value = option.parse(text)
    except ValueError as error:
        raise UsageError(f'{option.flags[0]}: {text[:MOST_QUOTED]!r} is no {NUMBERS[option.parse]}') from error
    if option.choices and value not in option.choices:
        like, choices = did_you_mean(text, option.choices), ', '.join(option.choices)
        problem = f'{flag}: {text[:MOST_QUOTED]!r} is not a valid {option.metavar}{like}'
        raise UsageError(f'{problem}. Fix: give one of {choices}')
    return value
