"""Wrong arguments and configurations, and refused starts."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from ecomp.model import keys
from tests.kit.commands import Control, Ecompute, Result, eschedule, run, write_config
from tests.kit.invariants import allocations, check, everything
from tests.kit.servers import environment, free_port
from tests.kit.story import NOBODY, SMALL, addressed, boot, logged, one_line, place

# Wrong arguments and closed pipes: one clear line, the right exit code, and nothing is left behind.


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        ([NOBODY, NOBODY], 'not a command'),
        (['create'], 'create: give a placement query, in quotes, or a --flavor'),
        (['evnets', NOBODY], "'evnets' is not a command: did you mean eschedule events?"),
        (['no_name'], 'neither a command nor an instance'),
        (['Web1'], 'neither a command nor an instance'),
        ([NOBODY + '0'], 'neither a command nor an instance'),
        (['delete', 'web1'], "'delete' is not a command: did you mean eschedule destroy, which deletes the disk?"),
        (['images', 'x'], "'images' is not a command: an image is a URL behind the query"),
        (['image'], "'image' is neither a command nor an instance: an image is a URL"),
        (['run', SMALL], "'run' is not a command"),
        (['create', 'web1'], "create: 'web1' is not a placement query. Try: 'resources=VCPU:1,"),
        (['host', 'lsit'], "'host lsit' is not a command (did you mean eschedule host list?)"),
        (['events', '-n', '-1'], '-n: 0 to 1000000 lines'),
        (['hosts', '-n', '3'], '--lines does not go with this form'),
        (['wait', 'web1', '--for', 'readdy'], '--for=readdy: there is no such stage (did you mean ready?); say req'),
        ([SMALL, '--wait', '5'], 'the image 5 must be a URL'),
        ([SMALL, '/etc/passwd'], 'the image /etc/passwd must be a URL'),
        ([SMALL, 'http://a b/c'], 'is not a URL'),
        ([SMALL, 'http://images.invalid/a#sha256=zz'], 'has a #fragment'),
        ([SMALL, '--user-data', '/nowhere'], 'user-data /nowhere: cannot be read'),
        ([SMALL, '--ssh-key', '/nowhere'], 'ssh keys /nowhere: cannot be read'),
        ([SMALL, '--on', ''], 'no compute is named'),
        ([f'{SMALL},'], "'' is not CLASS:AMOUNT"),
        (['resources=VCPU=1'], "'VCPU=1' is not CLASS:AMOUNT"),
        (['resources=vcpu:1'], 'did you mean VCPU?'),
        (['VCPU=1'], "'VCPU' is nothing that placement asks for"),
        (['VCPU:1'], "'VCPU:1' is neither a command nor an instance"),
        (['Lst'], "'Lst' is neither a command nor an instance: did you mean eschedule list?"),
        (['show', 'abc-'], "'abc-' is no instance: give its name, its uuid or the beginning of its uuid"),
        (['quota'], "'quota' alone is not a command: quota has list, show and set"),
        (['flavor', 'lsit'], "'flavor lsit' is not a command (did you mean eschedule flavor list?): flavor has list, "),
        (['help', 'delete'], 'did you mean eschedule destroy, which deletes the disk?'),
        (['completion'], 'for which shell?'),
        (['completion', 'ksh'], 'for which shell? Give one of bash, zsh, fish'),
        (['host', 'show'], 'which compute?'),
        (['flavor', 'show'], 'which flavor?'),
        (['quota', 'show'], 'which quota'),
        (['quota', 'set', 'web'], 'give a project and its limits'),
        (['quota', 'set', 'VCPU=1', 'web'], 'give a project and its limits'),
        (['quota', 'set', 'p', 'VCPU=1', 'VCPU=2'], 'VCPU is given twice'),
        (['flavor', 'set', 'x', 'resources=VCPU:99999999999999999999'], 'is not a whole number from 1 to 2147483647'),
        (['destroy'], 'which instance'),
        (['destroy', 'no_name'], 'no_name'),
        (['destroy', NOBODY, 'no_name'], 'no_name'),
        (['destroy', 'list'], "'list' is no instance"),
        (['show'], 'which instance'),
        (['list', 'all'], 'all'),
        (['--all'], 'nothing to do'),
        (['hosts', 'hv1'], 'hv1'),
        (['--all', 'hosts'], '--all'),
        (['host'], 'host has list, show,'),
        (['host', 'remember', NOBODY], 'not a command: host has '),
        (['host', 'forget'], 'which compute'),
        (['host', 'enable', NOBODY, NOBODY], 'which compute'),
        (['-f', 'csv', 'host', 'forget', NOBODY], '-f csv goes with what has columns'),
        (['--wait', 'list'], '--wait'),
        (['--timeout', '5', SMALL], '--wait'),
        (['--wait', '--timeout', '-1', SMALL], '--timeout'),
        (['--wait', '--timeout', 'nan', SMALL], '--timeout'),
        (['--wait=nonsense', SMALL], 'nonsense'),
        (['destroy', '--wait=started', NOBODY], '--wait'),
        (['--uuid', NOBODY, 'list'], '--uuid'),
        (['--uuid', 'short', SMALL], 'short'),
        (['-f', 'value', 'stop', NOBODY], '-f value goes with what has columns'),
        (['-f', 'json', '-c', 'name', 'list'], '-c does not go with -f json'),
        (['-f', 'yaml', '--wide', 'hosts'], '--wide does not go with -f yaml'),
        (['-f', 'json', 'list', '--no-header'], '--no-header does not go with -f json'),
        (['list', '-c', 'name,'], '-c: give the name of a column'),
        (['list', '--sort', ''], '--sort: give the name of a column'),
        (['stop', NOBODY, '--sort', 'name'], '--sort does not go with this form'),
        (['-f', 'csv', '--wait', SMALL], '-f csv goes with what has columns'),
        (['--count', '0', SMALL], '1 to 100'),
        (['--count', '61', '--name', 'web', SMALL], '1 to 60 with names'),
        (['--count', '2', '--name', 'w' * 62, SMALL], '1 to 63 letters'),
        (['--count', '3', '--min', '4', SMALL], '--min: 1 to 3'),
        (['--count', '2', '--min', '3', SMALL], '--min: 1 to 2'),
        (['--min', '2', SMALL], '--min goes with --count'),
        (['--count', '101', SMALL], '1 to 100'),
        (['--project', 'x' * 300, SMALL], 'is no project'),
        (['audit', 'x'], 'audit takes no further words'),
        (['audit', '--all'], '--all does not go with this form'),
        (['list', '--fix'], '--fix does not go with this form'),
        (['--count', '2', 'list'], '--count does not go with this form'),
        (['--all', 'show', NOBODY], '--all'),
        (['--config', '/nowhere/schedule.yaml', 'list'], '/nowhere/schedule.yaml'),
        ([SMALL, 'http://images.invalid/a', 'http://images.invalid/b'], 'http://images.invalid/b'),
        ([SMALL, 'ftp://images.invalid/a.img'], 'ftp://images.invalid/a.img'),
        ([SMALL, 'images.invalid/a.img'], 'images.invalid/a.img'),
        ([SMALL, 'http://'], 'names no host'),
        ([SMALL, ''], 'image'),
        ([''], 'neither a command nor an instance'),
        (['--name', '', SMALL], '--name'),
        (['--name', 'Web1', SMALL], 'use lower case'),
        (['--name', 'web.1', SMALL], '1 to 63 letters'),
        (['--name', 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a', SMALL], 'looks like a uuid'),
        (['--name', 'list', SMALL], 'is reserved for a command'),
        (['--name', 'web1', 'hosts'], '--name does not go with this form'),
        (['list', '--state', 'well'], '--state: there is no such state; say active, building'),
        (['list', '--watch', '-f', 'json'], '--watch draws a table'),
        (['show', NOBODY, '--watch'], '--watch does not go with this form'),
        (['list', '--group', 'a/b'], '--group'),
        (['--ssh-key', 'x.pub', 'list'], '--ssh-key does not go with this form'),
        (['--ssh-key', '/nowhere/x.pub', SMALL], 'ssh keys /nowhere/x.pub: cannot be read: No such file'),
        (['--ssh-key', '', SMALL], 'cannot be read'),
        (['--ssh-key', '/', SMALL], 'cannot be read: Is a directory'),
        (['--user-data', '/nowhere/x', SMALL], 'user-data /nowhere/x: cannot be read: No such file'),
        (['--user-data', '', SMALL], 'cannot be read'),
        (['--user-data', '/dev/null', SMALL], 'user-data /dev/null: is empty'),
        (['--user-data', '/dev/zero', SMALL], 'has more than 262144 bytes, and 262144 (256 KiB) is the limit'),
        (['--ssh-key', '/dev/zero', SMALL], '32768 (32 KiB) is the limit'),
        (['--user-data', '/nowhere/x', '-f', 'json', 'list'], '--user-data does not go with this form'),
    ],
)
def test_wrong_words(tmp_path: Path, words: list[str], says: str) -> None:
    # Runs in this process: a Python process for each row would take ten seconds more. No server is contacted.
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from ecomp import schedule

    out, err = StringIO(), StringIO()
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = schedule.main(words)
    finally:
        os.chdir(before)
    assert one_line(Result(code, out.getvalue(), err.getvalue()), 2, says)
    assert out.getvalue() == ''


def test_no_words_print_the_help(tmp_path: Path) -> None:
    bare_result = run('ecomp.schedule', directory=tmp_path)
    assert bare_result.code == 2
    assert bare_result.stderr == ''
    for form in ('destroy', 'list', 'show', '--uuid', '--wait', '--timeout', 'exit codes'):
        assert form in bare_result.stdout
    help_result = run('ecomp.schedule', '--help', directory=tmp_path)
    assert (help_result.code, help_result.stdout) == (0, bare_result.stdout)
    for module, name in (('ecomp.schedule', 'eschedule'), ('ecomp.compute', 'ecompute')):
        version = run(module, '--version', directory=tmp_path)
        assert version.code == 0
        assert version.stdout.startswith(f'{name} ')


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        (['--fake'], '--fake'),
        (['--fake', 'VCPU'], 'VCPU'),
        (['--fake', 'VCPU:0'], 'VCPU:0'),
        (['--fake', 'VCPU:-4'], 'VCPU:-4'),
        (['--fake', 'VCPU:4,VCPU:5'], 'twice'),
        (['--fake', 'vcpu:4'], 'vcpu'),
        (['--fake', ''], 'CLASS:TOTAL'),
        (['--frobnicate'], '--frobnicate'),
        (['compute.yaml'], 'compute.yaml'),
        (['--config', '/nowhere/compute.yaml'], '/nowhere/compute.yaml'),
    ],
)
def test_wrong_words_for_ecompute(tmp_path: Path, words: list[str], says: str) -> None:
    one_line(run('ecomp.compute', *words, directory=tmp_path), 2, says, command='ecompute')


@pytest.mark.unaudited('its compute is a key that nobody keeps')
@pytest.mark.parametrize(
    ('query', 'says'),
    [
        ('resources=VCPU:1,DISK_GB', "'DISK_GB' is not CLASS:AMOUNT"),
        ('resources=VCPU:0,DISK_GB:1,MEMORY_MB:1', 'VCPU: 0 is not from 1 to 2147483647'),
        ('resources=VCPU:-1,DISK_GB:1,MEMORY_MB:1', "VCPU: '-1' is not a whole number from 1"),
        ('resources=VCPU:1.5,DISK_GB:1,MEMORY_MB:1', "VCPU: '1.5' is not a whole number"),
        ('resources=VCPU:99999999999999999999,DISK_GB:1,MEMORY_MB:1', 'VCPU: 99999999999999999999 is not from 1'),
        ('resources=VCPU:1,VCPU:2,DISK_GB:1,MEMORY_MB:1', 'VCPU is there twice'),
        ('resources=VCPU:1&resources=DISK_GB:1,MEMORY_MB:1', 'resources= is there twice'),
        ('resources=VCPU:1, DISK_GB:1, MEMORY_MB:1', 'there is a blank in resources='),
        ('resources=vcpu:1,DISK_GB:1,MEMORY_MB:1', "'vcpu' is no resource class (did you mean VCPU?)"),
        ('resource=VCPU:1,DISK_GB:1,MEMORY_MB:1', "'resource' is nothing that placement asks for (did you mean res"),
        ('resources=VCPU:1,DISK_GB:1,MEMORY_MB:1,GOLD:1', 'placement knows no resource class GOLD'),
        ('resources=VCPUS:1,DISK_GB:1,MEMORY_MB:1', 'no resource class VCPUS (did you mean VCPU?)'),
        (f'{SMALL}&required=NO_SUCH_TRAIT', 'placement knows no trait NO_SUCH_TRAIT'),
        (f'{SMALL}&required=!HW_CPU_X86_AVX22', 'no trait HW_CPU_X86_AVX22 (did you mean HW_CPU_X86_AVX2?)'),
        (f'{SMALL}&in_tree=nonsense', 'placement refuses it: '),
        (f'{SMALL}&nonsense=1', 'nonsense'),
        (f'{SMALL}&limit=0', 'limit'),
        (f'{SMALL}&group_policy=all', 'group_policy'),
        ('nonsense=1', 'nonsense'),
        ('required=HW_CPU_X86_AVX2', 'it asks for no resources'),
        ('resources=', 'CLASS:AMOUNT'),
        ('resources=VCPU:1,MEMORY_MB:1', 'DISK_GB'),
        ('resources=DISK_GB:1', 'VCPU, MEMORY_MB'),
    ],
)
def test_wrong_queries(cluster: Control, query: str, says: str) -> None:
    provider = cluster.placement.make_provider(VCPU=4, DISK_GB=10, MEMORY_MB=512)
    # As good as alive: no query gets far enough to be carried out.
    cluster.etcd.put(f'/computes/{provider}', '{}', cluster.etcd.grant())
    refused = cluster.eschedule(query)
    one_line(refused, 2, says)
    assert refused.stdout == ''
    assert allocations(cluster) == {}
    assert set(everything(cluster)) == {f'/computes/{provider}'}


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        (['quota', 'set', 'p', 'VCPUS=5'], 'placement knows no resource class VCPUS (did you mean VCPU?)'),
        (['quota', 'set', 'p', 'INSTANCES=5'], 'no resource class INSTANCES (did you mean instances?)'),
        (['quota', 'set', 'p', 'MEMORY=5', 'VCPU=1'], 'no resource class MEMORY (did you mean MEMORY_MB?)'),
        (['quota', 'set', 'p', 'NOPE=5'], 'placement knows no resource class NOPE'),
        (['quota', 'set', 'p', 'vcpu=3'], 'is no limit'),
        (['quota', 'set', 'a\nb', 'VCPU=5'], 'is no project'),
        (['quota', 'set', 'x' * 256, 'VCPU=5'], 'is no project'),
        (['flavor', 'set', 'x', 'resources=NOPE:1'], 'flavor x: placement knows no resource class NOPE'),
        (['flavor', 'set', 'x', f'{SMALL}&required=NOPE'], 'flavor x: placement knows no trait NOPE'),
        (['flavor', 'set', 'x', f'{SMALL}&required=!HW_CPU_X86_VMXX'], '(did you mean HW_CPU_X86_VMX?)'),
    ],
)
def test_limits_and_flavors_that_would_mean_nothing(cluster: Control, words: list[str], says: str) -> None:
    one_line(cluster.eschedule(*words), 2, says)
    assert everything(cluster) == {}


def test_what_no_compute_has_yet_is_said(cluster: Control) -> None:
    for words in (['flavor', 'set', 'x', f'{SMALL}&required=CUSTOM_X'], ['quota', 'set', 'p', 'CUSTOM_X=1']):
        one_line(cluster.eschedule(*words), 0, 'placement knows no ', 'CUSTOM_X')
    one_line(cluster.eschedule('flavor', 'set', 'part', 'resources=VCPU:1'), 0, 'asks for no MEMORY_MB, DISK_GB')
    # The amounts do not matter here: without DISK_GB no guest can be built.
    lacking = "flavor part asks for no DISK_GB, which a guest needs: add 'resources=DISK_GB:…'"
    one_line(cluster.eschedule('--flavor', 'part', 'resources=MEMORY_MB:64'), 2, lacking)
    # A limit may be removed even if its name is unknown: it was set at some time.
    one_line(cluster.eschedule('quota', 'set', 'p', 'VCPUS=none'), 0, 'quota of project p')


def test_a_uuid_that_exists_nowhere(cluster: Control) -> None:
    for words in ([NOBODY], ['show', NOBODY], ['destroy', NOBODY], ['destroy', '--wait', NOBODY], [NOBODY.upper()]):
        refused = cluster.eschedule(*words)
        one_line(refused, 4, NOBODY, 'no such instance')
        assert refused.stdout == ''
    assert everything(cluster) == {}


@pytest.mark.usefixtures('compute')
def test_the_reader_has_gone(cluster: Control) -> None:
    instance = boot(cluster)
    config = str(cluster.schedule_yaml)
    for words in (['list'], ['list', '-f', 'json'], ['show', instance], [instance]):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            ended = run('ecomp.schedule', '--config', config, *words, directory=cluster.directory, stdout=writer)
        finally:
            os.close(writer)
        assert (ended.code, ended.stderr) == (1, ''), (words, ended)
        done = run('ecomp.schedule', '--config', config, *words, directory=cluster.directory, closed=True)
        assert (done.code, done.stderr) == (0, ''), (words, done)
    piped = f'{sys.executable} -m ecomp.schedule --config {config} list | head -1'
    done = subprocess.run(['sh', '-c', piped], capture_output=True, text=True, check=False, env=environment())
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith('INSTANCE')


@pytest.mark.parametrize('how', ['closed', 'full'])
def test_a_request_whose_answer_cannot_be_written(cluster: Control, compute: Ecompute, instance: str, how: str) -> None:
    words = ['--config', str(cluster.schedule_yaml), '--uuid', instance, SMALL]
    if how == 'closed':
        ended = run('ecomp.schedule', *words, directory=cluster.directory, closed=True)
    else:
        with open('/dev/full', 'w') as full:
            ended = run('ecomp.schedule', *words, directory=cluster.directory, stdout=full.fileno())
        one_line(ended, 1, instance, compute.uuid, 'was placed', 'No space left')
    # The instance is placed: a lost answer loses nothing.
    addressed(cluster, instance)


# Wrong configurations, and servers that do not answer: one clear line and the right exit code.


WRONG_YAML = """\
# line 1
resise: False
etcd:
  hots: localhost
  port: many
  password: secret
