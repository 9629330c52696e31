"""Commands that enter a guest: ssh, which trusts only reported host keys, and the console.

Each runs the system's ssh, or the command `reach` of schedule.yaml.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ecomp.cli.command import QUOTED, Command, Context, plain
from ecomp.cli.options import any_instances, instance_and_command, just_one_instance, user_and_instance
from ecomp.errors import EcompError, NotFound, Unreachable
from ecomp.model import reach
from ecomp.model.record import ACTIVE, Record, timestamp
from ecomp.model.text import printable, some

if TYPE_CHECKING:
    from ecomp.scheduler.looking.hosts import WayIn

# Bytes of a console line; a longer line is printed in several parts.
LINE_LIMIT = 8192
LAST_LINES = 5
# Seconds after which a login to a guest is given up; under emulation it takes ten or twenty.
LOGIN = 120.0
# Seconds after its start in which a guest's cloud-init reports. Without a report by then, none is expected.
REPORT_SECONDS = 600
# Seconds that a host has to send the last console lines; after that they are omitted.
AT_ONCE = 3.0


def _ssh(do: Context) -> int:
    from ecomp.scheduler.looking.hosts import way_in

    user, word = user_and_instance(do.words[0])
    access = way_in(do.store, do.instance(word))
    ssh_options = _options(do, access, do.options.accept_new)
    _become(do, _ssh_command(do, access, ssh_options, user, do.words[1:]))


def _ssh_command(do: Context, way: WayIn, told: Mapping[str, str], user: str, command: Sequence[str]) -> list[str]:
    """Return the ssh command line for a guest; `user` '' means that of schedule.yaml."""
    key = [('-i', do.options.identity)] if do.options.identity else []
    pairs = [*(('-o', f'{name}={value}') for name, value in told.items()), *key, ('-l', user or do.config.ssh_user)]
    options = [word for pair in pairs for word in pair]
    return ['ssh', *options, '--', way.address, *reach.remote_line(command)]


def why_not_entered(do: Context, instance: str, tell: Callable[[], None]) -> str:
    """Log in to a guest with known host keys and out again; return '' or why that failed.

    `on_tick` is called about once a second; what it raises ends the login. Its known_hosts file is removed. Raises
    EcompError if ssh is not installed, the guest has no reachable address, or its host keys are unknown.
    """
    from ecomp.scheduler.looking.hosts import way_in

    access = way_in(do.store, instance)
    ssh_options = {**_options(do, access, accept_new=False), 'BatchMode': 'yes', 'ConnectTimeout': f'{LOGIN:.0f}'}
    command = _ssh_command(do, access, ssh_options, '', ['true'])
    try:
        code, output = _ran(command, LOGIN, tell, with_errors=True)
    except FileNotFoundError as error:
        raise _not_there(command[0]) from error
    finally:
        (_known_hosts() / instance).unlink(missing_ok=True)
    if code < 0:
        return f'ssh has not come in within {LOGIN:.0f} s'
    last = ' '.join([_line(line) for line in output.splitlines() if line][-1:])
    return '' if code == 0 else f'ssh ended with {code}: {printable(last, 200)}'


def _ssh_config(do: Context) -> int:
    import socket

    from ecomp.scheduler.looking.find import all_records
    from ecomp.scheduler.looking.hosts import computes, names, way_in

    instance_by_name, cluster = names(do.store), computes(do.store)
    own_name = socket.gethostname().partition('.')[0].lower()

    def put(word: str) -> None:
        access = way_in(do.store, do.instance(word))
        instance = access.record.instance
        # A compromised compute can write any name into its records, and ssh would use it. A name that belongs to a host
        # must lead to that host: guests are reached through hosts, so a guest with its host's name would be reached
        # through itself, forever. The same holds for this machine's own name.
        is_host = access.called in (access.host, own_name, 'localhost', 'ip6-localhost') or bool(
            cluster.named(access.called)
        )
        host = access.called if instance_by_name.get(access.called) == instance and not is_host else instance
        lines = {'HostName': access.address, 'User': do.config.ssh_user, **_options(do, access, accept_new=False)}
        do.out.put('\n'.join([f'Host {host}', *(f'    {name} {value}' for name, value in lines.items()), '']))

    if do.words:
        return do.find_each(put)[1]
    records = [item for item in all_records(do.store, with_gone=False)[0] if item.state == ACTIVE and item.address]
    unverified = [record.name or record.instance for record in records if not record.host_keys]
    if unverified:
        instance_names = printable(some(unverified, QUOTED))
        do.out.say(f'left out, for what host keys they have is not known: {instance_names}')
    return do.find_each(put, [record.instance for record in records if record.host_keys])[1]


def _console(do: Context) -> int:
    from ecomp.scheduler.looking.hosts import host_of, running

    record = running(do.store, do.instance(do.words[0]))
    if record.console is None:
        raise NotFound(f'{record.instance}: has no console: its guest is only pretended')
    command = ['virsh', '-c', 'qemu:///system', 'console', record.instance]
    _become(do, do.config.reach.run(host_of(do.store, record), command, ['-t']))


def _log(do: Context) -> int:
    import subprocess  # imported late, here and below: it is slow to load

    from ecomp.scheduler.looking.hosts import console

    instance = do.instance(do.words[0])
    host, file = console(do.store, instance)
    do.close()
    command = do.config.reach.run(host, reach.tail(file, do.options.lines, do.options.follow))
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None  # because of stdout=PIPE
            read_line = partial(child.stdout.readline, LINE_LIMIT)
            try:
                for line in iter(read_line, b''):
                    do.out.put(_line(line))
            except BaseException:
                child.terminate()
                raise
        code = child.returncode
    except KeyboardInterrupt:
        if not do.options.follow:
            raise
        return 0  # Ctrl-C is the normal end of --follow
    except FileNotFoundError as error:
        raise _not_there(command[0]) from error
    if code == reach.NO_FILE:
        raise NotFound(f'{instance}: its console on {host} has nothing yet')
    if code:
        raise Unreachable(f'{host}: {printable(command[0], 200)}, by reach of schedule.yaml, ended with {code}')
    return 0


def last_lines(do: Context, record: Record) -> list[str]:
    """Read the last console lines, or [] if the host does not answer promptly; never an error."""
    from ecomp.scheduler.looking.hosts import host_of

    if record.console is None:
        return []
    with suppress(EcompError, ValueError, OSError):
        file = reach.console_file(record.instance, record.console)
        options = ['-o', 'BatchMode=yes', '-o', f'ConnectTimeout={AT_ONCE:.0f}']
        command = do.config.reach.run(host_of(do.store, record), reach.tail(file, LAST_LINES, False), options)
        _, output = _ran(command, AT_ONCE)
        return [_line(line) for line in output.rstrip(b'\n').split(b'\n') if line]
    return []


def _ran(
    command: Sequence[str], seconds: float, tell: Callable[[], None] = lambda: None, with_errors: bool = False
) -> tuple[int, bytes]:
    """Run a command; return its exit code, negative after a timeout, and its output.

    The output is cut to MAX_LAST_LINES * LINE_LIMIT_BYTES, and includes stderr if `with_stderr`. `on_tick` is called
    about once a second; what it raises kills the command and passes. Raises FileNotFoundError.
    """
    import signal
    import subprocess
    import tempfile
    import time

    deadline = time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:  # not a pipe, which stays open while any descendant holds it
        errors = file if with_errors else subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=errors, start_new_session=True)
        try:
            while child.poll() is None and (remaining := deadline - time.monotonic()) > 0:
                tell()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(min(1.0, remaining))
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        file.seek(0)
        return child.returncode, file.read(LAST_LINES * LINE_LIMIT)


def _options(do: Context, way: WayIn, accept_new: bool) -> Mapping[str, str]:
    """Return the ssh options for a guest; if it reported host keys, write them to a file first.

    Otherwise a key that was accepted before is used, or with `accept_new` the first key that the guest shows. Raises
    StillGoing if a report may still come, else EcompError if no key was accepted.
    """
    from ecomp.scheduler.looking.hosts import make_not_ready

    instance, keys = way.record.instance, way.record.host_keys
    known_hosts = _known_hosts() / instance
    accepted = known_hosts.with_suffix('.accepted')
    proxy = None if way.host is None else do.config.reach.proxy(way.host, way.address)
    if not keys:
        if accept_new:
            known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not accepted.exists():
            if not _is_without_keys(way.record):
                raise make_not_ready(way.record)
            why = 'its guest has not reported its host keys, so it is unverified'
            raise EcompError(f'{way.called}: {why}. Fix: --accept-new accepts the key that it shows first')
        return reach.ssh_options(instance, str(accepted), proxy, 'accept-new' if accept_new else 'yes')
    known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _put(known_hosts, ''.join(f'{instance} {key}\n' for key in keys))
    return reach.ssh_options(instance, str(known_hosts), proxy)


def _is_without_keys(record: Record) -> bool:
    """Return True if no report of host keys will come: it came without, failed, or is overdue."""
    started = record.reached.get('started', '')
    latest_start = timestamp(datetime.now(UTC) - timedelta(seconds=REPORT_SECONDS))
    return 'ready' in record.reached or record.cloud_init is not None or started < latest_start


def _put(path: Path, text: str) -> None:
    """Write a file atomically, as ssh may read it concurrently; no-op if it has this text."""
    with suppress(OSError):
        if path.read_text() == text:
            return
    temporary = path.with_name(f'{path.name}.{os.getpid()}')
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _known_hosts() -> Path:
    """Return the directory of guests' host keys; EcompError without a home directory."""
    try:
        return Path.home() / '.cache/ecomp/known_hosts'
    except RuntimeError as error:
        raise EcompError('no home directory: nowhere to put host keys for ssh') from error


