"""A YAML file that people write by hand, read strictly: every value with its line, every mistake at once.

Only what a configuration needs of YAML is taken: mappings, lists and plain values in one document of at most 64 KiB.
Anchors, aliases, tags and deep nesting are refused, and a key that is there twice, of which PyYAML would silently
keep the last, is a mistake like any other.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ecomp.errors import UsageError
from ecomp.model.json_object import dump
from ecomp.model.text import did_you_mean, escaped
from ecomp.yaml_plain import Node as Node
from ecomp.yaml_plain import plain

CONFIG_VARIABLE = 'ECOMP_CONFIG'
MAX_BYTES = 64 * 1024  # of a file; a larger one is refused
MAX_DEPTH = 8  # of mappings and lists in each other; deeper ones are refused

CORE_NUMBER = (
    r'(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?'
    r'|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$'
)
"""What YAML 1.2's core schema takes for a number. PyYAML, which knows YAML 1.1, takes 1e3, 0o17 and 08 for text."""

T = TypeVar('T')
Part = TypeVar('Part', Node, tuple[Node, Node])


class Wrong(Exception):
    """Why one value is refused; the reader of its section adds the file, the line and the key.

    `parts`: it is parts of the value that are wrong, each in a line of its own.
    """

    def __init__(self, reason: str = '', parts: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(reason)
        self.parts = parts


class Section:
    """One mapping of a file, whose keys are taken one by one; a key that is never taken is unknown.

    `complain` notes a mistake by its line; `prefix` is the names of the sections around it, each with a dot.
    """

    def __init__(self, complain: Callable[[int, str], None], node: Node | None, prefix: str = '') -> None:
        self._complain = complain
        self._prefix = prefix
        self._nodes: dict[str, Node] = {}
        self._keys: dict[str, int] = {}
        self._taken: dict[str, None] = {}
        self._sections: list[Section] = []
        if node is None or node.kind == 'null':
            return
        if node.kind != 'map':
            complain(node.line, f'{prefix.rstrip(".") or "the file"}: must be keys with values, not {described(node)}')
        for key, value in node.pairs:
            if key.items or key.pairs:
                complain(key.line, f'{prefix}…: a key must be a word')
            elif key.text in self._keys:
                complain(key.line, f'{prefix}{shown(key.text)}: is there twice, first in line {self._keys[key.text]}')
            else:
                self._keys[key.text] = key.line
                self._nodes[key.text] = value

    def __contains__(self, key: str) -> bool:
        return key in self._nodes and self._nodes[key].kind != 'null'

    def take(self, key: str, parse: Callable[[Node], T], default: T) -> T:
        """The key's value as `parse` reads it, `default` if the key is missing or has none.

        What `parse` refuses with Wrong is noted for finish(), and the default returned.
        """
        self._taken[key] = None
        if key not in self:
            return default
        try:
            return parse(self._nodes[key])
        except Wrong as wrong:
            for line, reason in wrong.parts or [(self._keys[key], str(wrong))]:
                self._complain(line, f'{self._prefix}{shown(key)}: {reason}')
            return default

    def section(self, key: str) -> Section:
        """The mapping under a key, empty if the key is missing."""
        self._taken[key] = None
        section = Section(self._complain, self._nodes.get(key), f'{self._prefix}{key}.')
        self._sections.append(section)
        return section

    def refuse(self, key: str, reason: str) -> None:
        """Note the reason if the key is there: no value of it is right."""
        if key in self._keys:
            self._taken[key] = None
            self.complain(key, reason)

    def complain(self, key: str, reason: str) -> None:
        """Note the reason against a key that is there."""
        self._complain(self._keys[key], f'{self._prefix}{shown(key)}: {reason}')

    def finish(self) -> None:
        """Note every key that was not taken, here and in the sections below."""
        for key in self._keys.keys() - self._taken.keys():
            self.complain(key, 'unknown key' + did_you_mean(key, self._taken))
        for section in self._sections:
            section.finish()


class YamlFile:
    """A configuration file: its top section, its directory, the mistakes noted so far; no `path` without a file."""

    def __init__(self, name: str, directory: Path, node: Node | None, path: Path | None = None) -> None:
        self.directory = directory
        self.path = path
        self._name = name
        self._problems: list[tuple[int, str]] = []
        self.top = Section(lambda line, text: self._problems.append((line, text)), node)

    @classmethod
    def read(cls, path: Path | None, usual: str) -> YamlFile:
        """The file at `path`; None means one of the `usual` name where find_usual() finds it, else an empty one.

        UsageError if it cannot be read or is not YAML.
        """
        named = path is not None
        path = path if path is not None else find_usual(usual)
        name = shown(str(path or usual), 200)
        try:
            directory = Path(os.path.abspath(path or usual)).parent
            if path is None:
                return cls(name, directory, None)
            with open(path, 'rb', opener=None if named else _at_once) as stream:
                if not named:
                    check_owner(name, os.fstat(stream.fileno()))
                content = stream.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f'{name}: cannot be read: {reason}') from error
        if len(content) > MAX_BYTES:
            raise UsageError(f'{name}: is larger than {MAX_BYTES // 1024} KiB; this is not a configuration file')
        node = plain(content.decode('ascii', 'replace')) or _parse(content, name)
        return cls(name, directory, node, directory / path.name)

    def path_of(self, node: Node) -> Path:
        """An absolute path; a relative one is taken from the file's directory. Wrong."""
        text = text_of(node)
        if text.startswith('~'):
            raise Wrong('write the directory out: whose home ~ is depends on who starts the program')
        return Path(os.path.normpath(self.directory / text))

    def paths_of(self, node: Node) -> tuple[Path, ...]:
        """A list of paths."""
        return list_of(self.path_of, 'a list like [id_ed25519.pub]')(node)

    def file_of(self, node: Node) -> Path:
        """A path to a file that can be read."""
        path = self.path_of(node)
        try:
            can_be_read = path.is_file() and os.access(path, os.R_OK)
        except PermissionError as error:
            why = f'{self._name} names {path}, and permission is denied'
            raise UsageError(f'{why}. Fix: run this as the owner of that file, or with sudo') from error
        if not can_be_read:
            raise Wrong(f'{shown(str(path), 200)} is not a file that can be read')
        return path

    def warn(self, text: str) -> None:
        """Log a warning about the file."""
        import logging  # here, because few files have anything to warn of

        logging.getLogger(__name__).warning('%s: %s', self._name, text)

    def finish(self) -> None:
        """UsageError with a line for each mistake noted, in the order of their lines in the file."""
        self.top.finish()
        if self._problems:
            raise UsageError('\n'.join(f'{self._name}:{line}: {text}' for line, text in sorted(self._problems)))


