"""Commands that enter a guest: ssh, its console, and the log of the console."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

from ecomp.cli.command import MAX_QUOTED_WORDS, Command, Context, select_options
from ecomp.cli.options import Options, parse_any_instances, parse_instance_and_command, parse_one_instance, split_user
from ecomp.errors import EcompError, NotFound, Unreachable
from ecomp.model import reach
from ecomp.model.record import Record
from ecomp.model.states import ACTIVE
from ecomp.model.text import format_time, join_some, make_printable
from ecomp.scheduler.queries import computes
from ecomp.scheduler.queries.find import list_records

# Bytes of a console line; a longer line is printed in several parts.
LINE_LIMIT_BYTES = 8192
MAX_LAST_LINES = 5
# Seconds after its start in which a guest's cloud-init reports. Without a report by then, none is expected.
REPORT_SECONDS = 600
# Seconds that a host has to send the last console lines; after that they are omitted.
LAST_LINES_TIMEOUT_SECONDS = 3.0


def _run_ssh(ctx: Context) -> int:
    if ctx.options.print_config:
        return _print_ssh_config(ctx)
    user, word = split_user(ctx.words[0])
    access = computes.find_guest_access(ctx.store, ctx.resolve_instance(word))
    if access.record.console is None and not access.record.host_keys:
        raise NotFound(f'{access.record.instance}: its guest is fake, so nothing answers ssh')
    ctx.report_age(access.record)
    ssh_options = _make_ssh_options(ctx, access, ctx.options.accept_new)
    pairs = [
        *(('-o', f'{name}={value}') for name, value in ssh_options.items()),
        *([('-i', ctx.options.identity)] if ctx.options.identity else []),
        ('-l', user or ctx.config.ssh_user),
    ]
    options = [word for pair in pairs for word in pair]
    return _replace_process(ctx, ['ssh', *options, '--', access.address, *reach.quote_remote_command(ctx.words[1:])])


def _print_ssh_config(ctx: Context) -> int:
    import socket

    owner_by_name, cluster = computes.read_names(ctx.store), computes.read_computes(ctx.store)
    own_name = socket.gethostname().partition('.')[0].lower()

    def print_entry(word: str) -> None:
        access = computes.find_guest_access(ctx.store, ctx.resolve_instance(word))
        instance = access.record.instance
        # A compromised compute can write any name into its records, and ssh would use it. A name that belongs to a host
        # must lead to that host: guests are reached through hosts, so a guest with its host's name would be reached
        # through itself, forever. The same holds for this machine's own name.
        own_names = (access.host, own_name, 'localhost', 'ip6-localhost')
        is_host = access.display_name in own_names or bool(cluster.find_by_hostname(access.display_name))
        host = access.display_name if owner_by_name.get(access.display_name) == instance and not is_host else instance
        lines = {'HostName': access.address, 'User': ctx.config.ssh_user}
        lines |= _make_ssh_options(ctx, access, accept_new=False)
        ctx.out.put('\n'.join([f'Host {host}', *(f'    {name} {value}' for name, value in lines.items()), '']))

    if ctx.words:
        return ctx.find_each(print_entry)[1]
    records, _ = list_records(ctx.store, with_gone=False)
    records = [record for record in records if record.state == ACTIVE and record.address]
    if unverified := [record.name or record.instance for record in records if not record.host_keys]:
        instance_names = make_printable(join_some(unverified, MAX_QUOTED_WORDS))
        ctx.out.say(f'no entries for these guests, because their host keys are unknown: {instance_names}')
    return ctx.find_each(print_entry, [record.instance for record in records if record.host_keys])[1]


def _open_console(ctx: Context) -> int:
    record = computes.find_running(ctx.store, ctx.resolve_instance(ctx.words[0]))
    if record.console is None:
        raise NotFound(f'{record.instance}: has no console: its guest is fake')
    command = ['virsh', '-c', 'qemu:///system', 'console', record.instance]
    _replace_process(ctx, ctx.config.reach.make_command(computes.find_host_name(ctx.store, record), command, ['-t']))


def _print_log(ctx: Context) -> int:
    import subprocess  # imported late, here and below: it is slow to load

    instance = ctx.resolve_instance(ctx.words[0])
    host, file = computes.find_console(ctx.store, instance)
    ctx.close()
    command = ctx.config.reach.make_command(host, reach.make_tail_command(file, ctx.options.lines, ctx.options.follow))
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None  # because of stdout=PIPE
            read_line = partial(child.stdout.readline, LINE_LIMIT_BYTES)
            try:
                for line in iter(read_line, b''):
                    ctx.out.put(_decode_line(line))
            except BaseException:
                child.terminate()
                raise
        code = child.returncode
    except KeyboardInterrupt:
        if not ctx.options.follow:
            raise
        return 0  # Ctrl-C is the normal end of --follow
    except FileNotFoundError as error:
        raise _make_missing_program_error(command[0]) from error
    if code == reach.NO_FILE_STATUS:
        raise NotFound(f'{instance}: its console log on {host} does not exist yet')
    if code:
        raise Unreachable(f'{host}: {make_printable(command[0], 200)} (`reach` in schedule.yaml) exited with {code}')
    return 0


def read_last_lines(ctx: Context, record: Record) -> list[str]:
    """Return the last console lines that arrive in time and are not empty, [] on an error."""
    if record.console is None:
        return []
    with suppress(EcompError, ValueError, OSError):
        file = reach.parse_console_path(record.instance, record.console)
        options = ['-o', 'BatchMode=yes', '-o', f'ConnectTimeout={LAST_LINES_TIMEOUT_SECONDS:.0f}']
        tail = reach.make_tail_command(file, MAX_LAST_LINES, False)
        command = ctx.config.reach.make_command(computes.find_host_name(ctx.store, record), tail, options)
        return [_decode_line(line) for line in _capture_output(command).rstrip(b'\n').split(b'\n') if line]
    return []


def _capture_output(command: Sequence[str]) -> bytes:
    """Return what a command prints within LAST_LINES_TIMEOUT_SECONDS, and then kill it."""
    import signal
    import subprocess
    import tempfile

    with tempfile.TemporaryFile() as file:  # not a pipe, which stays open while any descendant holds it
        quiet = subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=quiet, stdout=file, stderr=quiet, start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                child.wait(LAST_LINES_TIMEOUT_SECONDS)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        file.seek(0)
        return file.read(MAX_LAST_LINES * LINE_LIMIT_BYTES)


def _make_ssh_options(ctx: Context, access: computes.GuestAccess, accept_new: bool) -> Mapping[str, str]:
    """Return the ssh options for a guest, and write its reported host keys to a file.

    Without reported keys, ssh trusts the key accepted before or, with `accept_new`, the first that the guest shows.
    Without any of these, it raises EcompError.
    """
    instance, keys = access.record.instance, access.record.host_keys
    known_hosts = _find_known_hosts_directory() / instance
    number = (access.record.rebuilt or '').partition(':')[0]  # a rebuilt guest has other keys
    accepted = known_hosts.with_suffix(f'.{number}.accepted' if number else '.accepted')
    proxy = None if access.host is None else ctx.config.reach.make_proxy_command(access.host, access.address)
    if not keys:
        if accept_new:
            known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not accepted.exists():
            if _can_still_report(access.record):
                raise computes.make_not_ready(access.record)
            why = 'the guest has not reported its host keys, so ssh cannot verify the guest'
            cure = 'give --accept-new, which accepts the first key that the guest shows'
            raise EcompError(f'{access.display_name}: {why}. Fix: {cure}')
        return reach.make_ssh_options(instance, str(accepted), proxy, 'accept-new' if accept_new else 'yes')
    known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_if_changed(known_hosts, ''.join(f'{instance} {key}\n' for key in keys))
    return reach.make_ssh_options(instance, str(known_hosts), proxy)


def _can_still_report(record: Record) -> bool:
    started = record.reached_stages.get('started', '')
    latest_start = format_time(datetime.now(UTC) - timedelta(seconds=REPORT_SECONDS))
    return not ('ready' in record.reached_stages or record.cloud_init is not None or started < latest_start)


def _write_if_changed(path: Path, text: str) -> None:
    with suppress(OSError):
        if path.read_text() == text:
            return
    temporary = path.with_name(f'{path.name}.{os.getpid()}')  # ssh may read the file concurrently
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _find_known_hosts_directory() -> Path:
    try:
        return Path.home() / '.cache/ecomp/known_hosts'
    except RuntimeError as error:
        problem = 'the host keys of guests cannot be stored: there is no home directory'
        raise EcompError(f'{problem}. Fix: set HOME') from error


def _replace_process(ctx: Context, command: list[str]) -> NoReturn:
    import signal

    ctx.close()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
    try:
        os.execvp(command[0], command)
    except FileNotFoundError as error:
        raise _make_missing_program_error(command[0]) from error


def _make_missing_program_error(program: str) -> EcompError:
    name = make_printable(program, 200)
    return EcompError(f'{name} is not installed. Fix: install it, or change `reach` in schedule.yaml')


def _decode_line(line: bytes) -> str:
    return reach.strip_escapes(line.decode(errors='replace').rstrip('\n')).expandtabs()


def _find_ssh_problems(name: str, words: Sequence[str], options: Options) -> Iterator[str]:
    if options.print_config:
        if options.accept_new or options.identity:
            yield f'{name}: --accept-new and --identity are not accepted with --print-config'
        parse_any_instances(name, words)
    elif not words:
        yield f'{name}: missing argument: an instance, by name or uuid'


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('ssh', 'ssh [USER@]<id> [-- CMD…]', 'log in to a guest, or run a command there',
            'Log in to a guest with ssh: through its host, as `reach` in schedule.yaml describes, or directly if the '
            'guest is on a bridge. Default of USER: ssh_user of schedule.yaml. ssh trusts only the host keys that the '
            "guest reported once its cloud-init had finished. A CMD of one word is a command line for the guest's "
            'shell; several words reach the guest unchanged. Once ssh runs, the exit code is that of ssh; before '
            'that, it is one of those below. With --print-config it prints entries for ~/.ssh/config instead, with '
            'which ssh, scp and rsync reach these guests in the same way: `eschedule ssh --print-config [<id>…]`. '
            'Default: entries for all guests that run and have reported their host keys.',
            parse_instance_and_command, _run_ssh, select_options('accept_new identity print_config'), (4, 5, 6),
            example='eschedule ssh web1 -- uptime', find_problems=_find_ssh_problems),
    Command('console', 'console <id>', "open a guest's serial console; ^] leaves it",
            "Open `virsh console` of the guest, on its host, as `reach` in schedule.yaml describes. The guest's "
            'output goes to the terminal unfiltered. ^] leaves the console.',
            parse_one_instance, _open_console, exit_codes=(4, 5, 6), example='eschedule console web1'),
    Command('log', 'log <id>', "print the output of a guest's console",
            "Print the output of a guest's serial console, also while it boots: the log file on its host (see `reach` "
            'in schedule.yaml), and the older files that virtlogd keeps. Colours and cursor movements are left out.',
            parse_one_instance, _print_log, select_options('follow lines'), (4,),
            example='eschedule log web1 -f -n 20'),
)
