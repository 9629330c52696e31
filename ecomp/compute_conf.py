"""compute.yaml, read once into a frozen, complete value: by the same rules as schedule.yaml, see ecomp.conf.

In a module of its own, so that no eschedule loads it: making these classes takes 1 % of a short command's time.
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
MOST_RATIO = 1000  # of an inventory; a larger allocation ratio is refused


# As in yaml_file: each reads a node's value, or raises Wrong with what it should have been.


def _uuid(node: Node) -> str:
    if not keys.is_uuid(text := text_of(node).lower()):
        raise Wrong(f'must be a uuid like {DEFAULT_USER_ID}, not {shown(text)}')
    return text


def _trait(node: Node) -> str:
    from ecomp.model.traits import check_trait  # for those who have some: os_traits takes its time

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
    plain = node.kind in ('int', 'float') and re.fullmatch(r'[0-9]{1,9}(\.[0-9]{0,9})?', node.text)
    if not plain or not 0 < (ratio := float(node.text)) <= MOST_RATIO:
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
    """The interfaces of `networks`, or of its form of 2019, `bridge`: a second one."""
    if name in file.top and 'bridge' in file.top:
        file.top.complain('bridge', 'say it in networks, where it stands beside them: - bridge: NAME')
    nothing: tuple[Attachment, ...] = ()
    second = file.top.take('bridge', lambda node: (Attachment('bridge', _interface(node)),), nothing)
    return file.top.take(name, _network_list, (*default, *second))


def _network_list(node: Node) -> tuple[Attachment, ...]:
    def called(item: Node) -> str:
        kind, name = item.pairs[0]
        return f'{kind.text} {shown(name.text)}'

    found = list_of(_attachment, 'a list of `- network: NAME` and `- bridge: NAME`', least=1, once=called)(node)
    if len(found) > MOST_INTERFACES:
        raise Wrong(f'must be at most {MOST_INTERFACES}, are {len(found)}')
    return found


@dataclass(frozen=True)
class ComputeConfig:
    """What ecompute is told, as compute.yaml explains it: a row a key. None: it finds out itself.

    `path` is that file, None where there is none; `directory` is that file's.
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
    """Load `path`; None means the compute.yaml that find_usual() finds, or the defaults. UsageError."""
    return load(ComputeConfig, path, 'compute.yaml')


def parse_inventory(text: str) -> dict[str, int]:
    """{class: total} of `VCPU:4,DISK_GB:10,MEMORY_MB:512`, as `ecompute --fake` takes it, with spaces around parts.

    UsageError if a part is no CLASS:TOTAL with a total above 0, or a class is there twice.
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
