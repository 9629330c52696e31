"""What an instance may be called, and which words are the beginning of a uuid."""

from __future__ import annotations

import re
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.commands import COMMANDS, PLANNED
from ecomp.model.command_names import RESERVED
from ecomp.model.text import check_name, is_label, is_name, uuid_prefix

UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
HEXADECIMAL = ['cafe', 'db1', 'db-1', 'dc1', '7', 'dead-beef', 'd578fb7c', UUID[:-1]]


@pytest.mark.parametrize(
    'name', ['web1', 'w', 'a-0-z', '1web', 'x' * 63, 'database', 'facade1g', 'xn--bcher-kva', *HEXADECIMAL]
)
def test_a_name(name: str) -> None:
    assert check_name(name) == name
    assert is_name(name)


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('', 'becomes a host name'),
        ('-web', 'no - at either end'),
        ('web-', 'no - at either end'),
        ('we b', '1 to 63 letters'),
        ('web.example', '1 to 63 letters'),
        ('web_1', '1 to 63 letters'),
        ('x' * 64, '1 to 63 letters'),
        ('wéb', '1 to 63 letters'),
        ('web\n', '1 to 63 letters'),
        ('\x1b[2J', '1 to 63 letters'),
        ('../etc', '1 to 63 letters'),
        ('resources=vcpu', '1 to 63 letters'),
        ('Web1', 'use lower case'),
        (UUID, 'looks like a uuid'),
        (UUID.replace('-', ''), 'looks like a uuid'),
        ('a' * 33, 'looks like a uuid'),
        *((word, 'is reserved for a command') for word in ('list', 'reboot', 'ssh-config', 'what-if', 'rename', 'set')),
    ],
)
def test_no_name_and_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        check_name(text)
    assert str(caught.value).isprintable()
    assert not is_name(text)


def test_no_instance_can_be_called_as_a_command_or_a_planned_one_is() -> None:
    assert {name.split()[0] for name in COMMANDS} | PLANNED == RESERVED


@given(st.text(max_size=70))
def test_what_passes_is_a_label_and_no_uuid(text: str) -> None:
    try:
        check_name(text)
    except ValueError:
        return
    assert re.fullmatch('[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?', text)
    assert is_label(text)
    assert len(text.replace('-', '')) < 32 or uuid_prefix(text) is None


@pytest.mark.parametrize(
    ('word', 'prefix'),
    [
        ('d578', 'd578'),
        ('D578FB7C', 'd578fb7c'),
        ('d578fb7c-', 'd578fb7c'),
        ('d578fb7c77', 'd578fb7c-77'),
        ('d578fb7c-77', 'd578fb7c-77'),
        (UUID[:-1], UUID[:-1]),
        ('d57', None),
        ('d5-78', None),
        ('d578fb7c-7-787', None),
        ('d578-', None),
        ('-d578', None),
        ('----', None),
        ('d57g', None),
        (UUID, None),
        (UUID.replace('-', ''), None),
        ('', None),
        ('d578\n', None),
        ('１２３４', None),
    ],
)
def test_the_beginning_of_a_uuid(word: str, prefix: str | None) -> None:
    assert uuid_prefix(word) == prefix


@given(st.uuids(), st.integers(4, 35), st.booleans())
def test_every_beginning_is_one(number: uuid.UUID, length: int, dashes: bool) -> None:
    beginning = str(number)[:length]
    found = uuid_prefix(beginning if dashes else beginning.replace('-', ''))
    if found is None:
        assert len(beginning.replace('-', '')) < 4
    else:
        assert str(number).startswith(found)
        assert found == beginning.rstrip('-')