placement:
  endpoint: localhost:8080
uuid: 17
"""


@pytest.mark.parametrize(
    ('module', 'name', 'extra'),
    [('ecomp.compute', 'compute.yaml', {'resise': 2, 'uuid': 9}), ('ecomp.schedule', 'schedule.yaml', {'uuid': 9})],
)
def test_every_wrong_key_is_named_with_its_line(tmp_path: Path, module: str, name: str, extra: dict[str, int]) -> None:
    (tmp_path / name).write_text(WRONG_YAML)
    words = ['list'] if module == 'ecomp.schedule' else ['--fake', 'VCPU:1,DISK_GB:1,MEMORY_MB:1']
    command = 'eschedule' if module == 'ecomp.schedule' else 'ecompute'
    refused = run(module, *words, directory=tmp_path)
    assert refused.code == 2
    assert refused.stdout == ''
    # One message, with a line for each mistake.
    first, *rest = refused.stderr.splitlines()
    assert first.startswith(f'{command}: {name}:'), refused
    assert all(line.startswith(f'{name}:') for line in rest), refused
    lines = [first, *rest]
    expected_lines = {'hots': 4, 'port': 5, 'password': 6, 'endpoint': 8, **extra}
    for key, number in expected_lines.items():
        assert [line for line in lines if f'{name}:{number}: ' in line and key in line], (key, refused)
    assert 'secret' not in refused.stderr


@pytest.mark.parametrize(
    ('text', 'says'), [('etcd: [', 'not YAML'), ('- a\n- b\n', 'keys with values'), ('a: b: c\n', ':1:'), ('x', 'keys')]
)
def test_configuration_that_is_none(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / 'schedule.yaml').write_text(text)
    one_line(run('ecomp.schedule', 'list', directory=tmp_path), 2, 'schedule.yaml', says)


def test_grpc_options_are_ignored_with_one_line(cluster: Control) -> None:
    warning = (
        'etcd.grpc_options is ignored: etcd is asked without gRPC now. Fix: remove the key; version 2.0 refuses it'
    )
    compute = cluster.ecompute()
    for config in (cluster.schedule_yaml, compute.config):
        content = yaml.safe_load(config.read_text())
        content['etcd']['grpc_options'] = {'grpc.keepalive_time_ms': 1000}
        config.write_text(yaml.safe_dump(content))
    done = eschedule(cluster.schedule_yaml, 'list')
    assert (done.code, done.stderr) == (0, f'eschedule: {cluster.schedule_yaml}: {warning}\n')
    compute.restart()
    assert len(logged(compute, ' WARNING ', f'{compute.config}: {warning}')) == 1


def test_eschedule_without_etcd(cluster: Control) -> None:
    cluster.ecompute()
    nowhere = f'127.0.0.1:{free_port()}'
    config = write_config(cluster.directory / 'no-etcd.yaml', nowhere, cluster.placement.url)
    for words in ([SMALL], [SMALL, '--uuid', NOBODY], [NOBODY], ['list'], ['show', NOBODY], ['destroy', NOBODY]):
        refused = eschedule(config, *words, timeout=15)
        one_line(refused, 7, 'etcd', nowhere, 'cannot be reached', f'(told by {config})')
        assert refused.stdout == ''
    assert allocations(cluster) == {}


def test_who_was_told_by_no_file_says_so(tmp_path: Path) -> None:
    env = {**environment(), 'HOME': str(tmp_path)}
    for module, name in (('schedule', 'schedule.yaml'), ('compute', 'compute.yaml')):
        words = ['list'] if module == 'schedule' else ['--fake', 'VCPU:1']
        command = ['unshare', '-n', sys.executable, '-m', f'ecomp.{module}', *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        last_line = done.stderr.splitlines()[-1]
        assert (done.returncode, 'localhost:2379 cannot be reached' in last_line) == (7, True), done
        assert last_line.endswith(f' (a guess: no {name} was found, --config FILE names one)')


def test_eschedule_without_placement(cluster: Control, compute: Ecompute) -> None:
    nowhere = f'http://127.0.0.1:{free_port()}'
    config = write_config(cluster.directory / 'no-placement.yaml', cluster.etcd.endpoint, nowhere)
    for words in ([SMALL], [SMALL, '--uuid', NOBODY]):
        refused = eschedule(config, *words, timeout=15)
        one_line(refused, 7, 'placement', nowhere, 'cannot be reached')
        assert refused.stdout == ''
    assert set(everything(cluster)) - {'/cluster'} == {f'/computes/{compute.uuid}', f'/hostnames/{compute.uuid}'}
    # Commands that do not need placement do not contact it.
    assert eschedule(config, 'list').code == 0


def test_something_else_answers_in_placements_place(cluster: Control) -> None:
    cluster.ecompute()
    config = write_config(cluster.directory / 'odd.yaml', cluster.etcd.endpoint, f'http://{cluster.etcd.endpoint}')
    one_line(eschedule(config, SMALL), 7, cluster.etcd.endpoint, 'is `placement:` right?')
    assert cluster.etcd.keys('/requests/') == []


def test_frozen_servers_are_not_waited_for_for_ever(own_control: Control) -> None:
    own_control.ecompute()
    config = yaml.safe_load(own_control.schedule_yaml.read_text())
    config['etcd']['timeout'] = 1
    own_control.schedule_yaml.write_text(yaml.safe_dump(config))
    own_control.etcd.pause()
    one_line(own_control.eschedule(SMALL, timeout=15), 7, 'etcd', own_control.etcd.endpoint)
    own_control.etcd.resume()
    check(own_control)


# A refused start of an ecompute leaves the state directory unchanged: the next start is the same compute.


OTHER = '0b5e55ed-0000-4000-8000-000000000000'
INVENTORY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


def everything_in(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content of a directory and of each path below it."""
    paths = [directory, *sorted(directory.rglob('*'))]
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b'') for path in paths}


