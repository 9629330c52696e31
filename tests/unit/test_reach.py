"""Commands for hypervisors and ssh options: text from etcd or a user stays one argument."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.commands import parse
from ecomp.errors import UsageError
from ecomp.model.reach import (
    DEFAULT_REACH,
    check_user,
    is_host_name,
    make_ssh_options,
    make_tail_command,
    parse_console_path,
    parse_reach,
    quote_remote_command,
    strip_escapes,
)

INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
FILE = f'/var/lib/ecompute/console/{INSTANCE}.log'


def test_ssh_gets_one_quoted_line_and_is_its_own_proxy() -> None:
    assert DEFAULT_REACH.make_command('hv1', ['tail', "it's"], ['-t']) == ['ssh', '-t', 'hv1', "tail 'it'\"'\"'s'"]
    reach = parse_reach('/usr/bin/ssh -J bastion root@{host}')
    assert reach.make_proxy_command('hv1', '10.0.0.5') == [
        '/usr/bin/ssh',
        '-W',
        '10.0.0.5:22',
        '-J',
        'bastion',
        'root@hv1',
    ]


def test_other_command_gets_separate_arguments() -> None:
    reach = parse_reach("sudo elab exec --name 'my lab' {host}")
    assert reach.make_command('hv1', ['a b', '$c'], ['-t']) == [
        'sudo',
        'elab',
        'exec',
        '--name',
        'my lab',
        'hv1',
        'a b',
        '$c',
    ]
    assert reach.make_proxy_command('hv1', '10.0.0.5')[:8] == [*reach.words[:5], 'hv1', 'bash', '-c']
    assert reach.make_proxy_command('hv1', '10.0.0.5')[-2:] == ['10.0.0.5', '22']


@pytest.mark.parametrize('text', ['', 'ssh', '{host}', "ssh '{host}", 'ssh host'])
def test_invalid_reach_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match='command'):
        parse_reach(text)


@pytest.mark.parametrize('name', ['hv1', 'HV-1', '10.0.0.1', 'hv1.example.org', 63 * 'a'])
def test_valid_host_names(name: str) -> None:
    assert is_host_name(name)


@pytest.mark.parametrize(
    'name', ['', '-oProxyCommand=x', 'hv1-', 'hv 1', 'hv1;id', 'hv1\n', '$(id)', 'a..b', '.a', 64 * 'a', 254 * 'a', 'é']
)
def test_invalid_host_names(name: str) -> None:
    assert not is_host_name(name)


@pytest.mark.parametrize('user', ['', '-l', 'a b', 'root;id', 'a@b', 33 * 'a'])
def test_invalid_users_are_refused(user: str) -> None:
    with pytest.raises(ValueError, match='is not a valid user name'):
        check_user(user)


@pytest.mark.parametrize('path', [FILE, f'/my state/console/{INSTANCE}.log', f'/console/{INSTANCE}.log'])
def test_console_file_of_the_instance_is_accepted(path: str) -> None:
    assert parse_console_path(INSTANCE, f'hv1:{path}') == path


@pytest.mark.parametrize(
    'path',
    [
        *('', '/etc/shadow', f'console/{INSTANCE}.log', f'/var/../console/{INSTANCE}.log', f'{FILE}\n', f'{FILE}.0'),
        *(f'/x/{INSTANCE}.log', FILE.replace('d578', 'd579'), f'//console/{INSTANCE}.log', f'-/console/{INSTANCE}.log'),
        *(f'/var/./console/{INSTANCE}.log', f'/a\nb/console/{INSTANCE}.log'),
    ],
)
def test_other_console_files_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match='not its console'):
        parse_console_path(INSTANCE, f'hv1:{path}')


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


@pytest.mark.parametrize(
    ('line', 'shown'),
    [
        ('\x1b[0;32m  OK  \x1b[0m started\r', '  OK   started'),
        ('\x1b]0;title\x07x\x1b[2J\x1b(B', 'x'),
        ('a\tb', 'a\tb'),
    ],
)
def test_terminal_codes_are_removed_from_a_console_line(line: str, shown: str) -> None:
    assert strip_escapes(line) == shown


def test_option_f_means_follow_only_for_log() -> None:
    command = parse(['-n', '5', 'log', '-f', 'web1'])
    assert (command.name, command.words, command.options.follow, command.options.lines) == ('log', ('web1',), True, 5)
    assert parse(['--config', 'log', 'list', '-f', 'json']).options.format == 'json'
    assert parse(['--project', 'log', 'resources=VCPU:1', '-f', 'json']).options.format == 'json'
    with pytest.raises(UsageError, match='-n: must be 0 to 1000000'):
        parse(['log', 'web1', '-n', '-1'])


def test_arguments_after_two_dashes_are_words() -> None:
    command = parse(['ssh', 'root@web1', '-i', 'key', '--', 'ls', '-l', '--', '--wait'])
    assert (command.name, command.words) == ('ssh', ('root@web1', 'ls', '-l', '--', '--wait'))
    assert (command.options.identity, command.options.wait) == ('key', None)
    for wrong in (['ssh'], ['ssh', '-l x@web1'], ['ssh', 'a b@web1'], ['console', 'web1', 'web2'], ['log']):
        with pytest.raises(UsageError):
            parse(wrong)
