"""Users who choose image URLs cannot reach forbidden addresses, and cannot block a compute."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from array import array
from base64 import b64encode
from contextlib import ExitStack, suppress
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import psutil
import pytest

from ecomp.agent.images import cache, fetch, inspection
from ecomp.agent.images.cache import ImageCache
from ecomp.agent.images.sources import EgressPolicy, make_egress_policy
from ecomp.agent.instance.build import Cancelled
from ecomp.compute_conf import load_compute
from ecomp.errors import BuildFailed, EcompError
from ecomp.model import keys
from ecomp.model.image import find_address_refusal, parse_image_sources
from ecomp.model.order import InvalidRequest, parse_request
from tests.kit.certificates import Authority
from tests.kit.commands import run_module
from tests.kit.image_server import Handler, ImageServer
from tests.kit.images import LIMITS, LOOPBACK_REACH, MIB, get_base, list_cached
from tests.kit.servers import SLOWDOWN_FACTOR, free_port, wait_until
from tests.security.image_servers import BOOT_DISK, fetch_refusal, get_port, make_cache

URL_WITH_PASSWORD = 'http://alice:hunter2@images.example.org/x.qcow2'


def test_password_in_an_image_url_is_refused_by_eschedule(tmp_path: Path) -> None:
    """The password would be visible to all in the request, the record, `show` and `list`."""
    result = run_module(
        'ecomp.schedule', 'resources=VCPU:1,MEMORY_MB:64,DISK_GB:1', URL_WITH_PASSWORD, directory=tmp_path
    )
    assert result.code == 2
    assert result.stdout == ''
    assert result.stderr.startswith('eschedule: the image has a user or a password in its URL')
    assert 'hunter2' not in result.stderr


def test_password_in_an_image_url_is_refused_by_ecompute(tmp_path: Path) -> None:
    compute, instance = str(uuid4()), str(uuid4())
    allocations = {compute: {'resources': {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}}}
    value = json.dumps({'allocations': allocations, 'instance': instance, 'image': URL_WITH_PASSWORD})
    parsed = parse_request(compute, keys.request(compute, instance), value.encode())
    assert isinstance(parsed, InvalidRequest)
    assert 'the image has a user or a password in its URL' in parsed.reason
    assert 'hunter2' not in repr(parsed)
    cache = ImageCache(tmp_path / 'images', inspection.inspect, None, LIMITS, LOOPBACK_REACH)
    with pytest.raises(BuildFailed, match='the image has a user or a password') as caught:
        get_base(cache, URL_WITH_PASSWORD)
    assert 'hunter2' not in str(caught.value)


def test_only_listed_sources_are_allowed() -> None:
    sources = parse_image_sources(['images.example.org', '10.1.0.0/16', '127.0.0.2', '::1/128'])
    allowed = [('images.example.org', '203.0.113.7'), ('Images.Example.ORG.', '10.9.9.9'), ('any', '10.1.2.3')]
    allowed += [('any', '127.0.0.2'), ('any', '::1'), ('any', '::ffff:10.1.0.1'), ('any', '::ffff:127.0.0.2')]
    for host, address in allowed:
        assert find_address_refusal(host, ip_address(address), sources) is None, (host, address)
    for host, address in [('any', '203.0.113.7'), ('x.images.example.org', '203.0.113.7'), ('any', '10.2.0.1')]:
        assert find_address_refusal(host, ip_address(address), sources) == 'not in the `image_sources:` of this compute'
    # Listing a name does not allow this host's loopback addresses.
    for host, address in [('images.example.org', '127.0.0.1'), ('any', '127.0.0.1'), ('images.example.org', 'fe80::1')]:
        assert find_address_refusal(host, ip_address(address), sources), (host, address)
    assert find_address_refusal('any', ip_address('10.1.0.1'), parse_image_sources([])) is not None


def test_loopback_is_refused_without_a_request(web: ImageServer, tmp_path: Path) -> None:
    port = get_port(web.url)
    for host in ('127.0.0.1', 'localhost', '0.0.0.0', '127.1', '2130706433', '[::ffff:127.0.0.1]', '[::1]'):
        reason = fetch_refusal(make_cache(tmp_path, EgressPolicy()), f'http://{host}:{port}/good')
        assert reason.endswith(': images from there are refused'), reason
        assert 'a loopback address' in reason or 'not the address of a host' in reason
    assert web.requests == []


def test_a_name_is_resolved_once(web: ImageServer, tmp_path: Path, dns_answers: dict[str, list[list[str]]]) -> None:
    """The address that was checked is the one connected to, even if DNS changes its answer."""
    dns_answers['images.example.org'] = [['127.0.0.1'], ['169.254.169.254']]
    url = f'http://images.example.org:{get_port(web.url)}/good'
    assert (
        get_base(make_cache(tmp_path, LOOPBACK_REACH), f'{url}#sha256={sha256(BOOT_DISK).hexdigest()}').format == 'raw'
    )
    assert web.requests == ['good']
    web.requests.clear()
    dns_answers['images.example.org'] = [['127.0.0.1', '169.254.169.254']]
    why = fetch_refusal(make_cache(tmp_path, LOOPBACK_REACH), f'{url}?2')
    assert why == f'{url}?2: images.example.org is 169.254.169.254, a link-local address: images from there are refused'
    assert web.requests == []


def test_every_hop_of_a_redirect_is_checked(
    web: ImageServer, tmp_path: Path, dns_answers: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dns_answers['images.example.org'] = dns_answers['hidden-hunter2.example.org'] = [['127.0.0.1']]
    port = get_port(web.url)
    only = EgressPolicy(parse_image_sources(['images.example.org', '127.0.0.1/32']))
    assert get_base(make_cache(tmp_path, only), f'http://images.example.org:{port}/moved').format == 'raw'
    for where, expected in [
        (f'http://127.0.0.2:{port}/good', 'a refused address (a loopback address)'),
        ('http://169.254.169.254/hunter2', 'a refused address (a link-local address)'),
        ('http://hunter2:x@127.0.0.1/', 'an invalid image URL, or one with a user or a password'),
        ('ftp://hunter2/', 'an invalid image URL'),
        ('http://[hunter2/', 'an invalid image URL'),
    ]:
        monkeypatch.setattr(Handler, 'answer_moved', lambda handler, where=where: handler.redirect(where))
        reason = fetch_refusal(make_cache(tmp_path, only), f'http://images.example.org:{port}/moved?{len(expected)}')
        assert f': redirected to {expected}' in reason
        assert 'hunter2' not in reason
    assert 'good' in web.requests
    assert web.requests.count('good') == 1


def test_only_a_direct_refusal_by_the_image_sources_is_the_fault_of_the_host(
    web: ImageServer, tmp_path: Path, dns_answers: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dns_answers['images.example.org'], dns_answers['unlisted.example.org'] = [['127.0.0.1']], [['192.0.2.1']]
    base, unlisted = (f'http://{name}.example.org:{get_port(web.url)}' for name in ('images', 'unlisted'))
    cache = make_cache(tmp_path, EgressPolicy(parse_image_sources(['images.example.org', '127.0.0.1/32'])))
    monkeypatch.setattr(Handler, 'answer_moved', lambda handler: handler.redirect(f'{unlisted}/good'))
    for url, is_host_fault in [(f'{unlisted}/good', True), (f'{base}/moved', False)]:
        with pytest.raises(BuildFailed, match='image_sources') as refused:
            get_base(cache, url)
        assert refused.value.is_host_fault is is_host_fault


def test_the_body_of_a_redirect_is_not_read(web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body may be endless, and would be read into memory."""
    waited: list[bool] = []

    def answer(handler: Handler) -> None:
        handler.send_body(b'x', length=10**12, status=302, location='good')
        waited.append(handler.server.may_go_on.wait(20))

    monkeypatch.setattr(Handler, 'answer_moved', answer)
    assert get_base(make_cache(tmp_path, LOOPBACK_REACH), web.url + 'moved').format == 'raw'
    assert waited == []


