"""Commands that enter a hypervisor: `reach` of schedule.yaml. Pure.

It is ssh, which passes a line to a remote shell, or a command that runs its arguments unchanged, such as `elab exec`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ecomp.model import keys

HOST_PLACEHOLDER = '{host}'
SSH_PORT = 22

_LABEL = '[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?'
# Compiled when used, because most commands read the configuration but enter no host.
_HOST_NAME = rf'(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*'
_USER = '[A-Za-z_][A-Za-z0-9_.-]{0,31}'
_PATH_SEGMENT = '/[^/\x00-\x1f\x7f]+'

# For bash: connects standard input and output to TCP port $1 of address $0; for ssh, use -W instead. ssh ends the
# script with SIGHUP, and the process that reads the connection would otherwise stay as long as the guest's sshd waits.
RELAY_SCRIPT = 'trap : HUP; exec 3<>/dev/tcp/$0/$1 || exit 1; cat <&3 & exec >&3; cat; kill $! 2>/dev/null'
# Prints the last $2 lines (`+1`: all) of the console in file $1, from the backups that virtlogd keeps (max_backups 3),
# too. Follows the file unless $3 is empty. Exits with NO_FILE_STATUS if there is no such file.
TAIL_SCRIPT = """\
[ -e "$1" ] || exit 66
size=$(wc -c <"$1")
{ cat -- "$1.2" "$1.1" "$1.0" 2>/dev/null; head -c "$size" -- "$1"; } | tail -n "$2"
[ -z "$3" ] || exec tail -c "+$((size + 1))" -F -- "$1" 2>/dev/null"""
NO_FILE_STATUS = 66


class ReachCommand(NamedTuple):
    """The command that enters a hypervisor, with HOST_PLACEHOLDER for its host name.

    Callers have to check `host` with is_host_name(), which its methods only assert.
    """

    words: tuple[str, ...]

    @property
    def is_ssh(self) -> bool:
        return self.words[0].rpartition('/')[2] == 'ssh'

    def make_command(self, host: str, command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """Return the argv that runs a command on a host. `options` are left out unless it is ssh."""
        first, *others = self._fill_in_host(host)
        if not self.is_ssh:
            return [first, *others, *command]
        return [first, *options, *others, shlex.join(command)]

    def make_proxy_command(self, host: str, address: str) -> list[str]:
        """Return the arguments that connect standard input and output to sshd of a guest."""
        first, *others = self._fill_in_host(host)
        if not self.is_ssh:
            return [first, *others, 'bash', '-c', RELAY_SCRIPT, address, str(SSH_PORT)]
        return [first, '-W', f'{address}:{SSH_PORT}', *others]

    def _fill_in_host(self, host: str) -> list[str]:
        assert is_host_name(host)  # otherwise ssh might take it for an option
        return [word.replace(HOST_PLACEHOLDER, host) for word in self.words]


DEFAULT_REACH = ReachCommand(('ssh', HOST_PLACEHOLDER))


def parse_reach(text: str) -> ReachCommand:
    """Parse a command with HOST_PLACEHOLDER after its first word, or raise ValueError."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f'is not a command: {error}') from error
    if not any(HOST_PLACEHOLDER in word for word in words[1:]):
        raise ValueError(f'must be a command that contains {HOST_PLACEHOLDER}, such as `ssh root@{HOST_PLACEHOLDER}`')
    return ReachCommand(words)


def is_host_name(text: str) -> bool:
    """Return whether a text is an RFC 1123 name or an IPv4 address, and so no option of ssh."""
    return re.fullmatch(_HOST_NAME, text) is not None


def check_user(text: str) -> str:
    if not re.fullmatch(_USER, text):
        raise ValueError(f'{text[:40]!r} is not a valid user name: a name has 1 to 32 letters, digits, _, . and -')
    return text


def parse_console_path(instance: str, console: str) -> str:
    """Return the file in `console`, `<host>:<file>`, or raise ValueError if it is no console."""
    assert keys.is_uuid(instance)
    # Computes keep consoles there, and records must not name other files.
    path = console.partition(':')[2]
    if not re.fullmatch(rf'({_PATH_SEGMENT})*/console/{instance}\.log', path) or '/../' in path or '/./' in path:
        raise ValueError('its record names a file that is not its console')
    return path


def make_tail_command(path: str, lines: int | None, follow: bool) -> list[str]:
    """Return the command that prints a console's last lines (None: all), and may `follow` it."""
    return ['sh', '-c', TAIL_SCRIPT, 'sh', path, '+1' if lines is None else str(lines), 'follow' if follow else '']


def make_ssh_options(
    instance: str, known_hosts: str, proxy: Sequence[str] | None, host_key_checking: str = 'yes'
) -> dict[str, str]:
    """Return the options with which ssh accepts only the guest's keys in a `known_hosts` file."""
    # Source: ssh_config(5).
    return {
        'HostKeyAlias': instance,
        'StrictHostKeyChecking': host_key_checking,  # with `accept-new` the first key is trusted
        'UserKnownHostsFile': '"' + known_hosts.replace('%', '%%') + '"',
        'GlobalKnownHostsFile': '/dev/null',
        'IgnoreUnknown': 'KnownHostsCommand',  # OpenSSH before 8.5
        'KnownHostsCommand': 'none',
        'VerifyHostKeyDNS': 'no',
        'UpdateHostKeys': 'no',
        'CheckHostIP': 'no',
        # Guests of two hosts may have the same address, so a shared connection might lead to the other guest.
        'ControlPath': 'none',
        'ProxyCommand': 'none' if proxy is None else shlex.join(proxy).replace('%', '%%'),
    }


def quote_remote_command(command: Sequence[str]) -> list[str]:
    """Return ssh's arguments for a command: one word unchanged, as shell text, several quoted."""
    return [shlex.join(command)] if len(command) > 1 else list(command)


_ESCAPE_SEQUENCES = r'\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[ -/]*[0-~])|\r'


def strip_escapes(line: str) -> str:
    return re.sub(_ESCAPE_SEQUENCES, '', line)
