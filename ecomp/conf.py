"""schedule.yaml as a frozen value, and the sections etcd and placement of both files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ecomp import yaml_file as yaml
from ecomp.model.image import check_image
from ecomp.model.reach import DEFAULT_REACH, ReachCommand, check_user, parse_reach
from ecomp.model.text import check_plain_name
from ecomp.model.warning_codes import SCHEDULE_WARNINGS

if TYPE_CHECKING:
    import socket

T = TypeVar('T')
CERTIFICATE_KEYS = ('ca_cert', 'cert_cert', 'cert_key')
CLEARTEXT_REFUSAL = (
    '{} is not an address of this machine, but the connection to it would be in plain text. Fix: set {}ca_cert, '
    'cert_cert and cert_key (`elab certs` makes them), or, on a network without other users, `insecure: true`'
)
# Constant, because usages are queried by project, and placement adds a row for each new one. They are
# uuid5(NAMESPACE_URL, 'ecomp:user' and 'ecomp:project').
DEFAULT_USER_ID = '17e6e83b-634e-5c2c-a5ac-0a147aa07def'
DEFAULT_PROJECT_ID = '18dbf4e8-fca6-5cf2-b50f-511855813014'
# Not 0.3.6, the default of 2019: its SHA-256 is not published (only its MD5). metal3 and kubevirt pin this one, too.
DEFAULT_IMAGE = (
    'https://download.cirros-cloud.net/0.6.2/cirros-0.6.2-x86_64-disk.img'
    '#sha256=07e44a73e54c94d988028515403c1ed762055e01b83a767edf3c2b387f78ce00'
)
REMOVED_KEYS = {
    'flavors': "flavors are stored in etcd. Fix: remove the key, and run `eschedule flavor set NAME 'resources=…'`"
}


class EtcdConfig(NamedTuple):
    """How to reach etcd: in plain text without certificates, with `timeout` seconds a call."""

    endpoints: tuple[str, ...] = ('localhost:2379',)
    ca_cert: Path | None = None
    cert_key: Path | None = None
    cert_cert: Path | None = None
    timeout: float = 5.0


class PlacementConfig(NamedTuple):
    """The URL of placement, without a trailing slash, and files of credentials."""

    endpoint: str = 'http://localhost:8080'
    ca_cert: Path | None = None
    cert_key: Path | None = None
    cert_cert: Path | None = None
    token_file: Path | None = None


Backend = TypeVar('Backend', EtcdConfig, PlacementConfig)


def _parse_seconds(node: yaml.Node) -> float:
    if node.kind not in ('int', 'float') or not re.fullmatch(r'[0-9]{1,9}(\.[0-9]*)?', node.text):
        raise ValueError(f'must be a number of seconds, not {yaml.describe_typed_node(node)}')
    if not 0 < (seconds := float(node.text)) <= 3600:
        raise ValueError(f'must be more than 0 and at most 3600 seconds, not {yaml.shorten(node.text)}')
    return seconds


def _parse_host(text: str) -> str:
    """Parse a host name or an address, and put an IPv6 address in brackets."""
    import ipaddress  # imported here: only a file that names a host needs it

    if re.fullmatch(r'[A-Za-z0-9_]([A-Za-z0-9_.-]{0,253})', text):
        return text
    try:
        return f'[{ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))}]'
    except ValueError as error:
        raise ValueError(f'must be a host name or address, not {yaml.shorten(text)}') from error


def _parse_endpoint(node: yaml.Node) -> str:
    host, _, port = (text := yaml.parse_text(node)).rpartition(':')
    if not re.fullmatch('[0-9]{1,5}', port) or not 1 <= int(port) <= 65535:
        raise ValueError(f'{yaml.shorten(text)} must be host:port, with a port from 1 to 65535')
    return f'{_parse_host(host)}:{int(port)}'


def parse_url(node: yaml.Node) -> str:
    """Parse an http or https URL without user, query or fragment, and strip final slashes."""
    from urllib.parse import urlsplit  # as above

    text = yaml.parse_text(node)
    try:
        parts = urlsplit(text)
        port = parts.port
        host = _parse_host(parts.hostname or '')
    except ValueError as error:
        raise ValueError('must be a URL like http://ds1:8080') from error
    if '@' in parts.netloc:  # not repeated: it may be a password
        raise ValueError('must not contain a user or password: they would appear in logs and process lists')
    if parts.scheme not in ('http', 'https') or parts.query or parts.fragment or ' ' in text or not host:
        raise ValueError(f'must be a URL like http://ds1:8080, not {yaml.shorten(text)}')
    if port == 0:
        raise ValueError('the port must be 1 to 65535')
    return text.rstrip('/')


def read_etcd(file: yaml.YamlFile, name: str, default: EtcdConfig) -> EtcdConfig:
    """Read the section `name`, and add its mistakes to the problems of `file`."""
    etcd = file.top.read_section(name)
    for key in etcd.take_keys('user|password'):
        etcd.add_problem(key, 'logging in with a password is not safe. Fix: use certificates (cert_cert, cert_key)')
    host = etcd.read('host', lambda node: _parse_host(yaml.parse_text(node)), 'localhost')
    port = etcd.read('port', yaml.make_integer_parser(1, 65535), 2379)
    parse = yaml.make_list_parser(_parse_endpoint, 'a list like [ds1:2379, ds2:2379]', min_items=1)
    single: tuple[str, ...] = (f'{host}:{port}',)
    endpoints = etcd.read('endpoints', parse, single)
    for key in ('host', 'port'):
        if key in etcd and 'endpoints' in etcd:
            etcd.add_problem(key, 'set either endpoints, or host and port')
    if etcd.read('grpc_options', yaml.describe_node, None):
        import logging  # imported here: few files cause a warning

        text = '%s: etcd.grpc_options is ignored: ecomp uses no gRPC library. Fix: remove the key; ecomp 2.0 refuses it'
        logging.getLogger(__name__).warning(text, file.name)
    config = EtcdConfig(endpoints, timeout=etcd.read('timeout', _parse_seconds, default.timeout))
    return _read_certificates(file, etcd, config, 'endpoints' if 'endpoints' in etcd else 'host', '')


def read_placement(file: yaml.YamlFile, name: str, default: PlacementConfig) -> PlacementConfig:
    """Read the section `name`, and add its mistakes to the problems of `file`."""
    placement = file.top.read_section(name)
    endpoint = placement.read('endpoint', parse_url, default.endpoint)
    for key in CERTIFICATE_KEYS:
        if key in placement and not endpoint.startswith('https://'):
            placement.add_problem(key, f'needs an endpoint with https://, not {endpoint}')
    config = PlacementConfig(endpoint, token_file=placement.read('token_file', file.parse_readable_file, None))
    return _read_certificates(file, placement, config, 'endpoint', 'an endpoint with https://, ')


def _read_certificates(file: yaml.YamlFile, section: yaml.Section, config: Backend, key: str, advice: str) -> Backend:
    """Add the certificates to `config`, and report plain text that `insecure` does not allow."""
    for one, other in (('cert_key', 'cert_cert'), ('cert_cert', 'cert_key')):
        if one in section and other not in section:
            section.add_problem(one, f'needs {other}, too')
    may_be_plain = section.read('insecure', yaml.parse_flag, False) or any(name in section for name in CERTIFICATE_KEYS)
    files: dict[str, Any] = {name: section.read(name, file.parse_readable_file, None) for name in CERTIFICATE_KEYS}
    config = config._replace(**files)
    if not may_be_plain and (hosts := list_cleartext_hosts(config)):
        section.add_problem(key, CLEARTEXT_REFUSAL.format(hosts[0], advice))
    return config


def make_field(default: T, parse: Callable[[yaml.Node], T]) -> T:
    """Make a dataclass field, whose value `parse` makes of the file's key of the same name."""
    return make_custom_field(default, lambda file, name, default: file.top.read(name, parse, default))


