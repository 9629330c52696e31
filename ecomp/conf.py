"""schedule.yaml, read once into a frozen, complete value; compute.yaml's is in ecomp.compute_conf.

A missing file means the defaults, which point at localhost; an empty file and a key without a value mean the same.
Everything wrong in a file is one UsageError, with a line for each mistake:
`schedule.yaml:3: imag: unknown key (did you mean image?)`.
Relative paths in a file are meant relative to that file. The keys are described in the two example files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ecomp.endpoints import EtcdConfig as EtcdConfig
from ecomp.endpoints import PlacementConfig as PlacementConfig
from ecomp.endpoints import etcd_of, placement_of
from ecomp.model.image import check_image
from ecomp.model.reach import DEFAULT_REACH, Reach, check_user, parse_reach
from ecomp.yaml_file import Node, Wrong, YamlFile, described, read_parts, text_of

if TYPE_CHECKING:
    from ecomp.model.flavor import Flavor

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
    """The configuration in `path`; None means the schedule.yaml that config_path finds, or the defaults. UsageError."""
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
