"""Every command of eschedule, from its words to its row; and what --help says of all and of each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from ecomp.cli.command import CREATE, EXITS, QUERY, Command, Context, Invocation
from ecomp.cli.near import FAMILY_WORDS, NAMES, hint, suggest
from ecomp.cli.options import HELP, SHELLS, Option, Options, Words, check, check_taken, find_info_option, is_image, read
from ecomp.errors import UsageError
from ecomp.model.command_names import BY_MODULE
from ecomp.model.record import STAGES
from ecomp.model.text import PREFIX, printable

FAMILIES: Mapping[str, Sequence[str]] = {
    'New instances': ('create',),
    'Looking': ('inspect', 'history'),
    'Into a guest': ('enter',),
    'Changing': ('change',),
    'Flavors, groups and quotas': ('sharing',),
    'Computes and the cluster': ('operators', 'doctor'),
    'Help': ('commands',),
}
"""The modules that have rows, by what their commands are for, in the order of the help."""

PLANNED = frozenset({
    *('again', 'apply', 'copy', 'evacuate', 'exec', 'image', 'logs', 'metrics', 'migrate', 'move', 'protect'),
    *('rebuild', 'rename', 'resize', 'results', 'run', 'set', 'snapshot', 'stack', 'top', 'ui', 'unprotect'),
    *('version', 'what-if'),
})  # fmt: skip
"""First words of commands that are planned: an instance of that name would be hidden by the command later."""


def load_rows(module: str) -> Sequence[Command]:
    """Return the rows of one of the modules of FAMILIES. Only that one is loaded: a short command needs no other."""
    match module:
        case 'create':
            from ecomp.cli.create import COMMANDS as rows
        case 'inspect':
            from ecomp.cli.inspect import COMMANDS as rows
        case 'history':
            from ecomp.cli.history import COMMANDS as rows
        case 'enter':
            from ecomp.cli.enter import COMMANDS as rows
        case 'change':
            from ecomp.cli.change import COMMANDS as rows
        case 'sharing':
            from ecomp.cli.sharing import COMMANDS as rows
        case 'operators':
            from ecomp.cli.operators import COMMANDS as rows
        case 'doctor':
            from ecomp.cli.doctor import COMMANDS as rows
        case 'commands':
            return _ROWS
        case _:
            raise ValueError(module)
    return rows


class _Commands(Mapping[str, Command]):
    _modules: Mapping[str, str] = {name: module for module, names in BY_MODULE.items() for name in names}

    def __getitem__(self, name: str) -> Command:
        rows = load_rows(self._modules[name])
        return next(each for each in rows if each.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


COMMANDS: Mapping[str, Command] = _Commands()
"""Every command by its name, in the order of the help. A name may have two words, and has no = in it."""


def families() -> dict[str, list[Command]]:
    """All commands by what they are for."""
    return {family: [row for module in modules for row in load_rows(module)] for family, modules in FAMILIES.items()}


MEANS = {
    '<id>': f'<id> is an instance: its name, its uuid, or {PREFIX} digits or more of that.',
    '<host>': f'<host> is a compute: its host name, its uuid, or {PREFIX} digits or more of that.',
}
WIDTH = 80
"""Characters of a line of the help: the least that terminals have."""
WIDEST_COLUMN = 26
"""Characters before what an option does: the text of one that is written longer begins in the next line."""


def parse(argv: Sequence[str]) -> Invocation:
    """Return the command in the arguments, HELP for --help, or VERSION, which has no row. UsageError."""
    try:
        return _parse(argv)
    except UsageError as error:
        raise UsageError(printable(str(error))) from error  # whatever was typed, it is quoted in one line


def _parse(argv: Sequence[str]) -> Invocation:
    if info := find_info_option(argv):
        return Invocation(info, tuple(_command_to_explain(argv).split()) if info == HELP else (), Options())
    words, options = read(argv)
    may_name_stage = options.wait == '' and 'size' in COMMANDS[_named(words) or CREATE].options
    if may_name_stage and (joined := _joined(argv)) != list(argv):
        words, options = read(joined)
    name, taken = _command(words, options.flavor is not None)
    row = COMMANDS[name]
    check_taken(options, row.options)
    row.check(name, taken, options)
    check(name, options, row.options)
    return Invocation(name, taken, options)


def _joined(argv: Sequence[str]) -> list[str]:
    """--wait and a stage behind it as one word. Where no instance is made, that word is an instance's name."""
    joined: list[str] = []
    for word in argv:
        if joined[-1:] == ['--wait'] and word in STAGES:
            joined[-1] = f'--wait={word}'
        else:
            joined.append(word)
    return joined


def _command(words: Sequence[str], flavored: bool) -> tuple[str, tuple[str, ...]]:
    """The command's name and its words. The two forms of 2019 do without a name: they are told by their words."""
    if flavored and (not words or is_image(words[0])):
        return CREATE, COMMANDS[CREATE].words(CREATE, words)
    if not words:
        raise UsageError('nothing to do: give a placement query, a uuid or a command; --help shows all')
    name = _named(words)
    if name:
        return name, COMMANDS[name].words(name, words[len(name.split()) :])
    if '=' in words[0]:
        return CREATE, COMMANDS[CREATE].words(CREATE, words)
    if words[0] in FAMILY_WORDS:
        raise _half(*words)
    try:
        return QUERY, COMMANDS[QUERY].words(QUERY, words)
    except UsageError as error:
        raise UsageError(f'{error}{hint(words)}') from error


