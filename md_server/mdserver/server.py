"""The metadata server: bottle on waitress. `make_app(config)` is all of it; `main` starts it.

Started as `mdserver [CONF]`, as `python -m mdserver.server`, or straight from the tree as
`sudo python md_server/mdserver/server.py mdserver.conf`. Ends with exit 0 at SIGINT, SIGTERM or, with --with-parent, at
the end of its standard input; exit 1 when it cannot listen, 2 when it is told something wrong. With --user it is root
until it listens and that user before it reads what anybody sends; what only root may open its monitor opens.

waitress rather than bottle's own wsgiref: that serves one client at a time, and threads on top of it are one for each
client that says nothing. waitress reads a request whole in its one loop, with limits, before a thread is given to it.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import io
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import quote

if not __package__:
    # Started as a script: the package is this file's directory, found from the one above it. The directory itself
    # has to go from the path, or `import conf` anywhere would find ours.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import bottle

from mdserver import __version__, conf, guests, limits, metadata
from mdserver.files import Files
from mdserver.monitor import Ids, Monitor, drop_rights, find_user

log = logging.getLogger('mdserver')

INSTANCE = 'mdserver.instance'
WHY = 'mdserver.why'

LATE = ('idna', 'ascii')  # Python imports these when first used, maybe from where root alone can read
METADATA_ADDRESS = '169.254.169.254'
ADDRESS = re.compile(r'([0-9.]+|\[[0-9a-fA-F:.]+\])(:[0-9]+)?')
PROXIES = ('HTTP_X_FORWARDED', 'HTTP_FORWARDED', 'HTTP_VIA', 'HTTP_X_REAL_IP')  # how the headers that they add begin
THREADS = 4
HEADER_LIMIT = 8192  # bytes; more is refused
BODY_LIMIT = 4096  # bytes, more is refused; a guest has its host keys to say, and what went wrong
CONNECTIONS = 500  # of all clients together, further ones wait; what one may have is in limits


class App(bottle.Bottle):  # type: ignore[misc]
    """bottle with errors in one plain line, and a line in the log for each request (--verbose).

    Of one address that is LINES a second, and FIRST_LINES at once; for further requests there is no line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = limits.FairShares(limits.LINES, limits.FIRST_LINES)

    def may_say(self, address: str) -> bool:
        """Whether another line about this address may go into the log now."""
        return self._lines.allows(address, time.monotonic())

    def default_error_handler(self, res: bottle.HTTPError) -> str:
        bottle.response.content_type = 'text/plain; charset=utf-8'
        return f'{res.status_line}: {res.body}\n'

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def logged(status: str, *rest: Any) -> Any:
            client = environ['REMOTE_ADDR']
            if self.may_say(client):
                # Quoted: a path is the client's own words and must stay within its line.
                asked = f'{quote(environ["REQUEST_METHOD"])[:10]} {quote(environ["PATH_INFO"], "/=:")[:200]}'
                guest = f'instance={environ.get(INSTANCE, "-")}{environ.get(WHY, "")}'
                log.debug('%s %s client=%s %s', asked, status[:3], client, guest)
            return start_response(status, *rest)

        return super().wsgi(environ, logged)  # type: ignore[no-any-return]


def make_app(files: Files) -> bottle.Bottle:
    """The WSGI application. It knows a client by REMOTE_ADDR, and by nothing that the client sends."""
    app = App()

    def asking() -> tuple[str, guests.Guest]:
        """The MAC of the guest that asks, and what it is told; raises HTTPError."""
        environ = bottle.request.environ
        address = environ['REMOTE_ADDR']
        try:
            mac = files.leased_to(address, time.time())
            guest = files.filled_in(files.guest(mac), address)
        except guests.Unknown as error:
            environ[WHY] = f' ({error}: {error.detail})'
            if isinstance(error, guests.Forged) and app.may_say(address):
                log.warning('REFUSED %s: %s: %s', address, error, error.detail)
            refusal = bottle.HTTPError(404, f'{error}')
        except (guests.Broken, OSError, ValueError) as error:
            log.error('client=%s: %s', address, error)
            refusal = bottle.HTTPError(500, 'what is known of this guest cannot be read: see the log of mdserver')
        else:
            environ[INSTANCE] = guest.instance
            with suppress(OSError):  # it is answered although the file system is read-only
                files.note_answer([mac])
            return mac, guest
        with suppress(guests.Broken, OSError):
            files.note_answer(files.find_macs(address), refusal.body)
        raise refusal

    def serve(path: str = '') -> bottle.HTTPResponse:
        _check_headers()
        if not path.strip('/'):
            return _plain(metadata.versions())
        body = metadata.answer(path, asking()[1])
        return bottle.HTTPError(404, 'no such data') if body is None else _plain(body)

    def hear(instance: str) -> bottle.HTTPResponse:
        _check_headers()
        mac, guest = asking()
        if guest.instance != instance:
            return bottle.HTTPError(404, 'no such data')
        try:
            said = metadata.word(bottle.request.body.read(BODY_LIMIT))
        except ValueError:
            return bottle.HTTPError(400, f'a form of at most {metadata.FIELDS} fields, please')
        try:
            files.note_ready(mac, instance, said)
        except FileNotFoundError:
            return bottle.HTTPError(404, 'no such data')  # it was removed meanwhile
        except OSError as error:
            log.error('instance %s is ready, and that cannot be noted: %s', instance, error)
            return bottle.HTTPError(500, 'that cannot be noted: see the log of mdserver')
        return _plain(b'ok')

    app.route(['/phone-home/<instance>', '/phone-home/<instance>/'], 'POST', hear)
    app.route(['/', '/<path:path>'], 'GET', serve)
    return app


