"""Completion of eschedule's command lines in bash, zsh and fish: scripts, made from the commands' rows. Pure.

What may stand at a place is either written in the script (commands, options, stages), or asked for at each TAB:
instances, hosts, flavors, groups and projects, by `eschedule … -f value`. Those names come from etcd, so nothing is
offered that a shell would read as more than a word.
"""

from __future__ import annotations

from collections.abc import Mapping

from ecomp.cli.command import QUERY, Command
from ecomp.cli.inspect import COLUMNS, MORE, REASON
from ecomp.cli.near import FAMILY_WORDS, NAMES
from ecomp.cli.options import OPTIONS, SHELLS, Option
from ecomp.model.record import QUEUED, STAGES, STATES

LIVE: Mapping[str, str] = {
    'instances': 'list -f value -c NAME,INSTANCE',
    'hosts': 'hosts -f value -c HOST,COMPUTE',
    'computes': 'hosts -f value -c COMPUTE',
    'flavors': 'flavor list -f value -c FLAVOR',
    'groups': 'group list -f value -c GROUP',
    'projects': 'quota list -f value -c PROJECT',
}
"""What is asked for each kind of words. Of two columns both may be typed."""

FIRST_WORDS = tuple(dict.fromkeys(name.partition(' ')[0] for name in NAMES))
"""What commands begin with, in the order of the help."""

FILES, FREE = 'files', 'free'
"""Kinds of values of options: a file; nothing that is known."""

WORDS = {'<id>': 'instances', '<host>': 'hosts', '<uuid>': 'computes', 'GROUP': 'groups', 'PROJECT': 'projects'}
VALUES = {'FILE': FILES, 'COMPUTE': 'hosts', 'GROUP': 'groups', 'ID': 'projects'}
"""Kinds, by what stands in a command's usage, and by the name of an option's value."""

SAFE = '[A-Za-z0-9._-]'
"""Of these characters alone is what is offered of what etcd holds."""


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """Return the script for one of SHELLS, to be read by it."""
    return _fish(commands) if shell == 'fish' else _posix(shell, commands)


def words_of(command: Command) -> str:
    """The kind of the words of a command, '' where none is known."""
    if command.name.startswith('flavor ') and 'NAME…' in command.usage:
        return 'flavors'
    return next((kind for written, kind in WORDS.items() if written in command.usage), '')


def values_of(field: str, row: Option) -> str:
    """The kind of an option's value: the words themselves after a =, where there are few; '' where it has none."""
    known = {'STATE': sorted({QUEUED, *STATES}), 'COLUMN': [each.name.lower() for each in (*COLUMNS, REASON, *MORE)]}
    choices = STAGES if 'STAGE' in row.metavar else known.get(row.metavar, row.choices)
    if choices:
        return '=' + ' '.join(choices)
    return 'flavors' if field == 'flavor' else VALUES.get(row.metavar, FREE if row.metavar else '')


# bash and zsh: the same functions tell what may come, in what both understand; only what becomes of it differs


POSIX = """\
# Completion of eschedule in {name}: made by `eschedule completion {name}`, which says how it is used.

_eschedule_flags() {{ # COMMAND: its options
    case $1 in
{flags}
        *) echo --help --version ;;
    esac
}}

_eschedule_words() {{ # COMMAND: what its words are
    case $1 in
{words}
    esac
}}

_eschedule_value() {{ # OPTION: what its value is, nothing where it has none
    case $1 in
{values}
    esac
}}

_eschedule_known() {{ # KIND CONFIG: the words of a kind, a line each
    local kind=$1 config=$2
    set --
    [ -z "$config" ] || set -- --config "$config"
    case $kind in
        '='*) echo "${{kind#=}}" | tr ' ' '\\n' ;;
        commands) echo {first} | tr ' ' '\\n' ;;
{live}
    esac
}}

_eschedule_asked() {{ # ARGUMENT...: what eschedule prints, as far as it is plain words
    command eschedule "$@" 2>/dev/null </dev/null | tr '\\t' '\\n' | grep -x '{safe}*' | grep -vx -e -
}}

_eschedule_candidates() {{ # CURRENT BEFORE...: what may stand in place of CURRENT, a line each; <files> for files
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
            -f) [ "$first" = log ] || skip=$word ;; # log has an -f of its own, without a value
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
    # bash takes a = for a word of its own.
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


def _posix(shell: str, commands: Mapping[str, Command]) -> str:
    flags = {name: ' '.join(flag for each in row.takes() for flag in each.flags) for name, row in commands.items()}
    made = POSIX.format(
        name=shell,
        safe=SAFE,
        flags=_cases({f"'{name}'": f'echo {listed} --help' for name, listed in flags.items()}),
        words=_cases({f"'{name}'": f'echo {kind}' for name, row in commands.items() if (kind := _kind(row))}),
        values=_cases({
            ' | '.join(row.flags): f"echo '{kind}'"
            for field, rows in OPTIONS.items() for row in rows if (kind := values_of(field, row))
        }),
        live=_cases({kind: f'_eschedule_asked "$@" {asked}' for kind, asked in LIVE.items()}),
        first=' '.join(FIRST_WORDS),
        families=' | '.join(FAMILY_WORDS),
        seconds=_cases({
            f'{first}// | help/{first}/': f"echo '{' '.join(each)}' | tr ' ' '\\n'"
            for first, each in FAMILY_WORDS.items()
        }, 16),
    )  # fmt: skip
    return f'#compdef eschedule\n{made}{ZSH}' if shell == 'zsh' else made + BASH


def _kind(command: Command) -> str:
    return {'help': 'commands', 'completion': f"'={' '.join(SHELLS)}'"}.get(command.name, words_of(command))


def _cases(each: Mapping[str, str], indent: int = 8) -> str:
    return '\n'.join(f'{" " * indent}{pattern}) {does} ;;' for pattern, does in each.items())


# fish, which asks of each line whether it is to be offered here


FISH = """\
# Completion of eschedule in fish: made by `eschedule completion fish`, which says how it is used.

