"""The commands that lead into a guest: ssh with its own host keys and no others, and its console.

Each finds the way, and then is the system's own ssh, or the user's `reach` of schedule.yaml.
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

LINE_LIMIT = 8192
"""Bytes of a line of a console; a longer one is printed in several."""
LAST_LINES = 5
"""Lines of a console that are said when a time-out ends a wait."""
LOGIN = 120.0
"""Seconds that a login to a guest may take, which is then given up: under emulation it takes ten or twenty."""
REPORT_SECONDS = 600
"""Seconds after its start in which a guest's cloud-init reports; a guest that has not done so by then has none."""
AT_ONCE = 3.0
"""Seconds that a host may take for those; beyond that they are left out."""


def _ssh(do: Context) -> int:
    from ecomp.scheduler.looking.hosts import way_in

    user, word = user_and_instance(do.words[0])
    way = way_in(do.store, do.instance(word))
    told = _options(do, way, do.options.accept_new)
    _become(do, _ssh_command(do, way, told, user, do.words[1:]))


def _ssh_command(do: Context, way: WayIn, told: Mapping[str, str], user: str, command: Sequence[str]) -> list[str]:
    """The ssh that runs a command in a guest; `user` '' is that of schedule.yaml."""
    named = [('-i', do.options.identity)] if do.options.identity else []
    pairs = [*(('-o', f'{name}={value}') for name, value in told.items()), *named, ('-l', user or do.config.ssh_user)]
    options = [each for pair in pairs for each in pair]
    return ['ssh', *options, '--', way.address, *reach.remote_line(command)]


def why_not_entered(do: Context, instance: str, tell: Callable[[], None]) -> str:
    """Log in to a guest that has said its host keys, and out again; what ssh says of it if that fails, else ''.

    `tell` is called about once a second, and may end it. That the guest was entered leaves nothing here.
    """
    from ecomp.scheduler.looking.hosts import way_in

    way = way_in(do.store, instance)
    told = {**_options(do, way, accept_new=False), 'BatchMode': 'yes', 'ConnectTimeout': f'{LOGIN:.0f}'}
    command = _ssh_command(do, way, told, '', ['true'])
    try:
        code, said = _ran(command, LOGIN, tell, with_errors=True)
    except FileNotFoundError as error:
        raise _not_there(command[0]) from error
    finally:
        (_known_hosts() / instance).unlink(missing_ok=True)
    if code < 0:
        return f'ssh has not come in within {LOGIN:.0f} s'
    last = ' '.join([_line(line) for line in said.splitlines() if line][-1:])
    return '' if code == 0 else f'ssh ended with {code}: {printable(last, 200)}'


def _ssh_config(do: Context) -> int:
    import socket

    from ecomp.scheduler.looking.find import all_records
    from ecomp.scheduler.looking.hosts import computes, names, way_in

    named, hosts = names(do.store), computes(do.store)
    own = socket.gethostname().partition('.')[0].lower()

    def put(word: str) -> None:
        way = way_in(do.store, do.instance(word))
        instance = way.record.instance
        # Whoever has a compute writes any name into its records, and ssh would go by it. A host's name has to lead to
        # that host: guests are reached by it, and one of that name would be reached by itself, for ever. So our own.
        is_host = way.called in (way.host, own, 'localhost', 'ip6-localhost') or bool(hosts.named(way.called))
        host = way.called if named.get(way.called) == instance and not is_host else instance
        lines = {'HostName': way.address, 'User': do.config.ssh_user, **_options(do, way, accept_new=False)}
        do.out.put('\n'.join([f'Host {host}', *(f'    {name} {value}' for name, value in lines.items()), '']))

    if do.words:
        return do.find_each(put)[1]
    there = [each for each in all_records(do.store, with_gone=False)[0] if each.state == ACTIVE and each.address]
    unverified = [each.name or each.instance for each in there if not each.host_keys]
    if unverified:
        unknown = printable(some(unverified, QUOTED))
        do.out.say(f'left out, for what host keys they have is not known: {unknown}')
    return do.find_each(put, [each.instance for each in there if each.host_keys])[1]


def _console(do: Context) -> int:
    from ecomp.scheduler.looking.hosts import host_of, running

    record = running(do.store, do.instance(do.words[0]))
    if record.console is None:
        raise NotFound(f'{record.instance}: has no console: its guest is only pretended')
    command = ['virsh', '-c', 'qemu:///system', 'console', record.instance]
    _become(do, do.config.reach.run(host_of(do.store, record), command, ['-t']))


