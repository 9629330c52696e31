"""The metadata server: bottle on waitress."""

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
    # Started as a script: put the package's parent in place of this directory, where any `import conf` would find ours.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import bottle

from mdserver import __version__, conf, guests, limits, metadata
from mdserver.files import Files
from mdserver.monitor import Monitor, UserIds, drop_privileges, find_user

log = logging.getLogger('mdserver')

INSTANCE_KEY = 'mdserver.instance'
REASON_KEY = 'mdserver.why'

LATE_ENCODINGS = ('idna', 'ascii')  # encodings that Python imports at first use, perhaps from where only root can read
METADATA_ADDRESS = '169.254.169.254'
HOST_HEADER_PATTERN = re.compile(r'([0-9.]+|\[[0-9a-fA-F:.]+\])(:[0-9]+)?')
PROXY_HEADER_PREFIXES = ('HTTP_X_FORWARDED', 'HTTP_FORWARDED', 'HTTP_VIA', 'HTTP_X_REAL_IP')
THREADS = 4
MAX_HEADER_BYTES = 8192  # bytes; more is refused
MAX_BODY_BYTES = 4096  # bytes; more is refused. A guest posts its host keys and errors
MAX_CONNECTIONS = 500  # of all clients together, further ones wait; limits has those of one client


class App(bottle.Bottle):  # type: ignore[misc]
    """The WSGI application, which identifies a client by REMOTE_ADDR only."""

    def __init__(self, files: Files) -> None:
        super().__init__()
        self._files = files
        self.route(['/phone-home/<instance>', '/phone-home/<instance>/'], 'POST', self._receive_report)
        self.route(['/', '/<path:path>'], 'GET', self._serve_data)
        self._log_limiter = limits.RateLimiter(limits.LOG_LINES_PER_SECOND, limits.LOG_LINE_BURST)

    def default_error_handler(self, res: bottle.HTTPError) -> str:
        bottle.response.content_type = 'text/plain; charset=utf-8'
        return f'{res.status_line}: {res.body}\n'

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def log_and_start(status: str, *rest: Any) -> Any:
            client = environ['REMOTE_ADDR']
            if self._log_limiter.try_acquire(client, time.monotonic()):
                # Quoted: the client chooses the path, which must not break the log line.
                request_line = f'{quote(environ["REQUEST_METHOD"])[:10]} {quote(environ["PATH_INFO"], "/=:")[:200]}'
                guest = f'instance={environ.get(INSTANCE_KEY, "-")}{environ.get(REASON_KEY, "")}'
                log.debug('%s %s client=%s %s', request_line, status[:3], client, guest)
            return start_response(status, *rest)

        return super().wsgi(environ, log_and_start)  # type: ignore[no-any-return]

    def _identify_guest(self) -> tuple[str, guests.KnownGuest]:
        """Return the client's MAC and guest, or store the refusal and raise HTTPError."""
        environ = bottle.request.environ
        address = environ['REMOTE_ADDR']
        try:
            mac = self._files.find_leased_mac(address, time.time())
            guest = self._files.fill_in_defaults(self._files.read_guest(mac), address)
        except guests.UnknownGuestError as error:
            environ[REASON_KEY] = f' ({error}: {error.detail})'
            is_forged = isinstance(error, guests.ForgedAddressError)
            if is_forged and self._log_limiter.try_acquire(address, time.monotonic()):
                log.warning('REFUSED %s: %s: %s', address, error, error.detail)
            refusal = bottle.HTTPError(404, f'{error}')
        except (guests.BrokenFileError, OSError, ValueError) as error:
            log.error('client=%s: %s', address, error)
            refusal = bottle.HTTPError(500, 'the data of this guest cannot be read: see the log of mdserver')
        else:
            environ[INSTANCE_KEY] = guest.instance
            with suppress(OSError):  # answer even if the file system is read-only
                self._files.note_answer([mac])
            return mac, guest
        with suppress(guests.BrokenFileError, OSError):
            self._files.note_answer(self._files.find_macs(address), refusal.body)
        raise refusal

    def _serve_data(self, path: str = '') -> bottle.HTTPResponse:
        _require_direct()
        if not path.strip('/'):
            return _make_response(metadata.make_version_list())
        body = metadata.find_body(path, self._identify_guest()[1])
        return bottle.HTTPError(404, 'no such data') if body is None else _make_response(body)

    def _receive_report(self, instance: str) -> bottle.HTTPResponse:
        _require_direct()
        mac, guest = self._identify_guest()
        if guest.instance != instance:
            return bottle.HTTPError(404, 'no such data')
        try:
            report = metadata.parse_report(bottle.request.body.read(MAX_BODY_BYTES))
        except ValueError:
            return bottle.HTTPError(400, f'the form has more than {metadata.MAX_FORM_FIELDS} fields')
        try:
            self._files.note_ready(mac, instance, report)
        except FileNotFoundError:
            return bottle.HTTPError(404, 'no such data')  # removed concurrently
        except OSError as error:
            log.error('cannot store the ready report of instance %s: %s', instance, error)
            return bottle.HTTPError(500, 'the report cannot be stored: see the log of mdserver')
        return _make_response(b'ok')