function __eschedule_command # the command that is typed, as far as it is
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

function __eschedule_is # COMMAND...: it is one of these; without one yet it may become a new instance
    set -l named (__eschedule_command)
    test -n "$named"; or set named create
    contains -- "$named" $argv
end

function __eschedule_asked # ARGUMENT...: what eschedule prints, as far as it is plain words
    set -l line (commandline -opc)
    set -l at (contains -i -- --config $line); and set -a argv --config $line[(math $at + 1)]
    set -a argv (string match -- '--config=*' $line)
    set -l found (command eschedule $argv 2>/dev/null </dev/null | string split \\t)
    string match -r '^{safe}+$' -- $found | string match -v -- -
end

complete -c eschedule -f
{rows}
"""


def _fish(commands: Mapping[str, Command]) -> str:
    rows = list[str]()
    for name, row in commands.items():
        first, _, second = name.partition(' ')
        if second:
            rows.append(_row(f'__eschedule_is {first} "help {first}"', f'-a {second}', row.summary))
        elif name != QUERY:
            rows.append(_row('test -z (__eschedule_command)', f'-a {first}', row.summary))
        kind = words_of(row)
        if name == QUERY:
            rows.append(_row('test -z (__eschedule_command); and string length -q -- (commandline -ct)', _asked(kind)))
        elif kind:
            rows.append(_row(f'__eschedule_is "{name}"', _asked(kind)))
    for first, seconds in FAMILY_WORDS.items():
        rows.append(_row('test -z (__eschedule_command)', f'-a {first}', ', '.join(seconds)))
    rows.append(_row('__eschedule_is help', f'-a "{" ".join(FIRST_WORDS)}"'))
    rows.append(_row('__eschedule_is completion', f'-a "{" ".join(SHELLS)}"'))
    for field, options in OPTIONS.items():
        takers = [f'"{name}"' for name, row in commands.items() if field in {*row.options, 'config'}]
        for option in options:
            rows.append(_row(f'__eschedule_is {" ".join(takers)}', *_option(field, option), option.help))
    valued = ' '.join(flag for field, each in OPTIONS.items() for row in each if values_of(field, row)
                      for flag in row.flags if flag != '--wait')  # fmt: skip
    return FISH.format(valued=valued, families=' '.join(FAMILY_WORDS), safe=SAFE, rows='\n'.join(rows))


def _option(field: str, row: Option) -> list[str]:
    names = [f'-l {flag[2:]}' if flag.startswith('--') else f'-s {flag[1:]}' for flag in row.flags]
    kind = values_of(field, row)
    if kind.startswith('='):
        # The value of --wait alone may be left out, and stands behind a =.
        return [*names, f'-a "{kind[1:]}"', *([] if row.metavar.startswith('[') else ['-x'])]
    if kind in LIVE:
        return [*names, '-x', _asked(kind)]
    return [*names, {FILES: '-r -F', FREE: '-x'}.get(kind, '')]


def _asked(kind: str) -> str:
    return f"-a '(__eschedule_asked {LIVE[kind]})'"


def _row(where: str, *parts: str) -> str:
    *rest, last = parts
    if rest and not last.startswith('-'):
        said = last.partition('. ')[0].replace('\\', '').replace("'", "\\'")
        rest.append(f"-d '{said[:60]}'")
    else:
        rest = list(parts)
    return ' '.join(['complete', '-c', 'eschedule', '-n', f"'{where}'", *filter(None, rest)])
