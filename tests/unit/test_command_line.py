"""The command lines of eschedule and ecompute, and those made for hypervisors and ssh."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp import __version__
from ecomp.cli import suggestions
from ecomp.cli.command import Invocation
from ecomp.cli.commands import COMMANDS, format_help, parse
from ecomp.cli.input import read_user_data
from ecomp.cli.options import FLAGS, OPTIONS, Options, parse_line
from ecomp.cli.suggestions import FAMILY_SYNONYMS, FOREIGN_WORDS, LOSS_WARNINGS, OLD_WORDS, suggest_subcommand
from ecomp.errors import UsageError
from ecomp.model.reach import DEFAULT_REACH, make_ssh_options, make_tail_command, parse_reach, quote_remote_command
from ecomp.model.user_data import MAX_UNPACKED_BYTES
from tests.kit.servers import make_environment

# eschedule's command line: command, arguments, options. Refused ones are also in scenario/test_bad_input.py.


A, B = '1f0e4c9a-3a52-4b0f-8d87-0d8f1f2a6b01', '1f0e4c9a-3a52-4b0f-8d87-0d8f1f2a6b02'


def test_every_command_has_help() -> None:
    help_text = format_help('')
    for name, command in COMMANDS.items():
        assert f'{command.usage} ' in help_text
        assert command.summary in help_text
        assert f'usage: eschedule {command.usage} ' in format_help(name)
        # The query command has no name: an instance alone selects it.
        words = tuple(name.split()) if name != 'query' else ()
        assert parse([*name.split(), '--help']) == Invocation('help', words, Options())


def test_help_of_a_command_lists_only_its_own_options() -> None:
    for name, command in COMMANDS.items():
        flags = [flag for option in command.list_options(are_common=False) for flag in option.flags]
        help_text = format_help(name).partition('options:')[2].partition('exit codes')[0]
        listed = re.findall('^  (?:-[a-z](?: [A-Z]+)?, )?(--[a-z-]+)', help_text, re.MULTILINE)
        assert listed == [text for text in flags if len(text) > 2], name
        flags += [flag for option in command.list_options(are_common=True) for flag in option.flags]
        fields = {*command.options, 'config'}
        assert set(flags) == {flag for field in fields for option in OPTIONS[field] for flag in option.flags}, name


def test_every_option_belongs_to_a_command() -> None:
    used = {field for command in COMMANDS.values() for field in command.options}
    assert used | {'config'} == set(OPTIONS)


@pytest.mark.parametrize('name', ['list', *(name for name, each in COMMANDS.items() if '<host>' in each.usage)])
def test_command_that_takes_a_host_has_exit_code_conflict(name: str) -> None:
    """Two computes may have the same host name."""
    assert 5 in COMMANDS[name].exit_codes


def test_every_command_has_a_valid_example() -> None:
    for name, command in COMMANDS.items():
        program, *words = shlex.split(command.example)
        assert (program, parse(words).name) == ('eschedule', name)
        assert f'example: {command.example}\n' in format_help(name)


def test_help_of_a_first_word_lists_its_commands() -> None:
    help_text = format_help('host')
    assert [line.split('<')[0].split('   ')[0].strip() for line in help_text.splitlines() if line.startswith('  ')] == [
        *('host drain', 'host enable', 'host forget')
    ]


# The option parser of eschedule: any line. Its forms and refusals are in tests/golden/texts/commands.txt.


ANY_WORDS = [
    *FLAGS, '', '-', '--', '-5', '--nam', '--coun=3', '-fjson', '-n5', '-x', '--=', 'list', 'log', 'web1', 'a=b'
]  # fmt: skip


def test_unambiguous_beginning_of_an_option_is_enough() -> None:
    assert parse_line(['--flav', 'small', '--al']) == ([], Options(flavor='small', all=True))


@given(st.lists(
    st.one_of(
        st.sampled_from(ANY_WORDS),
        st.builds('{}={}'.format, st.sampled_from(ANY_WORDS), st.sampled_from(ANY_WORDS)),
        st.text(max_size=5),
    ),
    max_size=6,
))  # fmt: skip
def test_any_line_is_read_or_refused_with_one_line(argv: list[str]) -> None:
    message = ''
    try:
        parse(argv)
    except UsageError as error:
        message = str(error)
    assert message == '' or message.isprintable()


# Warnings about user-data that cloud-init would ignore silently.


WARNING_START = 'begins with #cloud-config, but '
UNKNOWN = 'does not begin with #cloud-config, #! or a MIME header, so cloud-init ignores it'
BROKEN = 'is damaged gzip, so cloud-init ignores it'


@pytest.mark.parametrize(
    ('data', 'warning'),
    [
        (gzip.compress(b'#!/bin/sh\n\xff\n', mtime=0), UNKNOWN),  # not UTF-8, so cloud-init finds no type
        (gzip.compress(b'#cloud-config\na: 1\n', mtime=0), ''),
        (gzip.compress(b'#cloud-config\n- a\n', mtime=0), f'{WARNING_START}it is not a mapping of keys to values'),
        (gzip.compress(b'#!/bin/sh\n', mtime=0)[:-3], BROKEN),
        (gzip.compress(b'#!/bin/sh\n', mtime=0) + b'more', BROKEN),
        pytest.param(gzip.compress(bytes(MAX_UNPACKED_BYTES + 1), mtime=0), '', id='too large'),
    ],
)
def test_packed_user_data_is_unpacked_for_the_warning(tmp_path: Path, data: bytes, warning: str) -> None:
    """Data that is not packed is in tests/golden/texts/requests.txt."""
    (tmp_path / 'data').write_bytes(data)
    warnings: list[str] = []
    assert read_user_data(tmp_path / 'data', warnings.append) == data
    assert len(warnings) == bool(warning)
    assert warning in ''.join(warnings)


def test_yaml_with_many_aliases_is_read_without_warning(tmp_path: Path) -> None:
    lines = ['#cloud-config', 'a0: &a0 [x]', *(f'a{n}: &a{n} [{", ".join([f"*a{n - 1}"] * 9)}]' for n in range(1, 40))]
    (tmp_path / 'data').write_text('\n'.join(lines))
    warnings: list[str] = []
    read_user_data(tmp_path / 'data', warnings.append)
    assert warnings == []


# An interrupt while eschedule loads its modules, or ecompute --check runs, ends in one line.


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = {words!r}
{run}
"""
RUN_SCHEDULE = 'from ecomp.schedule import run; run()'
RUN_CHECK = 'from ecomp.compute import main; sys.exit(main())'
LOADED_MODULES = ('ecomp.log', 'ecomp.errors', 'ecomp.cli.options', 'ecomp.cli.commands', 'ecomp.model.record')
LOADED_MODULES = (*LOADED_MODULES, 'ecomp.conf', 'yaml')