def _check_headers() -> None:
    environ = bottle.request.environ
    # A proxy inside a guest must not fetch that guest's data for whoever asks the proxy.
    if any(name.startswith(PROXIES) for name in environ):
        raise bottle.HTTPError(403, 'not through a proxy')
    # A malicious page in a guest's browser is of the same origin by a name of its own that leads here (DNS rebinding).
    if not ADDRESS.fullmatch(environ.get('HTTP_HOST', METADATA_ADDRESS)):
        raise bottle.HTTPError(421, f'not by a name: ask {METADATA_ADDRESS}')


def _plain(body: bytes) -> bottle.HTTPResponse:
    # No charset: user-data may be anything.
    return bottle.HTTPResponse(body, 200, {'Content-Type': 'text/plain'})


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OSError, whose str() says what, where and what to do."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
        # Here, not by waitress: of two that bound, only listening tells the second that it is late.
        sock.listen(CONNECTIONS)
    except OSError as error:
        sock.close()
        advice = {
            errno.EADDRNOTAVAIL: f'no interface here has that address: ip addr add {address}/32 dev virbr0',
            errno.EADDRINUSE: 'something listens there already, another mdserver perhaps: end it or take another port',
            errno.EACCES: 'ports below 1024 are root\'s: start it with sudo',
        }.get(error.errno or 0, error.strerror)
        raise OSError(f'cannot listen on {address}:{port}: {advice}') from error
    return sock


def may_ask(address: str, bridge: str | None, config: conf.Config, files: Files) -> bool:
    """Whether this address may ask: this machine's own, and guests' on `bridge`. None: any address may.

    The host answers for 169.254.169.254 on all its interfaces, so clients on its LAN get as far as this. Not done with
    SO_BINDTODEVICE: a network that is started again has another bridge of the same name.
    """
    if bridge is None or address == config.listen_address or address.startswith('127.'):
        return True
    try:
        return files.is_on(bridge, address) or files.has_lease(address, time.time())
    except (OSError, guests.Broken):
        return False  # its monitor is gone, and so is it in a moment


def end_with_parent() -> None:
    """Wait until standard input ends, then end this process as SIGTERM does."""
    with suppress(OSError):  # closed from the start: no parent holds it
        while os.read(0, 4096):
            pass
    # To the main thread, whose poll it has to interrupt.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _end(_signal: int, _frame: FrameType | None) -> None:
    # A monitor that ends from now on does as it should.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raise SystemExit(0)


def _become(name: str, ids: Ids) -> None:
    for encoding in LATE:
        codecs.lookup(encoding)
    try:
        drop_rights(ids)
    except OSError as error:
        advice = 'it needs CAP_SETUID and CAP_SETGID, and must not keep any capability'
        raise OSError(f'--user {name}: cannot become that user: {error.strerror}: {advice}') from error


def _user(name: str) -> Ids:
    """The numbers of the user that --user names. Raises ConfError."""
    try:
        ids = find_user(name)
    except ValueError as error:
        raise conf.ConfError(f'--user: {error}') from error
    if os.geteuid() != 0:
        raise conf.ConfError('--user: only root can become another user: start it with sudo, or leave --user out')
    return ids


def _configure(arguments: argparse.Namespace) -> conf.Config:
    config = conf.load(arguments.conf)
    if arguments.guests is not None:
        config = replace(config, guests=arguments.guests)
    if arguments.listen is not None:
        try:
            address, port = conf.address_port(arguments.listen, config.port)
        except ValueError as error:
            raise conf.ConfError(f'--listen: {error}') from error
        config = replace(config, listen_address=address, port=port)
    return config


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line as those of ecomp's commands are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'mdserver: {message}; --help shows all\n')

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not sys.stdout:
            super()._print_message(message, file)
        else:  # argparse's own passes over a full disk, or leaves it to Python's end, which is exit 120
            print(message, end='', flush=True)


