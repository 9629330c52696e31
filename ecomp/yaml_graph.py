"""Read and write any YAML by PyYAML, which loads slowly."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import yaml

from ecomp.errors import UsageError
from ecomp.model.json_object import dump
from ecomp.model.text import make_printable
from ecomp.yaml_plain import MAX_DEPTH, Node

# Numbers in YAML 1.2's core schema. PyYAML, which implements YAML 1.1, reads 1e3, 0o17 and 08 as text.
CORE_SCHEMA_NUMBER = (
    r'(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?'
    r'|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$'
)
# The key `<<`, unquoted, whose value is a mapping or a list of them to inherit from.
MERGE_TAG = 'tag:yaml.org,2002:merge'
# libyaml takes a tenth of the time, and is not in every PyYAML.
FAST_LOADER: Any = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)


class _Refusal(yaml.MarkedYAMLError):
    """A document is valid YAML, and is not accepted."""


def parse_any(content: bytes, name: str, max_nodes: int = 0) -> Node | None:
    """Parse at most `max_nodes` values, where 0 means any number and no aliases, None if empty."""
    if b'\t' in content:  # YAML accepts tabs in JSON, and PyYAML does not; a string of JSON has none
        with suppress(ValueError, RecursionError):
            json.loads(content)
            content = content.replace(b'\t', b' ')
    text = ''
    try:
        text = content.decode('utf-8-sig')
        # libyaml accepts tabs that PyYAML refuses, and describes errors in other words: PyYAML reads such files.
        if '\t' not in text:
            with suppress(yaml.YAMLError, ValueError, OverflowError):
                return _Walk(max_nodes).parse(text, FAST_LOADER)
        return _Walk(max_nodes).parse(text, yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = content.count(b'\n', 0, error.start) + 1
        raise UsageError(f'{name}:{line}: is not UTF-8 text') from error
    except yaml.MarkedYAMLError as error:
        raise UsageError(f'{name}:{_describe_error(error)}') from error
    except yaml.YAMLError as error:  # a character that YAML forbids; this error has no mark
        line = text.count('\n', 0, getattr(error, 'position', 0)) + 1
        raise UsageError(f'{name}:{line}: not YAML: it contains a character that is not printable') from error
    except (ValueError, OverflowError) as error:  # PyYAML's scanner passes "\UFFFFFFFF" to chr()
        raise UsageError(f'{name}: not YAML: {make_printable(str(error), 60)}') from error


def _describe_error(error: yaml.MarkedYAMLError) -> str:
    reason = error.problem or error.context or ''
    if reason.startswith('but '):
        reason = f'{error.context} {reason}'
    if not isinstance(error, _Refusal):
        reason = f'not YAML: {reason}' + ('. Fix: indent with spaces, not tabs' if r"'\t'" in reason else '')
    mark = error.context_mark if 'end of stream' in reason else error.problem_mark  # where the quote begins
    place = f'{mark.line + 1}:{mark.column + 1}:' if mark else ''
    return f'{place} {make_printable(reason, 200)}'


class _Walk:
    """The walk over the graph of one document, which replaces its aliases."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._counts = Counter[str]()

    def parse(self, text: str, loader: Any) -> Node | None:
        self._refuse_unsafe_events(text, loader)  # composing takes a minute for 1 MiB, and may recurse too deeply
        root = yaml.compose(text, Loader=loader)
        return self._convert(root, 0) if root else None

    def _refuse_unsafe_events(self, text: str, loader: Any) -> None:
        depth = 0
        events: Iterable[Any] = yaml.parse(text, Loader=loader)
        for event in events:
            reason = ''
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if getattr(event, 'anchor', None) and not self._max_nodes:
                reason = 'anchors and aliases (& and *) are not accepted. Fix: repeat the value'
            elif getattr(event, 'tag', None):
                reason = 'tags (!) are not accepted. Fix: if ! is part of the value, put it in quotes'
            elif depth > MAX_DEPTH:
                reason = 'is nested too deeply'
            if reason:
                raise _Refusal(problem=reason, problem_mark=event.start_mark)
            if isinstance(event, yaml.NodeEvent):
                self._count('parsed', 1, event.start_mark, 0)

    def _count(self, kind: str, number: int, mark: Any, depth: int) -> None:
        """Add to the number of nodes of this kind, and refuse too many or too deep ones."""
        self._counts[kind] += number
        if self._max_nodes and (self._counts[kind] > self._max_nodes or depth > MAX_DEPTH):
            limit = f'{self._max_nodes} values, or more than {MAX_DEPTH} levels'
            raise _Refusal(problem=f'has more than {limit}, once its aliases are replaced', problem_mark=mark)

    def _convert(self, node: yaml.Node, depth: int) -> Node:
        self._count('converted', 1, node.start_mark, depth)
        kind, line, below = node.tag.rpartition(':')[2], node.start_mark.line + 1, depth + 1
        if isinstance(node, yaml.MappingNode):
            pairs = ((self._convert(k, below), self._convert(v, below)) for k, v in self._list_pairs(node, below))
            return Node(kind, line, pairs=tuple(pairs))
        if isinstance(node, yaml.SequenceNode):
            return Node(kind, line, items=tuple(self._convert(item, below) for item in node.value))
        return Node(kind, line, text=node.value)

    def _list_pairs(self, node: yaml.MappingNode, depth: int) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return the pairs inherited with `<<` that a mapping does not override, and then its own."""
        own: list[tuple[yaml.Node, yaml.Node]] = []
        inherited: dict[object, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            bases = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if not self._max_nodes or key.tag != MERGE_TAG or not all(isinstance(b, yaml.MappingNode) for b in bases):
                own.append((key, value))
                continue
            for base in bases:
                self._count('merged', 1 + len(base.value), base.start_mark, depth)
                for pair in self._list_pairs(base, depth + 1):
                    inherited.setdefault(pair[0].value if isinstance(pair[0], yaml.ScalarNode) else pair[0], pair)
        names = {key.value for key, _ in own if isinstance(key, yaml.ScalarNode)}
        return [*(pair for name, pair in inherited.items() if name not in names), *own]


def explain_invalid_mapping(text: str) -> str | None:
    """Explain why a text is not a YAML mapping, or return None if it is one or is empty."""
    try:
        # Only the events: aliases are not expanded. No message quotes the text, which may be secret.
        marked_events = ((type(event), event.start_mark) for event in yaml.parse(text, Loader=FAST_LOADER))
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


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of YAML 1.2 would take for a number."""


# PyYAML's own resolvers come first, so integers stay unquoted.
_Dumper.add_implicit_resolver('tag:yaml.org,2002:float', re.compile(CORE_SCHEMA_NUMBER), list('-+.0123456789'))


def dump_yaml(value: object) -> str:
    """Dump a JSON value as ASCII, equal in YAML 1.1 and 1.2, without a final line break."""
    tree = json.loads(dump(value))  # a copy without shared objects, which would become aliases
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=1000)).rstrip('\n').removesuffix('\n...')
