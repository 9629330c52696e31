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
from tests.kit.commands import Control, Ecompute, Result, run_eschedule_process, run_module, write_config
from tests.kit.invariants import check_invariants, read_allocations, read_lasting_keys
from tests.kit.servers import free_port, make_environment
from tests.kit.story import SMALL_QUERY, UNKNOWN_UUID, assert_one_line, boot, find_log_lines, place, wait_address

# Wrong arguments and closed pipes: one clear line, the right exit code, and nothing is left behind.


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        ([UNKNOWN_UUID, UNKNOWN_UUID], 'not a command'),
        (['create'], 'create: missing argument: a quoted placement query, or --flavor'),
        (['evnets', UNKNOWN_UUID], "'evnets' is not a command: did you mean eschedule events?"),
        (['no_name'], 'neither a command nor an instance'),
        (['Web1'], 'neither a command nor an instance'),
        ([UNKNOWN_UUID + '0'], 'neither a command nor an instance'),
        (['delete', 'web1'], "'delete' is not a command: did you mean eschedule destroy, which deletes the disk?"),
        (['images', 'x'], "'images' is not a command: did you mean eschedule image list?"),
        (['image'], "'image' is not a complete command: the subcommand is list. Try: eschedule help image"),
        (['run', SMALL_QUERY], "'run' is not a command"),
        (['create', 'web1'], "create: 'web1' is not a placement query. Try: 'resources=VCPU:1,"),
        (['host', 'lsit'], "'host lsit' is not a command (did you mean eschedule host list?)"),
        (['events', '-n', '-1'], '-n: must be 0 to 1000000'),
        (['hosts', '-n', '3'], '--lines is not accepted by this command'),
        (['wait', 'web1', '--for', 'readdy'], "--for: 'readdy' is not a valid stage (did you mean ready?). Fix"),
        ([SMALL_QUERY, '--wait', '5'], "the image '5' is neither a URL nor a name in `images:`"),
        ([SMALL_QUERY, '/etc/passwd'], 'the image /etc/passwd must be a URL'),
        ([SMALL_QUERY, 'http://a b/c'], 'is not a URL'),
        ([SMALL_QUERY, 'http://images.invalid/a#sha256=zz'], 'has a #fragment'),
        ([SMALL_QUERY, '--user-data', '/nowhere'], 'user-data /nowhere: cannot be read'),
        ([SMALL_QUERY, '--ssh-key', '/nowhere'], 'ssh keys /nowhere: cannot be read'),
        ([SMALL_QUERY, '--on', ''], 'missing argument: a host'),
        ([f'{SMALL_QUERY},'], "'' is not CLASS:AMOUNT"),
        (['resources=VCPU=1'], "'VCPU=1' is not CLASS:AMOUNT"),
        (['resources=vcpu:1'], 'did you mean VCPU?'),
        (['VCPU=1'], "placement has no parameter 'VCPU'"),
        (['VCPU:1'], "'VCPU:1' is neither a command nor an instance"),
        (['Lst'], "'Lst' is neither a command nor an instance: did you mean eschedule list?"),
        (
            ['show', 'abc-'],
            "'abc-' is not a valid instance. Fix: give a name, a uuid, or at least the first 4 digits of a uuid",
        ),
        (['quota'], "'quota' is not a complete command: the subcommands of quota are list, show and set"),
        (
            ['flavor', 'lsit'],
            "'flavor lsit' is not a command (did you mean eschedule flavor list?): the subcommands of flavor are li",
        ),
        (['help', 'delete'], 'did you mean eschedule destroy, which deletes the disk?'),
        (['completion'], 'needs exactly one shell'),
        (['completion', 'ksh'], 'needs exactly one shell. Fix: give one of bash, zsh, fish'),
        (['host', 'show'], 'missing argument: one or more hosts'),
        (['flavor', 'show'], 'missing argument: one or more flavors, by name'),
        (['quota', 'show'], 'missing argument: one or more projects, by name'),
        (['quota', 'set', 'web'], 'missing argument: a project and its limits'),
        (['quota', 'set', 'VCPU=1', 'web'], 'missing argument: a project and its limits'),
        (['quota', 'set', 'p', 'VCPU=1', 'VCPU=2'], 'VCPU is given more than once'),
        (['flavor', 'set', 'x', 'resources=VCPU:99999999999999999999'], 'is not a whole number from 1 to 2147483647'),
        (['destroy'], 'missing argument: one or more instances'),
        (['destroy', 'no_name'], 'no_name'),
        (['destroy', UNKNOWN_UUID, 'no_name'], 'no_name'),
        (['destroy', 'list'], "'list' is not a valid instance"),
        (['show'], 'missing argument: one or more instances'),
        (['list', 'all'], 'all'),
        (['--all'], 'missing argument: a placement query, an instance or a command'),
        (['hosts', 'hv1'], 'hv1'),
        (['--all', 'hosts'], '--all'),
        (['host'], 'the subcommands of host are list, show,'),
        (['host', 'remember', UNKNOWN_UUID], 'not a command: the subcommands of host are '),
        (['host', 'forget'], 'missing argument: one or more hosts'),
        (['evacuate', UNKNOWN_UUID, UNKNOWN_UUID, '--fenced'], 'needs exactly one host'),
        (['evacuate', UNKNOWN_UUID], 'give --fenced'),
        (['-f', 'csv', 'host', 'forget', UNKNOWN_UUID], '-f csv needs columns'),
        (['--wait', 'list'], '--wait'),
        (['--timeout', '5', SMALL_QUERY], '--wait'),
        (['--wait', '--timeout', '-1', SMALL_QUERY], '--timeout'),
        (['--wait', '--timeout', 'nan', SMALL_QUERY], '--timeout'),
        (['--wait=nonsense', SMALL_QUERY], 'nonsense'),
        (['destroy', '--wait=started', UNKNOWN_UUID], '--wait'),
        (['--uuid', UNKNOWN_UUID, 'list'], '--uuid'),
        (['--uuid', 'short', SMALL_QUERY], 'short'),
        (['-f', 'value', 'stop', UNKNOWN_UUID], '-f value needs columns'),
        (['-f', 'json', '-c', 'name', 'list'], '-c is not accepted with -f json'),
        (['-f', 'yaml', '--wide', 'hosts'], '--wide is not accepted with -f yaml'),
        (['-f', 'json', 'list', '--no-header'], '--no-header is not accepted with -f json'),
        (['list', '-c', 'name,'], '-c: needs the name of a column'),
        (['list', '--sort', ''], '--sort: needs the name of a column'),
        (['stop', UNKNOWN_UUID, '--sort', 'name'], '--sort is not accepted by this command'),
        (['-f', 'csv', '--wait', SMALL_QUERY], '-f csv needs columns'),
        (['--count', '0', SMALL_QUERY], '1 to 100'),
        (['--count', '61', '--name', 'web', SMALL_QUERY], 'must be 1 to 60 with --name'),
        (['--count', '2', '--name', 'w' * 62, SMALL_QUERY], '1 to 63 letters'),
        (['--count', '3', '--min', '4', SMALL_QUERY], '--min: must be 1 to 3'),
        (['--count', '2', '--min', '3', SMALL_QUERY], '--min: must be 1 to 2'),
        (['--min', '2', SMALL_QUERY], '--min needs --count'),
        (['--count', '101', SMALL_QUERY], '1 to 100'),
        (['--project', 'x' * 300, SMALL_QUERY], 'is not a valid project'),
        (['audit', 'x'], "audit: unexpected argument 'x'"),
        (['audit', '--all'], '--all is not accepted by this command'),
        (['list', '--fix'], '--fix is not accepted by this command'),
        (['--count', '2', 'list'], '--count is not accepted by this command'),
        (['--all', 'show', UNKNOWN_UUID], '--all'),
        (['--config', '/nowhere/schedule.yaml', 'list'], '/nowhere/schedule.yaml'),
        ([SMALL_QUERY, 'http://images.invalid/a', 'http://images.invalid/b'], 'http://images.invalid/b'),
        ([SMALL_QUERY, 'ftp://images.invalid/a.img'], 'ftp://images.invalid/a.img'),
        ([SMALL_QUERY, 'images.invalid/a.img'], 'images.invalid/a.img'),
        ([SMALL_QUERY, 'http://'], 'must name a host'),
        ([SMALL_QUERY, ''], 'image'),
        ([''], 'neither a command nor an instance'),
        (['--name', '', SMALL_QUERY], '--name'),
        (['--name', 'Web1', SMALL_QUERY], 'use lower case'),
        (['--name', 'web.1', SMALL_QUERY], '1 to 63 letters'),
        (['--name', 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a', SMALL_QUERY], 'looks like a uuid'),
        (['--name', 'list', SMALL_QUERY], 'is reserved for a command'),
        (['--name', 'web1', 'hosts'], '--name is not accepted by this command'),
        (['list', '--state', 'well'], "--state: 'well' is not a valid state. Fix: give one of active, building"),
        (['list', '--watch', '-f', 'json'], '-f json is not accepted with --watch, which draws a table'),
        (['show', UNKNOWN_UUID, '--watch'], '--watch is not accepted by this command'),
        (['list', '--group', 'a/b'], '--group'),
        (['--ssh-key', 'x.pub', 'list'], '--ssh-key is not accepted by this command'),
        (['--ssh-key', '/nowhere/x.pub', SMALL_QUERY], 'ssh keys /nowhere/x.pub: cannot be read: No such file'),
        (['--ssh-key', '', SMALL_QUERY], 'cannot be read'),
        (['--ssh-key', '/', SMALL_QUERY], 'cannot be read: Is a directory'),
        (['--user-data', '/nowhere/x', SMALL_QUERY], 'user-data /nowhere/x: cannot be read: No such file'),
        (['--user-data', '', SMALL_QUERY], 'cannot be read'),
        (['--user-data', '/dev/null', SMALL_QUERY], 'user-data /dev/null: is empty'),
        (['--user-data', '/dev/zero', SMALL_QUERY], 'has more than 262144 bytes; the limit is 262144 (256 KiB)'),
        (['--ssh-key', '/dev/zero', SMALL_QUERY], 'the limit is 32768 (32 KiB)'),
        (['--user-data', '/nowhere/x', '-f', 'json', 'list'], '--user-data is not accepted by this command'),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(tmp_path: Path, words: list[str], says: str) -> None:
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
    assert assert_one_line(Result(code, out.getvalue(), err.getvalue()), 2, says)
    assert out.getvalue() == ''


def test_eschedule_without_arguments_prints_the_help(tmp_path: Path) -> None:
    bare_result = run_module('ecomp.schedule', directory=tmp_path)
    assert bare_result.code == 2
    assert bare_result.stderr == ''
    for form in ('destroy', 'list', 'show', '--uuid', '--wait', '--timeout', 'exit codes'):
        assert form in bare_result.stdout
    help_result = run_module('ecomp.schedule', '--help', directory=tmp_path)
    assert (help_result.code, help_result.stdout) == (0, bare_result.stdout)
    for module, name in (('ecomp.schedule', 'eschedule'), ('ecomp.compute', 'ecompute')):
        version = run_module(module, '--version', directory=tmp_path)
        assert version.code == 0
        assert version.stdout.startswith(f'{name} ')


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        (['--fake'], '--fake'),
        (['--fake', 'VCPU'], 'VCPU'),
        (['--fake', 'VCPU:0'], 'VCPU:0'),
        (['--fake', 'VCPU:-4'], 'VCPU:-4'),
        (['--fake', 'VCPU:4,VCPU:5'], 'is given more than once'),
        (['--fake', 'vcpu:4'], 'vcpu'),
        (['--fake', ''], 'CLASS:TOTAL'),
        (['--frobnicate'], '--frobnicate'),
        (['compute.yaml'], 'compute.yaml'),
        (['--config', '/nowhere/compute.yaml'], '/nowhere/compute.yaml'),
    ],
)
def test_wrong_ecompute_arguments_are_refused_in_one_line(tmp_path: Path, words: list[str], says: str) -> None:
    assert_one_line(run_module('ecomp.compute', *words, directory=tmp_path), 2, says, command='ecompute')


