"""Completion: `eschedule __complete CURRENT BEFORE…`, and the shell scripts that run it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TypeAlias

from ecomp.cli.command import CREATE, Command, Context, Invocation
from ecomp.cli.options import FLAGS, SHELLS, VALUE, Options
from ecomp.cli.suggestions import COMMAND_NAMES, FAMILY_WORDS
from ecomp.cli.terminal import Terminal
from ecomp.errors import EcompError
from ecomp.model.states import SHOWN_STATES, STAGES

# The candidate that stands for the names of files, which the shell completes.
FILES = '<files>'
# Seconds that etcd has for an answer at most: a person waits at the prompt.
MAX_ETCD_SECONDS = 2.0
# Names from etcd are offered only if every shell reads them as one word.
SAFE_NAME = re.compile('[A-Za-z0-9._-]+')
# A candidate, or a command that lists names and the columns whose cells are candidates.
Source: TypeAlias = str | tuple[str, str]
INSTANCES, HOSTS = ('list', 'NAME,INSTANCE'), ('hosts', 'HOST,COMPUTE')
FLAVORS, IMAGES = ('flavor', 'FLAVOR'), ('image', 'NAME')
GROUPS, PROJECTS = ('group', 'GROUP'), ('quota', 'PROJECT')
STACKS, MEMBERS = ('stack', 'STACK'), ('stack', 'MEMBERS')
# What completes a word, by a part of the command's usage. The first part that occurs counts.
SOURCES_BY_USAGE: Mapping[str, Sequence[Source]] = {
    **{'<id>': [INSTANCES], '<host>': [HOSTS], 'NAME…': [FLAVORS], 'IMAGE_URL': [IMAGES], 'GROUP': [GROUPS]},
    **{'PROJECT': [PROJECTS], 'STACK': [STACKS], 'FILE': [FILES], 'SHELL': SHELLS},
}
# What completes a value, by the flag or the metavar of the option.
SOURCES_BY_FLAG: Mapping[str, Sequence[Source]] = {
    **{'--flavor': [FLAVORS], 'COMPUTE': [HOSTS], 'GROUP': [GROUPS], 'ID': [PROJECTS], 'FILE': [FILES]},
    **{'STAGE': STAGES, '[=STAGE]': STAGES, 'STATE': sorted(SHOWN_STATES), 'STACK': [STACKS], 'MEMBER': [MEMBERS]},
}
FIRST_WORDS = tuple(dict.fromkeys(name.partition(' ')[0] for name in COMMAND_NAMES))


def print_candidates(put: Callable[[str], None], rows: Mapping[str, Command], current: str = '', *before: str) -> int:
    """Print the candidates for the word `current` after the words `before`, a line each."""
    flag, equals, typed = current.partition('=')
    prefix = f'{flag}=' if equals and flag in FLAGS else ''
    named_files = [value for option, value in zip(before, before[1:], strict=False) if option == '--config']
    named_files += [word.removeprefix('--config=') for word in before if word.startswith('--config=')]
    for source in _find_value_sources(flag) if prefix else _find_sources(rows, current, before):
        for name in [source] if isinstance(source, str) else _list_names(rows, *source, *named_files[:1]):
            if name == FILES:
                put(name)
            elif name.startswith(typed if prefix else current):
                put(prefix + name)
    return 0


def _find_sources(commands: Mapping[str, Command], current: str, before: Sequence[str]) -> Sequence[Source]:
    words, pending_flag = _split_line(before)
    command = _find_command(commands, words)
    topic = words[words[:1] == ['help'] :]
    if pending_flag:
        return _find_value_sources(pending_flag)
    if current.startswith('-'):
        options = command.list_options() if command else ()
        return [*(flag for option in options for flag in option.flags), '--help', '--version']
    if not topic:
        return [*FIRST_WORDS, *([INSTANCES] if current and not words else [])]
    seconds = FAMILY_WORDS.get(topic[0], ()) if len(topic) == 1 else ()
    usage = command.usage if command and words[0] != 'help' else ''
    return [*seconds, *next((sources for part, sources in SOURCES_BY_USAGE.items() if part in usage), ())]


def _split_line(before: Sequence[str]) -> tuple[list[str], str]:
    """Return the words without options, and the option whose value comes next, '' for none."""
    words, pending_flag = list[str](), ''
    for word in before:
        if pending_flag:
            pending_flag = ''
        elif not word.startswith('-'):
            words.append(word)
        elif word in FLAGS and FLAGS[word][1].metavar[:1] not in ('', '[') and (word, *words[:1]) != ('-f', 'log'):
            pending_flag = word
    return words, pending_flag


def _find_command(commands: Mapping[str, Command], words: Sequence[str]) -> Command | None:
    names = [' '.join(words[:2]), *words[:1]]
    if not words or '=' in words[0]:
        names = [CREATE]
    return next((commands[name] for name in names if name in commands), None)


def _find_value_sources(flag: str) -> Sequence[Source]:
    option = FLAGS[flag][1]
    if option.metavar == 'COLUMN':
        from ecomp.cli.inspect import make_record_listing  # imported here: seldom needed

        return [column.name.lower() for column in make_record_listing(()).columns]
    return option.choices or SOURCES_BY_FLAG.get(flag, SOURCES_BY_FLAG.get(option.metavar, ()))


def _list_names(commands: Mapping[str, Command], name: str, columns: str, config_file: str | None = None) -> list[str]:
    """Run a command that prints these columns, and return their safe cells, [] if it fails."""
    from ecomp.conf import load_schedule
    from ecomp.yaml_file import parse_config_option

    texts = list[str]()
    invocation = Invocation(name, (), Options(format=VALUE, columns=[columns]))
    with suppress(EcompError, OSError):
        config = load_schedule(parse_config_option(config_file))
        config = replace(config, etcd=config.etcd._replace(timeout=min(config.etcd.timeout, MAX_ETCD_SECONDS)))
        with closing(Context(Terminal(texts.append, texts.append, lambda _: None), config, invocation)) as context:
            commands[name].run(context)
    return [cell for cell in re.split('[\t\n]|, ', '\n'.join(texts)) if SAFE_NAME.fullmatch(cell) and cell != '-']


SCRIPTS = {
    'bash': r"""
