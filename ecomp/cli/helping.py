"""The commands that help a hand: what eschedule can be told, and completion in a shell."""

from __future__ import annotations

from collections.abc import Sequence

from ecomp.cli.command import Command, Context
from ecomp.cli.options import SHELLS, Words
from ecomp.errors import UsageError


def _help(do: Context) -> int:
    from ecomp.cli.commands import help_of  # which imports this

    do.out.put(help_of(' '.join(do.words)).rstrip('\n'))
    return 0


def _completion(do: Context) -> int:
    from ecomp.cli.commands import COMMANDS as every  # as above
    from ecomp.cli.completion import script

    do.out.put(script(do.words[0], every).rstrip('\n'))
    return 0


def _shell(name: str, words: Sequence[str]) -> Words:
    """The name of a shell."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError(f'{name}: for which shell? Give one of {", ".join(SHELLS)}')
    return tuple(words)


def _command_or_nothing(name: str, words: Sequence[str]) -> Words:
    """A command's name, which may have two words; or nothing."""
    from ecomp.cli.commands import COMMANDS, FAMILY_WORDS, NAMES  # as above
    from ecomp.cli.near import hint

    said = ' '.join(words)
    if said and said not in COMMANDS and said not in FAMILY_WORDS:
        raise UsageError(f'{name}: {said!r} is not a command{hint(words, NAMES)}')
    return tuple(words)


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('help', 'help [COMMAND]', 'what a command does, or all of them',
            'Say what a command does, which options it takes and how it ends, as its --help does; without one, which '
            'commands there are. It asks no server, and reads no configuration.',
            _command_or_nothing, _help, needs_config=False,
            example='eschedule help host drain'),
    Command('completion', 'completion SHELL', 'completion for bash, zsh or fish, to be read by it',
            'Print what makes bash, zsh or fish complete a command line of eschedule at a TAB: commands, options, and, '
            'asked for in that moment, names and uuids of instances, hosts, flavors, groups and projects. bash: '
            'eschedule completion bash >/etc/bash_completion.d/eschedule, or source <(eschedule completion bash) in '
            '~/.bashrc. zsh: eschedule completion zsh >_eschedule, in a directory of $fpath. fish: eschedule '
            'completion fish >~/.config/fish/completions/eschedule.fish.',
            _shell, _completion, needs_config=False,
            example='eschedule completion bash'),
)
