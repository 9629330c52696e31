"""Every answer in JSON is as the reference says: of each command the golden transcripts have some."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from docs.shapes import REFUSED, SHAPES
from ecomp.cli.commands import COMMANDS, parse
from ecomp.model.events import Event, as_object

WITHOUT = {'help', 'completion', 'ssh', 'ssh-config', 'console', 'log'}
"""Commands that print for people alone."""

EVENT = Event(7, 'instance', 'active', '1a5c0de0-0000-4000-8000-000000000001', 'web1')
"""events are told a line each, and not in the golden transcripts, whose etcd keeps no history."""

GOLDEN = Path(__file__).parents[1] / 'golden/commands'


def answers() -> Iterator[tuple[str, str, Any, int]]:
    """Of each golden command that asks for JSON or YAML: itself, its name, what it printed (or None), its code."""
    for path in sorted(GOLDEN.glob('eschedule-*.txt')):
        for block in path.read_text().split('\n$ eschedule ')[1:]:
            line, *lines = block.splitlines()
            printed = '\n'.join(each[2:] for each in lines if each.startswith('|'))
            code = next(int(each[2:]) for each in lines if each.startswith('= '))
            if code != 2 and (asked := parse(shlex.split(line))).options.format in ('json', 'yaml'):
                load = json.loads if asked.options.format == 'json' else yaml.safe_load
                yield line, asked.name, load(printed) if printed else None, code


ANSWERS = [*answers(), ('events -f json', 'events', as_object(EVENT), 0)]


@pytest.mark.parametrize(('line', 'name', 'printed', 'code'), ANSWERS, ids=[line for line, *_ in ANSWERS])
def test_an_answer_has_its_shape(line: str, name: str, printed: Any, code: int) -> None:
    if printed is None:
        assert code in (4, 7), f'{line}: something is to be said of it'
    else:
        Draft202012Validator(REFUSED if code == 3 else SHAPES[name]).validate(printed)


def test_every_command_that_prints_json_has_a_shape_and_is_tried() -> None:
    shaped = {name for name, command in COMMANDS.items() if 'format' in command.options}
    assert shaped == SHAPES.keys()
    assert shaped - {name for _, name, printed, _ in ANSWERS if printed} == set()
    assert COMMANDS.keys() - SHAPES.keys() == WITHOUT


@pytest.mark.parametrize('name', SHAPES)
def test_a_shape_is_a_schema_that_refuses(name: str) -> None:
    Draft202012Validator.check_schema(SHAPES[name])
    refuses = Draft202012Validator(SHAPES[name])
    good = next(printed for _, of, printed, code in ANSWERS if of == name and printed and code != 3)
    one = good[0] if isinstance(good, list) else good
    for wrong in ({**one, 'more': 1}, {field: value for field, value in one.items() if field != next(iter(one))}, 'x'):
        assert not refuses.is_valid([wrong] if isinstance(good, list) else wrong)