def _require_direct() -> None:
    """Raise HTTPError if the request comes through a proxy, or its Host is a name."""
    environ = bottle.request.environ
    # A proxy inside a guest must not fetch that guest's data for the proxy's clients.
    if any(name.startswith(PROXY_HEADER_PREFIXES) for name in environ):
        raise bottle.HTTPError(403, 'requests through a proxy are refused')
    # DNS rebinding: a malicious web page in a guest becomes same-origin by a host name that resolves to this server.
    if not HOST_HEADER_PATTERN.fullmatch(environ.get('HTTP_HOST', METADATA_ADDRESS)):
        raise bottle.HTTPError(421, f'host names are not accepted. Fix: use {METADATA_ADDRESS}')


def _make_response(body: bytes) -> bottle.HTTPResponse:
    return bottle.HTTPResponse(body, 200, {'Content-Type': 'text/plain'})


def listen(address: str, port: int) -> socket.socket:
    """Open a listening socket, or raise OSError with advice in its text."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
        # Listen here, not in waitress: two processes can bind, and only the second one's listen() fails.
        sock.listen(MAX_CONNECTIONS)
    except OSError as error:
        sock.close()
        advice = {
            errno.EADDRNOTAVAIL: f'no interface has this address. Fix: ip addr add {address}/32 dev virbr0',
            errno.EADDRINUSE: 'another process listens there, perhaps an mdserver. Fix: end it or use another port',
            errno.EACCES: 'ports below 1024 need root. Fix: start mdserver with sudo',
        }.get(error.errno or 0, error.strerror)
        raise OSError(f'cannot listen on {address}:{port}: {advice}') from error
    return sock


def is_allowed(address: str, bridge: str | None, config: conf.Config, files: Files) -> bool:
    """Return whether a client may ask: if local, on `bridge` (None: any) or with a lease."""
    # The host answers for 169.254.169.254 on all interfaces, so clients on its LAN get this far. SO_BINDTODEVICE would
    # not work: a restarted network has a new bridge of the same name.
    if bridge is None or address == config.listen_address or address.startswith('127.'):
        return True
    try:
        return files.is_on_bridge(bridge, address) or files.has_lease(address, time.time())
    except (OSError, guests.BrokenFileError):
        return False  # the monitor is gone, so this process is about to end


def end_with_parent() -> None:
    """Wait until standard input ends, then send SIGTERM to this process."""
    with suppress(OSError):  # it was closed from the start: there is no parent
        while os.read(0, 4096):
            pass
    # To the main thread, to interrupt its poll.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _exit(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raise SystemExit(0)


def _switch_user(name: str, ids: UserIds) -> None:
    for encoding in LATE_ENCODINGS:
        codecs.lookup(encoding)
    try:
        drop_privileges(ids)
    except OSError as error:
        why = 'mdserver must start with CAP_SETUID and CAP_SETGID, and lose all capabilities when it changes its user'
        raise OSError(f'--user {name}: cannot become this user: {error.strerror}: {why}') from error


def _resolve_user(name: str) -> UserIds:
    try:
        ids = find_user(name)
    except ValueError as error:
        raise conf.ConfError(f'--user: {error}') from error
    if os.geteuid() != 0:
        raise conf.ConfError('--user: only root can become another user. Fix: start mdserver with sudo, or omit --user')
    return ids


def _load_config(arguments: argparse.Namespace) -> conf.Config:
    config = conf.load(arguments.conf)
    if arguments.guests is not None:
        config = replace(config, guests=arguments.guests)
    if arguments.listen is not None:
        try:
            address, port = conf.parse_ipv4_endpoint(arguments.listen, config.port)
        except ValueError as error:
            raise conf.ConfError(f'--listen: {error}') from error
        config = replace(config, listen_address=address, port=port)
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f'mdserver: {message}. Try: --help\n')

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not sys.stdout:
            super()._print_message(message, file)
        else:  # argparse's method ignores a full disk, or leaves it to Python's shutdown: exit 120
            print(message, end='', flush=True)


class _OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123+01:00 INFO 4711 message`, as in ecompute, whose log may get it."""

    def __init__(self) -> None:
        super().__init__('%(levelname)s %(process)d %(message)s')

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec='milliseconds')
        return f'{when} {super().format(record)}'