class _OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123+01:00 INFO 4711 message`, as ecompute has it, in whose log this may be."""

    def __init__(self) -> None:
        super().__init__('%(asctime)s %(levelname)s %(process)d %(message)s')

    def formatTime(self, record: logging.LogRecord, _datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec='milliseconds')


def parser() -> argparse.ArgumentParser:
    """What mdserver may be told."""
    made = _Parser(prog='mdserver', description='Metadata for the guests on this host.')
    made.add_argument('conf', nargs='?', type=Path, metavar='CONF', help='mdserver.conf; without one, the defaults')
    made.add_argument('--listen', metavar='ADDRESS[:PORT]', help="instead of the file's (169.254.169.254:80)")
    made.add_argument('--guests', metavar='DIR', type=Path, help='the files of guests (/var/lib/ecompute/metadata)')
    made.add_argument('--bridge', metavar='NAME', help='answer nobody but this host, and leases on this bridge')
    made.add_argument('--user', metavar='NAME', help='once it listens, be this user (a name or a number), not root')
    made.add_argument('--with-parent', action='store_true', help='end when standard input ends')
    made.add_argument('--verbose', action='store_true', help='log each request too, not only what is wrong')
    unit = 'print the systemd unit that runs it beside ecompute, with CONF alone if given, and end'
    made.add_argument('--unit', action='store_true', help=unit)
    made.add_argument('--version', action='version', version=f'mdserver {__version__}')
    return made


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal, or the end of standard input with --with-parent; the exit code."""
    try:
        command = parser()
        arguments = command.parse_args(argv)
        if arguments.unit:
            if {**vars(arguments), 'unit': False, 'conf': None} != vars(command.parse_args([])):
                command.error('--unit goes with CONF alone: `guests` goes there, the rest by systemctl edit mdserver')
            _put(unit(arguments.conf, sys.argv[0]))
            return 0
    except OSError as error:
        return _unsaid(error)
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    log.setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    # First of all, so that no moment is left in which a signal ends it with another exit code.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    orphaned: list[int] = []

    def on_orphaned(number: int, _frame: FrameType | None) -> None:
        orphaned.append(number)
        raise SystemExit(1)

    with ExitStack() as at_exit:
        try:
            config = _configure(arguments)
            files = Files(config)
            if arguments.user is not None:
                ids = _user(arguments.user)
                signal.signal(signal.SIGCHLD, on_orphaned)
                # Before there is a socket, which is none of its business.
                monitor = Monitor(config)
                at_exit.callback(monitor.close)
                at_exit.callback(signal.signal, signal.SIGCHLD, signal.SIG_DFL)
                files = Files(config, monitor.ask)
            sock = at_exit.enter_context(listen(config.listen_address, config.port))
            if arguments.user is not None:
                _become(arguments.user, ids)
        except (conf.ConfError, OSError) as error:
            print(f'mdserver: {error}', file=sys.stderr)
            return 2 if isinstance(error, conf.ConfError) else 1
        _serve(arguments, config, files, sock)
    if orphaned:
        log.error('ENDED: its monitor, which opened its files for it, is gone')
        return 1
    log.info('ENDED')
    return 0


def _put(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What systemd reads is UTF-8, whatever the terminal's encoding is.
        sys.stdout.reconfigure(encoding='utf-8', errors='surrogateescape')
    print(text, end='', flush=True)


def _unsaid(error: OSError) -> int:
    """Say why nothing could be printed, unless whoever read us has gone; the exit code."""
    # Else Python would try once more at its end, and complain.
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with suppress(OSError):
        if not isinstance(error, BrokenPipeError):
            print(f'mdserver: {error.filename or "failed"}: {error.strerror or error}', file=sys.stderr, flush=True)
    return 1


def _serve(arguments: argparse.Namespace, config: conf.Config, files: Files, sock: socket.socket) -> None:
    server = limits.Server(
        make_app(files), sock, lambda address: may_ask(address, arguments.bridge, config, files),
        ident=f'mdserver/{__version__}', threads=THREADS,
        max_request_header_size=HEADER_LIMIT, max_request_body_size=BODY_LIMIT, connection_limit=CONNECTIONS,
        # Otherwise waitress removes X-Forwarded-For, and what is removed cannot be refused.
        clear_untrusted_proxy_headers=False,
        asyncore_use_poll=True,
    )
    log.info('LISTENING ON http://%s:%d/ GUESTS IN %s AS UID %d', *sock.getsockname(), config.guests, os.geteuid())
    notify('READY=1')
    if arguments.with_parent:
        threading.Thread(target=end_with_parent, daemon=True).start()
    server.run()


def notify(state: str) -> None:
    """Tell systemd, if it has started this process as a service: sd_notify(3)."""
    if path := os.environ.get('NOTIFY_SOCKET'):
        # It acts by itself where it hears nothing.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as said:
            said.settimeout(5)
            said.sendto(state.encode(), path.replace('@', '\0', 1) if path.startswith('@') else path)


def unit(conf_file: Path | None, program: str) -> str:
    """The unit that --unit prints, for mdserver as this `program`."""
    interpreter = [] if os.access(program, os.X_OK) else [sys.executable]
    words = [*interpreter, os.path.abspath(program), *([str(conf_file.absolute())] if conf_file else [])]
    first, *others = ('"' + re.sub(r'(["\\])', r'\\\1', each).replace('%', '%%') + '"' for each in words)
    said = ' '.join([first, *(each.replace('$', '$$') for each in others)])  # systemd.service(5) on command lines
    return Path(__file__).with_name('mdserver.service').read_text(encoding='utf-8').replace('@words@', said)


if __name__ == '__main__':
    sys.exit(main())
