"""Make completion scripts for bash, zsh and fish from the rows of the commands. Pure.

Commands, options and stages are constant. Other names are queried from etcd at each TAB; a script offers only those
that a shell reads as one word (SAFE_CHARACTERS).
"""

from __future__ import annotations

from collections.abc import Mapping

from ecomp.cli.command import QUERY, Command
from ecomp.cli.inspect import LIST_COLUMNS, REASON_COLUMN, WIDE_COLUMNS
from ecomp.cli.options import OPTIONS, SHELLS, Option
from ecomp.cli.suggestions import COMMAND_NAMES, FAMILY_WORDS
from ecomp.model.record import SHOWN_STATES, STAGES

# The command that lists the words of each kind. With two columns, a word of either is offered.
LISTING_COMMANDS: Mapping[str, str] = {
    'instances': 'list -f value -c NAME,INSTANCE',
    'hosts': 'hosts -f value -c HOST,COMPUTE',
    'computes': 'hosts -f value -c COMPUTE',
    'flavors': 'flavor list -f value -c FLAVOR',
    'images': 'image list -f value -c NAME',
    'groups': 'group list -f value -c GROUP',
    'projects': 'quota list -f value -c PROJECT',
}

FIRST_WORDS = tuple(dict.fromkeys(name.partition(' ')[0] for name in COMMAND_NAMES))

# Kinds of option values: a file, and text that cannot be completed.
FILES = 'files'
FREE_TEXT = 'free'

# Kinds, by placeholder in a command's usage, and by the metavar of an option.
KIND_BY_PLACEHOLDER = {
    '<id>': 'instances',
    '<host>': 'hosts',
    '<uuid>': 'computes',
    'IMAGE_URL': 'images',
    'GROUP': 'groups',
    'PROJECT': 'projects',
    'FILE': FILES,
}
KIND_BY_METAVAR = {'FILE': FILES, 'COMPUTE': 'hosts', 'GROUP': 'groups', 'ID': 'projects'}

# Names from etcd are offered only if they consist of these characters.
SAFE_CHARACTERS = '[A-Za-z0-9._-]'


def make_script(shell: str, commands: Mapping[str, Command]) -> str:
    """Return the completion script for one of SHELLS."""
    return _make_fish_script(commands) if shell == 'fish' else _make_posix_script(shell, commands)


def find_word_kind(command: Command) -> str:
    """Return the kind of a command's words, a key of LISTING_COMMANDS, or '' if no words are to be offered."""
    if command.name.startswith('flavor ') and 'NAME…' in command.usage:
        return 'flavors'
    return next((kind for written, kind in KIND_BY_PLACEHOLDER.items() if written in command.usage), '')


def find_value_kind(field: str, row: Option) -> str:
    """Return what completes a value: '=' with choices, FILES, FREE_TEXT, a key of LISTING_COMMANDS; '' if no value."""
    choices_by_metavar = {
        'STATE': sorted(SHOWN_STATES),
        'COLUMN': [column.name.lower() for column in (*LIST_COLUMNS, REASON_COLUMN, *WIDE_COLUMNS)],
    }
    choices = STAGES if 'STAGE' in row.metavar else choices_by_metavar.get(row.metavar, row.choices)
    if choices:
        return '=' + ' '.join(choices)
    return 'flavors' if field == 'flavor' else KIND_BY_METAVAR.get(row.metavar, FREE_TEXT if row.metavar else '')


# bash and zsh share the functions that find candidates, in syntax that both accept; only the output differs


