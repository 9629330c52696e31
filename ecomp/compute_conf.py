"""compute.yaml as a frozen value."""

# Separate from ecomp.conf, because defining it takes 1 % of the time of a short command.
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ecomp import conf, yaml_file
from ecomp.conf import EtcdConfig, PlacementConfig, make_custom_field, make_field, make_path_field
from ecomp.errors import Problem, UsageError
from ecomp.model import keys
from ecomp.model.allocation import is_class
from ecomp.model.guest import DEFAULT_NETWORKS, MAX_INTERFACES, Attachment
from ecomp.model.image import check_source
from ecomp.model.warning_codes import COMPUTE_WARNINGS
from ecomp.yaml_file import Node, YamlFile, make_checked_parser, make_choice_parser, make_unique_list_parser, parse_text

MAX_INT = 2**31 - 1  # placement's limit for a total
MAX_ALLOCATION_RATIO = 1000

_parse_uuid = make_checked_parser(
    lambda node: parse_text(node).lower(), keys.is_uuid, f'a uuid like {conf.DEFAULT_USER_ID}'
)
_parse_network = make_checked_parser(parse_text, re.compile('[^/]{1,100}').fullmatch, 'the name of a libvirt network')
_is_nic = re.compile(r'(?!\.\.?$)[A-Za-z0-9_.-]{1,15}').fullmatch
_parse_interface = make_checked_parser(parse_text, _is_nic, 'the name of a network interface (at most 15 characters)')


def _parse_trait(node: Node) -> str:
    from ecomp.model.traits import check_trait  # imported here: os_traits loads slowly, and few files have traits

    name = parse_text(node)
    try:
        return check_trait(name)
    except ValueError as error:
        raise ValueError(f'{yaml_file.shorten(name)} {error}') from error


def _parse_attachment(item: Node) -> Attachment:
    kinds = {'network': _parse_network, 'bridge': _parse_interface}
    if item.kind != 'map' or len(item.pairs) != 1 or item.pairs[0][0].text not in kinds:
        raise ValueError('must be `network: NAME` (a libvirt network) or `bridge: NAME` (a bridge of this host)')
    key, value = item.pairs[0]
    return Attachment(key.text, kinds[key.text](value))


def _parse_total_node(_: str, node: Node) -> int:
    return _parse_total(node.text if node.kind == 'int' else yaml_file.describe_typed_node(node))


def _parse_ratio(_: str, node: Node) -> float:
    is_decimal = node.kind in ('int', 'float') and re.fullmatch(r'[0-9]{1,9}(\.[0-9]{0,9})?', node.text)
    if not is_decimal or not 0 < (ratio := float(node.text)) <= MAX_ALLOCATION_RATIO:
        shape = f'a number like 0.5, above 0 and at most {MAX_ALLOCATION_RATIO}'
        raise ValueError(f'the ratio must be {shape}, not {yaml_file.describe_typed_node(node)}')
    return ratio


def _parse_class_node(key: Node) -> str:
    return _parse_resource_class(key.text)


def _parse_resource_class(name: str) -> str:
    if not is_class(name):
        raise ValueError('must be a resource class: capitals, digits and _')
    return name


def _parse_total(text: str) -> int:
    if not re.fullmatch('[1-9][0-9]{0,9}', text) or int(text) > MAX_INT:
        raise ValueError(f'the total must be a whole number from 1 to {MAX_INT}, not {yaml_file.shorten(text)}')
    return int(text)


_MAPPING = 'a mapping of resource classes to'
_parse_totals = yaml_file.make_mapping_parser(_parse_class_node, _parse_total_node, f'{_MAPPING} totals', 1)
_parse_ratios = yaml_file.make_mapping_parser(_parse_class_node, _parse_ratio, f'{_MAPPING} ratios', 1)
_parse_sources = make_unique_list_parser(yaml_file.make_text_parser(check_source))


def _read_networks(file: YamlFile, name: str, default: tuple[Attachment, ...]) -> tuple[Attachment, ...]:
    """Read `networks` or, without it, return `default` and the bridge of the old key `bridge`."""
    if name in file.top and 'bridge' in file.top:
        problem = 'is not accepted together with networks. Fix: move it to networks, as `- bridge: NAME`'
        file.top.add_problem('bridge', problem)
    no_attachments: tuple[Attachment, ...] = ()
    second = file.top.read('bridge', lambda node: (Attachment('bridge', _parse_interface(node)),), no_attachments)
    return file.top.read(name, _parse_networks, (*default, *second))


