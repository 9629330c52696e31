"""How a hypervisor is entered: `reach` of schedule.yaml, and what is run there by it. Pure.

It is ssh, with a shell at its other end, or any command that runs the words behind it as they are: `elab exec`, say.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ecomp.model import keys

HOST = '{host}'
"""What stands for the host name in `reach`."""
SSH_PORT = 22

_LABEL = '[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?'
# Compiled at their use, for most commands read the configuration and enter nothing.
_HOST_NAME = rf'(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*'
_USER = '[A-Za-z_][A-Za-z0-9_.-]{0,31}'
_STEP = '/[^/\x00-\x1f\x7f]+'

RELAY = 'trap : HUP; exec 3<>/dev/tcp/$0/$1 || exit 1; cat <&3 & exec >&3; cat; kill $! 2>/dev/null'
"""bash's own: its standard input and output are a TCP connection to the address $0, port $1. ssh has -W for this.

ssh ends it by SIGHUP; what reads the connection would stay for as long as the guest's sshd waits.
"""
TAIL = """\
[ -e "$1" ] || exit 66
size=$(wc -c <"$1")
{ cat -- "$1.2" "$1.1" "$1.0" 2>/dev/null; head -c "$size" -- "$1"; } | tail -n "$2"
[ -z "$3" ] || exec tail -c "+$((size + 1))" -F -- "$1" 2>/dev/null"""
"""The last $2 lines (`+1`: all) of the console in file $1, of those before that virtlogd keeps (its max_backups, 3) and
then, unless $3 is empty, whatever comes. Exit NO_FILE where there is no such file."""
NO_FILE = 66


class Reach(NamedTuple):
    """The command that leads to a hypervisor, with HOST in it."""

    words: tuple[str, ...]

    @property
    def is_ssh(self) -> bool:
        """Whether it is ssh: then a shell reads what is run, and ssh can reach the guest itself."""
        return self.words[0].rpartition('/')[2] == 'ssh'

    def run(self, host: str, command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """The words that run a command on a host. `options` are given to ssh; other commands do without."""
        first, *others = self._to(host)
        if not self.is_ssh:
            return [first, *others, *command]
        return [first, *options, *others, shlex.join(command)]

    def proxy(self, host: str, address: str) -> list[str]:
        """The words whose input and output are a connection from a host to the sshd of a guest at this address."""
        first, *others = self._to(host)
        if not self.is_ssh:
            return [first, *others, 'bash', '-c', RELAY, address, str(SSH_PORT)]
        return [first, '-W', f'{address}:{SSH_PORT}', *others]

    def _to(self, host: str) -> list[str]:
        assert is_host_name(host)  # or it might be an option
        return [word.replace(HOST, host) for word in self.words]


DEFAULT_REACH = Reach(('ssh', HOST))


def parse_reach(text: str) -> Reach:
    """The Reach in a line written as for a shell. ValueError says what is wrong with it."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f'is not a command: {error}') from error
    if not any(HOST in word for word in words[1:]):
        raise ValueError(f'must be a command with {HOST} in it, such as `ssh root@{HOST}`')
    return Reach(words)


def is_host_name(text: str) -> bool:
    """True for a host name by RFC 1123; none begins like an option."""
    return re.fullmatch(_HOST_NAME, text) is not None


def check_user(text: str) -> str:
    """The name of a user in a guest as it is; ValueError if it is none."""
    if not re.fullmatch(_USER, text):
        raise ValueError(f'{text[:40]!r} is no name of a user')
    return text


def console_file(instance: str, console: str) -> str:
    """The file in a record's `console`, `<host>:<file>`. ValueError if that cannot be the console of this instance.

    Every compute keeps them in the directory `console` of its state, and calls them by the instance.
    """
    assert keys.is_uuid(instance)
    path = console.partition(':')[2]
    if not re.fullmatch(rf'({_STEP})*/console/{instance}\.log', path) or '/../' in path or '/./' in path:
        raise ValueError('its record names another file than its console')
    return path


def tail(path: str, lines: int | None, follow: bool) -> list[str]:
    """The command that prints a console's last lines, None for all, on its host."""
    return ['sh', '-c', TAIL, 'sh', path, '+1' if lines is None else str(lines), 'follow' if follow else '']


def ssh_options(instance: str, known_hosts: str, proxy: Sequence[str] | None, checking: str = 'yes') -> dict[str, str]:
    """What ssh is told of a guest, by the option: its keys are those in the file, and nobody else's word counts.

    `proxy` is what connects, None for a guest that is reached as any machine is; `checking` is `accept-new` where the
    user takes the first key for the right one. Source: ssh_config(5).
    """
    return {
        'HostKeyAlias': instance,
        'StrictHostKeyChecking': checking,
        'UserKnownHostsFile': '"' + known_hosts.replace('%', '%%') + '"',
        'GlobalKnownHostsFile': '/dev/null',
        'IgnoreUnknown': 'KnownHostsCommand',  # OpenSSH before 8.5
        'KnownHostsCommand': 'none',
        'VerifyHostKeyDNS': 'no',
        'UpdateHostKeys': 'no',
        'CheckHostIP': 'no',
        # Guests of two hosts may have one address: a connection that is kept for it would be the other's.
        'ControlPath': 'none',
        'ProxyCommand': 'none' if proxy is None else shlex.join(proxy).replace('%', '%%'),
    }


def remote_line(command: Sequence[str]) -> list[str]:
    """What ssh is given of a command: a single word is a line for the guest's shell, several reach it as they are."""
    return [shlex.join(command)] if len(command) > 1 else list(command)


_COLOURS = r'\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[ -/]*[0-~])|\r'


def plain(line: str) -> str:
    """A line of a console without what moves a terminal's cursor or colours it."""
    return re.sub(_COLOURS, '', line)
