"""A strict reader of YAML configuration files: values have their lines, and one error has all mistakes.

It refuses more than 64 KiB, tags, deep nesting and repeated keys (PyYAML would use the last one). Anchors and aliases
are refused in configuration files, and accepted in a file of a stack.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ecomp.errors import UsageError
from ecomp.model.json_object import dump
from ecomp.model.text import escape_characters, format_suggestion
from ecomp.yaml_plain import Node as Node
from ecomp.yaml_plain import parse_plain

CONFIG_VARIABLE = 'ECOMP_CONFIG'
MAX_BYTES = 64 * 1024  # a larger file is refused
MAX_DEPTH = 8  # of nested mappings and lists; deeper ones are refused

# Numbers in YAML 1.2's core schema. PyYAML, which implements YAML 1.1, reads 1e3, 0o17 and 08 as text.
CORE_SCHEMA_NUMBER = (
    r'(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?'
    r'|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$'
)

# The key `<<`, unquoted, whose value is a mapping or a list of them to inherit from.
MERGE_TAG = 'tag:yaml.org,2002:merge'
# Kinds of unquoted scalars that are not text.
UNQUOTED_KINDS = ('int', 'float', 'bool', 'timestamp', 'null')

T = TypeVar('T')
Part = TypeVar('Part', Node, tuple[Node, Node])


class InvalidValue(Exception):
    """A value is refused: `reason`, or the (line, reason) of its `parts`. Section adds the key, YamlFile the file."""

    def __init__(self, reason: str = '', parts: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(reason)
        self.parts = parts


class Section:
    """A mapping whose keys are read one by one; a key that is never read is unknown.

    The argument `add_problem` records a line and its mistake; `prefix` has the enclosing sections, each with a dot.
    """

    def __init__(self, add_problem: Callable[[int, str], None], node: Node | None, prefix: str = '') -> None:
        """Record problems: `node` is no mapping; a key is a mapping, a list or repeated (its first value counts)."""
        self._add_problem = add_problem
        self._prefix = prefix
        self._line = node.line if node is not None else 1
        self._nodes: dict[str, Node] = {}
        self._keys: dict[str, int] = {}
        self._read_keys: dict[str, None] = {}
        self._sections: list[Section] = []
        self._line = 1
        if node is None or node.kind == 'null':
            return
        if node.kind != 'map':
            add_problem(
                node.line,
                f'{prefix.rstrip(".") or "the file"}: must be a mapping of keys to values, not {describe_node(node)}',
            )
        for key, value in node.pairs:
            if key.items or key.pairs:
                add_problem(key.line, f'{prefix}…: a key must be text')
            elif key.kind in UNQUOTED_KINDS and key.text != 'on':  # true in YAML 1.1, text in YAML 1.2
                add_problem(key.line, f'{prefix}{shorten(key.text)}: a key must be text. Fix: put it in quotes')
            elif key.text in self._keys:
                add_problem(
                    key.line,
                    f'{prefix}{shorten(key.text)}: is given more than once, first in line {self._keys[key.text]}',
                )
            else:
                self._keys[key.text] = key.line
                self._nodes[key.text] = value

    def __contains__(self, key: str) -> bool:
        """Return True if the key has a value other than null, even an invalid one."""
        return key in self._nodes and self._nodes[key].kind != 'null'

    def read(self, key: str, parse: Callable[[Node], T], default: T) -> T:
        """Return what `parse` returns; `default` if the key is missing or null, or `parse` refuses it (recorded)."""
        self._read_keys[key] = None
        if key not in self:
            return default
        try:
            return parse(self._nodes[key])
        except InvalidValue as wrong:
            for line, reason in wrong.parts or [(self._keys[key], str(wrong))]:
                self._add_problem(line, f'{self._prefix}{shorten(key)}: {reason}')
            return default

    def read_section(self, key: str) -> Section:
        """Return the mapping under a key; an empty one if it is missing, null, or (which is recorded) no mapping."""
        self._read_keys[key] = None
        section = Section(self._add_problem, self._nodes.get(key), f'{self._prefix}{key}.')
        section._line = self._keys.get(key, self._line)
        self._sections.append(section)
        return section

    def read_each_section(self) -> dict[str, Section]:
        """Return the mapping under each key, in the order of the file, as read_section() does."""
        return {key: self.read_section(key) for key in self._keys}

    def drop(self, pattern: str) -> list[str]:
        """Return the keys that match; they are then not reported as unknown."""
        matches = [key for key in self._keys if re.fullmatch(pattern, key)]
        self._read_keys |= dict.fromkeys(matches)
        return matches

    def refuse(self, key: str, reason: str) -> None:
        """Record the reason if the key exists, even with null: no value of it is valid."""
        if key in self._keys:
            self._read_keys[key] = None
            self.add_problem(key, reason)

    def add_problem(self, key: str, reason: str) -> None:
        """Record the reason against a key, without the key against the line of the section."""
        self._add_problem(self._keys.get(key, self._line), f'{self._prefix}{shorten(key)}: {reason}')

    def finish(self) -> None:
        """Record every unknown key, here and in the sections below."""
        for key in self._keys.keys() - self._read_keys.keys():
            self.add_problem(key, 'unknown key' + format_suggestion(key, self._read_keys))
        for section in self._sections:
            section.finish()


class YamlFile:
    """A configuration file and its problems so far; without a file `path` is None and `directory` the current one."""

    def __init__(self, name: str, directory: Path, node: Node | None, path: Path | None = None) -> None:
        self.directory = directory
        self.path = path
        self._name = name
        self._problems: list[tuple[int, str]] = []
        self.top = Section(lambda line, text: self._problems.append((line, text)), node)

    @classmethod
    def read(cls, path: Path | None, default_name: str) -> YamlFile:
        """Read the file at `path`; None means the default file, after check_owner(), or no file. Raises UsageError."""
        is_named = path is not None
        path = path if path is not None else find_default_file(default_name)
        name = shorten(str(path or default_name), 200)
        try:
            if not is_named and path is not None and path.is_symlink():
                # Whoever made the link may also have put files beside it, under the names that the target mentions.
                path = Path(os.path.realpath(path))
                if loose := find_loose_directory(path, _list_trusted_users()):
                    problem = f'{name}: is a link to a file below {loose}, where another user can exchange files'
                    raise UsageError(f'{problem}. Fix: replace it with a file, or name a configuration with --config')
            directory = Path(os.path.abspath(path or default_name)).parent
            if path is None:
                return cls(name, directory, None)
            with open(path, 'rb', opener=None if is_named else _open_found_file) as stream:
                if not is_named:
                    check_owner(name, os.fstat(stream.fileno()))
                content = stream.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f'{name}: cannot be read: {reason}') from error
        if len(content) > MAX_BYTES:
            raise UsageError(f'{name}: is larger than {MAX_BYTES // 1024} KiB, so it is not a configuration file')
        return cls(name, directory, _parse(content, name), directory / path.name)

    @classmethod
    def parse(cls, content: bytes, name: str, directory: Path, max_nodes: int) -> YamlFile:
        """Parse a document with anchors and aliases; UsageError if it is invalid YAML or has more values than this."""
        return cls(name, directory, _parse(content, name, max_nodes))

    def parse_path(self, node: Node) -> Path:
        """Parse a path, relative to the file's directory, and make it absolute; InvalidValue if it begins with `~`."""
        text = parse_text(node)
        if text.startswith('~'):
            raise InvalidValue(
                '~ is not accepted: it depends on the user who starts the program. Fix: write the directory in full'
            )
        return Path(os.path.normpath(self.directory / text))

    def parse_paths(self, node: Node) -> tuple[Path, ...]:
        """Parse a list of paths by parse_path(); else InvalidValue."""
        return make_list_parser(self.parse_path, 'a list like [id_ed25519.pub]')(node)

    def parse_readable_file(self, node: Node) -> Path:
        """Parse the path of a readable file; else InvalidValue, or UsageError if a directory on it denies access."""
        path = self.parse_path(node)
        try:
            is_readable = path.is_file() and os.access(path, os.R_OK)
        except PermissionError as error:
            problem = f'{self._name} names {path}, but this user may not read it'
            raise UsageError(f'{problem}. Fix: run this as the owner of that file, or with sudo') from error
        if not is_readable:
            raise InvalidValue(f'{shorten(str(path), 200)} is not a readable file')
        return path

    def warn(self, text: str) -> None:
        """Log a warning about the file."""
        import logging  # imported here: few files cause a warning

        logging.getLogger(__name__).warning('%s: %s', self._name, text)

    def finish(self) -> None:
        """Raise UsageError with a line for each problem, in the order of the file, if there is one."""
        self.top.finish()
        if self._problems:
            raise UsageError('\n'.join(f'{self._name}:{line}: {text}' for line, text in sorted(self._problems)))


