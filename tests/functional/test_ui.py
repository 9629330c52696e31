"""The server of `eschedule ui`: whom it refuses, what it sends, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ecomp.cli.command import Context
from ecomp.cli.inspect import _describe
from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.model.order import NameOwner
from ecomp.model.states import ACTIVE, ERROR
from ecomp.model.stored import encode
from ecomp.ui.server import MAX_PAGES, serve
from tests.functional.cloud import Cloud
from tests.kit.browser import Ui
from tests.kit.commands import run_eschedule, write_config
from tests.kit.servers import Etcd, wait_until
from tests.kit.written import make_host, make_instance, make_uuid

COMPUTE, INSTANCE, OTHER = make_uuid('compute', 0), make_uuid('instance', 0), make_uuid('other', 0)
PREFIX = 'eschedule --config /srv/second.yaml'
HOSTILE = '<script>alert(1)</script>\u202e'


@dataclass
class Page:
    """A client of the page at `url`."""

    url: str
    at_exit: ExitStack = field(default_factory=ExitStack)

    @property
    def host(self) -> str:
        return self.url.split('/')[2]

    @property
    def path(self) -> str:
        return f'/{self.url.split("/")[3]}/'

    def send(self, path: str, method: str = 'GET', headers: Mapping[str, str] = {}) -> HTTPResponse:
        connection = HTTPConnection(self.host, timeout=60)
        self.at_exit.callback(connection.close)
        connection.request(method, path, headers={'Connection': 'close', **headers})
        answer = connection.getresponse()
        self.at_exit.callback(answer.close)
        return answer

    def follow(self) -> Iterator[tuple[str, Any]]:
        """Yield each event that the server sends, with its data."""
        return parse_events(self.send(f'{self.path}events'))


def parse_events(answer: HTTPResponse) -> Iterator[tuple[str, Any]]:
    assert answer.status == 200, answer.read()
    while line := answer.readline().decode():
        if line.startswith('event: '):
            yield line[7:].strip(), json.loads(answer.readline().decode().removeprefix('data: '))


def wait_for_change(events: Iterator[tuple[str, Any]], is_expected: Callable[[Any], bool]) -> Any:
    return next(data for kind, data in events if kind != 'beat' and is_expected(data))


@pytest.fixture
def page(cloud: Cloud) -> Iterator[Page]:
    for key, value in {**make_host(COMPUTE, 'hv1'), **make_instance(0, COMPUTE)}.items():
        cloud.etcd.put(key, value, cloud.etcd.grant() if 'host' not in key else 0)
    config = EtcdConfig((cloud.etcd.endpoint,))
    with serve(config, 0, PREFIX, lambda instance: {'show': [['instance', instance]]}) as url, ExitStack() as at_exit:
        yield Page(url, at_exit)


@pytest.mark.parametrize(
    ('path', 'method', 'headers', 'status', 'reason'),
    [
        ('/', 'GET', {}, 403, 'this address has a wrong token'),
        ('/x/', 'GET', {}, 403, 'this address has a wrong token'),
        ('/x/events', 'GET', {}, 403, 'this address has a wrong token'),
        ('{0}', 'GET', {'Host': 'evil.example'}, 421, 'this host name is not accepted'),
        ('{0}', 'GET', {'Host': '127.0.0.1:1'}, 421, 'this host name is not accepted'),
        ('{0}events', 'GET', {'Origin': 'http://evil.example'}, 403, 'requests of other web pages are refused'),
        ('{0}events', 'GET', {'Origin': 'null'}, 403, 'requests of other web pages are refused'),
        *(('{0}', method, {}, 405, 'the page is read-only') for method in ('POST', 'PUT', 'DELETE', 'OPTIONS', 'X')),
        ('{0}page.html', 'GET', {}, 404, 'there is no such page'),
        ('{0}../x', 'GET', {}, 404, 'there is no such page'),
        ('{0}instance/x', 'GET', {}, 404, 'there is no such page'),
    ],
)
def test_foreign_request_is_refused_in_a_sentence(
    page: Page, path: str, method: str, headers: dict[str, str], status: int, reason: str
) -> None:
    answer = page.send(path.format(page.path), method, headers)
    text = answer.read().decode()
    assert (answer.status, reason in text, 'Fix: ' in text) == (status, True, True), text
    assert page.path.strip('/') not in text
    assert answer.headers['Content-Type'] == 'text/plain; charset=utf-8'
    assert answer.headers['Cache-Control'] == 'no-store'


def test_body_is_refused_before_it_is_read(page: Page) -> None:
    assert page.send(page.path, 'POST', {'Content-Length': '9' * 9}).status == 413


def test_page_runs_nothing_but_its_own_script_and_is_never_framed_or_kept(page: Page) -> None:
    answers = [page.send(page.path) for _ in range(2)]
    bodies = [answer.read().decode() for answer in answers]
    for answer, body in zip(answers, bodies, strict=True):
        policy = dict(part.strip().split(' ', 1) for part in answer.headers['Content-Security-Policy'].split(';'))
        nonce = policy['script-src'].removeprefix("'nonce-").rstrip("'")
        assert body.count(f'nonce="{nonce}"') == body.count('<script') + body.count('<style') == 2
        assert policy['style-src'] == policy['script-src']
        assert (policy['default-src'], policy['connect-src'], policy['frame-ancestors']) == (
            "'none'",
            "'self'",
            "'none'",
        )
        expected = {'Referrer-Policy': 'no-referrer', 'X-Frame-Options': 'DENY', 'X-Content-Type-Options': 'nosniff'}
        assert {name: answer.headers[name] for name in expected} == expected
        assert (answer.headers['Cache-Control'], answer.headers['Server']) == ('no-store', None)
    assert 'innerHTML' not in bodies[0]
    assert 'http://' not in bodies[0].replace('http://www.w3.org/2000/svg', ''), 'nothing comes from elsewhere'


def test_page_gets_all_then_only_what_changes(page: Page, cloud: Cloud) -> None:
    events = page.follow()
    kinds, whole = zip(*(next(events) for _ in range(2)), strict=True)
    assert kinds == ('beat', 'all')
    assert whole[1]['hosts'][COMPUTE][:2] == ['hv1', 'up']
    assert whole[1]['instances'][INSTANCE][:3] == [COMPUTE, 'web-0', 'active']
    cloud.etcd.put(keys.troubles(COMPUTE), '{"version": 1, "reasons": ["no disk"]}', cloud.etcd.grant())
    change = wait_for_change(events, lambda data: 'hosts' in data)
    assert change.keys() == {'hosts'}
    assert change['hosts'][COMPUTE][2] == 'up, cannot build: no disk'
    for key in make_instance(0, COMPUTE):
        cloud.etcd.delete(key)
    change = wait_for_change(events, lambda data: INSTANCE in data.get('instances', {}))
    assert change['instances'] == {INSTANCE: None}
    details = page.send(f'{page.path}instance/{INSTANCE}')
    assert json.load(details) == {'show': [['instance', INSTANCE]]}


def test_texts_of_etcd_arrive_as_data(page: Page, cloud: Cloud) -> None:
    events = page.follow()
    for key, value in make_instance(0, COMPUTE, project_id=HOSTILE, image=f'http://x/{HOSTILE}').items():
        cloud.etcd.put(key, value)
    change = wait_for_change(
        events, lambda data: data.get('instances', {}).get(INSTANCE, [''] * 7)[6] not in ('', 'shop')
    )
    assert change['instances'][INSTANCE][6] == '<script>alert(1)</script>\\u202e'


@pytest.mark.parametrize(
    ('compute', 'state', 'commands'),
    [
        # Its name belongs to another instance, and its host's name to another host.
        (COMPUTE, ERROR, ['show {instance} --command', 'destroy {instance}']),
        (COMPUTE, ACTIVE, ['hosts {compute}', 'evacuate {compute} --dry-run']),
        ('hv1', ACTIVE, ['events {instance} --watch']),
    ],
)
def test_commands_mean_what_is_shown(cloud: Cloud, compute: str, state: str, commands: list[str]) -> None:
    values = {**make_instance(0, compute, state, name='web'), keys.name('web'): encode(NameOwner(OTHER))}
    values |= {keys.hostname(each): '{"version": 1, "hostname": "hv1"}' for each in (COMPUTE, OTHER)}
    values.pop(keys.record('hv1', INSTANCE), None)
    for key, value in values.items():
        cloud.etcd.put(key, value)
    ctx = SimpleNamespace(store=cloud.store, resolve_instance=str, placement=cloud.placement, command_prefix=PREFIX)
    expected = [f'{PREFIX} {command.format(instance=INSTANCE, compute=COMPUTE)}' for command in commands]
    assert _describe(cast(Context, ctx), INSTANCE)['commands'] == expected


def test_ninth_page_is_told_so_and_a_closed_one_makes_room(page: Page) -> None:
    streams = [page.send(f'{page.path}events') for _ in range(MAX_PAGES)]
    for stream in streams:
        next(parse_events(stream))
    for path in (page.path, f'{page.path}events'):
        answer = page.send(path)
        assert (answer.status, answer.read()) == (
            503,
            b'503 8 pages are open. Fix: close one of them, and reload this one\n',
        )
    assert page.send(f'{page.path}instance/{INSTANCE}').status == 200
    page.at_exit.close()
    wait_until(lambda: page.send(page.path).status == 200, 5, 'a page was closed')


def test_page_says_since_when_etcd_is_away_and_continues(own_etcd: Etcd) -> None:
    for key, value in make_host(COMPUTE, 'hv1').items():
        own_etcd.put(key, value)
    with serve(EtcdConfig((own_etcd.endpoint,)), 0, PREFIX, dict) as url, ExitStack() as at_exit:
        events = Page(url, at_exit).follow()
        whole = wait_for_change(events, lambda _: True)
        assert whole['etcd'] == {'': [own_etcd.endpoint, '', '', PREFIX]}
        own_etcd.kill()
        change = wait_for_change(events, lambda data: 'etcd' in data)
        assert own_etcd.endpoint in change['etcd'][''][1]
        assert change['etcd'][''][2].endswith('Z')
        own_etcd.start()
        for key, value in make_instance(0, COMPUTE).items():
            own_etcd.put(key, value)
        seen: dict[str, Any] = {}
        wait_for_change(events, lambda data: bool(seen.update(data)) or {'etcd', 'instances'} <= seen.keys())
        assert (seen['etcd'][''][1:3], INSTANCE in seen['instances']) == (['', ''], True)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_prints_its_address_and_ends_with_its_terminal(etcd: Etcd, tmp_path: Path, number: int) -> None:
    config = write_config(tmp_path / 'schedule.yaml', etcd.endpoint, 'http://127.0.0.1:1')
    with Ui(config, tmp_path / 'ui') as ui, ExitStack() as at_exit:
        events = Page(ui.find_url(), at_exit).follow()
        next(events)
        assert ui.stop(number) == 0
        assert [kind for kind, _ in events if kind not in ('all', 'change', 'beat')] == []
        assert ui.log.read_text().splitlines()[1:] == [
            'eschedule: open this address in a browser on this machine. Ctrl-C ends the page'
        ]


def test_port_in_use_and_absent_etcd_are_reported(etcd: Etcd, tmp_path: Path) -> None:
    config = write_config(tmp_path / 'schedule.yaml', etcd.endpoint, 'http://127.0.0.1:1')
    with socket.create_server(('127.0.0.1', 0)) as taken:
        refused = run_eschedule(config, 'ui', '--port', str(taken.getsockname()[1]))
    assert (refused.code, refused.stdout, 'cannot listen on port' in refused.stderr) == (1, '', True), refused
    away = run_eschedule(write_config(tmp_path / 'away.yaml', '127.0.0.1:1', 'http://127.0.0.1:1'), 'ui')
    assert (away.code, away.stdout) == (7, ''), away