@pytest.mark.unaudited('its compute is a key that nobody keeps')
@pytest.mark.parametrize(
    ('query', 'says'),
    [
        ('resources=VCPU:1,DISK_GB', "'DISK_GB' is not CLASS:AMOUNT"),
        ('resources=VCPU:0,DISK_GB:1,MEMORY_MB:1', 'VCPU: 0 is not from 1 to 2147483647'),
        ('resources=VCPU:-1,DISK_GB:1,MEMORY_MB:1', "VCPU: '-1' is not a whole number from 1"),
        ('resources=VCPU:1.5,DISK_GB:1,MEMORY_MB:1', "VCPU: '1.5' is not a whole number"),
        ('resources=VCPU:99999999999999999999,DISK_GB:1,MEMORY_MB:1', 'VCPU: 99999999999999999999 is not from 1'),
        ('resources=VCPU:1,VCPU:2,DISK_GB:1,MEMORY_MB:1', 'VCPU is given more than once'),
        ('resources=VCPU:1&resources=DISK_GB:1,MEMORY_MB:1', 'resources= is given more than once'),
        ('resources=VCPU:1, DISK_GB:1, MEMORY_MB:1', 'resources= contains a blank'),
        ('resources=vcpu:1,DISK_GB:1,MEMORY_MB:1', "'vcpu' is not a valid resource class (did you mean VCPU?)"),
        ('resource=VCPU:1,DISK_GB:1,MEMORY_MB:1', "placement has no parameter 'resource' (did you mean resources?)"),
        ('resources=VCPU:1,DISK_GB:1,MEMORY_MB:1,GOLD:1', 'placement knows no resource class GOLD'),
        ('resources=VCPUS:1,DISK_GB:1,MEMORY_MB:1', 'no resource class VCPUS (did you mean VCPU?)'),
        (f'{SMALL_QUERY}&required=NO_SUCH_TRAIT', 'placement knows no trait NO_SUCH_TRAIT'),
        (f'{SMALL_QUERY}&required=!HW_CPU_X86_AVX22', 'no trait HW_CPU_X86_AVX22 (did you mean HW_CPU_X86_AVX2?)'),
        (f'{SMALL_QUERY}&in_tree=nonsense', 'placement refuses the request: '),
        (f'{SMALL_QUERY}&nonsense=1', 'nonsense'),
        (f'{SMALL_QUERY}&limit=0', 'limit'),
        (f'{SMALL_QUERY}&group_policy=all', 'group_policy'),
        ('nonsense=1', 'nonsense'),
        ('required=HW_CPU_X86_AVX2', 'resources= is missing'),
        ('resources=', 'CLASS:AMOUNT'),
        ('resources=VCPU:1,MEMORY_MB:1', 'DISK_GB'),
        ('resources=DISK_GB:1', 'VCPU, MEMORY_MB'),
    ],
)
def test_wrong_queries_are_refused_and_claim_nothing(cluster: Control, query: str, says: str) -> None:
    provider = cluster.placement.make_provider(VCPU=4, DISK_GB=10, MEMORY_MB=512)
    # As good as alive: no query gets far enough to be carried out.
    cluster.etcd.put(f'/computes/{provider}', '{}', cluster.etcd.grant())
    refused = cluster.eschedule(query)
    assert_one_line(refused, 2, says)
    assert refused.stdout == ''
    assert read_allocations(cluster) == {}
    assert set(read_lasting_keys(cluster)) == {f'/computes/{provider}'}


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        (['quota', 'set', 'p', 'VCPUS=5'], 'placement knows no resource class VCPUS (did you mean VCPU?)'),
        (['quota', 'set', 'p', 'INSTANCES=5'], 'no resource class INSTANCES (did you mean instances?)'),
        (['quota', 'set', 'p', 'MEMORY=5', 'VCPU=1'], 'no resource class MEMORY (did you mean MEMORY_MB?)'),
        (['quota', 'set', 'p', 'NOPE=5'], 'placement knows no resource class NOPE'),
        (['quota', 'set', 'p', 'vcpu=3'], 'is not a valid limit'),
        (['quota', 'set', 'a\nb', 'VCPU=5'], 'is not a valid project'),
        (['quota', 'set', 'x' * 256, 'VCPU=5'], 'is not a valid project'),
        (['flavor', 'set', 'x', 'resources=NOPE:1'], 'flavor x: placement knows no resource class NOPE'),
        (['flavor', 'set', 'x', f'{SMALL_QUERY}&required=NOPE'], 'flavor x: placement knows no trait NOPE'),
        (['flavor', 'set', 'x', f'{SMALL_QUERY}&required=!HW_CPU_X86_VMXX'], '(did you mean HW_CPU_X86_VMX?)'),
    ],
)
def test_quota_and_flavor_with_wrong_names_are_refused(cluster: Control, words: list[str], says: str) -> None:
    assert_one_line(cluster.eschedule(*words), 2, says)
    assert read_lasting_keys(cluster) == {}


