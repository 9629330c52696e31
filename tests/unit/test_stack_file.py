"""The file of `eschedule apply`: what it may contain, and every mistake with its line."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ecomp.cli.command import Context, Invocation
from ecomp.cli.options import Options
from ecomp.cli.stack_file import MAX_FILE_BYTES, StackFile, load_stack_file
from ecomp.cli.terminal import Terminal
from ecomp.conf import load_schedule
from ecomp.errors import UsageError
from ecomp.model.group import Membership
from ecomp.model.guest import MAX_USER_DATA_BYTES, SharedUserData
from ecomp.store.client import Entry, Snapshot
from ecomp.yaml_file import shorten

HASH = 'ab' * 32
SCHEDULE = f"""
image: http://images/trixie.qcow2#sha256={HASH}
images: {{trixie: 'http://images/trixie.qcow2#sha256={HASH}', bookworm: http://images/bookworm.qcow2}}
flavors: {{small: 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1', bare: 'resources=VCPU:1'}}
project_id: shop
"""
KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ4Gl6f0tBkXwz0v4kUJQ1u0q8fD0oYl1h2d3c4b5a6Z ann'
QUERY = 'resources=VCPU:2,MEMORY_MB:512,DISK_GB:4'


class FlavorStore:
    """An etcd with the flavor `shared`; `reads` are the keys that were read."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def get(self, key: str) -> Entry | None:
        self.reads.append(key)
        value = b'{"version": 1, "resources": {"VCPU": 8, "MEMORY_MB": 512, "DISK_GB": 1}}'
        return Entry(key, value, 1) if key == '/flavors/shared' else None

    def snapshot(self, *_: object, **__: object) -> Snapshot:
        return Snapshot(1, {'/flavors/shared': Entry('/flavors/shared', b'', 1)})


@pytest.fixture
def store() -> FlavorStore:
    return FlavorStore()


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: FlavorStore) -> Iterator[Callable[..., StackFile]]:
    """A function that loads a text as shop.yaml, beside a public key, user-data and a schedule.yaml."""
    (tmp_path / 'schedule.yaml').write_text(SCHEDULE)
    files = tmp_path / 'files'
    files.mkdir()
    (files / 'id.pub').write_text(KEY + '\n')
    (files / 'web.yaml').write_text('#cloud-config\n{}\n')
    monkeypatch.setenv('HOME', str(files))

    def load(content: str | bytes, path: str = 'files/shop.yaml', more: str = '') -> StackFile:
        if more:
            (tmp_path / 'schedule.yaml').write_text(SCHEDULE + more)
        monkeypatch.chdir(tmp_path)
        data = content if isinstance(content, bytes) else content.encode()
        Path('files/shop.yaml').write_bytes(data)
        terminal = Terminal(print, print, print)
        ctx = Context(terminal, load_schedule(tmp_path / 'schedule.yaml'), Invocation('apply', (path,), Options()))
        vars(ctx)['store'] = store
        if path == '-':
            read_end, write_end = os.pipe()
            os.write(write_end, data)
            os.close(write_end)
            os.dup2(read_end, 0)
            os.close(read_end)
        return load_stack_file(ctx, path)

    standard_input = os.dup(0)
    yield load
    os.dup2(standard_input, 0)
    os.close(standard_input)


@pytest.fixture
def mistakes(load: Callable[..., StackFile]) -> Callable[..., list[str]]:
    """A function that loads a text and returns the lines of its error, without the directory of the file."""

    def read(content: str | bytes, path: str = 'files/shop.yaml') -> list[str]:
        with pytest.raises(UsageError) as error:
            load(content, path)
        assert error.value.exit_code == 2
        return [line.replace('files/shop.yaml:', '') for line in str(error.value).split('\n')]

    return read


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        (b'stack: \xff\n', '1: is not UTF-8 text'),
        (' ' * (MAX_FILE_BYTES + 1), ' is larger than 1024 KiB'),
        ('stack: a\ninstances:\n' + '  b:\n' * 10_000, '5000:5: has more than 10000 values'),
        (f'stack: a\ninstances: [{"b, " * 10_000}]\n', ': has more than 10000 values'),
        (f'b: &b {{{", ".join(f"k{n}: 1" for n in range(900))}}}\nc: {{<<: [{"*b, " * 12}]}}\n', 'more than 10000'),
        ('stack: a\n'.encode('utf-16'), '1: is not UTF-8 text'),
        (b'\xef\xbb\xbfstak: a\ninstances: {}\n', '1: stack: is missing'),
    ],
)
def test_large_or_binary_file_is_refused(mistakes: Callable[..., list[str]], content: str | bytes, reason: str) -> None:
    """Other mistakes are in tests/golden/texts/files.txt."""
    assert any(reason in line for line in mistakes(content)), mistakes(content)


GOOD = 'stack: a\ninstances:\n  web: {flavor: small}\n'


@pytest.mark.parametrize(
    'content',
    [
        b'\xef\xbb\xbf' + GOOD.encode(),
        GOOD.replace('\n', '\r\n'),
        GOOD.rstrip(),
        f'%YAML 1.2\n---\n{GOOD}...\n',
        json.dumps({'stack': 'a', 'instances': {'web': {'flavor': 'small'}}}),
        json.dumps({'stack': 'a', 'instances': {'web': {'flavor': 'small'}}}, indent='\t'),
        '{"stack": "\\u0061", "instances": {"w\\u0065b": {"flavor": "small"}}}',
    ],
)
def test_same_stack_in_other_encodings(load: Callable[..., StackFile], content: str | bytes) -> None:
    assert load(content).instances == load(GOOD).instances


def test_file_that_is_a_device_or_a_pipe(mistakes: Callable[..., list[str]], tmp_path: Path) -> None:
    assert [line.split(': ')[1] for line in mistakes('', '/dev/null')] == ['instances', 'stack']
    (line,) = mistakes('', '/dev/zero')
    assert line == '/dev/zero: is larger than 1024 KiB'
    fifo = tmp_path / 'fifo'
    os.mkfifo(fifo)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(fifo.write_text, 'stack: a\n')  # as of a command in <(...)
        assert len(mistakes('', str(fifo))) == 1
        assert writing.result() == 9


def test_unreadable_file_is_named(mistakes: Callable[..., list[str]]) -> None:
    for path, reason in (('none/x.yaml', 'No such file or directory'), ('files', 'Is a directory'), ('a\0', 'null')):
        (line,) = mistakes('', path)
        assert (': cannot be read: ' in line, reason in line) == (True, True), line


def test_members_with_aliases_flavors_and_image_names(load: Callable[..., StackFile]) -> None:
    stack = load(f"""\
stack: shop
instances:
  db: &db {{flavor: small, image: bookworm, weigh: pack, group: {{name: g, policy: affinity, strict: false}}}}
  web: &web
    <<: *db
    count: 2
    query: resources=VCPU:2
    group: g
  api: {{<<: *web, count: 1, image: http://other/x.qcow2, name: front}}
  all: {{<<: [*web, *db], weigh: spread, count: }}
  own: {{query: '{QUERY}'}}
""")
    bookworm, small = 'http://images/bookworm.qcow2', 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1'
    double = small.replace('VCPU:1', 'VCPU:2')
    orders = {entry: (desired.order, desired.weigh) for entry, desired in stack.instances.items()}
    assert {entry: (each.name, each.query, each.image, weigh) for entry, (each, weigh) in orders.items()} == {
        'db/1': ('shop-db', small, bookworm, 'pack'),
        'web/1': ('shop-web-1', double, bookworm, 'pack'),
        'web/2': ('shop-web-2', double, bookworm, 'pack'),
        'api/1': ('front-1', double, 'http://other/x.qcow2', 'pack'),
        'all/1': ('shop-all', double, bookworm, 'spread'),
        'own/1': ('shop-own', QUERY, f'http://images/trixie.qcow2#sha256={HASH}', 'spread'),
    }
    assert (stack.name, stack.members) == ('shop', ['db', 'web', 'api', 'all', 'own'])
    # A policy holds for all members that name the group, wherever it is given.
    groups = {entry: desired.order.group for entry, desired in stack.instances.items()}
    assert groups == dict.fromkeys(stack.instances, Membership('g', 'affinity', False)) | {'own/1': None}
    assert {desired.order.project_id for desired in stack.instances.values()} == {'shop'}
    assert stack.instances['db/1'].origins == {
        'project': 'the default of schedule.yaml',
        'image': 'image bookworm of schedule.yaml',
        'query': 'flavor small',
    }
    assert stack.instances['own/1'].origins['image'] == 'the default of schedule.yaml'
    assert load('stack: a\nproject: p\ninstances: {}\n').instances == {}
    assert len(load('stack: a\ninstances: {b: {flavor: small, count: 300}}\n').instances) == 300


def test_flavor_of_etcd_is_read_once(load: Callable[..., StackFile], store: FlavorStore) -> None:
    stack = load('stack: a\ninstances: {b: {flavor: shared, count: 3}, c: {flavor: shared, query: resources=VCPU:9}}\n')
    queries = {entry: desired.order.query or '' for entry, desired in stack.instances.items()}
    assert {entry: query.partition(',')[0] for entry, query in queries.items()} == {
        **dict.fromkeys(('b/1', 'b/2', 'b/3'), 'resources=VCPU:8'),
        'c/1': 'resources=VCPU:9',
    }
    assert store.reads == ['/flavors/shared']


def test_paths_are_relative_to_the_file_or_the_current_directory(
    load: Callable[..., StackFile], tmp_path: Path
) -> None:
    files, digest = tmp_path / 'files', hashlib.sha256(b'#cloud-config\n{}\n').hexdigest()
    member = '{flavor: small, ssh_keys: [%s], user_data: %s}'
    texts = {
        prefix: f'stack: a\ninstances: {{b: {member % (prefix + "id.pub", prefix + "web.yaml")}}}\n'
        for prefix in ('', '~/', f'{files}/', '../files/', 'files/')
    }

    def check(stack: StackFile) -> None:
        (desired,) = stack.instances.values()
        assert desired.order.ssh_keys == (KEY,)
        assert desired.order.user_data_sha256 == digest
        assert stack.user_data.keys() == {digest}
        assert 'ssh_keys' not in desired.origins

    for prefix in ('', '~/', f'{files}/', '../files/'):
        check(load(texts[prefix]))
    for prefix in ('files/', '~/', f'{files}/'):
        check(load(texts[prefix], '-'))
    # Defaults of schedule.yaml, and a list that overrides them.
    more = 'ssh_keys: [files/id.pub]\nuser_data: files/web.yaml\n'
    stack = load('stack: a\ninstances: {b: {flavor: small, ssh_keys: []}, c: {flavor: small}}\n', more=more)
    b, c = stack.instances.values()
    assert (b.order.ssh_keys, c.order.ssh_keys, b.order.user_data_sha256) == (None, (KEY,), digest)
    assert ('ssh_keys' in b.origins, 'ssh_keys' in c.origins, 'user_data' in b.origins) == (False, True, True)


@pytest.mark.parametrize('path', ['../schedule.yaml', '{outside}', '~/../schedule.yaml', 'link', '/etc/hostname'])
def test_user_data_outside_the_directory_of_the_file_is_refused(
    path: str, mistakes: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The file may be somebody else's, and every guest of it can read its user-data."""
    (tmp_path / 'files/link').symlink_to(tmp_path / 'schedule.yaml')
    text = path.format(outside=tmp_path / 'schedule.yaml')
    (mistake,) = mistakes(f'stack: a\ninstances:\n  b: {{flavor: small, user_data: "{text}"}}\n')
    reason = 'is outside the directory of this file. Fix: copy it there'
    assert mistake == f'3: instances.b.user_data: {shorten(text)} {reason}'


def test_user_data_and_keys_may_stand_in_the_file(load: Callable[..., StackFile]) -> None:
    stack = load(f"""\
stack: a
instances:
  web:
    flavor: small
    user_data: |
      #!/bin/sh
      echo hello
    ssh_keys:
    - {KEY}
    - id.pub
""")
    (desired,) = stack.instances.values()
    script = b'#!/bin/sh\necho hello\n'
    assert desired.order.user_data_sha256 == hashlib.sha256(script).hexdigest()
    assert list(stack.user_data.values()) == [SharedUserData.from_bytes(script)]
    assert desired.order.ssh_keys == (KEY,)


def test_inline_user_data_has_the_limit_of_a_file(mistakes: Callable[..., list[str]]) -> None:
    data = json.dumps('#!/bin/sh\n' + '#' * MAX_USER_DATA_BYTES)
    (line,) = mistakes(f'stack: a\ninstances: {{b: {{flavor: small, user_data: {data}}}}}\n')
    assert line.startswith(f'2: instances.b.user_data: user-data: has {MAX_USER_DATA_BYTES + 10} bytes; the limit is')


def test_mistakes_on_standard_input_name_it(mistakes: Callable[..., list[str]]) -> None:
    found = mistakes('stack: A\ninstances: {b: {flavour: small, user_data: web.yaml}}\n', '-')
    assert not sys.stdin.closed  # it is asked later whether it is a terminal
    assert [line.split(': ')[0] for line in found] == ['standard input:1', *['standard input:2'] * 3], found
