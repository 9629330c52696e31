"""schedule.yaml, read once into a frozen, complete value, and the sections etcd and placement of both files.

A missing file means the defaults, which point at localhost; an empty file and a key without a value mean the same.
Everything wrong in a file is one UsageError, with a line for each mistake: `schedule.yaml:3: imag: unknown key (did
you mean image?)`. Relative paths in a file are meant relative to that file. The keys are described in the two example
files. Any certificate means TLS; without one other machines are asked only where the file says `insecure: true`.
compute.yaml's other keys are in ecomp.compute_conf.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ecomp.model.image import check_image
from ecomp.model.reach import DEFAULT_REACH, Reach, check_user, parse_reach
from ecomp.yaml_file import Node, Section, Wrong, YamlFile, between, described, flag, read_parts, shown, text_of, typed

if TYPE_CHECKING:
    import socket

    from ecomp.model.flavor import Flavor

CERTIFICATES = ('ca_cert', 'cert_cert', 'cert_key')
CLEAR = (
    '{} is no address of this machine, and all would be said in plain text: say {}ca_cert, cert_cert and cert_key '
    '(`elab certs` makes them), or, where nobody else is on that network, insecure: true'
)


class EtcdConfig(NamedTuple):
    """Where etcd is and how it is reached. `endpoints` are host:port; `timeout` is in seconds, for each call.

    `ca_cert` has the authority that signed its certificate, `cert_cert` and `cert_key` ours; all None means plain text.
    """

    endpoints: tuple[str, ...] = ('localhost:2379',)
    ca_cert: Path | None = None
    cert_key: Path | None = None
    cert_cert: Path | None = None
    timeout: float = 5.0


class PlacementConfig(NamedTuple):
    """Where placement is and who asks it, as the example files explain it. `endpoint` has no slash at its end.

    Certificates are read anew for each connection, `token_file` for each call.
    """

    endpoint: str = 'http://localhost:8080'
    ca_cert: Path | None = None
    cert_key: Path | None = None
    cert_cert: Path | None = None
    token_file: Path | None = None


def etcd_of(file: YamlFile, etcd: Section) -> EtcdConfig:
    """The EtcdConfig in the section `etcd`; what is wrong in it is noted in `file`."""
    for key in ('user', 'password'):
        etcd.refuse(key, 'logging in with a password cannot be done safely; use certificates (cert_cert, cert_key)')
    host = etcd.take('host', lambda node: _checked_host(text_of(node)), 'localhost')
    port = etcd.take('port', between(1, 65535), 2379)
    single: tuple[str, ...] = (f'{host}:{port}',)
    insecure = etcd.take('insecure', flag, False)
    endpoints = etcd.take('endpoints', _endpoints, single)
    for key in ('host', 'port'):
        if key in etcd and 'endpoints' in etcd:
            etcd.complain(key, 'say either endpoints, or host and port')
    config = EtcdConfig(
        endpoints,
        *_certificates(file, etcd),
        timeout=etcd.take('timeout', _seconds, EtcdConfig().timeout),
    )
    if etcd.take('grpc_options', described, None):
        file.warn(
            'etcd.grpc_options is ignored: etcd is asked without gRPC now. Fix: remove the key; version 2.0 refuses it'
        )
    if not insecure and not _says_how(etcd) and (others := in_clear(config)):
        etcd.complain('endpoints' if 'endpoints' in etcd else 'host', CLEAR.format(others[0], ''))
    return config


def placement_of(file: YamlFile, placement: Section) -> PlacementConfig:
    """The PlacementConfig in the section `placement`; what is wrong in it is noted in `file`."""
    endpoint = placement.take('endpoint', url, PlacementConfig().endpoint)
    for key in CERTIFICATES:
        if key in placement and not endpoint.startswith('https://'):
            placement.complain(key, f'needs an endpoint with https://, not {endpoint}')
    insecure = placement.take('insecure', flag, False)
    config = PlacementConfig(
        endpoint,
        *_certificates(file, placement),
        token_file=placement.take('token_file', file.file_of, None),
    )
    if not insecure and not _says_how(placement) and (others := in_clear(config)):
        placement.complain('endpoint', CLEAR.format(others[0], 'https://, '))
    return config


def in_clear(*asked: EtcdConfig | PlacementConfig) -> list[str]:
    """The hosts that are asked in plain text and are not this machine; of etcd with their ports."""
    found: list[str] = []
    for each in asked:
        if isinstance(each, PlacementConfig):
            scheme, _, rest = each.endpoint.partition('://')
            found += [] if scheme == 'https' else [rest.partition('/')[0]]
        elif not (each.ca_cert or each.cert_key or each.cert_cert):
            found += each.endpoints
    return [each for each in found if not _is_local(re.sub(r':[0-9]+\Z', '', each))]


def open_secrets(*asked: EtcdConfig | PlacementConfig) -> list[Path]:
    """The files of keys and tokens that every user of this machine can read or change."""
    found = {}
    for path in (path for each in asked for path in (each.cert_key, getattr(each, 'token_file', None)) if path):
        with suppress(OSError):  # whoever reads it says what is wrong
            found[path] = path.stat().st_mode & 0o006
    return [path for path, is_open in found.items() if is_open]


def connection_to(host: bytes | str, port: int, timeout: float, patience: float) -> socket.socket:
    """A TCP connection to one of the host's addresses, tried in their order. OSError, ValueError.

    The last has `timeout` seconds, as what follows has at each step. Those before it have half of `patience` between
    them, and a second each at most: where IPv6 leads nowhere, it is not to use up the time of the address that answers.
    Where that one refuses, the first that was only slow has as long.
    """
    import socket  # only who asks needs it

    *others, last = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    slow = []
    for each in others:
        with suppress(OSError):
            try:
                return _connected(each, min(1.0, patience / 2 / len(others)), timeout)
            except TimeoutError:
                slow.append(each)
    try:
        return _connected(last, timeout, timeout)
    except OSError as error:
        if not slow or isinstance(error, TimeoutError):
            raise
        return _connected(slow[0], timeout, timeout)


def _connected(found: Any, limit: float, timeout: float) -> socket.socket:
    import socket  # as above

    family, kind, protocol, _, address = found
    made = socket.socket(family, kind, protocol)
    try:
        made.settimeout(limit)
        made.connect(address)
        made.settimeout(timeout)
    except OSError:
        made.close()
        raise
    return made


def _says_how(section: Section) -> bool:
    """Whether the section names a certificate, right or wrong: what is wrong with it is noted already."""
    return any(key in section for key in CERTIFICATES)


def _is_local(host: str) -> bool:
    import ipaddress  # as below

    try:
        return ipaddress.ip_address(host.removeprefix('[').removesuffix(']')).is_loopback
    except ValueError:
        return host.lower() == 'localhost'


def _certificates(file: YamlFile, section: Section) -> tuple[Path | None, Path | None, Path | None]:
    """The section's ca_cert, cert_key and cert_cert; None for each it does not have."""
    for key, other in (('cert_key', 'cert_cert'), ('cert_cert', 'cert_key')):
        if key in section and other not in section:
            section.complain(key, f'needs {other} beside it')
    ca_cert = section.take('ca_cert', file.file_of, None)
    return ca_cert, section.take('cert_key', file.file_of, None), section.take('cert_cert', file.file_of, None)