def test_quota_and_flavor_warn_of_unknown_custom_names(cluster: Control) -> None:
    for words in (['flavor', 'set', 'x', f'{SMALL_QUERY}&required=CUSTOM_X'], ['quota', 'set', 'p', 'CUSTOM_X=1']):
        assert_one_line(cluster.eschedule(*words), 0, 'placement knows no ', 'CUSTOM_X')
    assert_one_line(
        cluster.eschedule('flavor', 'set', 'part', 'resources=VCPU:1'),
        0,
        'lacks MEMORY_MB, DISK_GB, which each request has to add',
    )
    # The amounts do not matter here: without DISK_GB no guest can be built.
    lacking = "flavor part lacks DISK_GB, which every guest needs. Fix: give a query with 'resources=DISK_GB:…'"
    assert_one_line(cluster.eschedule('--flavor', 'part', 'resources=MEMORY_MB:64'), 2, lacking)
    # A limit may be removed even if its name is unknown: it was set at some time.
    assert_one_line(cluster.eschedule('quota', 'set', 'p', 'VCPUS=none'), 0, 'quota of project p')


def test_unknown_uuid_is_no_such_instance(cluster: Control) -> None:
    for words in (
        [UNKNOWN_UUID],
        ['show', UNKNOWN_UUID],
        ['destroy', UNKNOWN_UUID],
        ['destroy', '--wait', UNKNOWN_UUID],
        [UNKNOWN_UUID.upper()],
    ):
        refused = cluster.eschedule(*words)
        assert_one_line(refused, 4, UNKNOWN_UUID, 'no such instance')
        assert refused.stdout == ''
    assert read_lasting_keys(cluster) == {}