def _half(first: str, second: str | None = None, *_: str) -> UsageError:
    """What to say of the first word of several commands, with a second that is of none of them."""
    seconds = FAMILY_WORDS[first]
    known = f'{first} has {", ".join(seconds[:-1])} and {seconds[-1]}'
    if second is None:
        return UsageError(f'{first!r} alone is not a command: {known}; eschedule help {first} says what each does')
    also = f' ({suggestion})' if (suggestion := suggest((first, second))) else ''
    return UsageError(f'{f"{first} {second}"!r} is not a command{also}: {known}')


def _named(words: Sequence[str]) -> str:
    """The command that these words begin with; '' if they begin with none."""
    names = (' '.join(words[:count]) for count in (2, 1))
    return next((name for name in names if name in NAMES), '')


# The help


def _command_to_explain(argv: Sequence[str]) -> str:
    """The name of the command that is typed beside --help, or the first word of several; '' for neither."""
    words = [word for word in argv if not word.startswith('-')]
    named = (_named(words[first:]) for first in range(len(words)))
    created = CREATE if any('=' in word for word in words) else ''
    half = next((word for word in words if word in FAMILY_WORDS), '')
    return next(filter(None, named), created or half)


def help_of(name: str) -> str:
    """The help of a command, by its name in COMMANDS; of several by their first word; of all of them for ''."""
    if name in FAMILY_WORDS:
        lines = [_line(COMMANDS[f'{name} {each}']) for each in FAMILY_WORDS[name]]
        more = f'`eschedule {name} … --help` says all about one of them.'
        return '\n'.join([f'usage: eschedule {name} …', '', *lines, '', more]) + '\n'
    return _help_of_one(COMMANDS[name]) if name else _help_of_all()


def _help_of_all() -> str:
    lines = [f'usage: eschedule {COMMANDS[CREATE].usage} [OPTION]…', f'       eschedule {COMMANDS[QUERY].usage}']
    lines += ['       eschedule COMMAND [WORD]… [OPTION]…', '']
    lines += _filled('`eschedule COMMAND --help` says all about one command, `eschedule create --help` about the first '
                     'form: --name, --uuid, --count, --group, --queue and more. Most wait with --wait, for --timeout '
                     'seconds at most, and print JSON with -f json. Options may stand anywhere.')  # fmt: skip
    for family, commands in families().items():
        lines += ['', f'{family}:', *map(_line, commands)]
    return '\n'.join([*lines, '', *MEANS.values(), *_exits(EXITS)]) + '\n'


def _line(command: Command) -> str:
    return f'  {command.usage:<27} {command.summary}'


def _help_of_one(command: Command) -> str:
    means = ''.join(f' {said}' for word, said in MEANS.items() if word in command.usage)
    exits = sorted({0, 1, 2, 7, *command.exits})
    lines = [f'usage: eschedule {command.usage} [OPTION]…', '', *_filled(command.description + means), '']
    lines += ['options:', *_option_lines(command.takes()), '', f'example: {command.example}', '']
    return '\n'.join([*lines, *_exits({code: EXITS[code] for code in exits})]) + '\n'


def _option_lines(options: Sequence[Option]) -> Iterator[str]:
    """Each option as it is written and, in a second column, what it does."""
    heads = [', '.join(f'{flag} {each.metavar}'.rstrip() for flag in each.flags) for each in options]
    column = min(max(map(len, heads)) + 4, WIDEST_COLUMN)
    for head, each in zip(heads, options, strict=True):
        fits = len(head) <= column - 4
        if not fits:
            yield f'  {head}'
        first = f'  {head}' if fits else ''
        yield textwrap.fill(each.help, WIDTH, initial_indent=f'{first:<{column}}', subsequent_indent=' ' * column)


def _exits(codes: Mapping[int, str]) -> list[str]:
    return _filled('exit codes: ' + '; '.join(f'{code} {meaning}' for code, meaning in codes.items()))


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent='            ' if text.startswith('exit codes') else '')


# The commands that help a hand: what eschedule can be told, and completion in a shell


def _help(do: Context) -> int:
    do.out.put(help_of(' '.join(do.words)).rstrip('\n'))
    return 0


def _completion(do: Context) -> int:
    from ecomp.cli.completion import script

    do.out.put(script(do.words[0], COMMANDS).rstrip('\n'))
    return 0


def _shell(name: str, words: Sequence[str]) -> Words:
    """The name of a shell."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError(f'{name}: for which shell? Give one of {", ".join(SHELLS)}')
    return tuple(words)


def _command_or_nothing(name: str, words: Sequence[str]) -> Words:
    """A command's name, which may have two words; or nothing."""
    said = ' '.join(words)
    if said and said not in COMMANDS and said not in FAMILY_WORDS:
        raise UsageError(f'{name}: {said!r} is not a command{hint(words)}')
    return tuple(words)


# fmt: off
_ROWS: Sequence[Command] = (
    Command('help', 'help [COMMAND]', 'what a command does, or all of them',
            'Say what a command does, which options it takes and how it ends, as its --help does; without one, which '
            'commands there are. It asks no server, and reads no configuration.',
            _command_or_nothing, _help, needs_config=False, example='eschedule help host drain'),
    Command('completion', 'completion SHELL', 'completion for bash, zsh or fish, to be read by it',
            'Print what makes bash, zsh or fish complete a command line of eschedule at a TAB: commands, options, and, '
            'asked for in that moment, names and uuids of instances, hosts, flavors, groups and projects. bash: '
            'eschedule completion bash >/etc/bash_completion.d/eschedule, or source <(eschedule completion bash) in '
            '~/.bashrc. zsh: eschedule completion zsh >_eschedule, in a directory of $fpath. fish: eschedule '
            'completion fish >~/.config/fish/completions/eschedule.fish.',
            _shell, _completion, needs_config=False, example='eschedule completion bash'),
)
