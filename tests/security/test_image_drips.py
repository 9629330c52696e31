"""An image that comes by drips holds nobody up, and leaves nothing behind in this process once it is given up."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ecomp.agent.images import download
from ecomp.agent.instance.build import Cancelled
from tests.kit.image_server import Handler, Web
from tests.kit.images import LOOPBACK, MIB, get, kept
from tests.kit.servers import until
from tests.security.image_servers import BOOT, everywhere, refusal


def drip_of_a_head(handler: Handler) -> None:
    """An answer whose head has no end."""
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nx: ')
    while not handler.server.may_go_on.wait(0.05):
        handler.wfile.write(b'x')
        handler.wfile.flush()


@pytest.mark.parametrize('path', ['head', 'dripping/good', 'drip'])
def test_a_download_that_is_given_up_leaves_no_thread_and_no_descriptor(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Whether its head, the list of checksums beside it or the image itself drips."""
    monkeypatch.setattr(Handler, 'answer_head', drip_of_a_head, raising=False)
    cache = everywhere(tmp_path, LOOPBACK)
    open_before = len(os.listdir('/proc/self/fd'))

    def cancelled_once_asked() -> None:
        if last in web.asked:
            raise Cancelled

    last = 'dripping/SHA256SUMS' if '/' in path else path
    for _ in range(5):
        web.asked.clear()
        with pytest.raises(Cancelled):
            get(cache, web.url + path, cancelled_once_asked)
    until(lambda: not [each for each in threading.enumerate() if each.name == 'download'], 10, 'its threads end')
    until(lambda: len(os.listdir('/proc/self/fd')) <= open_before, 10, 'nothing stays open')


def test_nor_does_one_in_the_middle_of_a_handshake(tmp_path: Path) -> None:
    """Of a server that takes the connection, and says nothing."""
    asked: list[float] = []

    def checkpoint() -> None:
        asked.append(time.monotonic())
        if len(asked) > 2:
            raise Cancelled

    with socket.create_server(('127.0.0.1', 0)) as server, pytest.raises(Cancelled):
        get(everywhere(tmp_path, LOOPBACK), f'https://127.0.0.1:{server.getsockname()[1]}/good', checkpoint)
    until(lambda: not [each for each in threading.enumerate() if each.name == 'download'], 3, 'its thread ends')


def test_nor_does_one_that_tries_one_address_after_another(tmp_path: Path, names: dict[str, list[list[str]]]) -> None:
    """A name may have any number of them, and each may be silent for seconds."""
    names['images.example.org'] = [['127.0.0.1'] * 20]
    began = threading.Event()

    def checkpoint() -> None:
        if began.wait(0.5):
            raise Cancelled
        began.set()

    with ExitStack() as full:
        server = full.enter_context(socket.create_server(('127.0.0.1', 0), backlog=0))
        for _ in range(4):  # from then on nobody is answered
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        with pytest.raises(Cancelled):
            get(everywhere(tmp_path, LOOPBACK), f'http://images.example.org:{server.getsockname()[1]}/x', checkpoint)
        until(lambda: not [each for each in threading.enumerate() if each.name == 'download'], 4, 'its thread ends')


@pytest.mark.parametrize(
    ('path', 'said'),
    [
        ('head', 'no answer after 0.5 s'),
        ('dripping/good', 'no SHA256SUMS after 0.5 s'),
        ('drip', r'less than 64 KiB/s for 0.5 s, [0-9]+ bytes so far'),
    ],
)
def test_a_drip_has_an_end(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str
) -> None:
    monkeypatch.setattr(Handler, 'answer_head', drip_of_a_head, raising=False)
    monkeypatch.setattr(download, 'ANSWER', 0.5)
    monkeypatch.setattr(download, 'SPELL', 0.5)
    assert re.search(said, refusal(everywhere(tmp_path, LOOPBACK), web.url + path))
    assert kept(tmp_path / 'images') == []
    # What is fast enough is not in a hurry.
    web.image = BOOT.ljust(MIB, b'\0')
    assert get(everywhere(tmp_path, LOOPBACK), web.url + 'good').virtual_size == MIB


def test_what_is_cached_is_used_where_a_newer_one_drips(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, 'SPELL', 0.5)
    first = get(everywhere(tmp_path, LOOPBACK), web.url + 'good')
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_drip)
    assert get(everywhere(tmp_path, LOOPBACK), web.url + 'good') == first
