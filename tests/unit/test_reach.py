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
    console_file,
    is_host_name,
    parse_reach,
    plain,
    remote_line,
    ssh_options,
    tail,
)

INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
FILE = f'/var/lib/ecompute/console/{INSTANCE}.log'


def test_ssh_is_given_one_quoted_line_and_reaches_the_guest_itself() -> None:
    assert DEFAULT_REACH.run('hv1', ['tail', "it's"], ['-t']) == ['ssh', '-t', 'hv1', "tail 'it'\"'\"'s'"]
    reach = parse_reach('/usr/bin/ssh -J bastion root@{host}')
    assert reach.proxy('hv1', '10.0.0.5') == ['/usr/bin/ssh', '-W', '10.0.0.5:22', '-J', 'bastion', 'root@hv1']


def test_any_other_command_is_given_the_words_as_they_are() -> None:
    reach = parse_reach("sudo elab exec --name 'my lab' {host}")
    assert reach.run('hv1', ['a b', '$c'], ['-t']) == ['sudo', 'elab', 'exec', '--name', 'my lab', 'hv1', 'a b', '$c']
    assert reach.proxy('hv1', '10.0.0.5')[:8] == [*reach.words[:5], 'hv1', 'bash', '-c']
    assert reach.proxy('hv1', '10.0.0.5')[-2:] == ['10.0.0.5', '22']


@pytest.mark.parametrize('text', ['', 'ssh', '{host}', "ssh '{host}", 'ssh host'])
def test_what_leads_nowhere_is_no_reach(text: str) -> None:
    with pytest.raises(ValueError, match='command'):
        parse_reach(text)


@pytest.mark.parametrize('name', ['hv1', 'HV-1', '10.0.0.1', 'hv1.example.org', 63 * 'a'])
def test_host_names(name: str) -> None:
    assert is_host_name(name)


@pytest.mark.parametrize(
    'name', ['', '-oProxyCommand=x', 'hv1-', 'hv 1', 'hv1;id', 'hv1\n', '$(id)', 'a..b', '.a', 64 * 'a', 254 * 'a', 'é']
)
def test_what_is_no_host_name(name: str) -> None:
    assert not is_host_name(name)


@pytest.mark.parametrize('user', ['', '-l', 'a b', 'root;id', 'a@b', 33 * 'a'])
def test_who_is_no_user(user: str) -> None:
    with pytest.raises(ValueError, match='no name of a user'):
        check_user(user)


@pytest.mark.parametrize('path', [FILE, f'/my state/console/{INSTANCE}.log', f'/console/{INSTANCE}.log'])
def test_a_console_is_below_its_computes_directory(path: str) -> None:
    assert console_file(INSTANCE, f'hv1:{path}') == path


@pytest.mark.parametrize(
    'path',
    [
        *('', '/etc/shadow', f'console/{INSTANCE}.log', f'/var/../console/{INSTANCE}.log', f'{FILE}\n', f'{FILE}.0'),
        *(f'/x/{INSTANCE}.log', FILE.replace('d578', 'd579'), f'//console/{INSTANCE}.log', f'-/console/{INSTANCE}.log'),
        *(f'/var/./console/{INSTANCE}.log', f'/a\nb/console/{INSTANCE}.log'),
    ],
)
def test_and_no_other_file_is_read(path: str) -> None:
    with pytest.raises(ValueError, match='another file'):
        console_file(INSTANCE, f'hv1:{path}')


@given(st.lists(st.text(st.characters(blacklist_characters='\0', blacklist_categories=['Cs'])), min_size=2))
def test_a_shell_reads_several_words_as_they_were(words: list[str]) -> None:
    [line] = remote_line(words)
    assert shlex.split(line) == words


def test_a_single_word_is_a_line_for_the_guests_shell() -> None:
    assert remote_line(['echo $HOME | wc']) == ['echo $HOME | wc']
    assert remote_line([]) == []


def test_ssh_is_told_to_believe_the_file_and_nobody_else() -> None:
    values = ssh_options(INSTANCE, '/home/100% me/known', ['elab', 'exec', 'hv1', 'a b', '%h'])
    assert values['StrictHostKeyChecking'] == 'yes'
    assert (values['HostKeyAlias'], values['GlobalKnownHostsFile']) == (INSTANCE, '/dev/null')
    assert values['UserKnownHostsFile'] == '"/home/100%% me/known"'
    assert values['ProxyCommand'] == "elab exec hv1 'a b' %%h"
    assert ssh_options(INSTANCE, '/x', None, 'accept-new')['ProxyCommand'] == 'none'
    options = [word for name, value in values.items() for word in ('-o', f'{name}={value}')]
    done = subprocess.run(['ssh', '-F', 'none', '-G', *options, '10.0.0.5'], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done
    settings = dict(line.split(' ', 1) for line in done.stdout.splitlines() if ' ' in line)
    assert (settings['stricthostkeychecking'], settings['globalknownhostsfile']) == ('true', '/dev/null')
    assert settings['userknownhostsfile'] == '/home/100% me/known'


def test_a_console_in_three_files_and_what_comes(tmp_path: Path) -> None:
    path = f'{tmp_path}/console.log'
    for suffix, text in (('.1', 'one\ntwo\n'), ('.0', 'three\n'), ('', 'four\nfive')):
        with open(path + suffix, 'w') as file:
            file.write(text)

    def read_tail(lines: int | None) -> str:
        return subprocess.run(tail(path, lines, False), capture_output=True, text=True, timeout=30).stdout

    assert [read_tail(None), read_tail(4), read_tail(1), read_tail(0)] == [
        'one\ntwo\nthree\nfour\nfive', 'two\nthree\nfour\nfive', 'five', ''
    ]  # fmt: skip
    with subprocess.Popen(tail(path, 1, True), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert os.read(child.stdout.fileno(), 100) == b'five'
            with open(path, 'a') as file:
                file.write('!\nsix\n')
            assert [child.stdout.readline() for _ in range(2)] == [b'!\n', b'six\n']
        finally:
            child.terminate()
    assert subprocess.run(tail(f'{path}.none', 1, True), timeout=30).returncode == 66


@pytest.mark.parametrize(
    ('line', 'shown'),
    [
        ('\x1b[0;32m  OK  \x1b[0m started\r', '  OK   started'),
        ('\x1b]0;title\x07x\x1b[2J\x1b(B', 'x'),
        ('a\tb', 'a\tb'),
    ],
)
def test_a_line_of_a_console_without_what_moves_the_cursor(line: str, shown: str) -> None:
    assert plain(line) == shown


def test_f_follows_for_log_alone() -> None:
    command = parse(['-n', '5', 'log', '-f', 'web1'])
    assert (command.name, command.words, command.options.follow, command.options.lines) == ('log', ('web1',), True, 5)
    assert parse(['--config', 'log', 'list', '-f', 'json']).options.format == 'json'
    assert parse(['--project', 'log', 'resources=VCPU:1', '-f', 'json']).options.format == 'json'
    with pytest.raises(UsageError, match='lines'):
        parse(['log', 'web1', '-n', '-1'])


def test_behind_two_dashes_all_are_words() -> None:
    command = parse(['ssh', 'root@web1', '-i', 'key', '--', 'ls', '-l', '--', '--wait'])
    assert (command.name, command.words) == ('ssh', ('root@web1', 'ls', '-l', '--', '--wait'))
    assert (command.options.identity, command.options.wait) == ('key', None)
    for wrong in (['ssh'], ['ssh', '-l x@web1'], ['ssh', 'a b@web1'], ['console', 'web1', 'web2'], ['log']):
        with pytest.raises(UsageError):
            parse(wrong)