def make_path_field(default: T, parse: Callable[[yaml.YamlFile, yaml.Node], T]) -> T:
    """Make a field as make_field() does, but with `parse(file, node)`, for relative paths."""
    return make_custom_field(default, lambda file, name, default: file.top.read(name, partial(parse, file), default))


def make_custom_field(default: T, read: Callable[[yaml.YamlFile, str, T], T]) -> T:
    """Make a dataclass field that load() sets to what `read(file, name, default)` returns."""
    options: Any = {'default_factory': default.copy} if isinstance(default, dict) else {'default': default}
    made_field: T = field(**options, metadata={'read': read})
    return made_field


def load(kind: Callable[..., T], path: Path | None, default_name: str, removed_keys: Mapping[str, str]) -> T:
    """Load a `kind` from `path` or the default file, or raise UsageError with all mistakes."""
    file = yaml.YamlFile.read(path, default_name)
    defaults: Any = kind()
    values = {}
    for spec in fields(defaults):
        read = spec.metadata.get('read')
        values[spec.name] = read(file, spec.name, getattr(defaults, spec.name)) if read else getattr(file, spec.name)
    for key, reason in removed_keys.items():
        if file.top.take_keys(key):
            file.top.add_problem(key, reason)
    file.finish()
    return kind(**values)