def _log(do: Context) -> int:
    import subprocess  # here and below: what takes its time to import is for those who need it

    from ecomp.scheduler.looking.hosts import console

    instance = do.instance(do.words[0])
    host, file = console(do.store, instance)
    do.close()
    command = do.config.reach.run(host, reach.tail(file, do.options.lines, do.options.follow))
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None  # it was made with a pipe
            read = partial(child.stdout.readline, LINE_LIMIT)
            try:
                for line in iter(read, b''):
                    do.out.put(_line(line))
            except BaseException:
                child.terminate()
                raise
        code = child.returncode
    except KeyboardInterrupt:
        if not do.options.follow:
            raise
        return 0  # it is how following ends
    except FileNotFoundError as error:
        raise _not_there(command[0]) from error
    if code == reach.NO_FILE:
        raise NotFound(f'{instance}: its console on {host} has nothing yet')
    if code:
        raise Unreachable(f'{host}: {printable(command[0], 200)}, by reach of schedule.yaml, ended with {code}')
    return 0


def last_lines(do: Context, record: Record) -> list[str]:
    """The last lines of an instance's console, if its host gives them at once; else none. Never an error."""
    from ecomp.scheduler.looking.hosts import host_of

    if record.console is None:
        return []
    with suppress(EcompError, ValueError, OSError):
        file = reach.console_file(record.instance, record.console)
        at_once = ['-o', 'BatchMode=yes', '-o', f'ConnectTimeout={AT_ONCE:.0f}']
        command = do.config.reach.run(host_of(do.store, record), reach.tail(file, LAST_LINES, False), at_once)
        _, found = _ran(command, AT_ONCE)
        return [_line(line) for line in found.rstrip(b'\n').split(b'\n') if line]
    return []


def _ran(
    command: Sequence[str], seconds: float, tell: Callable[[], None] = lambda: None, with_errors: bool = False
) -> tuple[int, bytes]:
    """A command's exit code, negative where its time was up, and the first of what it printed. FileNotFoundError.

    `tell` is called about once a second, and may end it. `with_errors`: what it says on stderr is read, too.
    """
    import signal
    import subprocess
    import tempfile
    import time

    until = time.monotonic() + seconds
    with tempfile.TemporaryFile() as said:  # a pipe would be waited for as long as anybody holds it
        errors = said if with_errors else subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=errors, start_new_session=True)
        try:
            while child.poll() is None and (left := until - time.monotonic()) > 0:
                tell()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(min(1.0, left))
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        said.seek(0)
        return child.returncode, said.read(LAST_LINES * LINE_LIMIT)


def _options(do: Context, way: WayIn, accept_new: bool) -> Mapping[str, str]:
    """What ssh is told of a guest. EcompError: its host keys are not known."""
    from ecomp.scheduler.looking.hosts import make_not_ready

    instance, keys = way.record.instance, way.record.host_keys
    known = _known_hosts() / instance
    accepted = known.with_suffix('.accepted')
    proxy = None if way.host is None else do.config.reach.proxy(way.host, way.address)
    if not keys:
        if accept_new:
            known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not accepted.exists():
            if not _is_without_keys(way.record):
                raise make_not_ready(way.record)
            why = 'its guest has not reported its host keys, so it is unverified'
            raise EcompError(f'{way.called}: {why}. Fix: --accept-new accepts the key that it shows first')
        return reach.ssh_options(instance, str(accepted), proxy, 'accept-new' if accept_new else 'yes')
    known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _put(known, ''.join(f'{instance} {key}\n' for key in keys))
    return reach.ssh_options(instance, str(known), proxy)


def _is_without_keys(record: Record) -> bool:
    """Whether no report of host keys is to be expected: it came without, failed, or has not come for a long time."""
    started = record.reached.get('started', '')
    since = timestamp(datetime.now(UTC) - timedelta(seconds=REPORT_SECONDS))
    return 'ready' in record.reached or record.cloud_init is not None or started < since


def _put(path: Path, text: str) -> None:
    """Write a file whole, unless it is there: several commands do so at once, and ssh may be reading it."""
    with suppress(OSError):
        if path.read_text() == text:
            return
    mine = path.with_name(f'{path.name}.{os.getpid()}')
    try:
        mine.write_text(text)
        mine.replace(path)
    finally:
        mine.unlink(missing_ok=True)


def _known_hosts() -> Path:
    """Where the keys of guests are for ssh to read, a file each."""
    try:
        return Path.home() / '.cache/ecomp/known_hosts'
    except RuntimeError as error:
        raise EcompError('no home directory: nowhere to put host keys for ssh') from error


def _become(do: Context, command: list[str]) -> NoReturn:
    """Be this command from now on; its exit code is the answer."""
    import signal

    do.close()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and so would the command
    try:
        os.execvp(command[0], command)
    except FileNotFoundError as error:
        raise _not_there(command[0]) from error


def _not_there(program: str) -> EcompError:
    return EcompError(f'{printable(program, 200)} is not here: install it, or see reach in schedule.yaml')


def _line(line: bytes) -> str:
    """A line of a console."""
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