# Default files. ecompute runs as root, and schedule.yaml names the user-data of guests: so a file that another user put
# into the working directory is refused.


def parse_config_option(argument: str | None) -> Path | None:
    """Parse the argument of --config; UsageError for '': a script's unset variable must not mean the default file."""
    if argument == '':
        raise UsageError("--config: '' is not a file name")
    return None if argument is None else Path(argument)


def find_default_file(name: str) -> Path | None:
    """Find the first file of this name in ./, ~/.config/ecomp/ and /etc/ecomp/, or None.

    If $ECOMP_CONFIG is set (not ''), only that directory is searched; UsageError if the file is missing there.
    """
    if config_directory := os.environ.get(CONFIG_VARIABLE):
        path = Path(config_directory) / name
        if not os.path.lexists(path):
            raise UsageError(f'{CONFIG_VARIABLE}={config_directory}: this directory has no {name}')
        return path
    directories = (Path(), Path(os.path.expanduser('~/.config/ecomp')), Path('/etc/ecomp'))
    return next((directory / name for directory in directories if os.path.lexists(directory / name)), None)


def describe_source(name: str, path: Path | None) -> str:
    """Describe, for a message, which file the addresses of etcd and placement are from; None means no file."""
    return (
        f'as configured in {path}' if path is not None else f'default, because no {name} was found; use --config FILE'
    )


