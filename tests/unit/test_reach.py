"""Commands for hypervisors and ssh options: text from etcd or a user stays one argument."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.reach import DEFAULT_REACH, make_ssh_options, make_tail_command, parse_reach, quote_remote_command

INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'


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
