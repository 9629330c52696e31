"""Suggestions: the nearest known word, or ecomp's command for that of another tool."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.commands import COMMANDS, parse
from ecomp.cli.suggestions import FAMILY_SYNONYMS, FOREIGN_NOUNS, FOREIGN_WORDS, LOSS_WARNINGS
from ecomp.errors import UsageError

# The nearest known word, or no suggestion.


# Commands of other tools, and typing errors: what they suggest, and what they must never suggest.


OPPOSITES = [('start', 'stop'), ('host enable', 'host disable'), ('host enable', 'host drain')]


def get_refusal(line: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse([*line.split(), 'web1', 'more'])
    return str(refused.value)


def find_suggestion(line: str) -> str:
    """Return the command that the refusal of a line suggests, or ''."""
    match = re.search(r'did you mean eschedule ([^?,]*)', get_refusal(line))
    return match[1] if match else ''


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


@pytest.mark.parametrize('prefix', ['un', 'dis', 'de', 'no', 'no-', 'non', 'in'])
def test_negated_command_never_suggests_itself(prefix: str) -> None:
    for name in {*COMMANDS} - {'query'}:
        *before, word = name.split()
        assert find_suggestion(' '.join([*before, prefix + word])) != name, name
