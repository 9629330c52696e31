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
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ecomp.model.image import check_image
from ecomp.model.reach import DEFAULT_REACH, Reach, check_user, parse_reach
from ecomp.yaml_file import (
    Node,
    Section,
    Wrong,
    YamlFile,
    between,
    checked,
    described,
    flag,
    list_of,
    mapping_of,
    shown,
    text_of,
    typed,
)

if TYPE_CHECKING:
    import socket

    from ecomp.model.flavor import Flavor

T = TypeVar('T')

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


# As in yaml_file: each of these reads a node's value, or raises Wrong with what it should have been.


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


def _endpoint(node: Node) -> str:
    host, _, port = (text := text_of(node)).rpartition(':')
    if not re.fullmatch('[0-9]{1,5}', port) or not 1 <= int(port) <= 65535:
        raise Wrong(f'{shown(text)} must be host:port, the port 1 to 65535')
    return f'{_checked_host(host)}:{int(port)}'


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


# The sections


def etcd_of(file: YamlFile, name: str, default: EtcdConfig) -> EtcdConfig:
    """The EtcdConfig in the section of this name; what is wrong in it is noted in `file`."""
    etcd = file.top.section(name)
    for key in ('user', 'password'):
        etcd.refuse(key, 'logging in with a password cannot be done safely; use certificates (cert_cert, cert_key)')
    host = etcd.take('host', lambda node: _checked_host(text_of(node)), 'localhost')
    port = etcd.take('port', between(1, 65535), 2379)
    single: tuple[str, ...] = (f'{host}:{port}',)
    insecure = etcd.take('insecure', flag, False)
    endpoints = etcd.take('endpoints', list_of(_endpoint, 'a list like [ds1:2379, ds2:2379]', least=1), single)
    for key in ('host', 'port'):
        if key in etcd and 'endpoints' in etcd:
            etcd.complain(key, 'say either endpoints, or host and port')
    config = EtcdConfig(
        endpoints,
        *_certificates(file, etcd),
        timeout=etcd.take('timeout', _seconds, default.timeout),
    )
    if etcd.take('grpc_options', described, None):
        file.warn(
            'etcd.grpc_options is ignored: etcd is asked without gRPC now. Fix: remove the key; version 2.0 refuses it'
        )
    if not insecure and not _says_how(etcd) and (others := in_clear(config)):
        etcd.complain('endpoints' if 'endpoints' in etcd else 'host', CLEAR.format(others[0], ''))
    return config


def placement_of(file: YamlFile, name: str, default: PlacementConfig) -> PlacementConfig:
    """The PlacementConfig in the section of this name; what is wrong in it is noted in `file`."""
    placement = file.top.section(name)
    endpoint = placement.take('endpoint', url, default.endpoint)
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


def _certificates(file: YamlFile, section: Section) -> tuple[Path | None, Path | None, Path | None]:
    """The section's ca_cert, cert_key and cert_cert; None for each it does not have."""
    for key, other in (('cert_key', 'cert_cert'), ('cert_cert', 'cert_key')):
        if key in section and other not in section:
            section.complain(key, f'needs {other} beside it')
    ca_cert = section.take('ca_cert', file.file_of, None)
    return ca_cert, section.take('cert_key', file.file_of, None), section.take('cert_cert', file.file_of, None)


def _says_how(section: Section) -> bool:
    """Whether the section names a certificate, right or wrong: what is wrong with it is noted already."""
    return any(key in section for key in CERTIFICATES)


# The rows


def key(default: T, parse: Callable[[Node], T]) -> T:
    """A field that the file's key of its name sets, as `parse` reads the value; `default` without one."""
    return row(default, lambda file, name, default: file.top.take(name, parse, default))


def path_key(default: T, parse: Callable[[YamlFile, Node], T]) -> T:
    """The same of paths, which are relative to the file: `parse` is a method of it."""
    return row(default, lambda file, name, default: file.top.take(name, partial(parse, file), default))


def row(default: T, read: Callable[[YamlFile, str, T], T]) -> T:
    """A field that `read` finds in the file: in a section, or in more than one key."""
    how: Any = {'default_factory': default.copy} if isinstance(default, dict) else {'default': default}
    made: T = field(**how, metadata={'read': read})
    return made


def load(kind: Callable[..., T], path: Path | None, usual: str) -> T:
    """Load `path` as its rows say; None means the file of the `usual` name that find_usual() finds, or the defaults.

    A field without a row is what the file itself has by that name. UsageError says all that is wrong.
    """
    file = YamlFile.read(path, usual)
    defaults: Any = kind()
    values = {}
    for each in fields(defaults):
        read = each.metadata.get('read')
        values[each.name] = read(file, each.name, getattr(defaults, each.name)) if read else getattr(file, each.name)
    file.finish()
    return kind(**values)


# schedule.yaml


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


def _flavors(node: Node) -> dict[str, Flavor]:
    from ecomp.model.flavor import parse_flavor  # for those who have some

    def name_of(node: Node) -> str:
        if node.items or node.pairs:
            raise Wrong('a name must be a word')
        return node.text

    def parse(name: str, node: Node) -> Flavor:
        return checked(partial(parse_flavor, name))(node)

    return mapping_of(name_of, parse, 'names with queries')(node)


def _identifier(node: Node) -> str:
    if len(text := text_of(node)) > 255:
        raise Wrong(f'must be at most 255 characters, has {len(text)}')
    return text


@dataclass(frozen=True)
class ScheduleConfig:
    """What eschedule is told, as schedule.yaml explains it: a row a key. All paths are absolute; `flavors` are by name.

    `path` is that file, None where there is none.
    """

    etcd: EtcdConfig = row(EtcdConfig(), etcd_of)
    placement: PlacementConfig = row(PlacementConfig(), placement_of)
    image: str = key(DEFAULT_IMAGE, checked(check_image))
    user_id: str = key(DEFAULT_USER_ID, _identifier)
    project_id: str = key(DEFAULT_PROJECT_ID, _identifier)
    user_data: Path | None = path_key(None, YamlFile.path_of)
    ssh_keys: tuple[Path, ...] = path_key((), YamlFile.paths_of)
    flavors: Mapping[str, Flavor] = key({}, _flavors)
    reach: Reach = key(DEFAULT_REACH, checked(parse_reach))
    ssh_user: str = key('debian', checked(check_user))
    path: Path | None = field(default=None, compare=False)


def load_schedule(path: Path | None = None) -> ScheduleConfig:
    """Load `path`; None means the schedule.yaml that find_usual() finds, or the defaults. UsageError."""
    return load(ScheduleConfig, path, 'schedule.yaml')


# How they are asked


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


def _is_local(host: str) -> bool:
    import ipaddress  # as below

    try:
        return ipaddress.ip_address(host.removeprefix('[').removesuffix(']')).is_loopback
    except ValueError:
        return host.lower() == 'localhost'


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