def _seconds(node: Node) -> float:
    if node.kind not in ('int', 'float') or not re.fullmatch(r'[0-9]{1,9}(\.[0-9]*)?', node.text):
        raise Wrong(f'must be a number of seconds, not {typed(node)}')
    if not 0 < (seconds := float(node.text)) <= 3600:
        raise Wrong(f'must be more than 0 and at most 3600 seconds, not {shown(node.text)}')
    return seconds


def _checked_host(text: str) -> str:
    """A host name or address as it is written before a colon and a port: an IPv6 address in brackets. Wrong."""
    import ipaddress  # only a file that names a host needs it

    if re.fullmatch(r'[A-Za-z0-9_]([A-Za-z0-9_.-]{0,253})', text):
        return text
    try:
        return f'[{ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))}]'
    except ValueError as error:
        raise Wrong(f'must be a host name or address, not {shown(text)}') from error


def _endpoints(node: Node) -> tuple[str, ...]:
    if node.kind != 'seq' or not node.items:
        raise Wrong(f'must be a list like [ds1:2379, ds2:2379], not {described(node)}')
    found: list[str] = []

    def read(item: Node) -> None:
        host, _, port = (text := text_of(item)).rpartition(':')
        if not re.fullmatch('[0-9]{1,5}', port) or not 1 <= int(port) <= 65535:
            raise Wrong(f'{shown(text)} must be host:port, the port 1 to 65535')
        found.append(f'{_checked_host(host)}:{int(port)}')

    read_parts(node.items, read)
    return tuple(found)


