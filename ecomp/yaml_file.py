"""A strict reader of YAML configuration files, which reports all mistakes in one UsageError.

It refuses more than 64 KiB, tags, deep nesting and repeated keys. Only the file of a stack may have aliases.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from ecomp.errors import UsageError
from ecomp.model.text import format_suggestion, make_printable
from ecomp.yaml_plain import Node as Node
from ecomp.yaml_plain import parse_plain

CONFIG_VARIABLE = 'ECOMP_CONFIG'
MAX_BYTES = 64 * 1024  # a larger file is refused
# Kinds of unquoted scalars that are not text.
UNQUOTED_KINDS = ('int', 'float', 'bool', 'timestamp', 'null')
T = TypeVar('T')


# Each function that parses a value raises ValueError with the reason if it refuses it.
class InvalidParts(ValueError):
    """Parts of a value are refused, each with its line and the reason."""

    def __init__(self, parts: Collection[tuple[int, str]]) -> None:
        super().__init__()
        self.parts = parts


class Section:
    """A mapping whose keys are read one by one, so that finish() can report unknown keys."""

    def __init__(self, problems: list[tuple[int, str]], node: Node | None, prefix: str = '', line: int = 1) -> None:
        self._problems, self._prefix, self._line = problems, prefix, line
        self._nodes: dict[str, Node] = {}
        self._keys: dict[str, int] = {}
        self._read_keys: dict[str, None] = {}
        self._sections: list[Section] = []
        if node is not None and node.kind not in ('map', 'null'):
            kind = describe_node(node)
            name = prefix.rstrip('.') or 'the file'
            problems.append((node.line, f'{name}: must be a mapping of keys to values, not {kind}'))
        for key, value in node.pairs if node else ():
            if key.items or key.pairs:
                self.add_problem('…', 'a key must be text', key.line)
            elif key.kind in UNQUOTED_KINDS and key.text != 'on':  # true in YAML 1.1, text in YAML 1.2
                self.add_problem(key.text, 'a key must be text. Fix: put it in quotes', key.line)
            elif key.text in self._keys:  # PyYAML would use the last value
                first = self._keys[key.text]
                self.add_problem(key.text, f'is given more than once, first in line {first}', key.line)
            else:
                self._keys[key.text], self._nodes[key.text] = key.line, value

    def __contains__(self, key: str) -> bool:
        """Return True if the key has a value other than null, even an invalid one."""
        return key in self._nodes and self._nodes[key].kind != 'null'

    def read(self, key: str, parse: Callable[[Node], T], default: T) -> T:
        """Return a key's parsed value, or `default`, and add a problem if `parse` refuses it."""
        self._read_keys[key] = None
        try:
            return parse(self._nodes[key]) if key in self else default
        except ValueError as wrong:
            for line, reason in wrong.parts if isinstance(wrong, InvalidParts) else [(0, str(wrong))]:
                self.add_problem(key, reason, line)
            return default

    def read_section(self, key: str) -> Section:
        """Return the section under a key, an empty one if there is no mapping."""
        self._read_keys[key] = None
        line = self._keys.get(key, self._line)
        self._sections.append(Section(self._problems, self._nodes.get(key), f'{self._prefix}{key}.', line))
        return self._sections[-1]

    def take_keys(self, pattern: str) -> list[str]:
        """Return the keys that match a regular expression, and count them as known."""
        matches = [key for key in self._keys if re.fullmatch(pattern, key)]
        self._read_keys |= dict.fromkeys(matches)
        return matches

    def add_problem(self, key: str, reason: str, line: int = 0) -> None:
        """Add a problem of a key, by default at the line of the key, else of the section."""
        line = line or self._keys.get(key, self._line)
        self._problems.append((line, f'{self._prefix}{shorten(key)}: {reason}'))

    def finish(self) -> None:
        """Add a problem for each key that was not read, here and in the sections below."""
        for key in self._keys.keys() - self._read_keys.keys():
            self.add_problem(key, 'unknown key' + format_suggestion(key, self._read_keys))
        for section in self._sections:
            section.finish()