def _parse_images(node: yaml.Node) -> dict[str, str]:
    parse = yaml.make_text_parser(check_image)
    parse_name = yaml.make_text_parser(partial(check_plain_name, kind='image'))
    return yaml.make_mapping_parser(parse_name, lambda _, node: parse(node), 'a mapping of names to URLs')(node)


def _parse_identifier(node: yaml.Node) -> str:
    if len(text := yaml.parse_text(node)) > 255:
        raise ValueError(f'must have at most 255 characters, not {len(text)}')
    return text


@dataclass(frozen=True)
class ScheduleConfig:
    """The settings of schedule.yaml, which explains each key."""

    etcd: EtcdConfig = make_custom_field(EtcdConfig(), read_etcd)
    placement: PlacementConfig = make_custom_field(PlacementConfig(), read_placement)
    image: str = make_field(DEFAULT_IMAGE, yaml.make_text_parser(check_image))
    user_id: str = make_field(DEFAULT_USER_ID, _parse_identifier)
    project_id: str = make_field(DEFAULT_PROJECT_ID, _parse_identifier)
    user_data: Path | None = make_path_field(None, yaml.YamlFile.parse_path)
    ssh_keys: tuple[Path, ...] = make_path_field(
        (), lambda file, node: yaml.make_list_parser(file.parse_path, 'a list like [id_ed25519.pub]')(node)
    )
    images: Mapping[str, str] = make_field({}, _parse_images)
    reach: ReachCommand = make_field(DEFAULT_REACH, yaml.make_text_parser(parse_reach))
    ssh_user: str = make_field('debian', yaml.make_text_parser(check_user))
    ignore_warnings: tuple[str, ...] = make_field(
        (), yaml.make_unique_list_parser(yaml.make_choice_parser(*SCHEDULE_WARNINGS))
    )
    path: Path | None = field(default=None, compare=False)


def load_schedule(path: Path | None = None) -> ScheduleConfig:
    """Load schedule.yaml from `path` or, for None, from the default file if there is one."""
    return load(ScheduleConfig, path, 'schedule.yaml', REMOVED_KEYS)


def list_cleartext_hosts(*configs: EtcdConfig | PlacementConfig) -> list[str]:
    """List the hosts, with ports, that are contacted in plain text, except loopback ones."""
    hosts: list[str] = []
    for config in configs:
        if isinstance(config, PlacementConfig):
            scheme, _, rest = config.endpoint.partition('://')
            hosts += [] if scheme == 'https' else [rest.partition('/')[0]]
        elif not (config.ca_cert or config.cert_key or config.cert_cert):
            hosts += config.endpoints
    return [host for host in hosts if not _is_loopback(re.sub(r':[0-9]+\Z', '', host))]


def list_exposed_secrets(*configs: EtcdConfig | PlacementConfig) -> list[Path]:
    """List the key and token files that all local users can read or write."""
    modes = {}
    for path in (path for config in configs for path in (config.cert_key, getattr(config, 'token_file', None)) if path):
        with suppress(OSError):  # reading the file later reports the error
            modes[path] = path.stat().st_mode & 0o006
    return [path for path, is_open in modes.items() if is_open]


def _is_loopback(host: str) -> bool:
    import ipaddress  # as above

    try:
        return ipaddress.ip_address(host.removeprefix('[').removesuffix(']')).is_loopback
    except ValueError:
        return host.lower() == 'localhost'


def connect_tcp(host: bytes | str, port: int, timeout: float, budget_seconds: float) -> socket.socket:
    """Connect to one of the host's addresses, tried in order.

    The last address has `timeout` seconds, which is also the timeout of the returned socket.
    The earlier ones share half of `budget_seconds`, at most one second each.

    Raises:
        OSError: the host has no address, or none of them accepts the connection.
        ValueError: the name of the host is invalid.
    """
    import socket  # imported here: only a connection needs it

    *others, last = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    timed_out = []
    for address_info in others:  # an IPv6 address without a route must leave time for the others
        with suppress(OSError):
            try:
                return _connect(address_info, min(1.0, budget_seconds / 2 / len(others)), timeout)
            except TimeoutError:
                timed_out.append(address_info)
    try:
        return _connect(last, timeout, timeout)
    except OSError as error:
        if not timed_out or isinstance(error, TimeoutError):
            raise
        return _connect(timed_out[0], timeout, timeout)


def _connect(address_info: Any, connect_timeout: float, timeout: float) -> socket.socket:
    import socket  # as above

    family, kind, protocol, _, address = address_info
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(connect_timeout)
        connection.connect(address)
        connection.settimeout(timeout)
    except OSError:
        connection.close()
        raise
    return connection