POSIX = """\
# Completion of eschedule for {name}, made by `eschedule completion {name}`. To install it: eschedule completion --help

_eschedule_flags() {{ # COMMAND: its options
    case $1 in
{flags}
        *) echo --help --version ;;
    esac
}}

_eschedule_words() {{ # COMMAND: the kind of its arguments
    case $1 in
{words}
    esac
}}

_eschedule_value() {{ # OPTION: the kind of its value; nothing if it has no value
    case $1 in
{values}
    esac
}}

_eschedule_known() {{ # KIND CONFIG: the candidates of a kind, one a line
    local kind=$1 config=$2
    set --
    [ -z "$config" ] || set -- --config "$config"
    case $kind in
        '='*) echo "${{kind#=}}" | tr ' ' '\\n' ;;
        commands) echo {first} | tr ' ' '\\n' ;;
{live}
    esac
}}

_eschedule_asked() {{ # ARGUMENT...: the output of eschedule, without anything that needs quotes
    command eschedule "$@" 2>/dev/null </dev/null | tr '\\t' '\\n' | grep -x '{safe}*' | grep -vx -e -
}}

_eschedule_candidates() {{ # CURRENT BEFORE...: the candidates for CURRENT, one a line; <files> for file names
    local current=$1 first='' second='' third='' named='' skip='' config='' word
    shift
    for word in "$@"; do
        if [ -n "$skip" ]; then
            [ "$skip" != --config ] || config=$word
            skip=''
            continue
        fi
        case $word in
            --config=*) config=${{word#*=}} ;;
            --*=* | --wait) ;;
            -f) [ "$first" = log ] || skip=$word ;; # -f of log has no value
            -*) [ -z "$(_eschedule_value "$word")" ] || skip=$word ;;
            *) if [ -z "$first" ]; then first=$word; elif [ -z "$second" ]; then second=$word; else third=$word; fi ;;
        esac
    done
    if [ -n "$skip" ]; then
        word=$(_eschedule_value "$skip")
        if [ "$word" = files ]; then echo '<files>'; else _eschedule_known "$word" "$config"; fi
        return
    fi
    case $first in
        {families}) named="$first $second" ;;
        *=*) named=create ;;
        *) named=$first ;;
    esac
    case $current in
        --*=*)
            word=${{current%%=*}}
            _eschedule_known "$(_eschedule_value "$word")" "$config" | while IFS= read -r second; do
                echo "$word=$second"
            done ;;
        -*) [ -n "$first" ] || named=create
            _eschedule_flags "$named" | tr ' ' '\\n' ;;
        *)
            if [ -z "$first" ]; then
                _eschedule_known commands ''
                [ -z "$current" ] || _eschedule_known instances "$config"
                return
            fi
            case "$first/$second/$third" in
{seconds}
                help/[!/]*) ;;
                *) _eschedule_known "$(_eschedule_words "$named")" "$config" ;;
            esac ;;
    esac
}}
"""

BASH = """
_eschedule() {
    local current='' each last word words=()
    # bash splits the line at each =.
    for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
        last=$((${#words[@]} - 1))
        if ((last >= 0)) && [[ $word == '=' || ${words[last]} == --*= ]]; then
            words[last]+=$word
        else
            words+=("$word")
        fi
    done
    last=$((${#words[@]} - 1))
    current=${words[last]}
    COMPREPLY=()
    while IFS= read -r each; do
        if [[ $each == '<files>' ]]; then
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -f -- "$current")
        elif [[ $each == "$current"* ]]; then
            [[ $current == --*=* && $COMP_WORDBREAKS == *=* ]] && each=${each#*=}
            COMPREPLY+=("$each")
        fi
    done < <(_eschedule_candidates "$current" "${words[@]:0:last}")
}
complete -F _eschedule eschedule
"""

ZSH = """
_eschedule() {
    local -a found
    found=("${(@f)$(_eschedule_candidates "${words[CURRENT]}" "${(@)words[2,CURRENT-1]}")}")
    if [[ ${found[1]} == '<files>' ]]; then _files; else compadd -- "${(@)found:#}"; fi
}
if [ "${funcstack[1]}" = _eschedule ]; then _eschedule "$@"; else compdef _eschedule eschedule; fi
"""


def _make_posix_script(shell: str, commands: Mapping[str, Command]) -> str:
    """Return the script for 'bash' or 'zsh'."""
    flags = {
        name: ' '.join(flag for option in row.list_options() for flag in option.flags) for name, row in commands.items()
    }
    functions = POSIX.format(
        name=shell,
        safe=SAFE_CHARACTERS,
        flags=_format_cases({f"'{name}'": f'echo {names} --help' for name, names in flags.items()}),
        words=_format_cases({
            f"'{name}'": f'echo {kind}' for name, row in commands.items() if (kind := _find_completion_kind(row))
        }),
        values=_format_cases({
            ' | '.join(row.flags): f"echo '{kind}'"
            for field, rows in OPTIONS.items() for row in rows if (kind := find_value_kind(field, row))
        }),
        live=_format_cases({kind: f'_eschedule_asked "$@" {command}' for kind, command in LISTING_COMMANDS.items()}),
        first=' '.join(FIRST_WORDS),
        families=' | '.join(FAMILY_WORDS),
        seconds=_format_cases({
            f'{first}// | help/{first}/': f"echo '{' '.join(seconds)}' | tr ' ' '\\n'"
            for first, seconds in FAMILY_WORDS.items()
        }, 16),
    )  # fmt: skip
    return f'#compdef eschedule\n{functions}{ZSH}' if shell == 'zsh' else functions + BASH


def _find_completion_kind(command: Command) -> str:
    """Return find_word_kind(), but "commands" for `help`, and "'=bash zsh fish'" with its quotes for `completion`."""
    return {'help': 'commands', 'completion': f"'={' '.join(SHELLS)}'"}.get(command.name, find_word_kind(command))


def _format_cases(command_by_pattern: Mapping[str, str], indent: int = 8) -> str:
    """Format the branches of a shell's `case`, a line each; nothing is quoted."""
    return '\n'.join(f'{" " * indent}{pattern}) {command} ;;' for pattern, command in command_by_pattern.items())


