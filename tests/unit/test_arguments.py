"""eschedule's arguments: the form, its words, its options. What is refused: scenario/test_bad_input.py."""

from __future__ import annotations

import re
import shlex

import pytest

from ecomp.cli.command import Invocation
from ecomp.cli.commands import COMMANDS, help_of, parse
from ecomp.cli.options import OPTIONS, Options
from ecomp.errors import UsageError

A, B = '1f0e4c9a-3a52-4b0f-8d87-0d8f1f2a6b01', '1f0e4c9a-3a52-4b0f-8d87-0d8f1f2a6b02'
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
IMAGE = 'http://images.invalid/a.img'


@pytest.mark.parametrize(
    ('argv', 'command'),
    [
        ([QUERY], Invocation('create', (QUERY,), Options())),
        ([QUERY, IMAGE], Invocation('create', (QUERY, IMAGE), Options())),
        (['create', QUERY, IMAGE], Invocation('create', (QUERY, IMAGE), Options())),
        (['create', QUERY, '--wait', 'ready'], Invocation('create', (QUERY,), Options(wait='ready'))),
        ([QUERY, '--wait', 'ready'], Invocation('create', (QUERY,), Options(wait='ready'))),
        (['--wait', 'ready', QUERY], Invocation('create', (QUERY,), Options(wait='ready'))),
        (['--wait=ready', QUERY], Invocation('create', (QUERY,), Options(wait='ready'))),
        (['stop', '--wait', 'ready'], Invocation('stop', ('ready',), Options(wait=''))),  # an instance may be called so
        (['create', '--flavor', 'x'], Invocation('create', ('',), Options(flavor='x'))),
        (['--flavor', 'x', 'create', IMAGE], Invocation('create', ('', IMAGE), Options(flavor='x'))),
        (['--wait', QUERY, IMAGE], Invocation('create', (QUERY, IMAGE), Options(wait=''))),
        (
            [QUERY, '--wait=started', '--timeout', '5', '--uuid', A.upper()],
            Invocation('create', (QUERY,), Options(uuid=A, wait='started', timeout=5.0)),
        ),
        ([A], Invocation('query', (A,), Options())),
        ([A.replace('-', '').upper()], Invocation('query', (A,), Options())),
        (['destroy', A, '--wait', B], Invocation('destroy', (A, B), Options(wait=''))),
        (['wait', A, B, '--for', 'disk'], Invocation('wait', (A, B), Options(stage='disk'))),
        (['stop', A, B], Invocation('stop', (A, B), Options())),
        (['reboot', '--wait', A, '--timeout', '5'], Invocation('reboot', (A,), Options(wait='', timeout=5.0))),
        (['wait', '--timeout', '5', A], Invocation('wait', (A,), Options(timeout=5.0))),
        (['-f', 'json', 'list', '--all'], Invocation('list', (), Options(format='json', all=True))),
        (['hosts', '-f', 'json'], Invocation('hosts', (), Options(format='json'))),
        (['host', 'forget', A.upper()], Invocation('host forget', (A,), Options())),
        (['web1'], Invocation('query', ('web1',), Options())),
        (['1F0E4C9A'], Invocation('query', ('1F0E4C9A',), Options())),
        (['show', 'web1', '1f0e', A.upper()], Invocation('show', ('web1', '1f0e', A), Options())),
        (
            [QUERY, '--name', 'web1', '--ssh-key', 'a.pub', '--user-data', '-', '--ssh-key', 'b.pub'],
            Invocation('create', (QUERY,), Options(name='web1', ssh_key=['a.pub', 'b.pub'], user_data='-')),
        ),
        (['--queue', '--flavor', 'x', IMAGE], Invocation('create', ('', IMAGE), Options(flavor='x', queue=True))),
        (['show', A, '--config', 'x.yaml'], Invocation('show', (A,), Options(config='x.yaml'))),
        # The help of what is typed beside it.
        (['--help'], Invocation('help', (), Options())),
        (['--help', '--nonsense'], Invocation('help', (), Options())),
        ([A, '--help'], Invocation('help', (), Options())),
        (['-h', 'wait', A], Invocation('help', ('wait',), Options())),
        (['--timeout', '5', 'host', 'drain', 'hv1', '--help'], Invocation('help', ('host', 'drain'), Options())),
        ([QUERY, '--help'], Invocation('help', ('create',), Options())),
        (['create', '--help'], Invocation('help', ('create',), Options())),
        (['host', '--help'], Invocation('help', ('host',), Options())),
    ],
)
def test_each_form(argv: list[str], command: Invocation) -> None:
    assert parse(argv) == command