@pytest.mark.usefixtures('compute')
def test_closed_stdout_prints_no_error(cluster: Control) -> None:
    instance = boot(cluster)
    config = str(cluster.schedule_yaml)
    for words in (['list'], ['list', '-f', 'json'], ['show', instance], [instance]):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            ended = run_module('ecomp.schedule', '--config', config, *words, directory=cluster.directory, stdout=writer)
        finally:
            os.close(writer)
        assert (ended.code, ended.stderr) == (1, ''), (words, ended)
        done = run_module(
            'ecomp.schedule', '--config', config, *words, directory=cluster.directory, without_stdout=True
        )
        assert (done.code, done.stderr) == (0, ''), (words, done)
    piped = f'{sys.executable} -m ecomp.schedule --config {config} list | head -1'
    done = subprocess.run(['sh', '-c', piped], capture_output=True, text=True, check=False, env=make_environment())
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith('INSTANCE')


@pytest.mark.parametrize('how', ['closed', 'full'])
def test_request_is_placed_though_its_answer_cannot_be_written(
    cluster: Control, compute: Ecompute, instance: str, how: str
) -> None:
    words = ['--config', str(cluster.schedule_yaml), '--uuid', instance, SMALL_QUERY]
    if how == 'closed':
        ended = run_module('ecomp.schedule', *words, directory=cluster.directory, without_stdout=True)
    else:
        with open('/dev/full', 'w') as full:
            ended = run_module('ecomp.schedule', *words, directory=cluster.directory, stdout=full.fileno())
        assert_one_line(ended, 1, instance, compute.uuid, 'was placed', 'No space left')
    # The instance is placed: a lost answer loses nothing.
    wait_address(cluster, instance)


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
    refused = run_module(module, *words, directory=tmp_path)
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
    ('text', 'says'),
    [('etcd: [', 'not YAML'), ('- a\n- b\n', 'a mapping of keys to values'), ('a: b: c\n', ':1:'), ('x', 'keys')],
)
def test_malformed_configuration_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / 'schedule.yaml').write_text(text)
    assert_one_line(run_module('ecomp.schedule', 'list', directory=tmp_path), 2, 'schedule.yaml', says)


