"""compute.yaml and schedule.yaml, each read once into a frozen, complete value.

A missing file means the defaults, which point at localhost; an empty file and a key without a value mean the same.
Everything wrong in a file is one UsageError, with a line for each mistake:
`compute.yaml:3: resise: unknown key (did you mean resize?)`.
Relative paths in a file are meant relative to that file. The keys are described in the two example files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ecomp.endpoints import EtcdConfig as EtcdConfig
from ecomp.endpoints import PlacementConfig as PlacementConfig
from ecomp.endpoints import etcd_of, placement_of, url
from ecomp.errors import UsageError
from ecomp.model.allocation import is_class
from ecomp.model.image import check_image, check_source
from ecomp.model.network import DEFAULT_NETWORKS, MOST_INTERFACES, Attachment
from ecomp.model.reach import DEFAULT_REACH, Reach, check_user, parse_reach
from ecomp.yaml_file import Node, Section, Wrong, YamlFile, between, described, each_once, flag, one_of, shown, text_of

if TYPE_CHECKING:
    from ecomp.model.flavor import Flavor

MAX_INT = 2**31 - 1  # placement's limit for a total
MOST_RATIO = 1000  # of an inventory; a larger allocation ratio is refused

T = TypeVar('T')

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
    traits: tuple[str, ...] = ()
    aggregates: tuple[str, ...] = ()
    allocation_ratios: Mapping[str, float] = field(default_factory=dict)
    directory: Path = Path('.')
    path: Path | None = field(default=None, compare=False)


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


def load_compute(path: Path | None = None) -> ComputeConfig:
    """The configuration in `path`; None means the compute.yaml that config_path finds, or the defaults. UsageError."""
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
        image_sources=top.take('image_sources', each_once(_checked(check_source)), None),
        image_proxy=top.take('image_proxy', url, None),
        queues=top.take('queues', flag, ComputeConfig.queues),
        traits=top.take('traits', each_once(_trait), ()),
        aggregates=top.take('aggregates', each_once(_uuid), ()),
        allocation_ratios=top.take('allocation_ratios', _by_class('ratios', _ratio), {}),
        directory=file.directory,
        path=file.path,
    )
    file.finish()
    return config


def load_schedule(path: Path | None = None) -> ScheduleConfig:
    """The configuration in `path`; None means the schedule.yaml that config_path finds, or the defaults. UsageError."""
    file = YamlFile.read(path, 'schedule.yaml')
    top = file.top
    config = ScheduleConfig(
        etcd=etcd_of(file, top.section('etcd')),
        placement=placement_of(file, top.section('placement')),
        image=top.take('image', _checked(check_image), ScheduleConfig.image),
        user_id=top.take('user_id', _identifier, ScheduleConfig.user_id),
        project_id=top.take('project_id', _identifier, ScheduleConfig.project_id),
        user_data=top.take('user_data', file.path_of, None),
        ssh_keys=top.take('ssh_keys', file.paths_of, ()),
        flavors=top.take('flavors', _flavors, {}),
        reach=top.take('reach', _reach, ScheduleConfig.reach),
        ssh_user=top.take('ssh_user', _checked(check_user), ScheduleConfig.ssh_user),
        path=file.path,
    )
    file.finish()
    return config


def _flavors(node: Node) -> dict[str, Flavor]:
    from ecomp.model.flavor import parse_flavor  # for those who have some

    if node.kind != 'map':
        raise Wrong(f'must be names with queries, not {described(node)}')
    found = {}
    for name, value in node.pairs:
        try:
            found[name.text] = parse_flavor(name.text, text_of(value))
        except ValueError as error:
            raise Wrong(f'{shown(name.text)}: {error}') from error
    return found


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


def _checked(check: Callable[[str], str]) -> Callable[[Node], str]:
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


def _uuid(node: Node) -> str:
    if not re.fullmatch(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}', text := text_of(node).lower()):
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
    for item in node.items:
        try:
            found.append(_attachment(item))
            if found[-1] in found[:-1]:
                raise Wrong(f'{found[-1].kind} {shown(found[-1].name)} is there twice')
        except Wrong as wrong:
            raise Wrong(f'line {item.line}: {wrong}') from wrong
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
        for key, value in node.pairs:
            try:
                if _resource_class(key.text) in found:
                    raise Wrong('is there twice')
                found[key.text] = parse(value)
            except Wrong as wrong:
                raise Wrong(f'{shown(key.text)} (line {key.line}): {wrong}') from wrong
        return found

    return parse_all


def _stated(node: Node) -> int:
    return _total(node.text if node.kind == 'int' else described(node))


def _ratio(node: Node) -> float:
    plain = node.kind in ('int', 'float') and re.fullmatch(r'[0-9]{1,9}(\.[0-9]{0,9})?', node.text)
    if not plain or not 0 < (ratio := float(node.text)) <= MOST_RATIO:
        raise Wrong(f'the ratio must be a number above 0, at most {MOST_RATIO}, not {described(node)}')
    return ratio


def _resource_class(name: str) -> str:
    if not is_class(name):
        raise Wrong('must be a resource class: capitals, digits and _')
    return name


def _total(text: str) -> int:
    if not re.fullmatch('[1-9][0-9]{0,9}', text) or int(text) > MAX_INT:
        raise Wrong(f'the total must be a whole number from 1 to {MAX_INT}, not {shown(text)}')
    return int(text)