# Where a configuration that nobody named is found, and from whom it is taken. ecompute is root, and schedule.yaml names
# the file that goes to guests as user-data: whoever may put a file where the next command is typed would be believed.


def path_of_option(word: str | None) -> Path | None:
    """The file that --config names; None where it is not there. UsageError for an empty word.

    That is a script's variable without a value: with another cluster's file its command would go there.
    """
    if word == '':
        raise UsageError("--config: '' names no file")
    return None if word is None else Path(word)


def find_usual(name: str) -> Path | None:
    """The first file of this name in ./, ~/.config/ecomp/ and /etc/ecomp/, None if there is none.

    If $ECOMP_CONFIG names a directory, the file in that one; UsageError if it has none.
    """
    if own := os.environ.get(CONFIG_VARIABLE):
        path = Path(own) / name
        if not os.path.lexists(path):
            raise UsageError(f'{CONFIG_VARIABLE}={own}: has no {name}')
        return path
    places = (Path(), Path(os.path.expanduser('~/.config/ecomp')), Path('/etc/ecomp'))
    return next((place / name for place in places if os.path.lexists(place / name)), None)


def told_by(name: str, path: Path | None) -> str:
    """By which file of this name we were told where etcd and placement are, as the end of a sentence."""
    return f'told by {path}' if path is not None else f'a guess: no {name} was found, --config FILE names one'


def check_owner(name: str, found: os.stat_result) -> None:
    """UsageError for a file that neither root nor the caller owns, that others can write to, or that is a pipe."""
    callers = {0, os.geteuid()}
    if os.geteuid() == 0 and (behind_sudo := os.environ.get('SUDO_UID', '')).isdecimal():
        callers.add(int(behind_sudo))
    if found.st_uid not in callers:
        raise UsageError(
            f'{name}: belongs to user {found.st_uid}, and a configuration that nobody named is taken from root and you '
            f'alone: chown it, or name it (--config)'
        )
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f'{name}: is no regular file: remove it, or name a configuration (--config)')
    # A user's own group has the user's number, and nobody else in it.
    others = 0o002 if found.st_gid == found.st_uid else 0o022
    if found.st_mode & others:
        raise UsageError(f'{name}: others can write to it: chmod go-w {name}')


