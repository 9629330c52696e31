"""Every command of eschedule, the parsing of a command line, and the text of --help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from ecomp.cli.command import CREATE, EXIT_CODES, QUERY, Command, Context, Invocation
from ecomp.cli.options import HELP, SHELLS, Option, Options, find_info, find_option_problems, is_image, parse_line
from ecomp.cli.suggestions import COMMAND_NAMES, FAMILY_WORDS, find_new_form, make_hint, suggest
from ecomp.errors import UsageError, put_before_fix
from ecomp.model.command_names import BY_MODULE
from ecomp.model.states import STAGES
from ecomp.model.text import MIN_PREFIX_DIGITS, make_printable

# The modules with rows of commands, by headings of the help, in the order of the help.
FAMILIES: Mapping[str, Sequence[str]] = {
    'New instances': ('create', 'apply'),
    'Showing instances': ('inspect', 'history'),
    'Entering guests': ('enter',),
    'Changing instances': ('change',),
    'Flavors, images, groups and quotas': ('sharing',),
    'Computes and the cluster': ('operators', 'adopt', 'top', 'check'),
    'Help': ('commands',),
}

# The help of all commands.
FULL_HELP = Path(__file__).with_name('help.txt')
# First words of planned commands. An instance with such a name would be hidden by the command later.
PLANNED_WORDS = frozenset({'copy', 'exec', 'logs', 'migrate', 'move', 'results', 'run', 'set', 'snapshot', 'version'})


def load_rows(module: str) -> Sequence[Command]:
    """Import one module of FAMILIES, such as 'create', and return its rows."""
    match module:  # loading all of them would be slow
        case 'create':
            from ecomp.cli.create import COMMANDS as ROWS
        case 'apply':
            from ecomp.cli.apply import COMMANDS as ROWS
        case 'inspect':
            from ecomp.cli.inspect import COMMANDS as ROWS
        case 'history':
            from ecomp.cli.history import COMMANDS as ROWS
        case 'enter':
            from ecomp.cli.enter import COMMANDS as ROWS
        case 'change':
            from ecomp.cli.change import COMMANDS as ROWS
        case 'sharing':
            from ecomp.cli.sharing import COMMANDS as ROWS
        case 'operators':
            from ecomp.cli.operators import COMMANDS as ROWS
        case 'adopt':
            from ecomp.cli.adopt import COMMANDS as ROWS
        case 'top':
            from ecomp.cli.top import COMMANDS as ROWS
        case 'check':
            from ecomp.cli.check import COMMANDS as ROWS
        case 'commands':
            return _ROWS
        case _:
            raise ValueError(module)
    return ROWS


class _Commands(Mapping[str, Command]):
    """The row of each command by name. A look-up imports the module of the command."""

    _modules: Mapping[str, str] = {name: module for module, names in BY_MODULE.items() for name in names}

    def __getitem__(self, name: str) -> Command:
        return next(row for row in load_rows(self._modules[name]) if row.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


# Every command by its name, in the order of the help. A name has one word or two, and no = in it.
COMMANDS: Mapping[str, Command] = _Commands()
PLACEHOLDER_MEANINGS = {
    '<id>': f'<id> is an instance: its name, uuid, or the first digits of its uuid, {MIN_PREFIX_DIGITS} or more.',
    '<host>': f'<host> is a compute: its name, uuid, or the first digits of its uuid, {MIN_PREFIX_DIGITS} or more.',
}
HELP_WIDTH = 80
# Columns before an option's help text; after a longer option the text begins on the next line.
MAX_FLAG_COLUMN_WIDTH = 26


def parse(argv: Sequence[str]) -> Invocation:
    """Parse a command line, whose name is HELP or VERSION if it has --help or --version."""
    try:  # the rest of a line with --help or --version is ignored
        return _parse(argv)
    except UsageError as error:
        raise UsageError(make_printable(str(error))) from error  # it may quote control characters


def _parse(argv: Sequence[str]) -> Invocation:
    if (old := find_new_form(argv))[0]:
        raise UsageError(f'{old[0]!r} is not a command any more. Fix: write eschedule {old[1]}')
    if info := find_info(argv):
        return Invocation(info, tuple(_find_command_to_explain(argv).split()) if info == HELP else (), Options())
    words, options = parse_line(argv)
    accepted = COMMANDS[_match_command(words) or CREATE].options
    # For commands that make instances `--wait STAGE` means --wait=STAGE.
    has_stages = options.wait == '' and {'size', 'dry_run'}.intersection(accepted)
    if has_stages and (joined := _join_wait_stage(argv)) != list(argv):
        if 'size' not in accepted:  # the word may be a file
            stage = next(word for word, typed in zip(joined, argv, strict=False) if word != typed)
            raise UsageError(f'{words[0]}: --wait takes its stage after =. Fix: write {stage}')
        words, options = parse_line(joined)
    name, taken = _find_command(words, options.flavor is not None)
    row = COMMANDS[name]
    for problem in chain(find_option_problems(name, options, row.options), row.find_problems(name, taken, options)):
        raise UsageError(problem)
    return Invocation(name, taken, options)


def _join_wait_stage(argv: Sequence[str]) -> list[str]:
    joined: list[str] = []
    for word in argv:
        if joined[-1:] == ['--wait'] and word in STAGES:
            joined[-1] = f'--wait={word}'
        else:
            joined.append(word)
    return joined


def _find_command(words: Sequence[str], has_flavor: bool) -> tuple[str, tuple[str, ...]]:
    """Return the command's name, CREATE or QUERY for a line without one, and its words."""
    if has_flavor and (not words or is_image(words[0])):
        return CREATE, COMMANDS[CREATE].parse_words(CREATE, words)
    if not words:
        raise UsageError('missing argument: a placement query, an instance or a command. Try: --help')
    if name := _match_command(words):
        return name, COMMANDS[name].parse_words(name, words[len(name.split()) :])
    if '=' in words[0]:
        return CREATE, COMMANDS[CREATE].parse_words(CREATE, words)
    if words[0] in FAMILY_WORDS:
        raise _make_incomplete_error(*words)
    try:
        return QUERY, COMMANDS[QUERY].parse_words(QUERY, words)
    except UsageError as error:
        raise UsageError(put_before_fix(str(error), make_hint(words))) from error