def start(compute: Ecompute, **settings: object) -> Result:
    """Start an ecompute with changed settings on the state directory of `compute`."""
    old_settings = yaml.safe_load(compute.config.read_text())
    inventory = str(settings.pop('fake', INVENTORY))
    merged = {key: value for key, value in {**old_settings, **settings}.items() if value is not None}
    config = compute.directory / 'refused.yaml'
    config.write_text(yaml.safe_dump(merged))
    words = ('--config', str(config), '--fake', inventory)
    return run('ecomp.compute', *words, directory=compute.directory)


@pytest.fixture
def stopped(cluster: Control) -> Ecompute:
    """Provide a stopped ecompute with an instance and a half-written file in its state."""
    compute = cluster.ecompute(traits=['CUSTOM_OURS'])
    addressed(cluster, place(cluster)[1])
    compute.stop()
    (compute.directory / 'state/.etcd.json.part').write_text('half')
    return compute


REFUSALS: Mapping[str, tuple[dict[str, object], int, str]] = {
    'a typo in uuid:': ({'uuid': OTHER}, 5, 'put `uuid: '),
    'a trait that placement does not know': ({'traits': ['HW_CPU_NO_SUCH']}, 2, 'HW_CPU_NO_SUCH'),
    'a ratio of what there is not': ({'allocation_ratios': {'SRIOV_NET_VF': 2.0}}, 2, 'SRIOV_NET_VF'),
    'a class that placement does not know': ({'fake': 'VCPU:4,MEMORY:512,DISK_GB:10'}, 2, 'resource class MEMORY (did'),
    'KVM for what is pretended': ({'virt_type': 'kvm'}, 2, 'only pretended'),
    'both': ({'uuid': OTHER, 'virt_type': 'kvm'}, 2, 'only pretended'),
}