def url(node: Node) -> str:
    """A URL of http or https, without a slash at its end. Wrong."""
    from urllib.parse import urlsplit  # as above

    text = text_of(node)
    try:
        parts = urlsplit(text)
        port = parts.port
        host = _checked_host(parts.hostname or '')
    except (ValueError, Wrong) as error:
        raise Wrong('must be a URL like http://ds1:8080') from error
    if '@' in parts.netloc:  # not shown again: it may be a password
        raise Wrong('must not carry a user or password: it would be in logs and process lists')
    if parts.scheme not in ('http', 'https') or parts.query or parts.fragment or ' ' in text or not host:
        raise Wrong(f'must be a URL like http://ds1:8080, not {shown(text)}')
    if port == 0:
        raise Wrong('the port must be 1 to 65535')
    return text.rstrip('/')


# Who the instances belong to if schedule.yaml does not say. Constant, because usages are asked for by project, and
# because placement makes a row for every new one. They are uuid5(NAMESPACE_URL, 'ecomp:user' and 'ecomp:project').
DEFAULT_USER_ID = '17e6e83b-634e-5c2c-a5ac-0a147aa07def'
DEFAULT_PROJECT_ID = '18dbf4e8-fca6-5cf2-b50f-511855813014'
# Not 2019's 0.3.6, of which nobody publishes a SHA-256 (Cirros itself has MD5 alone). This one many pin, metal3 and
# kubevirt among them.
DEFAULT_IMAGE = (
    'https://download.cirros-cloud.net/0.6.2/cirros-0.6.2-x86_64-disk.img'
    '#sha256=07e44a73e54c94d988028515403c1ed762055e01b83a767edf3c2b387f78ce00'
)


@dataclass(frozen=True)
class ScheduleConfig:
    """What eschedule is told, as schedule.yaml explains it. All paths are absolute; `flavors` are by name.

    `path` is that file, None where there is none.
    """

    etcd: EtcdConfig = EtcdConfig()
    placement: PlacementConfig = PlacementConfig()
    image: str = DEFAULT_IMAGE
    user_id: str = DEFAULT_USER_ID
    project_id: str = DEFAULT_PROJECT_ID
    user_data: Path | None = None
    ssh_keys: tuple[Path, ...] = ()
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    reach: Reach = DEFAULT_REACH
    ssh_user: str = 'debian'
    path: Path | None = field(default=None, compare=False)


def load_schedule(path: Path | None = None) -> ScheduleConfig:
    """Load `path`; None means the schedule.yaml that find_usual() finds, or the defaults. UsageError."""
    file = YamlFile.read(path, 'schedule.yaml')
    top = file.top
    config = ScheduleConfig(
        etcd=etcd_of(file, top.section('etcd')),
        placement=placement_of(file, top.section('placement')),
        image=top.take('image', checked(check_image), ScheduleConfig.image),
        user_id=top.take('user_id', _identifier, ScheduleConfig.user_id),
        project_id=top.take('project_id', _identifier, ScheduleConfig.project_id),
        user_data=top.take('user_data', file.path_of, None),
        ssh_keys=top.take('ssh_keys', file.paths_of, ()),
        flavors=top.take('flavors', _flavors, {}),
        reach=top.take('reach', _reach, ScheduleConfig.reach),
        ssh_user=top.take('ssh_user', checked(check_user), ScheduleConfig.ssh_user),
        path=file.path,
    )
    file.finish()
    return config


def _flavors(node: Node) -> dict[str, Flavor]:
    from ecomp.model.flavor import parse_flavor  # for those who have some

    if node.kind != 'map':
        raise Wrong(f'must be names with queries, not {described(node)}')
    found: dict[str, Flavor] = {}

    def read(pair: tuple[Node, Node]) -> None:
        name, value = pair
        if name.items or name.pairs:
            raise Wrong('a name must be a word')
        if name.text in found:
            raise Wrong('is there twice')
        try:
            found[name.text] = parse_flavor(name.text, text_of(value))
        except ValueError as error:
            raise Wrong(str(error)) from error

    read_parts(node.pairs, read)
    return found


# As in yaml_file: each reads a node's value, or raises Wrong with what it should have been.


def checked(check: Callable[[str], str]) -> Callable[[Node], str]:
    """A reader of text that `check` returns as it is to be, or refuses with a ValueError."""

    def parse(node: Node) -> str:
        try:
            return check(text_of(node))
        except ValueError as error:
            raise Wrong(str(error)) from error

    return parse


def _reach(node: Node) -> Reach:
    try:
        return parse_reach(text_of(node))
    except ValueError as error:
        raise Wrong(str(error)) from error


def _identifier(node: Node) -> str:
    if len(text := text_of(node)) > 255:
        raise Wrong(f'must be at most 255 characters, has {len(text)}')
    return text