def _make_incomplete_error(family: str, word: str | None = None, *_: str) -> UsageError:
    *others, last = FAMILY_WORDS[family]
    listed = f's of {family} are {", ".join(others)} and {last}' if others else f' is {last}'
    choices = f'the subcommand{listed}'
    if word is None:
        return UsageError(f'{family!r} is not a complete command: {choices}. Try: eschedule help {family}')
    also = f' ({suggestion})' if (suggestion := suggest((family, word))) else ''
    return UsageError(f'{f"{family} {word}"!r} is not a command{also}: {choices}')


def _match_command(words: Sequence[str]) -> str:
    return next((name for count in (2, 1) if (name := ' '.join(words[:count])) in COMMAND_NAMES), '')


def _find_command_to_explain(argv: Sequence[str]) -> str:
    words = [word for word in argv if not word.startswith('-')]
    matches = (_match_command(words[first:]) for first in range(len(words)))
    create_name = CREATE if any('=' in word for word in words) else ''
    return next(filter(None, matches), create_name or next((word for word in words if word in FAMILY_WORDS), ''))


def format_help(name: str) -> str:
    """Return the help of a command, of the commands of a family (`host`), or of all for ''."""
    if name in FAMILY_WORDS and name not in COMMANDS:
        lines = [format_summary(COMMANDS[f'{name} {second}']) for second in FAMILY_WORDS[name]]
        more = f'`eschedule {name} SUBCOMMAND --help` describes one of these commands.'
        return '\n'.join([f'usage: eschedule {name} …', '', *lines, '', more]) + '\n'
    # Made by `python -m docs.generate`: its rows would take longer to import than the command takes.
    return _format_command_help(COMMANDS[name]) if name else FULL_HELP.read_text('utf-8')