@pytest.mark.parametrize('what', REFUSALS)
def test_nothing_of_it_is_changed(stopped: Ecompute, what: str) -> None:
    settings, code, says = REFUSALS[what]
    before = everything_in(stopped.directory / 'state')
    refused = start(stopped, **settings)
    assert (refused.code, says in refused.stderr.splitlines()[-1]) == (code, True), refused
    assert everything_in(stopped.directory / 'state') == before
    # Without `uuid:` in its configuration the compute is the same as before.
    stopped.start()
    assert f'compute {stopped.uuid}, ' in stopped.last_words()


def test_nor_where_the_other_one_is_alive_by_a_key_on_no_lease(stopped: Ecompute, cluster: Control) -> None:
    cluster.etcd.put(keys.compute(stopped.uuid), '{}')
    try:
        refused = start(stopped, uuid=OTHER)
    finally:
        cluster.etcd.delete(keys.compute(stopped.uuid))
    assert (refused.code, f'put `uuid: {stopped.uuid}`' in refused.stderr) == (5, True), refused


@pytest.mark.parametrize('backend', ['etcd', 'placement'])
def test_nor_where_nobody_answers(stopped: Ecompute, backend: str) -> None:
    nowhere = f'127.0.0.1:{free_port()}'
    section = {'endpoints': [nowhere]} if backend == 'etcd' else {'endpoint': f'http://{nowhere}'}
    before = everything_in(stopped.directory / 'state')
    refused = start(stopped, uuid=OTHER, **{backend: section})
    assert (refused.code, f'{backend} at' in refused.stderr) == (7 if backend == 'etcd' else 5, backend == 'etcd')
    assert everything_in(stopped.directory / 'state') == before
    refused = start(stopped, **{backend: section})
    assert (refused.code, f'{backend} at' in refused.stderr) == (7, True)
    assert everything_in(stopped.directory / 'state') == before