_eschedule() {
    local word words=() prefix=
    for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do # bash splits the line at each =
        if [[ $words && ($word == '=' || ${words[-1]} == --*=) ]]; then words[-1]+=$word; else words+=("$word"); fi
    done
    word=${words[-1]}
    [[ $word != --*=* ]] || prefix=${word%%=*}=
    mapfile -t COMPREPLY < <(command eschedule __complete "$word" "${words[@]::${#words[@]}-1}" 2>/dev/null </dev/null)
    if [[ ${COMPREPLY[0]} == '<files>' ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -P "$prefix" -f -- "${word#"$prefix"}")
    fi
    [[ $COMP_WORDBREAKS != *=* ]] || COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}
complete -F _eschedule eschedule
""",
    'zsh': r"""
_eschedule() {
    local line=("${words[CURRENT]}" "${(@)words[2,CURRENT-1]}")
    local found=("${(@f)$(command eschedule __complete "$line[@]" 2>/dev/null </dev/null)}")
    if [[ ${found[1]} == '<files>' ]]; then compset -P '--*='; _files; else compadd -- "${(@)found:#}"; fi
}
if [ "${funcstack[1]}" = _eschedule ]; then _eschedule "$@"; else compdef _eschedule eschedule; fi
""",
    'fish': r"""
function __eschedule
    set -l current (commandline -ct)
    set -l found (command eschedule __complete "$current" (commandline -opc)[2..] 2>/dev/null </dev/null)
    if test "$found" = '<files>'
        set -l prefix (string match -r -- '^--[^=]*=' $current)
        string replace -r -- '^' "$prefix" (__fish_complete_path (string replace -r -- '^--[^=]*=' '' $current))
    else
        printf '%s\n' $found
    end
end
complete -c eschedule -f -a '(__eschedule)'
""",
}
"""The completion scripts: each calls `eschedule __complete`, and completes the names of files itself."""


def make_script(shell: str) -> str:
    """Return the completion script for one of SHELLS, without a final line break."""
    install = f'# Completion of eschedule for {shell}. To install it: eschedule completion --help'
    return ('#compdef eschedule\n' if shell == 'zsh' else '') + install + SCRIPTS[shell].rstrip('\n')