def test_every_command_is_explained() -> None:
    helped = help_of('')
    for name, each in COMMANDS.items():
        assert f'{each.usage} ' in helped
        assert each.summary in helped
        assert f'usage: eschedule {each.usage} ' in help_of(name)
        # What prints an address is told by an id, and by no word.
        words = tuple(name.split()) if name != 'query' else ()
        assert parse([*name.split(), '--help']) == Invocation('help', words, Options())


@pytest.mark.parametrize('name', COMMANDS)
def test_the_help_of_a_command_speaks_of_its_own_options_alone(name: str) -> None:
    shown = [flag for each in COMMANDS[name].takes() for flag in each.flags]
    helped = help_of(name).partition('options:')[2].partition('exit codes')[0]
    found = re.findall('^  (?:-[a-z](?: [A-Z]+)?, )?(--[a-z-]+)', helped, re.MULTILINE)
    assert found == [each for each in shown if len(each) > 2]
    fields = {*COMMANDS[name].options, 'config'}
    assert set(shown) == {flag for field in fields for each in OPTIONS[field] for flag in each.flags}


def test_every_option_is_some_command_s() -> None:
    taken = {field for each in COMMANDS.values() for field in each.options}
    assert taken | {'config'} == set(OPTIONS)


@pytest.mark.parametrize('name', ['list', *(name for name, each in COMMANDS.items() if '<host>' in each.usage)])
def test_who_takes_a_host_s_name_may_end_in_conflict(name: str) -> None:
    """Two computes may be called so."""
    assert 5 in COMMANDS[name].exits


def test_the_help_of_events_offers_what_events_prints() -> None:
    assert 'json or yaml' not in help_of('events')
    assert 'csv' not in help_of('events')


@pytest.mark.parametrize('name', COMMANDS)
def test_every_command_has_an_example_that_can_be_typed(name: str) -> None:
    program, *words = shlex.split(COMMANDS[name].example)
    assert program == 'eschedule'
    assert parse(words).name == name
    assert f'example: {COMMANDS[name].example}\n' in help_of(name)


@pytest.mark.parametrize(
    ('argv', 'said'),
    [
        (['create', 'web1'], "create: 'web1' is not a placement query. Try: 'resources=VCPU:1,"),
        (['create', '--flavor', 'x', 'web1'], "create: 'web1' is not a placement query. Try: 'resources=VCPU:1,"),
        (['plan', 'web1'], "plan: 'web1' is not a placement query. Try: 'resources=VCPU:1,"),
        # "--uuid $X" of a variable nobody set: it must not be placed under a uuid nobody knows.
        ([QUERY, '--uuid', ''], "'' is not a uuid that an instance can have"),
        ([QUERY, '--wait=redy'], '--wait=redy: there is no such stage (did you mean ready?); say requested, '),
        (['list', '--state', 'actve'], '--state: there is no such state (did you mean active?); say active, '),
        (['wait', A, '--timeout', '1000000000'], '--timeout: 0 to 999999999 seconds'),
        (['wait', A, '--timeout', '-1'], '--timeout: 0 to 999999999 seconds'),
        ([QUERY, '--min', '2'], '--min goes with --count'),
        (['query', 'web1'], "'query' is not a command: did you mean eschedule 'resources=…'?"),
        (['delete', 'web1'], "'delete' is not a command: did you mean eschedule destroy, which deletes the disk?"),
        (['ls', '-f', 'json', 'x'], "'ls' is not a command: did you mean eschedule list?"),
        (['images', 'x'], "'images' is not a command: an image is a URL behind the query"),
        (['Lst'], "'Lst' is neither a command nor an instance: did you mean eschedule list?"),
        (['xyzzy', 'x'], "'xyzzy' is not a command; --help shows all"),
        (['host', 'lsit'], "'host lsit' is not a command (did you mean eschedule host list?): host has list, "),
        (['host', 'forgte', 'hv1'], "'host forgte' is not a command: host has list, "),
        (['help', 'lst'], "help: 'lst' is not a command: did you mean eschedule list?"),
    ],
)
def test_what_is_refused_names_what_was_probably_meant(argv: list[str], said: str) -> None:
    """tests/golden/commands/eschedule-refused.txt has the refusals that are not here."""
    with pytest.raises(UsageError) as refused:
        parse(argv)
    assert said in str(refused.value)
    assert '\n' not in str(refused.value)


def test_help_of_several_commands_by_their_first_word() -> None:
    helped = help_of('host')
    assert [line.split('<')[0].split('   ')[0].strip() for line in helped.splitlines() if line.startswith('  ')] == [
        *('host list', 'host show', 'host disable', 'host drain', 'host enable', 'host forget'),
    ]