def _parse_networks(node: Node) -> tuple[Attachment, ...]:
    def describe(item: Node) -> str:
        kind, name = item.pairs[0]
        return f'{kind.text} {yaml_file.shorten(name.text)}'

    shape = 'a list of `- network: NAME` and `- bridge: NAME`'
    attachments = yaml_file.make_list_parser(_parse_attachment, shape, min_items=1, describe_item=describe)(node)
    if len(attachments) > MAX_INTERFACES:
        raise ValueError(f'must have at most {MAX_INTERFACES} entries, not {len(attachments)}')
    return attachments


def _parse_metrics_path(file: YamlFile, node: Node) -> Path:
    if (path := file.parse_path(node)).suffix != '.prom':
        name = yaml_file.shorten(path.name)
        raise ValueError(f'{name} must end in .prom, because node_exporter reads no other file')
    return path


def explain_unsafe_metrics(path: Path | None) -> Problem | None:
    """Return a problem unless only root and this user can write to the path's directory."""
    if path is None:
        return None
    loose: Path | None = path.parent
    with suppress(OSError):  # missing, or in a directory that this user cannot enter
        loose = yaml_file.find_loose_directory(path, (0, os.geteuid()))
        if loose is None and not path.parent.stat().st_mode & 0o022:
            return None
    what = f'no metrics are written: {loose or path.parent} is not a directory to which only root can write'
    return Problem(what, 'create it as root, writable by root only, or correct `metrics:` in compute.yaml')


@dataclass(frozen=True)
class ComputeConfig:
    """The settings of compute.yaml, which explains each key."""

    uuid: str | None = make_field(None, _parse_uuid)
    etcd: EtcdConfig = make_custom_field(EtcdConfig(), conf.read_etcd)
    placement: PlacementConfig = make_custom_field(PlacementConfig(), conf.read_placement)
    resize: bool = make_field(True, yaml_file.parse_flag)
    networks: tuple[Attachment, ...] = make_custom_field(DEFAULT_NETWORKS, _read_networks)
    metadata: str = make_field('network', make_choice_parser('network', 'iso'))
    state: Path = make_path_field(Path('/var/lib/ecompute'), YamlFile.parse_path)
    workers: int | None = make_field(None, yaml_file.make_integer_parser(1, 64))
    inventory: Mapping[str, int] | None = make_field(None, _parse_totals)
    virt_type: str = make_field('auto', make_choice_parser('auto', 'kvm', 'qemu'))
    images: Path | None = make_path_field(None, YamlFile.parse_path)
    image_cache: int | None = make_field(None, yaml_file.make_integer_parser(1, MAX_INT))
    image_sources: tuple[str, ...] | None = make_field(None, _parse_sources)
    image_proxy: str | None = make_field(None, conf.parse_url)
    queues: bool = make_field(False, yaml_file.parse_flag)
    hold_addresses: bool = make_field(False, yaml_file.parse_flag)
    traits: tuple[str, ...] = make_field((), make_unique_list_parser(_parse_trait))
    aggregates: tuple[str, ...] = make_field((), make_unique_list_parser(_parse_uuid))
    allocation_ratios: Mapping[str, float] = make_field({}, _parse_ratios)
    ignore_warnings: tuple[str, ...] = make_field((), make_unique_list_parser(make_choice_parser(*COMPUTE_WARNINGS)))
    metrics: Path | None = make_path_field(None, _parse_metrics_path)
    directory: Path = Path('.')  # of the file, or the working directory
    path: Path | None = field(default=None, compare=False)


def load_compute(path: Path | None = None) -> ComputeConfig:
    """Load compute.yaml from `path` or, for None, from the default file if there is one."""
    return conf.load(ComputeConfig, path, 'compute.yaml', {})


def parse_inventory(text: str) -> dict[str, int]:
    """Parse `VCPU:4, DISK_GB:10` to {class: total}, or raise UsageError."""
    totals: dict[str, int] = {}
    for part in text.split(','):
        name, colon, total = (word.strip() for word in part.partition(':'))
        try:
            if not colon:
                raise ValueError('is not CLASS:TOTAL')
            if name in totals:
                raise ValueError('is given more than once')
            totals[_parse_resource_class(name)] = _parse_total(total)
        except ValueError as wrong:
            where = f"inventory '{yaml_file.shorten(text)}': '{yaml_file.shorten(part.strip())}'"
            raise UsageError(f'{where}: {wrong}. Fix: write it like VCPU:4,DISK_GB:10,MEMORY_MB:512') from wrong
    return totals
