"""The file of a stack that `eschedule apply FILE` reads, checked as a whole."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ecomp import yaml_file as yaml
from ecomp.cli.command import Context
from ecomp.cli.input import STDIN, read_file, read_ssh_keys, read_user_data, require_guest_classes, resolve_image
from ecomp.cli.options import require_project
from ecomp.errors import EcompError, Unreachable, UsageError
from ecomp.model import query as queries
from ecomp.model.allocation import REQUIRED_CLASSES, list_missing_classes
from ecomp.model.apply import Desired
from ecomp.model.choose import SPREAD, STRATEGIES
from ecomp.model.group import POLICIES, Membership, check_group_name
from ecomp.model.order import USER_TEXTS, Order
from ecomp.model.stack import MAX_STACK_SIZE, check_member_name, check_stack_name
from ecomp.model.text import check_name
from ecomp.model.user_data import SharedUserData
from ecomp.yaml_file import Node, Section

if TYPE_CHECKING:
    from ecomp.model.flavor import Flavor

MAX_FILE_BYTES = 1024 * 1024
# Values of the file, once its aliases are replaced.
MAX_NODES = 10_000
FROM_CONFIG = 'the default of schedule.yaml'
T = TypeVar('T')


@dataclass(frozen=True)
class StackFile:
    """A file without problems: `instances` by "<member>/<number>", `user_data` by SHA-256."""

    name: str
    instances: dict[str, Desired] = field(default_factory=dict)
    user_data: dict[str, SharedUserData] = field(default_factory=dict)

    @property
    def members(self) -> list[str]:
        return list(dict.fromkeys(entry.rpartition('/')[0] for entry in self.instances))


def load_stack_file(ctx: Context, path: str) -> StackFile:
    """Read and check a file, or stdin for `-`, with the flavors from etcd that it names."""
    return _Reader(ctx, path).read()


def _parse_count(node: Node) -> int:
    if (count := yaml.parse_integer(node)) < 1:
        raise ValueError(f'must be at least 1, not {count}. Fix: remove the member, and apply with --prune')
    return count


class _Reader:
    def __init__(self, ctx: Context, path: str) -> None:
        self._ctx = ctx
        name = 'standard input' if path == STDIN else yaml.shorten(path, 200)
        self._directory = Path.cwd() if path == STDIN else Path(os.path.abspath(path)).parent
        content = read_file(name, path, MAX_FILE_BYTES, 'divide the stack')
        self._file = yaml.YamlFile.parse(content, name, self._directory, MAX_NODES)
        self._user_data: dict[str, SharedUserData] = {}
        self._groups: dict[str, Membership] = {}
        self._group_sections: dict[str, Section] = {}
        self._flavors: dict[str, Flavor] = {}
        # destroy --file needs only the names, so what the file refers to may be gone.
        self._is_apply = ctx.name == 'apply'
        self._resolve_compute = cache(ctx.resolve_compute)
        self._asks_placement = self._is_apply
        self._accepted_queries: set[str] = set()

    def read(self) -> StackFile:
        config, top = self._ctx.config, self._file.top
        name = top.read('stack', yaml.make_text_parser(check_stack_name), 'unnamed')
        if 'stack' not in top:
            top.add_problem('stack', 'is missing. Fix: give the stack a name, as `stack: shop`')
        project = top.read('project', yaml.parse_text, config.project_id)
        self._read_with(top, 'project', lambda: require_project(project), None)
        origins = {} if 'project' in top else {'project': FROM_CONFIG}
        owner = Order('', project_id=project, user_id=config.user_id)
        instances = self._read_instances(top.read_section('instances'), name, Desired(owner, SPREAD, origins))
        if not instances and 'instances' not in top:
            top.add_problem('instances', 'is missing. Fix: give a mapping of members, such as `web: {flavor: small}`')
        if len(instances) > MAX_STACK_SIZE:
            top.add_problem('instances', f'the stack has more than {MAX_STACK_SIZE} instances, the limit')
        if self._is_apply:
            self._report_missing_policies()
        self._file.finish()
        for entry, desired in instances.items():
            if desired.order.group is not None:
                group = self._groups[desired.order.group.name]
                instances[entry] = desired._replace(order=replace(desired.order, group=group))
        return StackFile(name, instances, self._user_data)

    def _read_instances(self, members: Section, stack: str, default: Desired) -> dict[str, Desired]:
        instances: dict[str, Desired] = {}
        member_by_name: dict[str, str] = {}
        for member in members.take_keys('(?s:.*)'):
            section = members.read_section(member)
            desired = self._read_member(section, default)
            names = self._read_names(section, desired.order.name or f'{stack}-{member}')
            try:
                check_member_name(member)
                check_name(names[-1])
            except ValueError as error:
                members.add_problem(member, str(error))
            if both := [own for own in names if own in member_by_name]:
                problem = f'its instance {both[0]} has the name of one of member {member_by_name[both[0]]}'
                members.add_problem(member, problem)
            member_by_name |= dict.fromkeys(names, member)
            for number, own in enumerate(names, 1):
                base = own.removesuffix('-1') if number == 1 and 'count' in section else ''
                order = replace(desired.order, name=own)
                instances[f'{member}/{number}'] = desired._replace(order=order, unnumbered_name=base)
        return instances

    def _read_names(self, section: Section, base: str) -> list[str]:
        numbers = range(1, min(section.read('count', _parse_count, 1), MAX_STACK_SIZE + 1) + 1)
        return [f'{base}-{number}' for number in numbers] if 'count' in section else [base]

    def _read_member(self, section: Section, default: Desired) -> Desired:
        config, origins = self._ctx.config, dict(default.origins)
        image = section.read('image', yaml.parse_text, None)
        if image is None:
            image, origins['image'] = config.image, FROM_CONFIG
        elif image in config.images:
            origins['image'] = f'image {image} of schedule.yaml'
        keys = section.read('ssh_keys', yaml.make_list_parser(self._parse_key, 'a list of files'), None)
        data = section.read('user_data', self._parse_user_data, None)
        for name, value, configured in (('ssh_keys', keys, config.ssh_keys), ('user_data', data, config.user_data)):
            if value is None and configured:
                origins[name] = FROM_CONFIG
        data = data or config.user_data
        query, flavor_origin = self._read_query(section)
        files = config.ssh_keys if keys is None else keys
        public_keys = self._read_with(section, 'ssh_keys', lambda: read_ssh_keys(files) if files else None, None)
        texts: Any = {key: section.read(key, yaml.make_text_parser(check), None) for key, check in USER_TEXTS.items()}
        order = replace(
            default.order,
            image=self._read_with(section, 'image', lambda: resolve_image(config, image), None),
            query=query,
            ssh_keys=public_keys,
            user_data_sha256=self._read_with(section, 'user_data', lambda: self._hash_user_data(data), None),
            group=section.read('group', self._parse_group, None),
            **texts,
        )
        if order.group is not None:
            self._remember_group(section, order.group)
        weigh = section.read('weigh', yaml.make_choice_parser(*STRATEGIES), default.weigh)
        return Desired(order, weigh, origins | flavor_origin, has_own_name=order.name is not None)

    def _read_query(self, section: Section) -> tuple[str, dict[str, str]]:
        """Return the query by flavor, query and `on`, and {'query': origin} if it has a flavor."""
        flavor = section.read('flavor', yaml.parse_text, None)
        query = section.read('query', yaml.make_text_parser(lambda text: queries.check_query(text, flavor is None)), '')
        on = section.read('on', yaml.parse_text, None)
        if section.take_keys('[A-Z][A-Z0-9_]*(:.*)?'):
            section.add_problem('query', 'is cut off at a comma, because it stands in { }. Fix: put it in quotes')
            return '', {}
        if flavor is None and 'query' not in section:
            section.add_problem('query', 'is missing. Fix: give the member a flavor or a query')
        if flavor is not None:
            query = self._read_with(section, 'flavor', lambda: self._merge_flavor(flavor, query), '')
        if on is not None and self._is_apply:
            on = self._read_with(section, 'on', lambda: self._resolve_compute(on or ''), None)
        if query:
            key = 'query' if 'query' in section else 'flavor'
            query = self._read_with(section, key, lambda: self._complete_query(query, on), '')
        return query, {} if flavor is None else {'query': f'flavor {flavor}'}

    def _complete_query(self, query: str, on: str | None) -> str:
        """Return the query with uuids and restricted to `on`, or raise UsageError, also placement's."""
        if lacking := list_missing_classes(queries.parse_names(query).classes):
            advice = f'add {",".join(f"{name}:…" for name in lacking)} to resources='
            raise UsageError(f'lacks {", ".join(lacking)}, which every guest needs. Fix: {advice}')
        if on is not None and queries.list_trees(query):
            raise UsageError('in_tree= is not accepted together with `on`. Fix: give one of them')
        query = queries.resolve_trees(query, self._resolve_compute) if self._is_apply else query
        is_plain = set(queries.parse_plain_amounts(query) or ()) == set(REQUIRED_CLASSES)
        if self._asks_placement and not is_plain and query not in self._accepted_queries:
            from ecomp.placement.allocations import read_candidates

            try:
                read_candidates(self._ctx.placement, f'{query}&limit=1')
                self._accepted_queries.add(query)
            except Unreachable:  # no mistake of the file, and an apply without changes needs no placement
                self._asks_placement = False
        return queries.restrict_to_compute(query, on) if on else query

    def _merge_flavor(self, flavor: str, query: str) -> str:
        from ecomp.model.flavor import merge_query
        from ecomp.scheduler.operations.sharing import load_flavor

        if flavor not in self._flavors:
            self._flavors[flavor], _ = load_flavor(self._ctx.store, flavor)
        merged = merge_query(self._flavors[flavor], query)
        require_guest_classes(flavor, merged)
        return merged

    def _hash_user_data(self, source: Path | bytes | None) -> str | None:
        """Read and remember user-data, and return its SHA-256."""
        if source is None:
            return None
        shared = SharedUserData.from_bytes(read_user_data(source, self._ctx.out.say))
        self._user_data[shared.sha256] = shared
        return shared.sha256

    def _parse_path(self, node: Node) -> Path:
        return self._directory / os.path.expanduser(yaml.parse_text(node))

    def _parse_user_data(self, node: Node) -> Path | bytes:
        if node.kind == 'str' and '\n' in node.text:
            return node.text.encode(errors='replace')
        if self._directory.resolve() not in (path := self._parse_path(node)).resolve().parents:
            shown = yaml.shorten(yaml.parse_text(node))
            raise ValueError(f'{shown} is outside the directory of this file. Fix: copy it there')
        return path

    def _parse_key(self, node: Node) -> Path | bytes:
        return node.text.encode() if re.match(r'[\w@.-]+ +AAAA', yaml.parse_text(node)) else self._parse_path(node)

    def _parse_group(self, node: Node) -> Membership:
        if node.kind != 'map':
            return Membership(yaml.make_text_parser(check_group_name)(node))
        problems: list[tuple[int, str]] = []
        section = Section(problems, node)
        name = section.read('name', yaml.make_text_parser(check_group_name), '')
        policy = section.read('policy', yaml.make_choice_parser(*POLICIES), None)
        membership = Membership(name, policy, section.read('strict', yaml.parse_flag, None))
        section.finish()
        if not name and not problems:
            problems.append((node.line, 'name: is missing'))
        if problems:
            raise yaml.InvalidParts(problems)
        return membership

    def _report_missing_policies(self) -> None:
        from ecomp.shared.names import load_group

        for name, section in self._group_sections.items():
            if self._groups[name].policy is None and load_group(self._ctx.store, name)[0] is None:
                fix = f'give its policy, as {{name: {name}, policy: affinity}}'
                section.add_problem('group', f'group {name} does not exist. Fix: {fix}')

    def _remember_group(self, section: Section, group: Membership) -> None:
        known = self._groups.get(group.name, group)
        policy, strict = known.policy or group.policy, group.strict if known.strict is None else known.strict
        if group.policy not in (None, policy) or group.strict not in (None, strict):
            section.add_problem('group', f'group {group.name} has another policy in another member')
        self._group_sections.setdefault(group.name, section)
        self._groups[group.name] = Membership(group.name, policy, strict)

    @staticmethod
    def _read_with(section: Section, key: str, read: Callable[[], T], default: T) -> T:
        """Return read(), or record its ValueError or exit code 2, 4 or 5, and return the default."""
        try:
            return read()
        except (EcompError, ValueError) as error:
            if isinstance(error, EcompError) and error.exit_code not in (2, 4, 5):
                raise
            section.add_problem(key, str(error))
            return default
