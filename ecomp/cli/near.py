"""Which command was probably meant by words that are none: the words of other tools, and typing errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecomp.cli.command import QUERY
from ecomp.model.command_names import BY_MODULE
from ecomp.model.text import near

NAMES = tuple(name for names in BY_MODULE.values() for name in names if name != QUERY)
"""What a command line may begin with, beside a query and an instance."""
FAMILY_WORDS: Mapping[str, Sequence[str]] = {
    first: [name.partition(' ')[2] for name in NAMES if name.startswith(f'{first} ')]
    for first in dict.fromkeys(name.partition(' ')[0] for name in NAMES if ' ' in name)
}
"""The second words of commands by their first, which says nothing alone."""

CREATE_FORM = "create 'resources=…' [IMAGE_URL]"
DESTROY = 'destroy'
NO_LIMIT = 'quota set PROJECT CLASS=none'


def _index_by_word(meanings: Mapping[str, str]) -> dict[str, str]:
    return {word: meaning for meaning, words in meanings.items() for word in words.split()}


# fmt: off
ELSEWHERE: Mapping[str, str] = _index_by_word({
    CREATE_FORM: 'create launch new boot make add deploy run init spawn define', "'resources=…'": 'query',
    DESTROY: 'delete del rm remove undefine purge terminate erase destory', 'clear': 'prune gc',
    'list': 'ls ps dir get', 'list --watch': 'watch', 'log': 'logs dmesg tail', 'why': 'explain', 'host drain': 'drain',
    'show': 'info describe inspect status stat state details dominfo domstate domid domuuid domifaddr dumpxml',
    'events': 'monitor history journal event', 'audit': 'check verify fsck', 'doctor': 'diagnose health',
    'stop': 'kill off halt shutdown poweroff power-off pause suspend down freeze managedsave',
    'start': 'on up resume unpause unsuspend poweron power-on wake', 'reboot': 'restart reset',
    'ssh': 'exec shell sh bash enter login connect', 'ssh-config': 'scp sftp rsync cp file',
    'console': 'attach serial vnc ttyconsole vncdisplay domdisplay', 'help': 'man usage', '--version': 'version about',
    'hosts': 'members top stats usage nodeinfo cluster-info hots', 'host forget': 'forget decommission',
    'host enable': 'enable uncordon undrain untaint undisable', 'host disable': 'disable cordon taint',
})
"""The commands of ours for the words of docker, virsh, incus, nomad, openstack and kubectl that mean the same."""

NOUNS: Mapping[str, str] = _index_by_word({
    '': 'server instance vm domain guest container pod alloc allocation job workload',
    'host': 'host node hypervisor compute computer agent cluster', 'flavor': 'flavor flavour profile',
    'quota': 'quota limit project', 'group': 'group',
})
"""The first word of our commands, if any, for the nouns that other tools' commands have, in the singular."""

IN_FAMILIES: Mapping[str, Mapping[str, str]] = {
    'host': {'stop': 'host disable', 'start': 'host enable', **dict.fromkeys((DESTROY, 'clear'), 'host forget')},
    'flavor': {**dict.fromkeys((CREATE_FORM, 'update', 'edit'), 'flavor set'),
               **dict.fromkeys((DESTROY, 'unset', 'clear'), 'flavor delete')},
    'quota': {**dict.fromkeys((CREATE_FORM, 'update', 'edit'), 'quota set'),
              **dict.fromkeys((DESTROY, 'unset', 'clear', 'reset'), NO_LIMIT)},
}
"""What commands of another meaning are called, by their first words."""

NONE = dict.fromkeys(('image', 'images', 'img'), 'an image is a URL behind the query, and nobody keeps a list of them')
"""What others have a command for, and we have not: why there is none."""

LOSSES = {DESTROY: ', which deletes the disk', 'host forget': ', for a machine that is off for good',
          'clear': ', which removes the records of what has ended', 'flavor delete': ', which deletes it for all users'}
"""What is said of a command that removes something for good. A typing error hints at none of them."""
# fmt: on

LIKE = 0.82
"""How much of a word has to be the same as of a command, from 0 to 1: state is no typing error for start."""


def hint(words: Sequence[str]) -> str:
    """Write the end of a sentence that says that `words` are no command."""
    suggestion = suggest(words)
    return f': {suggestion}' if suggestion else '; --help shows all'


def suggest(words: Sequence[str]) -> str:
    """Say what was meant by words that are no command; '' where that is not known."""
    first, second, *_ = [*(word.lower() for word in words), '', '']
    if first in NONE:
        return NONE[first]
    command = _find_command(first, second)
    return f'did you mean eschedule {command}{LOSSES.get(command, "")}?' if command else ''


def _find_command(first: str, second: str) -> str:
    if _get_family(first) is None and _get_family(second) is not None:  # kubectl has the verb before the noun
        first, second = second, first
    family = _get_family(first)
    if family:
        return _find_in_family(family, second) or ('' if first == family else f'{family} list')
    if family is not None:
        return _find_command(second, '') or 'list'
    known = [name.partition(' ')[0] for name in NAMES if name not in LOSSES]
    command = ELSEWHERE.get(first) or (first if first in NAMES else near(first, known, LIKE)) or ''
    return _find_in_family(command, second) or f'{command} list' if command in NOUNS else command


def _find_in_family(family: str, verb: str) -> str:
    known = {name.removeprefix(f'{family} '): name for name in NAMES if name.startswith(f'{family} ')}
    known |= {**{name: name for name in known.values()}, **IN_FAMILIES.get(family, {})}
    typo = near(verb, [each for each, name in known.items() if name not in LOSSES], LIKE)
    return known.get(verb) or known.get(ELSEWHERE.get(verb, '')) or (known[typo] if typo else '')


def _get_family(noun: str) -> str | None:
    return NOUNS.get(noun, NOUNS.get(noun.removesuffix('s')))