class YamlFile:
    """A configuration file or the file of a stack, with the problems found so far."""

    def __init__(self, name: str, directory: Path, node: Node | None, path: Path | None = None) -> None:
        self.name, self.directory, self.path = name, directory, path
        self._problems: list[tuple[int, str]] = []
        self.top = Section(self._problems, node)

    @classmethod
    def read(cls, path: Path | None, default_name: str) -> YamlFile:
        """Read `path` or, for None, a default file that no other user can change, or an empty one."""
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
                    require_trusted(name, os.fstat(stream.fileno()))
                content = stream.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f'{name}: cannot be read: {reason}') from error
        if len(content) > MAX_BYTES:
            raise UsageError(f'{name}: is larger than {MAX_BYTES // 1024} KiB, so it is not a configuration file')
        return cls.parse(content, name, directory, path=directory / path.name)

    @classmethod
    def parse(cls, content: bytes, name: str, place: Path, max_nodes: int = 0, path: Path | None = None) -> YamlFile:
        """Parse a document of at most `max_nodes` values, where 0 means no limit and no aliases."""
        node = parse_plain(content.decode('ascii', 'replace'))
        if node is None or (max_nodes and _count_values(node) > max_nodes):
            from ecomp.yaml_graph import parse_any  # imported here: loads slowly

            node = parse_any(content, name, max_nodes)
        return cls(name, place, node, path)

    def parse_path(self, node: Node) -> Path:
        """Parse a path relative to the file's directory, and make it absolute."""
        if (text := parse_text(node)).startswith('~'):
            problem = '~ is not accepted: it depends on the user who starts the program'
            raise ValueError(f'{problem}. Fix: write the directory in full')
        return Path(os.path.normpath(self.directory / text))

    def parse_readable_file(self, node: Node) -> Path:
        """Parse the path of a file that this user can read, or raise ValueError or UsageError."""
        path = self.parse_path(node)
        try:
            is_readable = path.is_file() and os.access(path, os.R_OK)
        except PermissionError as error:
            problem = f'{self.name} names {path}, but this user may not read it'
            raise UsageError(f'{problem}. Fix: run this as the owner of that file, or with sudo') from error
        if not is_readable:
            raise ValueError(f'{shorten(str(path), 200)} is not a readable file')
        return path

    def finish(self) -> None:
        """Raise UsageError with a line for each problem, if there is one."""
        self.top.finish()
        if self._problems:
            raise UsageError('\n'.join(f'{self.name}:{line}: {text}' for line, text in sorted(self._problems)))


# Default files. ecompute runs as root, and schedule.yaml names the user-data of guests: so a file that another user put
# into the working directory is refused.


def parse_config_option(argument: str | None) -> Path | None:
    if argument == '':  # an unset variable of a script must not mean the default file
        raise UsageError("--config: '' is not a file name")
    return None if argument is None else Path(argument)


def find_default_file(name: str) -> Path | None:
    """Find the first file of this name in ./, ~/.config/ecomp/ and /etc/ecomp/, or None.

    If $ECOMP_CONFIG is set, only that directory counts, and UsageError is raised if it has no such file.
    """
    if config_directory := os.environ.get(CONFIG_VARIABLE):
        path = Path(config_directory) / name
        if not os.path.lexists(path):
            raise UsageError(f'{CONFIG_VARIABLE}={config_directory}: this directory has no {name}')
        return path
    directories = (Path(), Path(os.path.expanduser('~/.config/ecomp')), Path('/etc/ecomp'))
    return next((directory / name for directory in directories if os.path.lexists(directory / name)), None)


def describe_source(name: str, path: Path | None) -> str:
    """Describe for a message which file has the addresses of etcd and placement."""
    return f'as configured in {path}' if path else f'default, because no {name} was found; use --config FILE'


def find_loose_directory(path: Path, trusted_users: Collection[int]) -> Path | None:
    """Return the first directory on a path where other users can exchange the next part."""
    for directory in reversed(path.parents):
        status = directory.lstat()
        # With the sticky bit, as in /tmp, only the owner of a file can exchange it. A link counts as loose.
        is_loose = _can_others_write(status) and not status.st_mode & stat.S_ISVTX
        if is_loose or status.st_uid not in trusted_users or not stat.S_ISDIR(status.st_mode):
            return directory
    return None


def _list_trusted_users() -> set[int]:
    sudo_user = os.environ.get('SUDO_UID', '') if os.geteuid() == 0 else ''
    return {0, os.geteuid(), *([int(sudo_user)] if sudo_user.isdecimal() else [])}


def _can_others_write(status: os.stat_result) -> bool:
    write_bits = 0o002 if status.st_gid == status.st_uid else 0o022
    return bool(status.st_mode & write_bits)


def require_trusted(name: str, status: os.stat_result) -> None:
    """Raise UsageError unless a file is regular, and no other user owns or can write to it."""
    if status.st_uid not in _list_trusted_users():
        rule = 'a configuration that is found by default must belong to root or to you'
        fix = 'change its owner with chown, or name a configuration with --config'
        raise UsageError(f'{name}: belongs to user {status.st_uid}, but {rule}. Fix: {fix}')
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f'{name}: is not a regular file. Fix: remove it, or name a configuration with --config')
    if _can_others_write(status):
        raise UsageError(f'{name}: other users can write to it. Fix: chmod go-w {name}')


def _open_found_file(path: str, flags: int) -> int:
    # Opening another user's pipe would block before require_trusted() can refuse it. A link would be a new one.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _count_values(node: Node) -> int:
    return 1 + sum(map(_count_values, node.items)) + sum(1 + _count_values(value) for _, value in node.pairs)


