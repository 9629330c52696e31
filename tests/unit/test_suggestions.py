"""Suggestions: the nearest known word, or ecomp's command for that of another tool."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.commands import COMMANDS, parse
from ecomp.cli.suggestions import FAMILY_SYNONYMS, FOREIGN_NOUNS, FOREIGN_WORDS, LOSS_WARNINGS
from ecomp.errors import UsageError
from ecomp.model.text import find_similar, format_suggestion

# The nearest known word, or no suggestion.


CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB', 'VGPU', 'instances')
NAMES = ('hv12', 'hv3', 'web')


@pytest.mark.parametrize(
    ('word', 'known_words', 'meant'),
    [
        ('VCPUS', CLASSES, 'VCPU'),
        ('vcpu', CLASSES, 'VCPU'),
        ('INSTANCES', CLASSES, 'instances'),
        ('MEMORY', CLASSES, 'MEMORY_MB'),
        ('DISK', CLASSES, 'DISK_GB'),
        ('NOPE', CLASSES, None),
        ('', CLASSES, None),
        ('VCPU' + 'x' * 10_000, CLASSES, None),
        ('VCPU', (), None),
        # Transposed letters.
        *(('wbe', NAMES, 'web'), ('hv9', NAMES, None), ('hv21', NAMES, 'hv12'), ('hvv', NAMES, None)),
        # An opposite is never suggested; a misspelt beginning does not make an opposite.
        *(
            (word, (opposite,), None)
            for word, opposite in (
                ('undrain', 'drain'),
                ('unset', 'set'),
                ('inactive', 'active'),
                ('--no-wait', '--wait'),
                ('--dequeue', '--queue'),
                ('--header', '--no-header'),
                ('undisable', 'disable'),
            )
        ),
        *((word, ('disable',), 'disable') for word in ('isable', 'desable', 'disabel', 'disables')),
    ],
)
def test_suggestions_finds_the_nearest_word(word: str, known_words: tuple[str, ...], meant: str | None) -> None:
    assert find_similar(word, known_words) == meant
    assert format_suggestion(word, known_words) == (f' (did you mean {meant}?)' if meant else '')


# Commands of other tools, and typing errors: what they suggest, and what they must never suggest.


CREATE_COMMAND = "create 'resources=…' [IMAGE_URL]"
NO_LIMIT = 'quota set PROJECT CLASS=none'
OTHER_TOOLS: Mapping[str, Mapping[str, str]] = {
    'docker': {
        'ps': 'list', 'ls': 'list', 'container ls': 'list', 'run': CREATE_COMMAND, 'rm': 'destroy',
        'container rm': 'destroy',
        'kill': 'stop', 'pause': 'stop', 'unpause': 'start', 'restart': 'reboot', 'exec': 'ssh', 'cp': 'ssh-config',
        'logs': 'log', 'inspect': 'show', 'attach': 'console', 'stats': 'top', 'version': '--version',
        'images': 'image list', 'image ls': 'image list',
        'prune': 'clear', 'history': 'events', 'node ls': 'host list', 'node inspect': 'host show',
    },
    'virsh': {
        'undefine': 'destroy', 'define': CREATE_COMMAND, 'shutdown': 'stop', 'suspend': 'stop', 'resume': 'start',
        'reset': 'reboot', 'dominfo': 'show', 'domstate': 'show', 'dumpxml': 'show', 'managedsave': 'stop',
        'nodeinfo': 'hosts', 'ttyconsole': 'console', 'event': 'events', 'domifaddr': 'show',
    },
    'incus': {
        'launch': CREATE_COMMAND, 'init': CREATE_COMMAND, 'delete': 'destroy', 'info': 'show', 'shell': 'ssh',
        'file push': 'ssh-config',
        'monitor': 'events', 'cluster list': 'host list', 'profile list': 'flavor list', 'profile create': 'flavor set',
        'profile delete': 'flavor delete',
    },
    'nomad': {
        'node status': 'host show', 'node drain': 'host drain', 'alloc exec': 'ssh', 'alloc logs': 'log',
        'alloc stop': 'stop', 'job stop': 'stop', 'job run': CREATE_COMMAND, 'job status': 'show', 'status': 'show',
        'server members': 'hosts', 'nodes': 'host list', 'quota inspect': 'quota show', 'gc': 'clear',
    },
    'openstack': {
        'server list': 'list', 'server create': CREATE_COMMAND, 'server delete': 'destroy', 'server destroy': 'destroy',
        'server show': 'show', 'server ssh': 'ssh', 'server pause': 'stop', 'servers': 'list',
        'server unpause': 'start', 'server reboot': 'reboot',
        'server event list': 'events', 'hypervisor list': 'host list', 'hypervisor show': 'host show',
        'compute service list': 'host list', 'flavor create': 'flavor set', 'flavor unset': 'flavor delete',
        'quota delete': NO_LIMIT, 'quota unset': NO_LIMIT, 'limits show': 'quota show',
    },
    'kubectl': {
        'get': 'list', 'get pods': 'list', 'get nodes': 'host list', 'describe': 'show', 'describe node': 'host show',
        'describe pod': 'show', 'delete pod': 'destroy', 'cordon': 'host disable', 'scp': 'ssh-config',
        'cordon node': 'host disable', 'uncordon': 'host enable', 'undrain': 'host enable', 'drain': 'host drain',
        'drain node': 'host drain', 'taint': 'host disable', 'cluster-info': 'hosts', 'explain': 'why',
    },
    'a power button': {
        'off': 'stop', 'halt': 'stop', 'poweroff': 'stop', 'down': 'stop', 'on': 'start', 'up': 'start',
        'poweron': 'start', 'host undrain': 'host enable', 'host uncordon': 'host enable',
        'host cordon': 'host disable',
        'host off': 'host disable', 'host on': 'host enable', 'host rm': 'host forget', 'host describe': 'host show',
        'host kill': 'host disable', 'quota rm': NO_LIMIT, 'quota clear': NO_LIMIT, 'flavor rm': 'flavor delete',
        'group ls': 'group list', 'enable': 'host enable', 'disable': 'host disable',
        'host disenable': 'host disable',  # a negated command may suggest its opposite
    },
}  # fmt: skip
OPPOSITES = [('start', 'stop'), ('host enable', 'host disable'), ('host enable', 'host drain')]


def get_refusal(line: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse([*line.split(), 'web1', 'more'])
    return str(refused.value)


def find_suggestion(line: str) -> str:
    """Return the command that the refusal of a line suggests, or ''."""
    match = re.search(r'did you mean eschedule ([^?,]*)', get_refusal(line))
    return match[1] if match else ''


@pytest.mark.parametrize(
    ('line', 'meant'),
    [pytest.param(*pair, id=f'{tool} {pair[0]}') for tool, each in OTHER_TOOLS.items() for pair in each.items()],
)
def test_command_of_another_tool_suggests_ours(line: str, meant: str) -> None:
    assert find_suggestion(line) == meant
    assert find_suggestion(line.upper()) == meant
    names_the_loss = 'did you mean eschedule destroy, which deletes the disk?' in get_refusal(line)
    assert names_the_loss == (meant == 'destroy')


def test_every_suggested_command_exists() -> None:
    commands = {*FOREIGN_WORDS.values(), *(name for family in FAMILY_SYNONYMS.values() for name in family.values())}
    for command in commands - {'--version', "'resources=…'"}:
        words = command.split()
        assert ' '.join(words[:2]) in COMMANDS or words[0] in COMMANDS, command


@st.composite
def misspelt_commands(draw: st.DrawFn) -> tuple[str, str, str]:
    """Generate a command, its line with an edited last word, and the negation before that word."""
    command = draw(st.sampled_from(sorted({*COMMANDS} - {'query'})))
    *before, word = command.split()
    for _ in range(draw(st.integers(0, 2))):
        position = draw(st.integers(0, len(word)))
        letter = draw(st.sampled_from(['', *string.ascii_lowercase]))
        word = word[:position] + letter + word[position + draw(st.integers(0, 1)) :]
    negation = draw(st.sampled_from(['', '', 'un', 'dis', 'de', 'no', 'non', 'in']))
    return command, ' '.join([*before, negation + word]), negation


@given(misspelt_commands())
def test_typing_error_never_suggests_a_loss_or_the_opposite(case: tuple[str, str, str]) -> None:
    command, line, negation = case
    words = line.split()
    exact = {
        *FOREIGN_WORDS,
        *FOREIGN_NOUNS,
        *FAMILY_SYNONYMS.get(words[0], ()),
        *(name.partition(' ')[0] for name in COMMANDS),
    }
    if words[-1] in exact or line in COMMANDS or len(words) != len(command.split()):
        return  # not a typing error, or no word remains
    hint = find_suggestion(line)
    assert hint not in LOSS_WARNINGS
    for pair in OPPOSITES:
        if command in pair and not negation:
            assert hint not in {*pair} - {command}


@pytest.mark.parametrize('name', sorted({*COMMANDS} - {'query'}))
@pytest.mark.parametrize('prefix', ['un', 'dis', 'de', 'no', 'no-', 'non', 'in'])
def test_negated_command_never_suggests_itself(name: str, prefix: str) -> None:
    *before, word = name.split()
    assert find_suggestion(' '.join([*before, prefix + word])) != name
