"""What readers of short texts make of them, compared with the files in texts/.

A line of a file is the argument of a reader as JSON (or its arguments, a list), and after `=` what it returns (nothing
if that is its argument) or after `!` why it refuses it. To add a case, add a line with the argument alone, run
`ECOMP_GOLDEN=write pytest tests/golden`, and read the difference.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mdserver import conf as mdserver_conf
from mdserver import guests, metadata

from docs import dashboard
from ecomp import log, systemd
from ecomp.cli import stack_file
from ecomp.cli.command import Context, Invocation
from ecomp.cli.commands import parse
from ecomp.cli.input import read_user_data
from ecomp.cli.options import Options, parse_line
from ecomp.cli.tables import format_document
from ecomp.cli.terminal import Terminal
from ecomp.compute_conf import load_compute, parse_inventory
from ecomp.conf import ScheduleConfig, list_cleartext_hosts, load_schedule
from ecomp.errors import EcompError, put_before_fix
from ecomp.lab import network
from ecomp.model import (
    cluster,
    explain,
    flavor,
    group,
    host,
    image,
    keys,
    query,
    quota,
    reach,
    stack,
    text,
    traits,
    usage,
    user_data,
)
from ecomp.model.allocation import Inventory, describe_difference
from ecomp.model.facts import parse_facts
from ecomp.model.stored import decode
from ecomp.store.client import Entry, Snapshot
from ecomp.virt import xml
from tests.kit.transcript import compare_with_file

pytestmark = pytest.mark.fast

INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
MAC = '52:54:00:aa:00:01'
NOW = datetime(2026, 11, 27, 16, 40, 0, 900_000, UTC)
AGGREGATE = 'a66e9a7e-0000-4000-8000-000000000001'
# What a refusal must not quote: these stand for secrets.
SECRETS = re.compile('hunter2|canary')
# What Python's own readers say differs between its versions.
OF_PYTHON = re.compile('(is not a URL|not JSON): .*')
GUEST = guests.KnownGuest(
    INSTANCE, 'web1', (('default', 'ssh-ed25519 AAAA me@here'), ('second', 'ssh-rsa BBBB')), b'#!user'
)
GUEST_FILE = {'version': 1, 'instance': INSTANCE, 'mac': MAC, 'hostname': 'web1', 'public_keys': None}


def load_file(name: str, load: Callable[[Path], object]) -> Callable[[str], object]:
    def read(content: str) -> object:
        Path(name).write_text(content)
        return load(Path(name))

    return read


def load_compute_yaml(path: Path) -> object:
    """Return the endpoints, and the hosts to which the connection is not encrypted."""
    config = load_compute(path)
    return [*config.etcd.endpoints, config.placement.endpoint], list_cleartext_hosts(config.etcd, config.placement)


def load_stack(path: Path) -> object:
    Path('schedule.yaml').write_text(
        'images: {trixie: http://images/trixie.qcow2, bookworm: http://images/bookworm.qcow2}\n'
        'image: http://images/trixie.qcow2\n'
    )
    schedule = load_schedule(Path('schedule.yaml'))
    context = Context(Terminal(print, print, print), schedule, Invocation('apply', (str(path),), Options()))
    small, bare = b'{"resources":{"VCPU":1,"MEMORY_MB":256,"DISK_GB":1}}', b'{"resources":{"VCPU":1}}'
    entries = {key: Entry(key, value, 1) for key, value in (('/flavors/small', small), ('/flavors/bare', bare))}
    vars(context)['store'] = SimpleNamespace(get=entries.get, snapshot=lambda *_, **__: Snapshot(1, entries))
    return stack_file.load_stack_file(context, str(path))


def find_warnings(content: str) -> object:
    warnings: list[str] = []
    Path('user-data').write_bytes(content.encode('latin-1'))
    read_user_data(Path('user-data'), warnings.append)
    return warnings


def format_options(options: Options) -> str:
    default = Options()
    return ' '.join(f'{name}={value!r}' for name, value in options._asdict().items() if value != getattr(default, name))


def format_command(line: str) -> str:
    command = parse(shlex.split(line))
    return f'{command.name} {list(command.words)} {format_options(command.options)}'.strip()


def format_words(line: str) -> str:
    words, options = parse_line(shlex.split(line))
    return f'{words} {format_options(options)}'.strip()


def make_stack(entry: str) -> bytes:
    entries = {entry: {'incarnation': 7, 'compute': INSTANCE}}
    return json.dumps({'version': 1, 'epoch': INSTANCE, 'entries': entries}).encode()


def make_context(line: str) -> Context:
    return Context(Terminal(print, print, print), ScheduleConfig(), parse(shlex.split(line)))


def read_network(definition: str) -> object:
    """Return whether libvirt serves DHCP and IPv6, and why the network cannot be used."""
    dhcp = xml.parse_dhcp(definition)
    return dhcp.is_served, dhcp.has_ipv6, tuple(str(problem or '') for problem in dhcp.problems)


def select_leases(leases: list[list[Any]]) -> object:
    """Return the MAC of each address whose lease counts. A lease has the seconds until its end."""
    parsed = [guests.Lease(address, mac, float('inf') if end == 'never' else end) for address, mac, end in leases]
    return {address: lease.mac for address, lease in guests.select_current(parsed, 0).items()}


def find_metadata(path: str) -> object:
    # A / at the end changes nothing.
    body = metadata.find_body(path, GUEST)
    assert metadata.find_body(path + '/', GUEST) == body
    return body


SMALL = 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1'


def explain_provider(value: str, traits: set[str], **inventories: Inventory) -> object:
    rooms = {'VCPU': Inventory(4), 'MEMORY_MB': Inventory(7800), 'DISK_GB': Inventory(25), **inventories}
    miss = explain.find_miss(query.parse_query(value), explain.Provider('p', rooms, traits, {AGGREGATE}))
    change = explain.find_smallest_miss([miss])
    return [each.reason for each in miss.failures], change and explain.format_cures(change.cures, 'p')


# {file: {kind: reader}}
READERS: dict[str, dict[str, Callable[..., object]]] = {
    'names': {
        'name of an instance': text.check_name,
        'beginning of a uuid': text.parse_uuid_prefix,
        'uuid': keys.is_uuid,
        'host name': host.is_hostname,
        'host of ssh': reach.is_host_name,
        'user of ssh': reach.check_user,
        'group': group.check_group_name,
        'stack': stack.check_stack_name,
        'member of a stack': stack.check_member_name,
        'entry of a stack': lambda name: [*decode(stack.Stack, make_stack(name), name='shop').entries],
        'lab': network.require_lab_name,
        'trait': traits.check_trait,
        'nearest word': text.find_similar,
    },
    'requests': {
        'image': image.check_image,
        'pin of an image': image.split_pin,
        'line of SHA256SUMS': lambda line: image.find_sha256(line, 'http://host/a/disk.img?x=/y'),
        'address of an image': lambda address: image.find_address_refusal('a.name', ip_address(address), None),
        'listed address': lambda address: image.find_address_refusal(
            'a.name', ip_address(address), image.parse_image_sources(['0.0.0.0/0', '::/0', '169.254.0.0/16'])
        ),
        'query': query.check_query,
        'parts of a query': lambda value: [*map(str, query.parse_query(value))],
        'query without disabled computes': query.exclude_disabled,
        'query for compute x': lambda value: query.restrict_to_compute(value, 'x'),
        'flavor': lambda name, value: flavor.parse_flavor(name, value).query,
        'value of a flavor': lambda value: decode(flavor.Flavor, value.encode(), name='small').query,
        'limits': quota.parse_limits,
        'inventory': parse_inventory,
        'public keys': lambda value: user_data.parse_public_keys(value.encode()),
        'host keys': user_data.parse_host_keys,
        'user-data': lambda value: user_data.check_user_data(value.encode('latin-1')),
        'warnings about user-data': find_warnings,
        'requested and held': describe_difference,
        'memory of a provider, for 256 MB': lambda memory: explain_provider(
            SMALL, set(), MEMORY_MB=Inventory(**memory)
        ),
        'query to a provider with the traits A and B': lambda value: explain_provider(f'{SMALL}&{value}', {'A', 'B'}),
    },
    'commands': {
        'command': format_command,
        'options': format_words,
        'command of another tool': lambda line: format_command(f'{line} web1 more'),
        'timeout of etcd': lambda line: make_context(line).etcd_config.timeout,
        'beginning of a suggested command': lambda line: make_context(line).command_prefix,
    },
    'files': {
        'compute.yaml': load_file('compute.yaml', load_compute_yaml),
        'schedule.yaml': load_file('schedule.yaml', lambda path: load_schedule(path).ignore_warnings),
        'mdserver.conf': load_file('mdserver.conf', mdserver_conf.load),
        'stack.yaml': load_file('stack.yaml', load_stack),
    },
    'others': {
        'path of the metadata': find_metadata,
        'file of a guest': lambda change: guests.parse_guest(json.dumps({**GUEST_FILE, **change}).encode(), MAC),
        'leases': lambda value: guests.parse_leases(json.dumps(value).encode(), 'br0'),
        'reach': lambda value: reach.parse_reach(value).words,
        'console': lambda path: reach.parse_console_path(INSTANCE, f'hv1:{path}'),
        'line of a console': reach.strip_escapes,
        'logged text': log.redact,
        'argument in a unit': systemd.quote_argument,
        'text in YAML': lambda value: format_document([value], 'yaml'),
        'clause before the fix': put_before_fix,
        'version of etcd': lambda version: (problem := cluster.describe_vulnerabilities(version)) and str(problem),
        'room that a compute publishes': lambda room: parse_facts(json.dumps({'room': room}).encode()),
        'ages of two leases': lambda *ages: host.find_last_seen(ages, NOW),
        'ticks of an axis': lambda highest, unit: [
            dashboard.format_value(tick, unit) for tick in dashboard.choose_ticks(highest, unit)
        ],
        'answer about usage': lambda value: usage.parse_answer(value.encode()),
        'current leases': select_leases,
        'network of libvirt': read_network,
        'channel of a guest': xml.has_agent,
        'routes of a machine': lambda routes: [*map(str, network.parse_routed_networks(routes))],
        'share of a host': network.divide_resources,
    },
}


def read_text(read: Callable[..., object], argument: Any) -> Iterable[str]:
    try:
        result = read(*argument) if isinstance(argument, list) else read(argument)
    except (ValueError, EcompError, mdserver_conf.ConfError) as error:
        message = OF_PYTHON.sub(r'\1', str(error).replace(f'{Path.cwd()}/', '').replace(str(Path.cwd()), 'HERE'))
        lines = [f' ! {line}' for line in message.split('\n')]
    else:
        lines = [' =' if result == argument else f' = {result!r}']
    for line in lines:
        assert line.isprintable(), line
        assert line.startswith(' =') or not SECRETS.search(line), line
        yield line


@pytest.mark.parametrize('name', READERS)
def test_texts_are_read_as_before(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(__file__).parent / f'texts/{name}.txt'
    lines: list[str] = []
    kinds = []
    for line in path.read_text().splitlines():
        if line.startswith('# '):
            kinds.append(line.removeprefix('# '))
            lines += ['', line] if lines else [line]
        elif line and not line.startswith(' '):
            argument, end = json.JSONDecoder().raw_decode(line)
            first, *rest = read_text(READERS[name][kinds[-1]], argument)
            lines += [line[:end] + first, *rest]
    assert kinds == [*READERS[name]], 'each kind has a section of the file'
    compare_with_file(path, '\n'.join(lines) + '\n')