def test_grpc_options_are_ignored_with_one_line(cluster: Control) -> None:
    warning = 'etcd.grpc_options is ignored: ecomp uses no gRPC library. Fix: remove the key; ecomp 2.0 refuses it'
    compute = cluster.ecompute()
    for config in (cluster.schedule_yaml, compute.config):
        content = yaml.safe_load(config.read_text())
        content['etcd']['grpc_options'] = {'grpc.keepalive_time_ms': 1000}
        config.write_text(yaml.safe_dump(content))
    done = run_eschedule_process(cluster.schedule_yaml, 'list')
    assert (done.code, done.stderr) == (0, f'eschedule: {cluster.schedule_yaml}: {warning}\n')
    compute.restart()
    assert len(find_log_lines(compute, ' WARNING ', f'{compute.config}: {warning}')) == 1


def test_eschedule_without_etcd(cluster: Control) -> None:
    cluster.ecompute()
    nowhere = f'127.0.0.1:{free_port()}'
    config = write_config(cluster.directory / 'no-etcd.yaml', nowhere, cluster.placement.url)
    for words in (
        [SMALL_QUERY],
        [SMALL_QUERY, '--uuid', UNKNOWN_UUID],
        [UNKNOWN_UUID],
        ['list'],
        ['show', UNKNOWN_UUID],
        ['destroy', UNKNOWN_UUID],
    ):
        refused = run_eschedule_process(config, *words, timeout=15)
        assert_one_line(refused, 7, 'etcd', nowhere, 'cannot be reached', f'(as configured in {config})')
        assert refused.stdout == ''
    assert read_allocations(cluster) == {}