def format_summary(command: Command) -> str:
    return f'  {command.usage:<27} {command.summary}'


def _format_command_help(command: Command) -> str:
    means = ''.join(f' {meaning}' for word, meaning in PLACEHOLDER_MEANINGS.items() if word in command.usage)
    exits = sorted({0, 1, 2, 7, *command.exit_codes})
    lines = [f'usage: eschedule {command.usage} [OPTION]…', '', *wrap(command.description + means), '']
    if own := command.list_options(are_common=False):
        lines += ['options:', *format_options(own), '']
    flags = ', '.join(option.flags[0] for option in command.list_options(are_common=True))
    lines += [*wrap(f'common options: {flags} (see `eschedule help`)'), '', f'example: {command.example}', '']
    return '\n'.join([*lines, *format_exit_codes({code: EXIT_CODES[code] for code in exits})]) + '\n'


def format_options(options: Sequence[Option]) -> Iterator[str]:
    """Yield the help of each option, folded to HELP_WIDTH."""
    heads = [', '.join(f'{flag} {option.metavar}'.rstrip() for flag in option.flags) for option in options]
    column = min(max(map(len, heads)) + 4, MAX_FLAG_COLUMN_WIDTH)
    for head, option in zip(heads, options, strict=True):
        fits = len(head) <= column - 4
        if not fits:
            yield f'  {head}'
        head = f'  {head}' if fits else ''
        yield textwrap.fill(option.help, HELP_WIDTH, initial_indent=f'{head:<{column}}', subsequent_indent=' ' * column)


def format_exit_codes(codes: Mapping[int, str]) -> list[str]:
    return wrap('exit codes: ' + '; '.join(f'{code} {meaning}' for code, meaning in codes.items()))


def wrap(text: str) -> list[str]:
    return textwrap.wrap(text, HELP_WIDTH, subsequent_indent='            ' if text.startswith('exit codes') else '')


def _print_help(ctx: Context) -> int:
    ctx.out.put(format_help(' '.join(ctx.words)).rstrip('\n'))
    return 0


def _print_completion(ctx: Context) -> int:
    from ecomp.cli.completion import make_script

    ctx.out.put(make_script(ctx.words[0]))
    return 0


def _parse_shell(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError(f'{name}: needs exactly one shell. Fix: give one of {", ".join(SHELLS)}')
    return tuple(words)


def _parse_help_topic(name: str, words: Sequence[str]) -> tuple[str, ...]:
    command = ' '.join(words)
    if command and command not in COMMANDS and command not in FAMILY_WORDS:
        raise UsageError(f'{name}: {command!r} is not a command{make_hint(words)}')
    return tuple(words)


# fmt: off
_ROWS: Sequence[Command] = (
    Command('help', 'help [COMMAND]', 'describe a command, or list all',
            'Describe a command: what it does, its options and its exit codes, as its --help does. Default: list all '
            'commands. `eschedule help` contacts no server and reads no configuration: it never exits with 7, and '
            '--config has no effect.',
            _parse_help_topic, _print_help, needs_config=False, example='eschedule help host drain'),
    Command('completion', 'completion SHELL', 'print the completion script of bash, zsh or fish',
            'Print a completion script for bash, zsh or fish. TAB then completes commands, options, and the names and '
            'uuids of instances, hosts, flavors, groups and projects; each TAB queries these names. bash: eschedule '
            'completion bash >/etc/bash_completion.d/eschedule, or source <(eschedule completion bash) in ~/.bashrc. '
            'zsh: eschedule completion zsh >_eschedule, in a directory of $fpath. fish: eschedule completion fish '
            '>~/.config/fish/completions/eschedule.fish.',
            _parse_shell, _print_completion, needs_config=False, example='eschedule completion bash'),
)