def find_loose_directory(path: Path, trusted_users: Collection[int]) -> Path | None:
    """Return the first directory of a path where other users can exchange the next part, or a link; else None. OSError.

    In a directory with the sticky bit, such as /tmp, only the owner of a file can exchange it.
    """
    for directory in reversed(path.parents):
        status = directory.lstat()
        is_loose = _can_others_write(status) and not status.st_mode & stat.S_ISVTX
        if is_loose or status.st_uid not in trusted_users or not stat.S_ISDIR(status.st_mode):
            return directory
    return None


def _list_trusted_users() -> set[int]:
    """Return the ids of root, the caller and, for root, sudo's user."""
    sudo_user = os.environ.get('SUDO_UID', '') if os.geteuid() == 0 else ''
    return {0, os.geteuid(), *([int(sudo_user)] if sudo_user.isdecimal() else [])}


def _can_others_write(status: os.stat_result) -> bool:
    """Return whether others can write. A group with the owner's number is that user's private one, without others."""
    write_bits = 0o002 if status.st_gid == status.st_uid else 0o022
    return bool(status.st_mode & write_bits)


def check_owner(name: str, status: os.stat_result) -> None:
    """Raise UsageError unless it is a regular file of root, the caller or sudo's user, and no other can write to it."""
    if status.st_uid not in _list_trusted_users():
        raise UsageError(
            f'{name}: belongs to user {status.st_uid}, but a configuration that is found by default must belong to '
            f'root or to you. Fix: change its owner with chown, or name a configuration with --config'
        )
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f'{name}: is not a regular file. Fix: remove it, or name a configuration with --config')
    if _can_others_write(status):
        raise UsageError(f'{name}: other users can write to it. Fix: chmod go-w {name}')


def _open_found_file(path: str, flags: int) -> int:
    # Opening another user's pipe would block before check_owner() can refuse it. A link would be a new one.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _parse(content: bytes, name: str, max_nodes: int = 0) -> Node | None:
    """Parse the document into nodes, None if it is empty; raise UsageError if it is invalid.

    Anchors and aliases are accepted if `max_nodes`, the values with each alias replaced, is not 0.
    """
    plain = parse_plain(content.decode('ascii', 'replace'))
    if plain is not None and (not max_nodes or _count_values(plain) <= max_nodes):
        return plain
    return _parse_with_pyyaml(content, name, max_nodes)