def _at_once(path: str, flags: int) -> int:
    # A pipe that somebody else put there would hold us up before it is seen whose it is.
    return os.open(path, flags | os.O_NONBLOCK)


def _parse(content: bytes, name: str) -> Node | None:
    """The document as nodes with their lines, None if it is empty. UsageError for what is not YAML, or not taken."""
    import yaml  # here, because without a file eschedule need not wait for it

    def refuse(mark: Any, reason: str) -> UsageError:
        place = f'{mark.line + 1}:{mark.column + 1}:' if mark else ''
        return UsageError(f'{name}:{place} {shown(reason, 200)}')

    def convert(node: yaml.Node) -> Node:
        kind, line = node.tag.rpartition(':')[2], node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return Node(kind, line, pairs=tuple((convert(key), convert(value)) for key, value in node.value))
        if isinstance(node, yaml.SequenceNode):
            return Node(kind, line, items=tuple(convert(item) for item in node.value))
        return Node(kind, line, text=node.value)

    try:
        text = content.decode('utf-8-sig')
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, 'anchor', None):
                raise refuse(event.start_mark, 'anchors and aliases (& and *) are not taken; write the value out')
            if getattr(event, 'tag', None):
                raise refuse(event.start_mark, 'tags (!) are not taken; put the value in quotes if ! belongs to it')
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:  # also keeps what recurses below from going too deep
                raise refuse(event.start_mark, 'is nested too deeply')
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return convert(root) if root else None
    except UnicodeDecodeError as error:
        line = content.count(b'\n', 0, error.start) + 1
        raise UsageError(f'{name}:{line}: is not UTF-8 text') from error
    except yaml.MarkedYAMLError as error:
        raise refuse(error.problem_mark, f'not YAML: {error.problem or error.context}') from error
    except yaml.YAMLError as error:  # a character YAML does not allow; it comes without a mark
        line = text.count('\n', 0, getattr(error, 'position', 0)) + 1
        raise UsageError(f'{name}:{line}: not YAML: a character that cannot be printed') from error
    except (ValueError, OverflowError) as error:  # "\UFFFFFFFF" gets through PyYAML's scanner to chr()
        raise UsageError(f'{name}: not YAML: {shown(str(error))}') from error


def why_no_mapping(text: str) -> str | None:
    """Why a text is no YAML of keys with values, with the line; None if it is. Nothing in it is quoted or made."""
    import yaml  # as above

    try:
        # The events alone: what an alias stands for is not written out.
        loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)
        marked = ((type(event), event.start_mark) for event in yaml.parse(text, Loader=loader))
        events = [(kind, mark.line if mark else 0) for kind, mark in marked]
    except yaml.MarkedYAMLError as error:
        return f'line {error.problem_mark.line + 1} is not YAML' if error.problem_mark else 'it is not YAML'
    except (yaml.YAMLError, ValueError, OverflowError):
        return 'it is not YAML'
    documents = [line for kind, line in events if kind is yaml.DocumentStartEvent]
    if len(documents) > 1:
        return f'line {documents[1] + 1} begins a second document'
    root = events[2][0] if len(events) > 3 else yaml.MappingStartEvent
    return None if root is yaml.MappingStartEvent else 'it is not keys with values'


# Each of these reads a node's value, or raises Wrong with what it should have been.


def text_of(node: Node) -> str:
    """A text: one printable line, not empty."""
    if node.kind in ('int', 'float', 'bool', 'timestamp'):
        raise Wrong(f'must be text; put {shown(node.text)} in quotes')
    if node.kind != 'str':
        raise Wrong(f'must be text, not {described(node)}')
    if not node.text.strip() or not node.text.isprintable():
        raise Wrong('must be one line of printable text')
    return node.text


def flag(node: Node) -> bool:
    """A truth value, in any of the words that YAML has for them."""
    if node.kind != 'bool':
        raise Wrong(f'must be True or False, not {typed(node)}')
    return node.text.lower() in ('true', 'yes', 'on')


def whole_number(node: Node) -> int:
    """A whole number written in decimals: YAML 1.1 also reads 010 as 8 and 1:30 as 90, which nobody means."""
    if node.kind != 'int' or not re.fullmatch(r'[-+]?(0|[1-9][0-9]{0,17})', node.text):
        raise Wrong(f'must be a whole number, not {typed(node)}')
    return int(node.text)