def test_unreachable_default_server_is_reported_as_a_guess(tmp_path: Path) -> None:
    env = {**make_environment(), 'HOME': str(tmp_path)}
    for module, name in (('schedule', 'schedule.yaml'), ('compute', 'compute.yaml')):
        words = ['list'] if module == 'schedule' else ['--fake', 'VCPU:1']
        command = ['unshare', '-n', sys.executable, '-m', f'ecomp.{module}', *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        last_line = done.stderr.splitlines()[-1]
        assert (done.returncode, 'localhost:2379 cannot be reached' in last_line) == (7, True), done
        advice = '. Try: eschedule doctor'
        if module == 'compute':
            advice = '; no guest is started before it answers. Try: ecompute --check'
        assert last_line.endswith(f' (default, because no {name} was found; use --config FILE){advice}')


def test_eschedule_without_placement(cluster: Control, compute: Ecompute) -> None:
    nowhere = f'http://127.0.0.1:{free_port()}'
    config = write_config(cluster.directory / 'no-placement.yaml', cluster.etcd.endpoint, nowhere)
    for words in ([SMALL_QUERY], [SMALL_QUERY, '--uuid', UNKNOWN_UUID]):
        refused = run_eschedule_process(config, *words, timeout=15)
        assert_one_line(refused, 7, 'placement', nowhere, 'cannot be reached')
        assert refused.stdout == ''
    assert set(read_lasting_keys(cluster)) - {'/cluster'} == {f'/computes/{compute.uuid}', f'/hostnames/{compute.uuid}'}
    # Commands that do not need placement do not contact it.
    assert run_eschedule_process(config, 'list').code == 0


def test_other_server_at_the_url_of_placement_is_reported(cluster: Control) -> None:
    cluster.ecompute()
    config = write_config(cluster.directory / 'odd.yaml', cluster.etcd.endpoint, f'http://{cluster.etcd.endpoint}')
    assert_one_line(run_eschedule_process(config, SMALL_QUERY), 7, cluster.etcd.endpoint, '(`placement:` may be wrong)')
    assert cluster.etcd.list_keys('/requests/') == []


def test_frozen_etcd_times_out(own_control: Control) -> None:
    own_control.ecompute()
    config = yaml.safe_load(own_control.schedule_yaml.read_text())
    config['etcd']['timeout'] = 1
    own_control.schedule_yaml.write_text(yaml.safe_dump(config))
    own_control.etcd.pause()
    assert_one_line(own_control.eschedule(SMALL_QUERY, timeout=15), 7, 'etcd', own_control.etcd.endpoint)
    own_control.etcd.resume()
    check_invariants(own_control)


# A refused start of an ecompute leaves the state directory unchanged: the next start is the same compute.


OTHER_UUID = '0b5e55ed-0000-4000-8000-000000000000'
INVENTORY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


def read_tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content of a directory and of each path below it."""
    paths = [directory, *sorted(directory.rglob('*'))]
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b'') for path in paths}


def try_start(compute: Ecompute, **settings: object) -> Result:
    """Start an ecompute with changed settings on the state directory of `compute`."""
    old_settings = yaml.safe_load(compute.config.read_text())
    inventory = str(settings.pop('fake', INVENTORY))
    merged = {key: value for key, value in {**old_settings, **settings}.items() if value is not None}
    config = compute.directory / 'refused.yaml'
    config.write_text(yaml.safe_dump(merged))
    words = ('--config', str(config), '--fake', inventory)
    return run_module('ecomp.compute', *words, directory=compute.directory)


@pytest.fixture
def stopped_compute(cluster: Control) -> Ecompute:
    """Provide a stopped ecompute with an instance and a half-written file in its state."""
    compute = cluster.ecompute(traits=['CUSTOM_OURS'])
    wait_address(cluster, place(cluster)[1])
    compute.stop()
    (compute.directory / 'state/.etcd.json.part').write_text('half')
    return compute


REFUSALS: Mapping[str, tuple[dict[str, object], int, str]] = {
    'a typo in uuid:': ({'uuid': OTHER_UUID}, 5, 'set `uuid: '),
    'a trait that placement does not know': ({'traits': ['HW_CPU_NO_SUCH']}, 2, 'HW_CPU_NO_SUCH'),
    'a ratio of what there is not': ({'allocation_ratios': {'SRIOV_NET_VF': 2.0}}, 2, 'SRIOV_NET_VF'),
    'a class that placement does not know': ({'fake': 'VCPU:4,MEMORY:512,DISK_GB:10'}, 2, 'resource class MEMORY (did'),
    'KVM for what is pretended': ({'virt_type': 'kvm'}, 2, 'the guests are fake'),
    'both': ({'uuid': OTHER_UUID, 'virt_type': 'kvm'}, 2, 'the guests are fake'),
}


@pytest.mark.parametrize('what', REFUSALS)
def test_refused_start_leaves_the_state_directory_unchanged(stopped_compute: Ecompute, what: str) -> None:
    settings, code, says = REFUSALS[what]
    before = read_tree(stopped_compute.directory / 'state')
    refused = try_start(stopped_compute, **settings)
    assert (refused.code, says in refused.stderr.splitlines()[-1]) == (code, True), refused
    assert read_tree(stopped_compute.directory / 'state') == before
    # Without `uuid:` in its configuration the compute is the same as before.
    stopped_compute.start()
    assert f'compute {stopped_compute.uuid}, ' in stopped_compute.tail_log()


def test_start_with_another_uuid_is_refused_despite_an_unleased_presence(
    stopped_compute: Ecompute, cluster: Control
) -> None:
    cluster.etcd.put(keys.compute(stopped_compute.uuid), '{}')
    try:
        refused = try_start(stopped_compute, uuid=OTHER_UUID)
    finally:
        cluster.etcd.delete(keys.compute(stopped_compute.uuid))
    assert (refused.code, f'set `uuid: {stopped_compute.uuid}`' in refused.stderr) == (5, True), refused


@pytest.mark.parametrize('backend', ['etcd', 'placement'])
def test_start_without_a_backend_leaves_the_state_unchanged(stopped_compute: Ecompute, backend: str) -> None:
    nowhere = f'127.0.0.1:{free_port()}'
    section = {'endpoints': [nowhere]} if backend == 'etcd' else {'endpoint': f'http://{nowhere}'}
    before = read_tree(stopped_compute.directory / 'state')
    refused = try_start(stopped_compute, uuid=OTHER_UUID, **{backend: section})
    assert (refused.code, f'{backend} at' in refused.stderr) == (7 if backend == 'etcd' else 5, backend == 'etcd')
    assert read_tree(stopped_compute.directory / 'state') == before
    refused = try_start(stopped_compute, **{backend: section})
    assert (refused.code, f'{backend} at' in refused.stderr) == (7, True)
    assert read_tree(stopped_compute.directory / 'state') == before


def test_start_with_the_uuid_of_a_running_compute_changes_nothing(stopped_compute: Ecompute, cluster: Control) -> None:
    stopped_compute.start()
    second = write_config(
        cluster.directory / 'second.yaml', cluster.etcd.endpoint, cluster.placement.url,
        state=str(cluster.directory / 'second'), uuid=stopped_compute.uuid,
    )  # fmt: skip
    second_state = cluster.directory / 'second'
    second_state.mkdir()
    for name in ('uuid', 'token'):
        (second_state / name).write_text(f'{uuid.uuid4()}\n')
    (second_state / 'lock').touch(0o600)
    before = read_tree(second_state)
    refused = run_module('ecomp.compute', '--config', str(second), '--fake', INVENTORY, directory=cluster.directory)
    assert (refused.code, 'is held by another ecompute' in refused.stderr) == (5, True), refused
    assert read_tree(second_state) == before


def test_start_in_the_state_directory_of_a_running_ecompute_is_refused(stopped_compute: Ecompute) -> None:
    stopped_compute.start()
    files = ('lock', 'uuid', 'token', 'fake.json', 'provider.json')
    before = {name: (stopped_compute.directory / 'state' / name).read_bytes() for name in files}
    refused = try_start(stopped_compute, uuid=OTHER_UUID)
    assert_one_line(refused, 5, f'is used by the ecompute with pid {stopped_compute.pid}', command='ecompute')
    assert {name: (stopped_compute.directory / 'state' / name).read_bytes() for name in files} == before


def test_start_with_a_malformed_state_file_changes_nothing(stopped_compute: Ecompute) -> None:
    for name, content in (('provider.json', '{"version": 99}'), ('etcd.json', 'x'), ('token', 'none\n')):
        path = stopped_compute.directory / 'state' / name
        original = path.read_bytes()
        path.write_text(content)
        before = read_tree(stopped_compute.directory / 'state')
        refused = try_start(stopped_compute)
        assert (refused.code, str(path) in refused.stderr) == (2, True), refused
        assert read_tree(stopped_compute.directory / 'state') == before
        path.write_bytes(original)