def parse_text(node: Node) -> str:
    """Parse one printable line of text, in quotes if it looks like a number, flag or date."""
    if node.kind in UNQUOTED_KINDS and node.kind != 'null':
        raise ValueError(f'must be text. Fix: put {shorten(node.text)} in quotes')
    if node.kind != 'str':
        raise ValueError(f'must be text, not {describe_node(node)}')
    if not node.text.strip() or not node.text.isprintable():
        raise ValueError('must be one line of printable text')
    return node.text


def parse_flag(node: Node) -> bool:
    """Parse an unquoted true, yes, on, false, no or off, in lower, upper or title case."""
    if node.kind != 'bool':
        raise ValueError(f'must be True or False, not {describe_typed_node(node)}')
    return node.text.lower() in ('true', 'yes', 'on')


def parse_integer(node: Node) -> int:
    """Parse a decimal integer of up to 18 digits."""
    # 010 and 1:30 are 8 and 90 in YAML 1.1.
    if node.kind != 'int' or not re.fullmatch(r'[-+]?(0|[1-9][0-9]{0,17})', node.text):
        raise ValueError(f'must be a whole number, not {describe_typed_node(node)}')
    return int(node.text)


def make_checked_parser(parse: Callable[[Node], T], accepts: Callable[[T], object], shape: str) -> Callable[[Node], T]:
    """Make a parser that raises `must be {shape}` for each value that `accepts` rejects."""

    def parse_checked(node: Node) -> T:
        if not accepts(value := parse(node)):
            raise ValueError(f'must be {shape}, not {shorten(str(value))}')
        return value

    return parse_checked


def make_integer_parser(low: int, high: int) -> Callable[[Node], int]:
    return make_checked_parser(parse_integer, lambda number: low <= number <= high, f'{low} to {high}')


def make_choice_parser(*words: str) -> Callable[[Node], str]:
    return make_checked_parser(parse_text, words.__contains__, f'{", ".join(words[:-1])} or {words[-1]}')


def make_text_parser(check: Callable[[str], T]) -> Callable[[Node], T]:
    return lambda node: check(parse_text(node))


def make_list_parser(
    parse: Callable[[Node], T],
    shape: str = 'a list',
    min_items: int = 0,
    describe_item: Callable[[Node], str] | None = None,
) -> Callable[[Node], tuple[T, ...]]:
    """Make a parser of a list, whose items must be unique if `describe_item` is given."""

    def parse_all(node: Node) -> tuple[T, ...]:
        values: list[T] = []

        def read(item: Node) -> None:
            values.append(parse(item))
            if describe_item and values[-1] in values[:-1]:
                raise ValueError(f'{describe_item(item)} is given more than once')

        _read_parts(node, 'seq', shape, min_items, read)
        return tuple(values)

    return parse_all


def make_unique_list_parser(parse: Callable[[Node], T]) -> Callable[[Node], tuple[T, ...]]:
    return make_list_parser(parse, describe_item=lambda item: shorten(item.text))


def make_mapping_parser(
    parse_name: Callable[[Node], str], parse: Callable[[str, Node], T], shape: str, min_items: int = 0
) -> Callable[[Node], dict[str, T]]:
    """Make a parser of a mapping with unique names, where `parse` gets name and value."""

    def parse_all(node: Node) -> dict[str, T]:
        values: dict[str, T] = {}

        def read(key: Node, value: Node) -> None:
            if (name := parse_name(key)) in values:
                raise ValueError('is given more than once')
            values[name] = parse(name, value)

        _read_parts(node, 'map', shape, min_items, read)
        return values

    return parse_all


def _read_parts(node: Node, kind: str, shape: str, min_parts: int, read: Callable[..., None]) -> None:
    """Call `read` for each item or pair, and raise one InvalidParts for all that it refuses."""
    parts: list[tuple[Node, ...]] = [*node.pairs, *((item,) for item in node.items)]
    if node.kind != kind or len(parts) < min_parts:
        raise ValueError(f'must be {shape}, not {describe_node(node)}')
    wrong: list[tuple[int, str]] = []
    for part in parts:
        try:
            read(*part)
        except ValueError as error:
            name = f'{shorten(part[0].text)}: ' if node.pairs and part[0].text else ''
            wrong.append((part[0].line, f'{name}{error}'))
    if wrong:
        raise InvalidParts(wrong)


def describe_node(node: Node) -> str:
    """Describe a node for a message: as a mapping, a list or nothing, or by its shortened text."""
    size = 'a' if node.items or node.pairs else 'an empty'
    return {'map': f'{size} mapping', 'seq': f'{size} list', 'null': 'nothing'}.get(node.kind) or shorten(node.text)


def describe_typed_node(node: Node) -> str:
    """Describe a node for a message, and say if it is text: a quoted "2379" looks like a number."""
    return f'the text "{shorten(node.text)}"' if node.kind == 'str' else describe_node(node)


def shorten(text: str, limit: int = 60) -> str:
    """Return an untrusted text as one printable line, cut at `limit` characters."""
    return make_printable(text, limit)
