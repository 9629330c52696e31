"""Suggest a command for a typing error or for a word of another tool. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecomp.cli.command import QUERY
from ecomp.model.command_names import BY_MODULE
from ecomp.model.text import find_similar

# What a command line may begin with, besides a query and an instance.
COMMAND_NAMES = tuple(name for names in BY_MODULE.values() for name in names if name != QUERY)
# The second words of two-word commands, by the first word, which alone is no command.
FAMILY_WORDS: Mapping[str, Sequence[str]] = {
    first: [name.partition(' ')[2] for name in COMMAND_NAMES if name.startswith(f'{first} ')]
    for first in dict.fromkeys(name.partition(' ')[0] for name in COMMAND_NAMES if ' ' in name)
}
CREATE_FORM = "create 'resources=…' [IMAGE_URL]"
DESTROY = 'destroy'
CLEAR = 'destroy --state gone,error'
COPY = 'ssh --print-config'
NO_LIMIT = 'quota set PROJECT CLASS=none'


def _index_by_word(meanings: Mapping[str, str]) -> dict[str, str]:
    return {word: meaning for meaning, words in meanings.items() for word in words.split()}


# fmt: off
# What does the work of commands of the release before, with these commands. They leave with the next release.
_OLD_BY_NEW: Mapping[str, Sequence[str]] = {
    'check': ('audit', 'doctor'), "create --dry-run 'resources=…'": ('plan',), 'evacuate --dry-run': ('what-if',),
    'show --timeline': ('timeline',), 'show --command': ('again',), 'image': ('image list',),
    'hosts': ('host list', 'host show'), 'host drain': ('host disable',), 'flavor': ('flavor list', 'flavor show'),
    'group': ('group list', 'group show'), 'quota': ('quota list', 'quota show'),
    CLEAR: ('clear',), COPY: ('ssh-config',), 'top -f prometheus': ('metrics',),
}
OLD_WORDS: Mapping[str, str] = {old: new for new, words in _OLD_BY_NEW.items() for old in words}

# Our commands for words of docker, virsh, incus, nomad, openstack and kubectl with the same meaning.
FOREIGN_WORDS: Mapping[str, str] = _index_by_word({
    CREATE_FORM: 'create launch new boot make add deploy run init spawn define', "'resources=…'": 'query',
    DESTROY: 'delete del rm remove undefine purge terminate erase destory', CLEAR: 'prune gc',
    'list': 'ls ps dir get', 'list --watch': 'watch', 'log': 'logs dmesg tail', 'why': 'explain',
    'show': 'info describe inspect status stat state details dominfo domstate domid domuuid domifaddr dumpxml',
    'events': 'monitor history journal event', 'check': 'verify fsck diagnose health',
    'stop': 'kill off halt shutdown poweroff power-off pause suspend down freeze managedsave',
    'start': 'on resume unpause unsuspend poweron power-on wake', 'reboot': 'restart reset',
    'ssh': 'exec shell sh bash enter login connect port-forward', COPY: 'scp sftp rsync cp file',
    'console': 'attach serial vnc ttyconsole vncdisplay domdisplay', 'help': 'man usage', '--version': 'version about',
    'apply FILE': 'up scale rollout sync', 'apply FILE --dry-run': 'diff validate lint',
    'top': 'stats usage', 'hosts': 'members nodeinfo cluster-info hots', 'host forget': 'forget decommission',
    'host enable': 'enable uncordon undrain untaint undisable', 'host drain': 'drain disable cordon taint',
})

# The first word of our commands, '' for none, for singular nouns in the commands of other tools.
FOREIGN_NOUNS: Mapping[str, str] = _index_by_word({
    '': 'server instance vm domain guest container pod alloc allocation job workload',
    'host': 'host node hypervisor compute computer agent cluster', 'flavor': 'flavor flavour profile',
    'quota': 'quota limit project', 'group': 'group', 'image': 'image img',
})

# By the first word of a two-word command: our command for a verb with another meaning there.
FAMILY_SYNONYMS: Mapping[str, Mapping[str, str]] = {
    'host': {'evacuate': 'evacuate', 'stop': 'host drain', 'start': 'host enable',
             **dict.fromkeys((DESTROY, CLEAR), 'host forget')},
    'flavor': {**dict.fromkeys((CREATE_FORM, 'update', 'edit'), 'flavor set'),
               **dict.fromkeys((DESTROY, 'unset', CLEAR), 'flavor delete')},
    'quota': {**dict.fromkeys((CREATE_FORM, 'update', 'edit'), 'quota set'),
              **dict.fromkeys((DESTROY, 'unset', CLEAR, 'reset'), NO_LIMIT)},
}

# What to add when suggesting a command that removes something for good. No typing error suggests one.
LOSS_WARNINGS = {DESTROY: ', which deletes the disk', 'host forget': ', for a host that never comes back',
          CLEAR: ', which removes the records of gone and failed instances',
          'flavor delete': ', which deletes the flavor for all users', 'rebuild': ', which deletes the disk',
          'unprotect': ', after which it can be destroyed'}
# fmt: on
# The similarity, from 0 to 1, that a typing error has to have: `state` is no typing error of `start`.
MIN_SIMILARITY = 0.82


def make_hint(words: Sequence[str]) -> str:
    """Return the end of a message for words that are no command: a guess, or a hint to --help."""
    return f': {suggestion}' if (suggestion := suggest(words)) else '. Try: --help'


def find_new_form(words: Sequence[str]) -> tuple[str, str]:
    """Return an old command that words begin with, and its successor, both '' for none."""
    names = (' '.join(words[:count]) for count in (2, 1))
    return next(((name, OLD_WORDS[name]) for name in names if name in OLD_WORDS), ('', ''))


def suggest(words: Sequence[str]) -> str:
    """Return a sentence on what was probably meant by words that are no command, or ''."""
    first, second, *_ = [*(word.lower() for word in words), '', '']
    command = find_new_form([first, second])[1] or _find_command(first, second)
    return f'did you mean eschedule {command}{LOSS_WARNINGS.get(command, "")}?' if command else ''


def _find_command(first: str, second: str) -> str:
    """Return our command for two words in lower case, '' for no guess."""
    if _get_family(first) is None and _get_family(second) is not None:  # kubectl puts the verb before the noun
        first, second = second, first
    family = _get_family(first)
    if family:
        return _find_in_family(family, second) or ('' if first == family else _get_listing(family))
    if family is not None:
        return _find_command(second, '') or 'list'
    candidates = [name.partition(' ')[0] for name in COMMAND_NAMES if name not in LOSS_WARNINGS]
    own_word = first if first in COMMAND_NAMES else find_similar(first, candidates, MIN_SIMILARITY)
    command = FOREIGN_WORDS.get(first) or own_word or ''
    return _find_in_family(command, second) or _get_listing(command) if command in FOREIGN_NOUNS else command


def suggest_subcommand(family: str, words: Sequence[str]) -> str:
    """Return what was probably meant by `family WORD…` if the first word names nothing, or ''."""
    command = _find_in_family(family, words[0].lower())
    return f'did you mean eschedule {command}{LOSS_WARNINGS.get(command, "")}?' if command not in ('', family) else ''


def _get_listing(family: str) -> str:
    return 'hosts' if family == 'host' else family


def _find_in_family(family: str, verb: str) -> str:
    commands = dict.fromkeys(('list', 'show'), _get_listing(family))
    commands |= {name.removeprefix(f'{family} '): name for name in COMMAND_NAMES if name.startswith(f'{family} ')}
    commands |= {**{name: name for name in commands.values()}, **FAMILY_SYNONYMS.get(family, {})}
    typo = find_similar(verb, [word for word, name in commands.items() if name not in LOSS_WARNINGS], MIN_SIMILARITY)
    return commands.get(verb) or commands.get(FOREIGN_WORDS.get(verb, '')) or (commands[typo] if typo else '')


def _get_family(noun: str) -> str | None:
    return FOREIGN_NOUNS.get(noun, FOREIGN_NOUNS.get(noun.removesuffix('s')))