def between(low: int, high: int) -> Callable[[Node], int]:
    """A reader of whole numbers from `low` to `high`."""

    def parse(node: Node) -> int:
        if not low <= (number := whole_number(node)) <= high:
            raise Wrong(f'must be {low} to {high}, not {number}')
        return number

    return parse


def one_of(*words: str) -> Callable[[Node], str]:
    """A reader of one of these words."""

    def parse(node: Node) -> str:
        if (word := text_of(node)) not in words:
            raise Wrong(f'must be {", ".join(words[:-1])} or {words[-1]}, not {shown(word)}')
        return word

    return parse


def checked(check: Callable[[str], T]) -> Callable[[Node], T]:
    """A reader of text of which `check` makes a value, or which it refuses with a ValueError."""

    def parse(node: Node) -> T:
        try:
            return check(text_of(node))
        except ValueError as error:
            raise Wrong(str(error)) from error

    return parse


def list_of(
    parse: Callable[[Node], T], shape: str = 'a list', least: int = 0, once: Callable[[Node], str] | None = None
) -> Callable[[Node], tuple[T, ...]]:
    """A reader of a list of at least so many items, each by `parse`; `shape` says what it looks like.

    `once`: none may be there twice, and this says what it is called then.
    """

    def parse_all(node: Node) -> tuple[T, ...]:
        if node.kind != 'seq' or len(node.items) < least:
            raise Wrong(f'must be {shape}, not {described(node)}')
        found: list[T] = []

        def read(item: Node) -> None:
            found.append(parse(item))
            if once and found[-1] in found[:-1]:
                raise Wrong(f'{once(item)} is there twice')

        read_parts(node.items, read)
        return tuple(found)

    return parse_all


def each_once(parse: Callable[[Node], T]) -> Callable[[Node], tuple[T, ...]]:
    """A reader of a list, each item by `parse`, and none twice."""
    return list_of(parse, once=lambda item: shown(item.text))


def mapping_of(
    name_of: Callable[[Node], str], parse: Callable[[str, Node], T], shape: str, least: int = 0
) -> Callable[[Node], dict[str, T]]:
    """A reader of a mapping of at least so many names, each there once, to what `parse` makes of name and value."""

    def parse_all(node: Node) -> dict[str, T]:
        if node.kind != 'map' or len(node.pairs) < least:
            raise Wrong(f'must be {shape}, not {described(node)}')
        found: dict[str, T] = {}

        def read(pair: tuple[Node, Node]) -> None:
            if (name := name_of(pair[0])) in found:
                raise Wrong('is there twice')
            found[name] = parse(name, pair[1])

        read_parts(node.pairs, read)
        return found

    return parse_all


def read_parts(parts: Sequence[Part], read: Callable[[Part], None]) -> None:
    """Have each item, or each key with its value, read by `read`. Wrong has all that it refuses, each with its line."""
    wrong: list[tuple[int, str]] = []
    for part in parts:
        item, name = (part, '') if isinstance(part, Node) else (part[0], part[0].text)
        try:
            read(part)
        except Wrong as error:
            wrong.append((item.line, f'{shown(name)}: {error}' if name else str(error)))
    if wrong:
        raise Wrong(parts=wrong)


def described(node: Node) -> str:
    """What a node holds, in words, for a message."""
    words = {'map': 'a mapping', 'seq': 'a list' if node.items else 'an empty list', 'null': 'nothing'}
    return words.get(node.kind) or shown(node.text)


def typed(node: Node) -> str:
    """What a node holds where no text is wanted: a text is called so, for "2379" looks like a number without quotes."""
    return f'the text "{shown(node.text)}"' if node.kind == 'str' else described(node)


def shown(text: str, limit: int = 60) -> str:
    """A text from outside as one printable line, cut off with `…` after `limit` characters."""
    safe = escaped(text[: limit + 1])
    return safe if len(text) <= limit else f'{safe[:limit]}…'


def dump_yaml(value: object) -> str:
    """A value that JSON has as YAML, of printable ASCII alone, without a line break at its end.

    What is text in it is text to a reader of YAML 1.1 and to one of 1.2.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    # Text that a resolver takes for something else is quoted. PyYAML's own come first, so its whole numbers stay such.
    Dumper.add_implicit_resolver('tag:yaml.org,2002:float', re.compile(CORE_NUMBER), list('-+.0123456789'))
    plain = json.loads(dump(value))  # nothing that stands twice is written as an alias
    return str(yaml.dump(plain, Dumper=Dumper, sort_keys=False, width=1000)).rstrip('\n').removesuffix('\n...')