def run_interrupted(directory: Path, **words: object) -> tuple[int, str, str]:
    """Run a program that is interrupted as it loads a module."""
    command = [sys.executable, '-c', INTERRUPTED.format(**words)]
    process = subprocess.run(
        command, cwd=directory, env=make_environment(), capture_output=True, text=True, check=False, timeout=60
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize('name', [*LOADED_MODULES, 'ecomp.scheduler.queries.find', 'h2', 'socket'])
def test_interrupt_while_modules_load_prints_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / 'schedule.yaml').write_text('etcd: {endpoints: ["127.0.0.1:1"]}\n')
    outcome = run_interrupted(tmp_path, name=name, words=['list'], number='SIGINT', run=RUN_SCHEDULE)
    assert outcome == (1, '', 'eschedule: interrupted\n')


@pytest.mark.parametrize('number', ['SIGINT', 'SIGTERM'])
def test_interrupted_check_does_not_report_success(number: str, tmp_path: Path) -> None:
    outcome = run_interrupted(tmp_path, name='ecomp.agent.checking', words=['--check'], number=number, run=RUN_CHECK)
    assert outcome == (1, '', 'ecompute: interrupted: the check is incomplete\n')


def test_interrupted_change_does_not_report_success(tmp_path: Path) -> None:
    words = ['--close-dhcp']
    outcome = run_interrupted(tmp_path, name='ecomp.agent.checking', words=words, number='SIGINT', run=RUN_CHECK)
    assert outcome == (1, '', 'ecompute: interrupted: the change is incomplete\n')


# Suggestions: the nearest known word, or ecomp's command for that of another tool.


# The nearest known word, or no suggestion.


OPPOSITES = [('start', 'stop'), ('host enable', 'host drain')]


