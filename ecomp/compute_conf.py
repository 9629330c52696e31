"""compute.yaml, read once into a frozen, complete value: by the same rules as schedule.yaml, see ecomp.conf.

In a module of its own, so that no eschedule loads it: making these classes takes 1 % of a short command's time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ecomp.conf import DEFAULT_USER_ID, EtcdConfig, PlacementConfig, checked, etcd_of, placement_of, url
from ecomp.errors import UsageError
from ecomp.model import keys
from ecomp.model.allocation import is_class
from ecomp.model.guest import DEFAULT_NETWORKS, MOST_INTERFACES, Attachment
from ecomp.model.image import check_source
from ecomp.yaml_file import (
    Node,
    Section,
    Wrong,
    YamlFile,
    between,
    described,
    each_once,
    flag,
    one_of,
    read_parts,
    shown,
    text_of,
    typed,
)

MAX_INT = 2**31 - 1  # placement's limit for a total
MOST_RATIO = 1000  # of an inventory; a larger allocation ratio is refused

T = TypeVar('T')


@dataclass(frozen=True)
class ComputeConfig:
    """What ecompute is told, as compute.yaml explains it; `directory` is that file's. None: it finds out itself.

    `path` is that file, None where there is none.
    """

    uuid: str | None = None
    etcd: EtcdConfig = EtcdConfig()
    placement: PlacementConfig = PlacementConfig()
    resize: bool = True
    networks: tuple[Attachment, ...] = DEFAULT_NETWORKS
    metadata: str = 'network'
    state: Path = Path('/var/lib/ecompute')
    workers: int | None = None
    inventory: Mapping[str, int] | None = None
    virt_type: str = 'auto'
    images: Path | None = None
    image_cache: int | None = None
    image_sources: tuple[str, ...] | None = None
    image_proxy: str | None = None
    queues: bool = False
    hold_addresses: bool = False
    traits: tuple[str, ...] = ()
    aggregates: tuple[str, ...] = ()
    allocation_ratios: Mapping[str, float] = field(default_factory=dict)
    directory: Path = Path('.')
    path: Path | None = field(default=None, compare=False)


def load_compute(path: Path | None = None) -> ComputeConfig:
    """Load `path`; None means the compute.yaml that find_usual() finds, or the defaults. UsageError."""
    file = YamlFile.read(path, 'compute.yaml')
    top = file.top
    config = ComputeConfig(
        uuid=top.take('uuid', _uuid, None),
        etcd=etcd_of(file, top.section('etcd')),
        placement=placement_of(file, top.section('placement')),
        resize=top.take('resize', flag, ComputeConfig.resize),
        networks=_networks(top),
        metadata=top.take('metadata', one_of('network', 'iso'), ComputeConfig.metadata),
        state=top.take('state', file.path_of, ComputeConfig.state),
        workers=top.take('workers', between(1, 64), None),
        inventory=top.take('inventory', _by_class('totals', _stated), None),
        virt_type=top.take('virt_type', one_of('auto', 'kvm', 'qemu'), ComputeConfig.virt_type),
        images=top.take('images', file.path_of, None),
        image_cache=top.take('image_cache', between(1, MAX_INT), None),
        image_sources=top.take('image_sources', each_once(checked(check_source)), None),
        image_proxy=top.take('image_proxy', url, None),
        queues=top.take('queues', flag, ComputeConfig.queues),
        hold_addresses=top.take('hold_addresses', flag, ComputeConfig.hold_addresses),
        traits=top.take('traits', each_once(_trait), ()),
        aggregates=top.take('aggregates', each_once(_uuid), ()),
        allocation_ratios=top.take('allocation_ratios', _by_class('ratios', _ratio), {}),
        directory=file.directory,
        path=file.path,
    )
    file.finish()
    return config


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


def _networks(top: Section) -> tuple[Attachment, ...]:
    if 'networks' in top and 'bridge' in top:
        top.complain('bridge', 'say it in networks, where it stands beside them: - bridge: NAME')
    # The form of 2019: a second interface.
    nothing: tuple[Attachment, ...] = ()
    second = top.take('bridge', lambda node: (Attachment('bridge', _interface(node)),), nothing)
    return top.take('networks', _network_list, (*DEFAULT_NETWORKS, *second))


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


def _network_list(node: Node) -> tuple[Attachment, ...]:
    if node.kind != 'seq' or not node.items:
        raise Wrong(f'must be a list of `- network: NAME` and `- bridge: NAME`, not {described(node)}')
    found: list[Attachment] = []

    def read(item: Node) -> None:
        found.append(_attachment(item))
        if found[-1] in found[:-1]:
            raise Wrong(f'{found[-1].kind} {shown(found[-1].name)} is there twice')

    read_parts(node.items, read)
    if len(found) > MOST_INTERFACES:
        raise Wrong(f'must be at most {MOST_INTERFACES}, are {len(found)}')
    return tuple(found)


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


def _by_class(what: str, parse: Callable[[Node], T]) -> Callable[[Node], Mapping[str, T]]:
    """A reader of a mapping of resource classes, each value by `parse`; `what` names the values for people."""

    def parse_all(node: Node) -> Mapping[str, T]:
        if node.kind != 'map' or not node.pairs:
            raise Wrong(f'must be resource classes with {what}, not {described(node)}')
        found: dict[str, T] = {}

        def read(pair: tuple[Node, Node]) -> None:
            key, value = pair
            if _resource_class(key.text) in found:
                raise Wrong('is there twice')
            found[key.text] = parse(value)

        read_parts(node.pairs, read)
        return found

    return parse_all


def _stated(node: Node) -> int:
    return _total(node.text if node.kind == 'int' else typed(node))


def _ratio(node: Node) -> float:
    plain = node.kind in ('int', 'float') and re.fullmatch(r'[0-9]{1,9}(\.[0-9]{0,9})?', node.text)
    if not plain or not 0 < (ratio := float(node.text)) <= MOST_RATIO:
        raise Wrong(f'the ratio must be a number like 0.5, above 0 and at most {MOST_RATIO}, not {typed(node)}')
    return ratio


def _resource_class(name: str) -> str:
    if not is_class(name):
        raise Wrong('must be a resource class: capitals, digits and _')
    return name


def _total(text: str) -> int:
    if not re.fullmatch('[1-9][0-9]{0,9}', text) or int(text) > MAX_INT:
        raise Wrong(f'the total must be a whole number from 1 to {MAX_INT}, not {shown(text)}')
    return int(text)