# fish, which evaluates a condition for each line before it offers it


FISH = """\
# Completion of eschedule for fish, made by `eschedule completion fish`. To install it: eschedule completion --help

function __eschedule_command # the command on the line so far
    set -l found
    set -l skip
    for word in (commandline -opc)[2..]
        if test -n "$skip"
            set skip
            continue
        end
        switch $word
            case '--*=*' --wait
            case {valued}
                set skip yes
            case '-*'
            case '*=*'
                test (count $found) -gt 0; or set found create
            case '*'
                test (count $found) -gt 2; or set -a found $word
        end
    end
    if test "$found[1]" = help
        echo "$found"
    else if contains -- "$found[1]" {families}
        echo "$found[1..2]"
    else
        echo "$found[1]"
    end
end

function __eschedule_is # COMMAND...: true if the line has one of them; a line without a command counts as create
    set -l named (__eschedule_command)
    test -n "$named"; or set named create
    contains -- "$named" $argv
end

function __eschedule_asked # ARGUMENT...: the output of eschedule, without anything that needs quotes
    set -l line (commandline -opc)
    set -l at (contains -i -- --config $line); and set -a argv --config $line[(math $at + 1)]
    set -a argv (string match -- '--config=*' $line)
    set -l found (command eschedule $argv 2>/dev/null </dev/null | string split \\t)
    string match -r '^{safe}+$' -- $found | string match -v -- -
end

complete -c eschedule -f
{rows}
"""


def _make_fish_script(commands: Mapping[str, Command]) -> str:
    rows = list[str]()
    for name, row in commands.items():
        first, _, second = name.partition(' ')
        if second:
            rows.append(_format_complete(f'__eschedule_is {first} "help {first}"', f'-a {second}', row.summary))
        elif name != QUERY:
            rows.append(_format_complete('test -z (__eschedule_command)', f'-a {first}', row.summary))
        kind = find_word_kind(row)
        if name == QUERY:
            rows.append(
                _format_complete(
                    'test -z (__eschedule_command); and string length -q -- (commandline -ct)', _format_lookup(kind)
                )
            )
        elif kind:
            values = '-F' if kind == FILES else _format_lookup(kind)
            rows.append(_format_complete(f'__eschedule_is "{name}"', values))
    for first, seconds in FAMILY_WORDS.items():
        rows.append(_format_complete('test -z (__eschedule_command)', f'-a {first}', ', '.join(seconds)))
    rows.append(_format_complete('__eschedule_is help', f'-a "{" ".join(FIRST_WORDS)}"'))
    rows.append(_format_complete('__eschedule_is completion', f'-a "{" ".join(SHELLS)}"'))
    for field, options in OPTIONS.items():
        command_names = [f'"{name}"' for name, row in commands.items() if field in {*row.options, 'config'}]
        for option in options:
            rows.append(
                _format_complete(
                    f'__eschedule_is {" ".join(command_names)}', *_format_option(field, option), option.help
                )
            )
    valued_flags = ' '.join(flag for field, field_rows in OPTIONS.items() for row in field_rows
                            if find_value_kind(field, row) for flag in row.flags if flag != '--wait')  # fmt: skip
    return FISH.format(valued=valued_flags, families=' '.join(FAMILY_WORDS), safe=SAFE_CHARACTERS, rows='\n'.join(rows))


def _format_option(field: str, row: Option) -> list[str]:
    """Return the arguments of fish's `complete` for an option: its flags, and its values."""
    names = [f'-l {flag[2:]}' if flag.startswith('--') else f'-s {flag[1:]}' for flag in row.flags]
    kind = find_value_kind(field, row)
    if kind.startswith('='):
        # The value of --wait is optional, and is given after a =.
        return [*names, f'-a "{kind[1:]}"', *([] if row.metavar.startswith('[') else ['-x'])]
    if kind in LISTING_COMMANDS:
        return [*names, '-x', _format_lookup(kind)]
    return [*names, {FILES: '-r -F', FREE_TEXT: '-x'}.get(kind, '')]


def _format_lookup(kind: str) -> str:
    """Return fish's option -a, which lists the names of this kind, a key of LISTING_COMMANDS, at each TAB."""
    return f"-a '(__eschedule_asked {LISTING_COMMANDS[kind]})'"


def _format_complete(condition: str, *parts: str) -> str:
    """Return a `complete` line; the last of several parts, if without -, is a summary, cut to 60 characters."""
    *rest, last = parts
    if rest and not last.startswith('-'):
        summary = last.partition('. ')[0].replace('\\', '').replace("'", "\\'")
        rest.append(f"-d '{summary[:60]}'")
    else:
        rest = list(parts)
    return ' '.join(['complete', '-c', 'eschedule', '-n', f"'{condition}'", *filter(None, rest)])
