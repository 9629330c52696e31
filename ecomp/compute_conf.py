"""compute.yaml, read into a frozen, complete value by the rules of ecomp.conf.

A separate module, so that eschedule does not load it: making these classes takes 1 % of a short command's time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ecomp.conf import (
    DEFAULT_USER_ID,
    EtcdConfig,
    PlacementConfig,
    etcd_of,
    key,
    load,
    path_key,
    placement_of,
    row,
    url,
)
from ecomp.errors import UsageError
from ecomp.model import keys
from ecomp.model.allocation import is_class
from ecomp.model.guest import DEFAULT_NETWORKS, MOST_INTERFACES, Attachment
from ecomp.model.image import check_source
from ecomp.yaml_file import (
    Node,
    Wrong,
    YamlFile,
    between,
    checked,
    each_once,
    flag,
    list_of,
    mapping_of,
    one_of,
    shown,
    text_of,
    typed,
)

MAX_INT = 2**31 - 1  # placement's limit for a total
MOST_RATIO = 1000  # a larger allocation ratio is refused


# Parsers of a node, as in yaml_file: each returns its value or raises InvalidValue with what is expected.


def _uuid(node: Node) -> str:
    if not keys.is_uuid(text := text_of(node).lower()):
        raise Wrong(f'must be a uuid like {DEFAULT_USER_ID}, not {shown(text)}')
    return text


def _trait(node: Node) -> str:
    from ecomp.model.traits import check_trait  # imported here: os_traits loads slowly, and few files have traits

    try:
        return check_trait(name := text_of(node))
    except ValueError as error:
        raise Wrong(f'{shown(name)} {error}') from error


def _attachment(item: Node) -> Attachment:
    kinds = {'network': _network, 'bridge': _interface}
    if item.kind != 'map' or len(item.pairs) != 1 or item.pairs[0][0].text not in kinds:
        raise Wrong('must be `network: NAME`, one of libvirt, or `bridge: NAME`, one of this host')
    key, value = item.pairs[0]
    return Attachment(key.text, kinds[key.text](value))


def _network(node: Node) -> str:
    if '/' in (text := text_of(node)) or len(text) > 100:
        raise Wrong(f'must be the name of a network of libvirt, not {shown(text)}')
    return text


def _interface(node: Node) -> str:
    if not re.fullmatch(r'(?!\.\.?$)[A-Za-z0-9_.-]{1,15}', text := text_of(node)):
        raise Wrong(f'must be the name of a network interface (at most 15 characters), not {shown(text)}')
    return text


def _stated(_: str, node: Node) -> int:
    return _total(node.text if node.kind == 'int' else typed(node))


def _ratio(_: str, node: Node) -> float:
    is_decimal = node.kind in ('int', 'float') and re.fullmatch(r'[0-9]{1,9}(\.[0-9]{0,9})?', node.text)
    if not is_decimal or not 0 < (ratio := float(node.text)) <= MOST_RATIO:
        raise Wrong(f'the ratio must be a number like 0.5, above 0 and at most {MOST_RATIO}, not {typed(node)}')
    return ratio


def _class_of(key: Node) -> str:
    return _resource_class(key.text)


def _resource_class(name: str) -> str:
    if not is_class(name):
        raise Wrong('must be a resource class: capitals, digits and _')
    return name


def _total(text: str) -> int:
    if not re.fullmatch('[1-9][0-9]{0,9}', text) or int(text) > MAX_INT:
        raise Wrong(f'the total must be a whole number from 1 to {MAX_INT}, not {shown(text)}')
    return int(text)


def _networks(file: YamlFile, name: str, default: tuple[Attachment, ...]) -> tuple[Attachment, ...]:
    """Read `networks`, or the defaults and the bridge of the old key `bridge`."""
    if name in file.top and 'bridge' in file.top:
        file.top.complain('bridge', 'say it in networks, where it stands beside them: - bridge: NAME')
    no_attachments: tuple[Attachment, ...] = ()
    second = file.top.take('bridge', lambda node: (Attachment('bridge', _interface(node)),), no_attachments)
    return file.top.take(name, _network_list, (*default, *second))


def _network_list(node: Node) -> tuple[Attachment, ...]:
    def describe(item: Node) -> str:
        kind, name = item.pairs[0]
        return f'{kind.text} {shown(name.text)}'

    attachments = list_of(_attachment, 'a list of `- network: NAME` and `- bridge: NAME`', least=1, once=describe)(node)
    if len(attachments) > MOST_INTERFACES:
        raise Wrong(f'must be at most {MOST_INTERFACES}, are {len(attachments)}')
    return attachments


@dataclass(frozen=True)
class ComputeConfig:
    """The settings of compute.yaml, which explains them: one field a key.

    None means that ecompute determines the value itself. `path` is the file, None if there is none; `directory` is the
    file's.
    """

    uuid: str | None = key(None, _uuid)
    etcd: EtcdConfig = row(EtcdConfig(), etcd_of)
    placement: PlacementConfig = row(PlacementConfig(), placement_of)
    resize: bool = key(True, flag)
    networks: tuple[Attachment, ...] = row(DEFAULT_NETWORKS, _networks)
    metadata: str = key('network', one_of('network', 'iso'))
    state: Path = path_key(Path('/var/lib/ecompute'), YamlFile.path_of)
    workers: int | None = key(None, between(1, 64))
    inventory: Mapping[str, int] | None = key(None, mapping_of(_class_of, _stated, 'resource classes with totals', 1))
    virt_type: str = key('auto', one_of('auto', 'kvm', 'qemu'))
    images: Path | None = path_key(None, YamlFile.path_of)
    image_cache: int | None = key(None, between(1, MAX_INT))
    image_sources: tuple[str, ...] | None = key(None, each_once(checked(check_source)))
    image_proxy: str | None = key(None, url)
    queues: bool = key(False, flag)
    hold_addresses: bool = key(False, flag)
    traits: tuple[str, ...] = key((), each_once(_trait))
    aggregates: tuple[str, ...] = key((), each_once(_uuid))
    allocation_ratios: Mapping[str, float] = key({}, mapping_of(_class_of, _ratio, 'resource classes with ratios', 1))
    directory: Path = Path('.')
    path: Path | None = field(default=None, compare=False)


def load_compute(path: Path | None = None) -> ComputeConfig:
    """Load compute.yaml as load() does; raise UsageError if it is invalid."""
    return load(ComputeConfig, path, 'compute.yaml')


def parse_inventory(text: str) -> dict[str, int]:
    """Parse {class: total} from `VCPU:4, DISK_GB:10, MEMORY_MB:512`, as --fake takes it.

    Raises UsageError if a part is not CLASS:TOTAL with a total from 1 to MAX_INT, or a class is repeated.
    """
    totals: dict[str, int] = {}
    for part in text.split(','):
        name, colon, total = (word.strip() for word in part.partition(':'))
        try:
            if not colon:
                raise Wrong('is not CLASS:TOTAL')
            if name in totals:
                raise Wrong('is there twice')
            totals[_resource_class(name)] = _total(total)
        except Wrong as wrong:
            where = f"inventory '{shown(text)}': '{shown(part.strip())}'"
            raise UsageError(f'{where}: {wrong}; say it like VCPU:4,DISK_GB:10,MEMORY_MB:512') from wrong
    return totals