def test_nor_where_another_ecompute_is_this_one(stopped: Ecompute, cluster: Control) -> None:
    stopped.start()
    second = write_config(
        cluster.directory / 'second.yaml', cluster.etcd.endpoint, cluster.placement.url,
        state=str(cluster.directory / 'second'), uuid=stopped.uuid,
    )  # fmt: skip
    second_state = cluster.directory / 'second'
    second_state.mkdir()
    for name in ('uuid', 'token'):
        (second_state / name).write_text(f'{uuid.uuid4()}\n')
    (second_state / 'lock').touch(0o600)
    before = everything_in(second_state)
    refused = run('ecomp.compute', '--config', str(second), '--fake', INVENTORY, directory=cluster.directory)
    assert (refused.code, 'is held by another ecompute' in refused.stderr) == (5, True), refused
    assert everything_in(second_state) == before


def test_nor_where_another_ecompute_has_it(stopped: Ecompute) -> None:
    stopped.start()
    files = ('lock', 'uuid', 'token', 'fake.json', 'provider.json')
    before = {name: (stopped.directory / 'state' / name).read_bytes() for name in files}
    refused = start(stopped, uuid=OTHER)
    one_line(refused, 5, f'is used by the ecompute with pid {stopped.pid}', command='ecompute')
    assert {name: (stopped.directory / 'state' / name).read_bytes() for name in files} == before


def test_nor_where_what_it_remembers_cannot_be_understood(stopped: Ecompute) -> None:
    for name, content in (('provider.json', '{"version": 99}'), ('etcd.json', 'x'), ('token', 'none\n')):
        path = stopped.directory / 'state' / name
        original = path.read_bytes()
        path.write_text(content)
        before = everything_in(stopped.directory / 'state')
        refused = start(stopped)
        assert (refused.code, str(path) in refused.stderr) == (2, True), refused
        assert everything_in(stopped.directory / 'state') == before
        path.write_bytes(original)