def test_addresses_of_etcd_and_placement_are_refused(
    web: ImageServer, tmp_path: Path, dns_answers: dict[str, list[list[str]]]
) -> None:
    port = get_port(web.url)
    dns_answers['control.example.org'] = dns_answers['other.example.org'] = [['127.0.0.1']]
    for control in ('127.0.0.1', 'control.example.org'):
        reach = EgressPolicy(LOOPBACK_REACH.sources, control_endpoints=((control, port),))
        for host in ('127.0.0.1', 'control.example.org', 'other.example.org'):
            reason = fetch_refusal(make_cache(tmp_path, reach), f'http://{host}:{port}/good')
            assert reason.endswith('127.0.0.1, the address of etcd or placement: images from there are refused')
    # If etcd or placement is on this host, it may listen on all addresses of the host.
    own_addresses = [
        info.address for infos in psutil.net_if_addrs().values() for info in infos if info.family == socket.AF_INET
    ]
    anywhere = EgressPolicy(parse_image_sources(['127.0.0.0/8', '0.0.0.0/0']), control_endpoints=(('localhost', port),))
    for address in ('127.0.0.2', *own_addresses):
        reason = fetch_refusal(make_cache(tmp_path, anywhere), f'http://{address}:{port}/good')
        assert reason.endswith(f'{address}, the address of etcd or placement: images from there are refused')
    assert web.requests == []
    assert get_base(
        make_cache(tmp_path, EgressPolicy(LOOPBACK_REACH.sources, control_endpoints=(('127.0.0.1', port + 1),))),
        web.url + 'good',
    )