def make_parser() -> argparse.ArgumentParser:
    cli = _Parser(prog='mdserver', description='Serve metadata to the guests on this host.')
    cli.add_argument('conf', nargs='?', type=Path, metavar='CONF', help='mdserver.conf. Default: built-in values')
    listen_help = 'address to listen on. Default: that of CONF, or 169.254.169.254:80'
    cli.add_argument('--listen', metavar='ADDRESS[:PORT]', help=listen_help)
    guests_help = "directory of ecompute's metadata files. Default: that of CONF, or /var/lib/ecompute/metadata"
    cli.add_argument('--guests', metavar='DIR', type=Path, help=guests_help)
    bridge_help = 'answer only this host, guests on this bridge, and holders of DHCP leases'
    cli.add_argument('--bridge', metavar='NAME', help=bridge_help)
    cli.add_argument('--user', metavar='NAME', help='once the port is open, run as this user (a name or a number)')
    cli.add_argument('--with-parent', action='store_true', help='exit when standard input ends')
    cli.add_argument('--verbose', action='store_true', help='also log each request')
    unit_help = 'print the systemd unit that runs mdserver beside ecompute, with CONF if given, and exit'
    cli.add_argument('--unit', action='store_true', help=unit_help)
    cli.add_argument('--version', action='version', version=f'mdserver {__version__}')
    return cli


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal, or with --with-parent the end of stdin, and return the exit code."""
    try:
        command = make_parser()
        arguments = command.parse_args(argv)
        if arguments.unit:
            if {**vars(arguments), 'unit': False, 'conf': None} != vars(command.parse_args([])):
                fix = 'set `guests` in CONF, and other options with `systemctl edit mdserver`'
                command.error(f'--unit accepts only CONF. Fix: {fix}')
            _print_unit(make_unit(arguments.conf, sys.argv[0]))
            return 0
    except OSError as error:
        return _report_output_error(error)
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    log.setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    # Before anything else, so that a signal cannot end it with another exit code.
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    orphaned: list[int] = []

    def on_orphaned(number: int, _frame: FrameType | None) -> None:
        orphaned.append(number)
        raise SystemExit(1)

    with ExitStack() as at_exit:
        try:
            config = _load_config(arguments)
            files = Files(config)
            if arguments.user is not None:
                ids = _resolve_user(arguments.user)
                signal.signal(signal.SIGCHLD, on_orphaned)
                # Before the socket is opened, which the monitor must not inherit.
                monitor = Monitor(config)
                at_exit.callback(monitor.close)
                at_exit.callback(signal.signal, signal.SIGCHLD, signal.SIG_DFL)
                files = Files(config, monitor.ask)
            sock = at_exit.enter_context(listen(config.listen_address, config.port))
            if arguments.user is not None:
                _switch_user(arguments.user, ids)
        except (conf.ConfError, OSError) as error:
            print(f'mdserver: {error}', file=sys.stderr)
            return 2 if isinstance(error, conf.ConfError) else 1
        _serve(arguments, config, files, sock)
    if orphaned:
        log.error('ENDED: the monitor process, which opens the files, has ended')
        return 1
    log.info('ENDED')
    return 0


def _print_unit(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding='utf-8', errors='surrogateescape')
    print(text, end='', flush=True)


def _report_output_error(error: OSError) -> int:
    # Redirect stdout: otherwise Python would retry at its end and print an error.
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with suppress(OSError):
        if not isinstance(error, BrokenPipeError):
            print(f'mdserver: {error.filename or "failed"}: {error.strerror or error}', file=sys.stderr, flush=True)
    return 1


def _serve(arguments: argparse.Namespace, config: conf.Config, files: Files, sock: socket.socket) -> None:
    # bottle's own wsgiref serves one client at a time, and with threads each silent client would hold one. waitress
    # reads each request completely in one loop, with limits, before it uses a thread.
    server = limits.Server(
        App(files),
        sock,
        lambda address: is_allowed(address, arguments.bridge, config, files),
        ident=f'mdserver/{__version__}',
        threads=THREADS,
        max_request_header_size=MAX_HEADER_BYTES,
        max_request_body_size=MAX_BODY_BYTES,
        connection_limit=MAX_CONNECTIONS,
        # Otherwise waitress removes X-Forwarded-For, and we could not refuse it.
        clear_untrusted_proxy_headers=False,
        asyncore_use_poll=True,
    )
    log.info('LISTENING ON http://%s:%d/ GUESTS IN %s AS UID %d', *sock.getsockname(), config.guests, os.geteuid())
    notify_systemd('READY=1')
    if arguments.with_parent:
        threading.Thread(target=end_with_parent, daemon=True).start()
    server.run()


def notify_systemd(state: str) -> None:
    """Send `state` to systemd, as in sd_notify(3), if systemd started this process."""
    if path := os.environ.get('NOTIFY_SOCKET'):
        # After an error systemd times out.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(5)
            channel.sendto(state.encode(), path.replace('@', '\0', 1) if path.startswith('@') else path)


def make_unit(conf_file: Path | None, program: str) -> str:
    interpreter = [] if os.access(program, os.X_OK) else [sys.executable]
    arguments = [*interpreter, os.path.abspath(program), *([str(conf_file.absolute())] if conf_file else [])]
    first, *others = ('"' + re.sub(r'(["\\])', r'\\\1', word).replace('%', '%%') + '"' for word in arguments)
    # Quoted as in systemd.service(5), "Command lines".
    command_line = ' '.join([first, *(word.replace('$', '$$') for word in others)])
    return Path(__file__).with_name('mdserver.service').read_text(encoding='utf-8').replace('@words@', command_line)


if __name__ == '__main__':
    sys.exit(main())