def _become(do: Context, command: list[str]) -> NoReturn:
    """Close etcd and replace this process by a command; EcompError if it is not installed."""
    import signal

    do.close()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
    try:
        os.execvp(command[0], command)
    except FileNotFoundError as error:
        raise _not_there(command[0]) from error


def _not_there(program: str) -> EcompError:
    return EcompError(f'{printable(program, 200)} is not here: install it, or see reach in schedule.yaml')


def _line(line: bytes) -> str:
    return reach.plain(line.decode(errors='replace').rstrip('\n')).expandtabs()


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('ssh', 'ssh [USER@]<id> [-- CMD…]', 'log in to a guest, or run a command there',
            'Be ssh to a guest: through its hypervisor, by `reach` of schedule.yaml, or directly where it is on a '
            "bridge. USER is by default schedule.yaml's ssh_user. The guest's host keys are those that it said itself "
            'when its cloud-init was through: another key is refused. Of CMD a single word is a line for the guest\'s '
            'shell; several words reach it as they are. The exit code is that of ssh.',
            instance_and_command, _ssh, plain('accept_new identity'), (4, 5, 6),
            example='eschedule ssh web1 -- uptime'),
    Command('ssh-config', 'ssh-config [<id>…]', 'what ~/.ssh/config needs for guests',
            'Print lines for ~/.ssh/config with which ssh, scp and rsync reach guests as `eschedule ssh` does; of all '
            'that run and have said their host keys, where none is named.',
            any_instances, _ssh_config, exits=(4, 5, 6), example='eschedule ssh-config web1 web2'),
    Command('console', 'console <id>', "a guest's serial console; ^] leaves it",
            "Be on the guest's serial console, by `virsh console` on its host, which `reach` of schedule.yaml leads "
            'to. What the guest writes goes to the terminal as it is. ^] leaves it.',
            just_one_instance, _console, exits=(4, 5, 6), example='eschedule console web1'),
    Command('log', 'log <id>', "what a guest has written to its console",
            "Print what a guest has written to its serial console, also while it boots: the file on its host, which "
            "`reach` of schedule.yaml leads to, and those before it that virtlogd keeps. Colours and what moves the "
            'cursor are left out.',
            just_one_instance, _log, plain('follow lines'), (4,), example='eschedule log web1 -f -n 20'),
)