def find_own_address() -> str:
    addresses = [
        ip_address(info.address.partition('%')[0])
        for infos in psutil.net_if_addrs().values()
        for info in infos
        if info.family in (socket.AF_INET, socket.AF_INET6)
    ]
    own_addresses = [address for address in addresses if not address.is_loopback and not address.is_link_local]
    assert own_addresses, 'this machine has no address but loopback and link-local ones'
    return f'[{own_addresses[0]}]' if own_addresses[0].version == 6 else str(own_addresses[0])


@pytest.mark.parametrize('listed', [None, ['0.0.0.0/0', '::/0'], ['images.example.org', '0.0.0.0/0', '::/0']])
def test_own_address_is_refused_unless_listed_by_itself(
    listed: list[str] | None, web: ImageServer, tmp_path: Path, dns_answers: dict[str, list[list[str]]]
) -> None:
    own = find_own_address()
    dns_answers['images.example.org'] = [[own.strip('[]')]]
    reach = EgressPolicy(None if listed is None else parse_image_sources(listed))
    for host in (own, 'images.example.org'):
        reason = fetch_refusal(make_cache(tmp_path, reach), f'http://{host}:{get_port(web.url)}/good')
        where = 'an address of this host that `image_sources:` does not list exactly: images from there are refused'
        assert reason.endswith(f'{own.strip("[]")}, {where}')
    alone = EgressPolicy(parse_image_sources([own.strip('[]')]))
    assert 'Connection refused' in fetch_refusal(make_cache(tmp_path, alone), f'http://{own}:{free_port()}/good')


def test_control_plane_is_read_from_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / 'compute.yaml'
    path.write_text(
        'etcd: {endpoints: ["ds1:2379", "[fd12::1]:2380"], insecure: true}\nplacement: {endpoint: https://ds2/placement}\n'
        'image_sources: [Images.Example.org, 127.0.0.0/8, fd12::7]\nimage_proxy: http://proxy:3128\n'
    )
    reach = make_egress_policy(load_compute(path))
    assert reach.control_endpoints == (('ds1', 2379), ('fd12::1', 2380), ('ds2', 443))
    assert reach.proxy_url == 'http://proxy:3128'
    assert reach.sources == parse_image_sources(['images.example.org', '127.0.0.0/8', 'fd12::7/128'])
    path.write_text('')
    assert make_egress_policy(load_compute(path)) == EgressPolicy(
        control_endpoints=(('localhost', 2379), ('localhost', 8080))
    )