def get_refusal(line: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse([*line.split(), 'web1', 'more'])
    return str(refused.value)


def find_suggestion(line: str) -> str:
    """Return the suggested command, or '': what is no subcommand may be a name."""
    if line.split()[0] in ('flavor', 'quota'):
        return (
            suggest_subcommand(line.split()[0], line.split()[1:]).partition('eschedule ')[2].rstrip('?').split(',')[0]
        )
    match = re.search(r'did you mean eschedule ([^?,]*)', get_refusal(line))
    return match[1] if match else ''


def test_old_words_are_answered_until_the_next_release() -> None:
    assert __version__ == '1.2.0.dev0' or not OLD_WORDS, 'remove OLD_WORDS: a release has answered them'
    for old, new in OLD_WORDS.items():
        assert old not in COMMANDS
        assert new.split()[0] in COMMANDS or ' '.join(new.split()[:2]) in COMMANDS, new
        with pytest.raises(UsageError, match=f'{old!r} is not a command any more. Fix: write eschedule '):
            parse(old.split())


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
        *suggestions.FOREIGN_NOUNS,
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
        line = ' '.join([*before, prefix + word])
        assert line in COMMANDS or find_suggestion(line) != name, name


# Commands for hypervisors and ssh options: text from etcd or a user stays one argument.


INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'


def test_ssh_gets_one_quoted_line_and_is_its_own_proxy() -> None:
    assert DEFAULT_REACH.make_command('hv1', ['tail', "it's"], ['-t']) == ['ssh', '-t', 'hv1', "tail 'it'\"'\"'s'"]
    reach = parse_reach('/usr/bin/ssh -J bastion root@{host}')
    proxied = shlex.split('/usr/bin/ssh -W 10.0.0.5:22 -J bastion root@hv1')
    assert reach.make_proxy_command('hv1', '10.0.0.5') == proxied


def test_other_command_gets_separate_arguments() -> None:
    reach = parse_reach("sudo elab exec --name 'my lab' {host}")
    assert reach.make_command('hv1', ['a b', '$c'], ['-t']) == shlex.split(
        "sudo elab exec --name 'my lab' hv1 'a b' '$c'"
    )
    assert reach.make_proxy_command('hv1', '10.0.0.5')[:8] == [*reach.words[:5], 'hv1', 'bash', '-c']
    assert reach.make_proxy_command('hv1', '10.0.0.5')[-2:] == ['10.0.0.5', '22']


@given(st.lists(st.text(st.characters(blacklist_characters='\0', blacklist_categories=['Cs'])), min_size=2))
def test_shell_reads_quoted_words_unchanged(words: list[str]) -> None:
    [line] = quote_remote_command(words)
    assert shlex.split(line) == words


def test_single_word_is_a_line_for_the_guests_shell() -> None:
    assert quote_remote_command(['echo $HOME | wc']) == ['echo $HOME | wc']
    assert quote_remote_command([]) == []


def test_ssh_options_trust_only_the_known_hosts_file() -> None:
    values = make_ssh_options(INSTANCE, '/home/100% me/known', ['elab', 'exec', 'hv1', 'a b', '%h'])
    assert values['StrictHostKeyChecking'] == 'yes'
    assert (values['HostKeyAlias'], values['GlobalKnownHostsFile']) == (INSTANCE, '/dev/null')
    assert values['UserKnownHostsFile'] == '"/home/100%% me/known"'
    assert values['ProxyCommand'] == "elab exec hv1 'a b' %%h"
    assert make_ssh_options(INSTANCE, '/x', None, 'accept-new')['ProxyCommand'] == 'none'
    options = [word for name, value in values.items() for word in ('-o', f'{name}={value}')]
    done = subprocess.run(['ssh', '-F', 'none', '-G', *options, '10.0.0.5'], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done
    settings = dict(line.split(' ', 1) for line in done.stdout.splitlines() if ' ' in line)
    assert (settings['stricthostkeychecking'], settings['globalknownhostsfile']) == ('true', '/dev/null')
    assert settings['userknownhostsfile'] == '/home/100% me/known'


def test_tail_reads_rotated_files_and_follows(tmp_path: Path) -> None:
    path = f'{tmp_path}/console.log'
    for suffix, text in (('.1', 'one\ntwo\n'), ('.0', 'three\n'), ('', 'four\nfive')):
        with open(path + suffix, 'w') as file:
            file.write(text)

    def read_tail(lines: int | None) -> str:
        return subprocess.run(make_tail_command(path, lines, False), capture_output=True, text=True, timeout=30).stdout

    assert [read_tail(None), read_tail(4), read_tail(1), read_tail(0)] == [
        'one\ntwo\nthree\nfour\nfive', 'two\nthree\nfour\nfive', 'five', ''
    ]  # fmt: skip
    with subprocess.Popen(make_tail_command(path, 1, True), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert os.read(child.stdout.fileno(), 100) == b'five'
            with open(path, 'a') as file:
                file.write('!\nsix\n')
            assert [child.stdout.readline() for _ in range(2)] == [b'!\n', b'six\n']
        finally:
            child.terminate()
    assert subprocess.run(make_tail_command(f'{path}.none', 1, True), timeout=30).returncode == 66