def _count_values(node: Node) -> int:
    return 1 + sum(map(_count_values, node.items)) + sum(1 + _count_values(value) for _, value in node.pairs)


def _parse_with_pyyaml(content: bytes, name: str, max_nodes: int = 0) -> Node | None:
    """Parse as _parse() does, any YAML."""
    import yaml  # imported here: most eschedule commands do without it

    if b'\t' in content:  # YAML accepts tabs in JSON, and PyYAML does not; a string of JSON has none
        with suppress(ValueError, RecursionError):
            json.loads(content)
            content = content.replace(b'\t', b' ')
    # libyaml takes a tenth of the time, and is not in every PyYAML. It accepts tabs that PyYAML refuses, and describes
    # errors in other words: PyYAML reads such files.
    if b'\t' not in content and hasattr(yaml, 'CSafeLoader'):
        with suppress(UsageError):
            return _parse_with_loader(content, name, max_nodes, yaml.CSafeLoader)
    return _parse_with_loader(content, name, max_nodes, yaml.SafeLoader)


def _parse_with_loader(content: bytes, name: str, max_nodes: int, loader: Any) -> Node | None:
    """Parse as _parse() does, with a loader of PyYAML."""
    import yaml

    def refuse(mark: Any, reason: str) -> UsageError:
        place = f'{mark.line + 1}:{mark.column + 1}:' if mark else ''
        return UsageError(f'{name}:{place} {shorten(reason, 200)}')

    counts = Counter[str]()

    def count_nodes(kind: str, number: int, mark: Any, depth: int) -> None:
        """Refuse more than `max_nodes` of a kind, or more levels: an anchor may contain an alias of itself."""
        counts[kind] += number
        if max_nodes and (counts[kind] > max_nodes or depth > MAX_DEPTH):
            limit = f'{max_nodes} values, or more than {MAX_DEPTH} levels'
            raise refuse(mark, f'has more than {limit}, once its aliases are replaced')

    def list_pairs(node: yaml.MappingNode, depth: int) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return the pairs of a mapping, after those that it inherits with `<<` and does not replace."""
        own: list[tuple[yaml.Node, yaml.Node]] = []
        inherited: dict[object, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            bases = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if max_nodes and key.tag == MERGE_TAG and all(isinstance(base, yaml.MappingNode) for base in bases):
                for base in bases:
                    count_nodes('merged', 1 + len(base.value), base.start_mark, depth)
                    for pair in list_pairs(base, depth + 1):
                        inherited.setdefault(pair[0].value if isinstance(pair[0], yaml.ScalarNode) else pair[0], pair)
            else:
                own.append((key, value))
        names = {key.value for key, _ in own if isinstance(key, yaml.ScalarNode)}
        return [*(pair for name, pair in inherited.items() if name not in names), *own]

    def convert(node: yaml.Node, depth: int = 0) -> Node:
        count_nodes('converted', 1, node.start_mark, depth)
        kind, line = node.tag.rpartition(':')[2], node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            pairs = ((convert(key, depth + 1), convert(value, depth + 1)) for key, value in list_pairs(node, depth + 1))
            return Node(kind, line, pairs=tuple(pairs))
        if isinstance(node, yaml.SequenceNode):
            return Node(kind, line, items=tuple(convert(item, depth + 1) for item in node.value))
        return Node(kind, line, text=node.value)

    try:
        text = content.decode('utf-8-sig')
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            if not max_nodes and (isinstance(event, yaml.AliasEvent) or getattr(event, 'anchor', None)):
                raise refuse(event.start_mark, 'anchors and aliases (& and *) are not accepted. Fix: repeat the value')
            if getattr(event, 'tag', None):
                raise refuse(
                    event.start_mark, 'tags (!) are not accepted. Fix: if ! is part of the value, put it in quotes'
                )
            if isinstance(event, yaml.NodeEvent):  # composing a file that is refused anyway takes a minute for 1 MiB
                count_nodes('parsed', 1, event.start_mark, 0)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:  # also limits the recursion of convert()
                raise refuse(event.start_mark, 'is nested too deeply')
        root = yaml.compose(text, Loader=loader)
        return convert(root) if root else None
    except UnicodeDecodeError as error:
        line = content.count(b'\n', 0, error.start) + 1
        raise UsageError(f'{name}:{line}: is not UTF-8 text') from error
    except yaml.MarkedYAMLError as error:
        reason = error.problem or error.context or ''
        reason = f'{error.context} {reason}' if reason.startswith('but ') else reason
        advice = '. Fix: indent with spaces, not tabs' if r"'\t'" in reason else ''
        mark = error.context_mark if 'end of stream' in reason else error.problem_mark  # where the quote begins
        raise refuse(mark, f'not YAML: {reason}{advice}') from error
    except yaml.YAMLError as error:  # a character that YAML forbids; this error has no mark
        line = text.count('\n', 0, getattr(error, 'position', 0)) + 1
        raise UsageError(f'{name}:{line}: not YAML: it contains a character that is not printable') from error
    except (ValueError, OverflowError) as error:  # PyYAML's scanner passes "\UFFFFFFFF" to chr()
        raise UsageError(f'{name}: not YAML: {shorten(str(error))}') from error


def explain_invalid_mapping(text: str) -> str | None:
    """Explain, without quoting it, why a text of any size is not one YAML mapping; None if it is one or is empty."""
    import yaml  # as above

    try:
        # Only the events: aliases are not expanded.
        loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)
        marked_events = ((type(event), event.start_mark) for event in yaml.parse(text, Loader=loader))
        events = [(kind, mark.line if mark else 0) for kind, mark in marked_events]
    except yaml.MarkedYAMLError as error:
        return f'line {error.problem_mark.line + 1} is not YAML' if error.problem_mark else 'it is not YAML'
    except (yaml.YAMLError, ValueError, OverflowError):
        return 'it is not YAML'
    documents = [line for kind, line in events if kind is yaml.DocumentStartEvent]
    if len(documents) > 1:
        return f'line {documents[1] + 1} begins a second document'
    root = events[2][0] if len(events) > 3 else yaml.MappingStartEvent
    return None if root is yaml.MappingStartEvent else 'it is not a mapping of keys to values'


def parse_text(node: Node) -> str:
    """Parse a text of one printable line, not blank; else InvalidValue, also for an unquoted number, flag or date."""
    if node.kind in UNQUOTED_KINDS and node.kind != 'null':
        raise InvalidValue(f'must be text. Fix: put {shorten(node.text)} in quotes')
    if node.kind != 'str':
        raise InvalidValue(f'must be text, not {describe_node(node)}')
    if not node.text.strip() or not node.text.isprintable():
        raise InvalidValue('must be one line of printable text')
    return node.text


def parse_flag(node: Node) -> bool:
    """Parse true, yes, on, false, no or off, unquoted, in lower, upper or title case; else InvalidValue."""
    if node.kind != 'bool':
        raise InvalidValue(f'must be True or False, not {describe_typed_node(node)}')
    return node.text.lower() in ('true', 'yes', 'on')


def parse_integer(node: Node) -> int:
    """Parse a decimal integer of up to 18 digits; else InvalidValue, also for 010 and 1:30 (8 and 90 in YAML 1.1)."""
    if node.kind != 'int' or not re.fullmatch(r'[-+]?(0|[1-9][0-9]{0,17})', node.text):
        raise InvalidValue(f'must be a whole number, not {describe_typed_node(node)}')
    return int(node.text)


def make_integer_parser(low: int, high: int) -> Callable[[Node], int]:
    """Make a parser of integers from `low` to `high`, which raises InvalidValue for others."""

    def parse(node: Node) -> int:
        if not low <= (number := parse_integer(node)) <= high:
            raise InvalidValue(f'must be {low} to {high}, not {number}')
        return number

    return parse


def make_choice_parser(*words: str) -> Callable[[Node], str]:
    """Make a parser of one of these words, which raises InvalidValue for others."""

    def parse(node: Node) -> str:
        if (word := parse_text(node)) not in words:
            raise InvalidValue(f'must be {", ".join(words[:-1])} or {words[-1]}, not {shorten(word)}')
        return word

    return parse


def make_text_parser(check: Callable[[str], T]) -> Callable[[Node], T]:
    """Make a parser of text that `check` converts; its ValueError becomes InvalidValue."""

    def parse(node: Node) -> T:
        try:
            return check(parse_text(node))
        except ValueError as error:
            raise InvalidValue(str(error)) from error

    return parse


def make_list_parser(
    parse: Callable[[Node], T],
    shape: str = 'a list',
    min_items: int = 0,
    describe_item: Callable[[Node], str] | None = None,
) -> Callable[[Node], tuple[T, ...]]:
    """Make a parser of a list. Messages call it `shape`; with `describe_item`, for messages, items must be unique."""

    def parse_all(node: Node) -> tuple[T, ...]:
        if node.kind != 'seq' or len(node.items) < min_items:
            raise InvalidValue(f'must be {shape}, not {describe_node(node)}')
        values: list[T] = []

        def read(item: Node) -> None:
            values.append(parse(item))
            if describe_item and values[-1] in values[:-1]:
                raise InvalidValue(f'{describe_item(item)} is given more than once')

        read_parts(node.items, read)
        return tuple(values)

    return parse_all


def make_unique_list_parser(parse: Callable[[Node], T]) -> Callable[[Node], tuple[T, ...]]:
    """Make a parser of a list without repetitions, which raises InvalidValue for others."""
    return make_list_parser(parse, describe_item=lambda item: shorten(item.text))


def make_mapping_parser(
    parse_name: Callable[[Node], str], parse: Callable[[str, Node], T], shape: str, min_items: int = 0
) -> Callable[[Node], dict[str, T]]:
    """Make a parser of a mapping with unique names. Messages call it `shape`; `parse` converts the value of a name."""

    def parse_all(node: Node) -> dict[str, T]:
        if node.kind != 'map' or len(node.pairs) < min_items:
            raise InvalidValue(f'must be {shape}, not {describe_node(node)}')
        values: dict[str, T] = {}

        def read(pair: tuple[Node, Node]) -> None:
            if (name := parse_name(pair[0])) in values:
                raise InvalidValue('is given more than once')
            values[name] = parse(name, pair[1])

        read_parts(node.pairs, read)
        return values

    return parse_all


def read_parts(parts: Sequence[Part], read: Callable[[Part], None]) -> None:
    """Call `read` for each part; then raise one InvalidValue with all that it refused, if any."""
    wrong: list[tuple[int, str]] = []
    for part in parts:
        item, name = (part, '') if isinstance(part, Node) else (part[0], part[0].text)
        try:
            read(part)
        except InvalidValue as error:
            wrong.append((item.line, f'{shorten(name)}: {error}' if name else str(error)))
    if wrong:
        raise InvalidValue(parts=wrong)


def describe_node(node: Node) -> str:
    """Describe a node for a message: as a mapping, a list or nothing, or by its shortened text."""
    map_text, list_text = ('a' if node.pairs else 'an empty', 'a' if node.items else 'an empty')
    words_by_kind = {'map': f'{map_text} mapping', 'seq': f'{list_text} list', 'null': 'nothing'}
    return words_by_kind.get(node.kind) or shorten(node.text)


def describe_typed_node(node: Node) -> str:
    """Describe a node for a message, and say if it is text: a quoted "2379" looks like a number."""
    return f'the text "{shorten(node.text)}"' if node.kind == 'str' else describe_node(node)


def shorten(text: str, limit: int = 60) -> str:
    """Return an untrusted text as one printable line; what exceeds `limit` characters becomes `…`."""
    safe = escape_characters(text[: limit + 1])
    return safe if len(text) <= limit else f'{safe[:limit]}…'


def dump_yaml(value: object) -> str:
    """Dump a JSON value as ASCII, equal in YAML 1.1 and 1.2, without a final line break."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    # Quote text that a resolver would read as another type. PyYAML's own come first, so integers stay unquoted.
    Dumper.add_implicit_resolver('tag:yaml.org,2002:float', re.compile(CORE_SCHEMA_NUMBER), list('-+.0123456789'))
    tree = json.loads(dump(value))  # a copy without shared objects, which would become aliases
    return str(yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=1000)).rstrip('\n').removesuffix('\n...')