@pytest.fixture
def tls_context(web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    authority = Authority(tmp_path / 'tls')
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(tmp_path / 'tls', 'server', 'images.example.org'))
    web.socket = context.wrap_socket(web.socket, server_side=True)
    monkeypatch.setenv('REQUESTS_CA_BUNDLE', str(authority.certificate))
    return context


def test_certificate_is_checked_against_the_host_name(
    web: ImageServer,
    tls_context: ssl.SSLContext,
    tmp_path: Path,
    dns_answers: dict[str, list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested_names: list[str | None] = []
    tls_context.sni_callback = lambda _socket, name, _context: requested_names.append(name)
    dns_answers['images.example.org'] = dns_answers['other.example.org'] = [['127.0.0.1']]
    port = get_port(web.url)
    url = f'https://images.example.org:{port}/good'
    with monkeypatch.context() as stranger:
        stranger.delenv('REQUESTS_CA_BUNDLE')
        refusal = fetch_refusal(make_cache(tmp_path, LOOPBACK_REACH), url)
        assert 'the server cannot be reached: ' in refusal
        assert refusal.endswith('certificate'), 'OpenSSL says where in its source'
    assert get_base(make_cache(tmp_path, LOOPBACK_REACH), url).format == 'raw'
    assert 'cannot be reached' in fetch_refusal(
        make_cache(tmp_path, LOOPBACK_REACH), f'https://other.example.org:{port}/good'
    )
    assert set(requested_names) == {'images.example.org', 'other.example.org'}
    assert set(web.requests) == {'good', 'SHA256SUMS'}


# Proxies and credentials.


def test_proxy_and_netrc_of_the_environment_are_ignored(
    web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str | None] = []
    answer = Handler.answer_good
    monkeypatch.setattr(Handler, 'answer_good', lambda self: (sent.append(self.headers['authorization']), answer(self)))
    (tmp_path / '.netrc').write_text('machine 127.0.0.1 login root password hunter2\n')
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('NETRC', str(tmp_path / '.netrc'))
    for name in ('http_proxy', 'https_proxy', 'all_proxy', 'HTTP_PROXY', 'ALL_PROXY'):
        monkeypatch.setenv(name, f'http://127.0.0.1:{free_port()}')
    assert get_base(make_cache(tmp_path, LOOPBACK_REACH), web.url + 'good').format == 'raw'
    assert sent == [None]


def test_cookies_of_a_server_are_not_sent_back(
    web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could be for all hosts of a domain, also for another one to which a redirect leads."""
    sent: list[str | None] = []
    answer = Handler.answer_good
    monkeypatch.setattr(Handler, 'answer_good', lambda self: (sent.append(self.headers['cookie']), answer(self)))
    monkeypatch.setattr(
        Handler, 'answer_moved', lambda self: self.send_body(b'', status=302, location='good', set_cookie='a=b')
    )
    get_base(make_cache(tmp_path, LOOPBACK_REACH), web.url + 'moved')
    assert sent == [None]


def test_certificate_is_checked_against_the_name_behind_a_proxy(
    web: ImageServer,
    tls_context: ssl.SSLContext,  # noqa: ARG001
    tmp_path: Path,
) -> None:
    """The proxy resolves the name and gets its password, but does not see the request."""
    connects: list[str] = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            connects.append(f'{self.path} {self.headers["proxy-authorization"]}')
            with socket.create_connection(('127.0.0.1', get_port(web.url))) as server:
                self.send_response(200)
                self.end_headers()
                answers = threading.Thread(target=relay, args=(server, self.connection), daemon=True)
                answers.start()
                relay(self.connection, server)
                answers.join(SLOWDOWN_FACTOR)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        try:
            reach = EgressPolicy(None, f'http://ann:s%40cret@127.0.0.1:{proxy.server_port}')
            assert get_base(make_cache(tmp_path, reach), 'https://images.example.org/good').format == 'raw'
            assert set(connects) == {f'images.example.org:443 Basic {b64encode(b"ann:s@cret").decode()}'}
            assert set(web.requests) == {'good', 'SHA256SUMS'}
            reason = fetch_refusal(make_cache(tmp_path, reach), 'https://other.example.org/good')
            assert 'Hostname mismatch' in reason
        finally:
            proxy.shutdown()


def relay(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def test_sources_are_checked_by_name_behind_a_proxy(
    web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test's server is the proxy, which gets whole URLs."""
    requested_urls: list[str] = []

    def proxied(handler: Handler) -> None:
        requested_urls.append(handler.path)
        handler.send_body(b'' if handler.path.endswith('SHA256SUMS') else BOOT_DISK)

    monkeypatch.setattr(Handler, 'do_GET', proxied)
    only = EgressPolicy(
        parse_image_sources(['images.example.org', '10.0.0.0/8']), web.url.rstrip('/'), (('ds1', 2379),)
    )
    for url in ('http://images.example.org/x', 'http://10.1.2.3/x'):
        assert get_base(make_cache(tmp_path, only), url).format == 'raw'
        assert requested_urls == [url, url.replace('/x', '/SHA256SUMS')]
        requested_urls.clear()
    for host, expected in [
        ('other.example.org', 'not in the `image_sources:` of this compute'),
        ('127.0.0.1', 'a loopback address'),
        ('127.1', 'a loopback address'),
        ('[::1]', 'a loopback address'),
        ('192.168.1.1', 'not in the `image_sources:` of this compute'),
        ('169.254.169.254', 'a link-local address'),
    ]:
        assert expected in fetch_refusal(make_cache(tmp_path, only), f'http://{host}/x')
    any_name = EgressPolicy(None, web.url.rstrip('/'), (('ds1', 2379),))
    assert 'a loopback address' in fetch_refusal(make_cache(tmp_path, any_name), 'http://localhost/x')
    assert 'etcd or placement' in fetch_refusal(make_cache(tmp_path, any_name), 'http://ds1:2379/x')
    assert 'a link-local address' in fetch_refusal(make_cache(tmp_path, any_name), 'http://169.254.169.254./x')
    for host in ('[fe80::1%25eth0]', 'images.example.org%2f'):
        assert 'not the address of a host' in fetch_refusal(make_cache(tmp_path, any_name), f'http://{host}/x')
    assert requested_urls == []
    assert get_base(make_cache(tmp_path, any_name), 'http://unknown.example.org/y').format == 'raw'


# Hostile images: inspecting one has limits, and errors show none of its content. Bad answers of servers are in
# functional/test_images.py, scenarios with hostile images in faults/test_images.py.


needs_qemu_img = pytest.mark.skipif(shutil.which('qemu-img') is None, reason='qemu-img (qemu-utils) is not installed')


def do_nothing() -> None:
    """A checkpoint that does not cancel."""


def assert_refused(image: Path, words: str) -> None:
    with pytest.raises(BuildFailed, match=words):
        inspection.inspect(image, do_nothing)


def list_inspectors() -> list[int]:
    pids = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if inspection.__name__ in child.cmdline():
                pids.append(child.pid)
    return pids


def to_big_endian(entries: array[int]) -> bytes:
    if sys.byteorder == 'little':
        entries.byteswap()
    return entries.tobytes()


def make_qcow2(path: Path, bits: int, tables: array[int], length: int) -> Path:
    """Write a qcow2 of `length` bytes and clusters of 2^bits bytes with these L2 tables."""
    cluster = 1 << bits
    size = len(tables) * (cluster // 8) * cluster
    header = (b'QFI\xfb', 3, 0, 0, bits, min(size, 2**62), 0, len(tables), cluster, 0, 1, 0, 0, 0, 0, 0, 4, 104)
    with path.open('wb') as file:
        file.write(struct.pack('>4sIQIIQIIQQIIQQQQII', *header))
        file.seek(cluster)
        file.write(to_big_endian(tables))
        file.truncate(length)
    return path


@needs_qemu_img
@pytest.mark.parametrize('which', ['L1', 'L2', 'refcount'])
def test_unaligned_table_is_refused_as_by_qemu(which: str, tmp_path: Path) -> None:
    raw, path = tmp_path / 'raw', tmp_path / 'x.qcow2'
    raw.write_bytes(BOOT_DISK + os.urandom(MIB))
    subprocess.run(['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(path)], check=True)
    assert inspection.inspect(path, do_nothing).format == 'qcow2'
    os.truncate(path, path.stat().st_size + 2 * MIB)
    with path.open('r+b') as file:
        file.seek(40)
        l1, _ = struct.unpack('>QQ', file.read(16))
        position = {'L1': 40, 'L2': l1, 'refcount': 48}[which]
        file.seek(position)
        (offset,) = struct.unpack('>Q', file.read(8))
        file.seek(position)
        file.write(struct.pack('>Q', offset + 512))
    assert_refused(path, 'a table that does not begin at a cluster')
    assert subprocess.run(['qemu-img', 'check', '-q', str(path)], capture_output=True, check=False).returncode


def test_overlapping_tables_are_refused_quickly(tmp_path: Path) -> None:
    """Inspecting 20,480 overlapping tables of 2 MiB in 16 MiB once took nine minutes."""
    tables = array('Q', (4 * MIB + 512 * number for number in range(20480)))
    path = make_qcow2(tmp_path / 'x', 21, tables, 16 * MIB)
    started = time.process_time()
    assert_refused(path, 'a table that does not begin at a cluster')
    assert time.process_time() - started < SLOWDOWN_FACTOR


def make_empty_qcow2(path: Path, *options: str) -> Path:
    subprocess.run(['qemu-img', 'create', '-q', '-f', 'qcow2', *options, str(path), '128G'], check=True)
    return path


@needs_qemu_img
def test_image_that_needs_too_much_qemu_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """QEMU's largest table, 32 MiB, is within the default limit."""
    image = make_empty_qcow2(tmp_path / 'x', '-o', 'cluster_size=512')
    assert inspection.inspect(image, do_nothing).virtual_size == 128 * 2**30
    monkeypatch.setattr(inspection, 'MAX_QEMU_DATA_BYTES', 40 * MIB)
    assert_refused(image, r'needs more than 40 MiB to open it\. Fix: qemu-img convert')


@needs_qemu_img
def test_image_that_qemu_itself_refuses_is_refused(tmp_path: Path) -> None:
    image = make_empty_qcow2(tmp_path / 'x')
    with image.open('r+b') as file:
        file.seek(96)
        file.write(struct.pack('>I', 7))  # reference counts of 128 bits; QEMU supports 64
    assert_refused(image, 'QEMU cannot open the image')


def test_qcow2_is_refused_without_qemu_img(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = make_qcow2(tmp_path / 'x', 16, array('Q', [0]), MIB)
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(EcompError, match=r'qemu-img is not installed here\. Fix: install qemu-utils'):
        inspection.inspect(image, do_nothing)


def make_slow_image(directory: Path) -> Path:
    """Make a sparse file of 4 GiB of tables, each at a cluster, which take a minute to inspect."""
    tables = array('Q', (2 * MIB * number for number in range(3, 2000)))
    return make_qcow2(directory / 'slow', 21, tables, 4 * 2**30)


def test_image_inspection_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, 'MAX_SECONDS', 1)
    assert_refused(make_slow_image(tmp_path), 'the inspection of the image takes more than 1 s: the image is refused')
    assert list_inspectors() == []


def test_image_inspection_has_a_processor_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inspecting process uses its own limit up, however long that takes on a busy machine."""
    monkeypatch.setattr(inspection, '_make_timeout_error', lambda: BuildFailed('image', 'by its processor time'))
    monkeypatch.setattr(inspection, 'time', SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(inspection, 'MAX_SECONDS', 1)
    assert_refused(make_slow_image(tmp_path), 'by its processor time')


def test_image_inspection_has_a_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four million separate tables, the most that QEMU would read."""
    path = make_qcow2(tmp_path / 'x', 16, array('Q', range(0, 2**22 * 65536, 65536)), 64 * MIB)
    monkeypatch.setattr(inspection, 'MAX_ADDRESS_SPACE_BYTES', 160 * MIB)
    assert_refused(path, 'the inspection of the image needs more than 160 MiB of memory')
    monkeypatch.undo()
    assert_refused(path, 'cut-off')


@pytest.mark.parametrize('stopped', [Cancelled, KeyboardInterrupt])
def test_destroy_or_signal_ends_image_inspection(
    web: ImageServer, tmp_path: Path, stopped: type[BaseException]
) -> None:
    shelf = tmp_path / 'shelf'
    shelf.mkdir()
    make_slow_image(shelf).rename(shelf / 'slow')
    seen_at: list[float] = []

    def checkpoint() -> None:
        if list_inspectors():
            seen_at.append(time.monotonic())
        if len(seen_at) > 3:
            raise stopped

    cache = ImageCache(
        tmp_path / 'images', lambda _, check: inspection.inspect(hostile, check), None, LIMITS, LOOPBACK_REACH
    )
    hostile = shelf / 'slow'
    with pytest.raises(stopped):
        get_base(cache, web.url + 'good', checkpoint)
    assert time.monotonic() - seen_at[-1] < SLOWDOWN_FACTOR
    assert list_inspectors() == []
    assert list_cached(tmp_path / 'images') == []


@pytest.mark.parametrize(
    'page', [b'TOKEN=hunter2-and-more', b'{"etcdserver":"3.4.23"}', b'QFI\xfb\0\0\0\x03' + b'hunter2-' * 200]
)
def test_refusal_shows_no_content_of_the_image(web: ImageServer, tmp_path: Path, page: bytes) -> None:
    web.image = page
    cache = ImageCache(tmp_path / 'images', inspection.inspect, None, LIMITS, LOOPBACK_REACH)
    with pytest.raises(BuildFailed) as caught:
        get_base(cache, web.url + 'good')
    reason = caught.value.reason
    assert 'image' in reason
    numbers = {str(int.from_bytes(page[i : i + size], 'big')) for size in (4, 8) for i in range(min(len(page), 64))}
    for secret in ('hunter2', 'TOKEN', 'etcdserver', '3.4.23', '68 75 6e', page[:8].hex(' '), *(numbers - {'0', '3'})):
        assert secret not in reason


# A slow download blocks nothing, and leaves nothing in this process once it is cancelled.


def list_children() -> list[psutil.Process]:
    return psutil.Process().children()


def send_endless_head(handler: Handler) -> None:
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nx: ')
    while not handler.server.may_go_on.wait(0.05):
        handler.wfile.write(b'x')
        handler.wfile.flush()


def send_endless_trailer(handler: Handler) -> None:
    handler.protocol_version = 'HTTP/1.1'
    handler.send_head(transfer_encoding='chunked')
    handler.wfile.write(b'1\r\nx\r\n0\r\n')
    while not handler.server.may_go_on.wait(0.05):
        handler.wfile.write(b'x: y\r\n')
        handler.wfile.flush()


@pytest.mark.parametrize('path', ['head', 'dripping/good', 'drip'])
def test_cancelled_download_leaves_no_process_or_descriptor(
    web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The head, the list of checksums or the image itself arrives slowly."""
    monkeypatch.setattr(Handler, 'answer_head', send_endless_head, raising=False)
    cache = make_cache(tmp_path, LOOPBACK_REACH)
    open_before, children = len(os.listdir('/proc/self/fd')), list_children()

    def cancelled_once_asked() -> None:
        if last in web.requests:
            raise Cancelled

    last = 'dripping/SHA256SUMS' if '/' in path else path
    for _ in range(5):
        web.requests.clear()
        with pytest.raises(Cancelled):
            get_base(cache, web.url + path, cancelled_once_asked)
    assert list_children() == children
    wait_until(lambda: len(os.listdir('/proc/self/fd')) <= open_before, 10, 'nothing stays open')


def test_cancelled_tls_handshake_leaves_no_process(tmp_path: Path) -> None:
    """The server accepts the connection, and sends nothing."""
    checks, children = list[float](), list_children()

    def checkpoint() -> None:
        checks.append(time.monotonic())
        if len(checks) > 2:
            raise Cancelled

    with socket.create_server(('127.0.0.1', 0)) as server, pytest.raises(Cancelled):
        get_base(make_cache(tmp_path, LOOPBACK_REACH), f'https://127.0.0.1:{server.getsockname()[1]}/good', checkpoint)
    assert list_children() == children


def test_cancelled_connection_attempts_leave_nothing(tmp_path: Path, dns_answers: dict[str, list[list[str]]]) -> None:
    """A name may have any number of addresses, each silent for seconds."""
    dns_answers['images.example.org'] = [['127.0.0.1'] * 20]
    started, children = threading.Event(), list_children()

    def checkpoint() -> None:
        if started.wait(0.5):
            raise Cancelled
        started.set()

    with ExitStack() as full:
        server = full.enter_context(socket.create_server(('127.0.0.1', 0), backlog=0))
        for _ in range(4):  # fills the queue: later connections get no answer
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        with pytest.raises(Cancelled):
            get_base(
                make_cache(tmp_path, LOOPBACK_REACH),
                f'http://images.example.org:{server.getsockname()[1]}/x',
                checkpoint,
            )
        assert list_children() == children


@pytest.mark.parametrize(
    ('path', 'message'),
    [
        ('head', 'no answer after 0.5 s'),
        ('dripping/good', 'no SHA256SUMS after 0.5 s'),
        ('drip', r'slower than 64 KiB/s for 0.5 s, [0-9]+ bytes so far'),
        ('trailer', 'no data after 0.5 s'),
    ],
)
def test_slow_answers_time_out(
    web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.setattr(Handler, 'answer_head', send_endless_head, raising=False)
    monkeypatch.setattr(Handler, 'answer_trailer', send_endless_trailer, raising=False)
    monkeypatch.setattr(fetch, 'MAX_ANSWER_SECONDS', 0.5)
    monkeypatch.setattr(fetch, 'SLOW_PERIOD_SECONDS', 0.5)
    assert re.search(message, fetch_refusal(make_cache(tmp_path, LOOPBACK_REACH), web.url + path))
    assert list_cached(tmp_path / 'images') == []
    # A download that is fast enough has no deadline.
    web.image = BOOT_DISK.ljust(MIB, b'\0')
    assert get_base(make_cache(tmp_path, LOOPBACK_REACH), web.url + 'good').virtual_size == MIB


def test_slow_name_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library's resolver has time limits of its own, and cannot be interrupted."""
    monkeypatch.setattr(socket, 'getaddrinfo', lambda *_, **__: time.sleep(60))
    monkeypatch.setattr(fetch, 'MAX_ANSWER_SECONDS', 0.5)
    monkeypatch.setattr(fetch, 'REPORT_SECONDS', 0.1)
    refusal = fetch_refusal(make_cache(tmp_path, LOOPBACK_REACH), 'http://images.example.org/x')
    assert 'does not answer in time' in refusal


@pytest.mark.parametrize('scheme', ['http', 'https'])
def test_endless_answer_about_a_cached_image_keeps_no_thread(
    web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, scheme: str
) -> None:
    url = f'http://127.0.0.1:{get_port(web.url)}/good'
    if scheme == 'https':
        request.getfixturevalue('tls_context')
        request.getfixturevalue('dns_answers')['images.example.org'] = [['127.0.0.1']]
        url = f'https://images.example.org:{get_port(web.url)}/good'
    first = get_base(make_cache(tmp_path, LOOPBACK_REACH), url)
    monkeypatch.setattr(Handler, 'answer_good', send_endless_head)
    monkeypatch.setattr(cache, 'MAX_CHECK_SECONDS', 0.5)
    assert get_base(make_cache(tmp_path, LOOPBACK_REACH), url) == first
    wait_until(lambda: 'question' not in [thread.name for thread in threading.enumerate()], 5, 'its thread ends')


def test_cached_image_is_used_if_the_newer_one_is_slow(
    web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, 'SLOW_PERIOD_SECONDS', 0.5)
    first = get_base(make_cache(tmp_path, LOOPBACK_REACH), web.url + 'good')
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_drip)
    assert get_base(make_cache(tmp_path, LOOPBACK_REACH), web.url + 'good') == first
