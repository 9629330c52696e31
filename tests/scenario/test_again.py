"""`eschedule show --command`: the printed command, run by a shell, makes the same request."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.kit.commands import Control, Ecompute, Result
from tests.kit.invariants import check_invariants
from tests.kit.journal import JOURNAL
from tests.kit.servers import make_environment
from tests.kit.story import IMAGE, SMALL_QUERY, UNKNOWN_UUID, assert_one_line, boot, place, wait_address, wait_state

KEYS = [
    f'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{letter * 43} {comment}'
    for letter, comment in (('A', "it's me"), ('B', 'you@there'))
]
SCRIPT = "#!/bin/sh\necho 'a canary'\n"
# The parts of a request that differ between two requests for the same thing.
PASSING = ('instance', 'stages', 'allocations', 'consumer_generation', 'why')
QUOTED_PROJECT = "it's $(touch harm) & more"


def read_request(control: Control, instance: str) -> dict[str, Any]:
    (key,) = [key for key in control.etcd.list_keys('/hosts/') if key.endswith(instance)]
    return dict(json.loads(control.etcd.get(key) or b''))


def drop_fields(request: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name not in (*PASSING, *names)}


def print_again(control: Control, word: str) -> Result:
    result = control.eschedule('show', '--command', word)
    assert result.code == 0, result
    assert len(result.stdout.splitlines()) == 1, result
    return result


def run_printed(control: Control, command: str) -> str:
    """Run a printed command line in a shell, in the directory of the files."""
    script = f'eschedule() {{ {shlex.quote(sys.executable)} -m ecomp.schedule "$@"; }}\n{command}'
    started = time.monotonic()
    done = subprocess.run(
        ['bash', '-euc', script],
        cwd=control.directory, env=make_environment(), capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    JOURNAL.add_run(shlex.split(command)[1:], done.returncode, (done.stdout, done.stderr), started, 0)
    assert done.returncode == 0, done
    return done.stdout.split()[-1]


def write_files(directory: Path) -> list[str]:
    (directory / 'keys.pub').write_text(f'# mine\n{KEYS[0]}\n')
    (directory / 'others.pub').write_text(f'{KEYS[1]}\n')
    (directory / 'script').write_text(SCRIPT)
    files = [str(directory / name) for name in ('keys.pub', 'others.pub', 'script')]
    return ['--ssh-key', files[0], '--ssh-key', files[1], '--user-data', files[2]]


def test_printed_command_makes_the_same_request(cluster: Control, compute: Ecompute, tmp_path: Path) -> None:
    words = [*write_files(tmp_path), '--name', 'web1', '--project', QUOTED_PROJECT, '--weigh', 'pack']
    group = ['--group', 'apart', '--policy', 'anti-affinity', '--soft']
    instance = boot(cluster, f'{SMALL_QUERY}&in_tree={compute.uuid}', IMAGE, *words, *group)
    before = read_request(cluster, instance)
    result = print_again(cluster, 'web1')
    assert result.stderr == '', 'all is known'
    (host,) = json.loads(cluster.eschedule('hosts', '-f', 'json').stdout)
    printed = shlex.split(result.stdout)
    assert (printed[3], printed[printed.index('--on') + 1]) == (SMALL_QUERY, host['hostname']), printed
    directory = cluster.directory
    files = {name: directory / f'again-web1.{name}' for name in ('pub', 'user-data')}
    assert files['pub'].read_text().splitlines() == KEYS
    assert files['user-data'].read_text() == SCRIPT
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
    document = json.loads(cluster.eschedule('show', '--command', 'web1', '-f', 'json').stdout)
    assert document == {
        'command': shlex.split(result.stdout),
        'files': ['again-web1.pub', 'again-web1.user-data'],
        'unknown': [],
    }
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    again = run_printed(cluster, result.stdout)
    assert again != instance
    assert drop_fields(read_request(cluster, again)) == drop_fields(before)
    assert read_request(cluster, again)['why']['weigh'] == before['why']['weigh'] == 'pack'
    assert not (directory / 'harm').exists()
    wait_address(cluster, again)
    check_invariants(cluster, compute)


def test_default_project_and_a_host_without_a_name_of_its_own(cluster: Control, compute: Ecompute) -> None:
    other = cluster.ecompute()  # on this host, too, so that its name means both
    instance = boot(cluster, SMALL_QUERY, IMAGE, '--on', compute.uuid)
    words = shlex.split(print_again(cluster, instance).stdout)
    assert ('--project' in words, words[words.index('--on') + 1]) == (False, compute.uuid), words
    check_invariants(cluster, compute, other)


def test_file_with_other_content_is_not_replaced(cluster: Control, compute: Ecompute, tmp_path: Path) -> None:
    instance = boot(cluster, SMALL_QUERY, *write_files(tmp_path))
    kept = cluster.directory / f'again-{instance[:8]}.user-data'
    kept.write_text('mine')
    assert_one_line(
        cluster.eschedule('show', '--command', instance), 5, kept.name, 'exists with other content. Fix: move it away'
    )
    assert kept.read_text() == 'mine'
    kept.unlink()
    print_again(cluster, instance)
    assert kept.read_text() == SCRIPT
    check_invariants(cluster, compute)


def test_member_of_a_set_has_the_user_data_in_etcd(cluster: Control, compute: Ecompute, tmp_path: Path) -> None:
    words = ('--count', '2', '--name', 'many', '--wait', '-f', 'json', *write_files(tmp_path))
    placed = json.loads(cluster.eschedule(SMALL_QUERY, IMAGE, *words).stdout)
    instance = placed[1]['instance']
    before = read_request(cluster, instance)
    result = print_again(cluster, 'many-2')
    assert result.stderr == 'eschedule: many-2: it is one of a set of 2: the command creates one instance\n'
    assert (cluster.directory / 'again-many-2.user-data').read_text() == SCRIPT
    assert cluster.eschedule('destroy', '--wait', 'many-2').code == 0
    again = read_request(cluster, run_printed(cluster, result.stdout))
    changed = ('user_data', 'user_data_sha256', 'count')
    assert drop_fields(again, *changed) == drop_fields(before, *changed)
    # It cannot be taken from elsewhere, and that is said.
    (key,) = cluster.etcd.list_keys('/user-data/')
    cluster.etcd.delete(key)
    result = print_again(cluster, 'many-1')
    assert 'many-1: its user-data is unknown: etcd does not have it any more' in result.stderr
    assert '--user-data' not in result.stdout
    check_invariants(cluster, compute)


def test_gone_and_failed_instances_lack_what_only_their_request_had(
    cluster: Control, compute: Ecompute, tmp_path: Path
) -> None:
    words = write_files(tmp_path)
    group = ('--group', 'apart', '--policy', 'affinity')
    gone = boot(cluster, SMALL_QUERY, IMAGE, '--name', 'web1', *words, *group)
    assert cluster.eschedule('destroy', '--wait', gone).code == 0
    # The claim differs from the request, so the compute refuses to build.
    compute.pause()
    failed = place(cluster, SMALL_QUERY, IMAGE, '--name', 'web2', *words)[1]
    cluster.placement.call('DELETE', f'/allocations/{failed}')
    compute.resume()
    wait_state(cluster, failed, 'error')
    for instance, name in ((gone, 'web1'), (failed, 'web2')):
        result = print_again(cluster, instance)
        for fact in ('ssh keys', 'user-data'):
            assert f'{instance}: its {fact} ' in result.stderr
        assert ('its request is gone' in result.stderr, f'--name {name}' in result.stdout) == (True, True)
        assert '--ssh-key' not in result.stdout
        assert not list(cluster.directory.glob(f'again-{name}*'))
    assert 'the policy of its group is unknown' in print_again(cluster, gone).stderr
    failed_command = print_again(cluster, failed).stdout
    again = run_printed(cluster, failed_command)
    request = read_request(cluster, again)
    assert (request['name'], request['query'], request['image']) == ('web2', SMALL_QUERY, IMAGE)
    wait_address(cluster, again)
    assert_one_line(cluster.eschedule('show', '--command', UNKNOWN_UUID), 4, 'no such instance')
    check_invariants(cluster, compute)


def test_recorded_query_is_printed_whole_and_never_becomes_an_option(cluster: Control, compute: Ecompute) -> None:
    gone = boot(cluster, SMALL_QUERY, IMAGE)
    assert cluster.eschedule('destroy', '--wait', gone).code == 0
    record = json.loads(cluster.etcd.read_record(gone) or b'')
    query = f'{SMALL_QUERY}&required={",".join(f"CUSTOM_TRAIT_{number}" for number in range(200))}'
    assert len(query) > 2000
    cluster.etcd.put_record(json.dumps({**record, 'query': query}))
    assert query in shlex.split(print_again(cluster, gone).stdout)
    for written in ({'query': '--config=/tmp/theirs.yaml'}, {'query': 'destroy', 'image': 'web1'}):
        cluster.etcd.put_record(json.dumps({**record, **written}))
        assert_one_line(cluster.eschedule('show', '--command', gone), 5, 'etcd has no valid query and image')
    cluster.etcd.delete(cluster.etcd.find_record_key(gone))  # it is on no lease any more
    check_invariants(cluster, compute)
