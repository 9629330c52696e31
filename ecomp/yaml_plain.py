"""A reader of simple YAML, so that short commands need not load PyYAML. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

# Nested mappings and lists; PyYAML's reader refuses deeper ones.
MAX_DEPTH = 8
_LINE = re.compile(r'( *)(?:(- +)|([A-Za-z_][A-Za-z0-9_-]*):(?: +|$))([^ #].*|)')
_BLANK_OR_COMMENT = re.compile(' *(#.*)?')
_WORD = r'[A-Za-z_/][A-Za-z0-9_./:@%+=~#-]*(?<!:)|[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+(?::[0-9]+)?'
# _WORD is a word in any place, this one a word outside of lists in brackets.
_WORD_OUTSIDE_LIST = r'[A-Za-z_/][A-Za-z0-9_./:@%+=~#,&!-]*(?<!:)'
_QUOTED = r"""'[ !#-&(-~]*'|"[ !#-\[\]-~]*\""""
_SCALAR = re.compile(f'({_WORD}|{_WORD_OUTSIDE_LIST}|0|[1-9][0-9]{{0,17}}|{_QUOTED})(?: +#.*)?')
_LIST = rf'\[ *((?:(?:{_WORD}|{_QUOTED})(?: *, *(?:{_WORD}|{_QUOTED}))*)?) *\](?: +#.*)?'
_ITEM = f'{_WORD}|{_QUOTED}'
_BOOLEANS = {'true', 'True', 'false', 'False'}
# Words that YAML reads as booleans or null, in some of their spellings.
_RESERVED_WORD = re.compile('yes|no|on|off|true|false|null', re.IGNORECASE)


class Node(NamedTuple):
    """A value, whose `kind` is str, int, float, bool, null, map, seq or another tag of YAML."""

    kind: str
    line: int
    text: str = ''
    items: tuple[Node, ...] = ()
    pairs: tuple[tuple[Node, Node], ...] = ()


class _Line(NamedTuple):
    number: int
    indent: int
    is_item: bool
    key: str
    rest: str


class _NotPlain(Exception):
    """The text is not simple, so PyYAML must parse it."""


def parse_plain(text: str) -> Node | None:
    """Parse a simple document as PyYAML would, or return None for others, even invalid ones."""
    if not text.isascii() or any(character < ' ' and character != '\n' for character in text):
        return None
    lines: list[_Line] = []
    for number, line in enumerate(text.split('\n'), 1):
        if _BLANK_OR_COMMENT.fullmatch(line):
            continue
        if (match := _LINE.fullmatch(line)) is None:
            return None
        spaces, dash, key, rest = match.groups()
        lines.append(_Line(number, len(spaces), dash is not None, key or '', rest))
    if not lines:
        return Node('null', 1)
    try:
        return _parse_block(lines) if lines[0].indent == 0 else None
    except _NotPlain:
        return None


def _parse_block(lines: list[_Line], depth: int = 1) -> Node:
    """Parse the lines of one mapping or list, or raise _NotPlain."""
    first = lines[0]
    if depth == MAX_DEPTH:  # there may be a list in brackets below
        raise _NotPlain
    if first.is_item:
        if any((item.indent, item.is_item) != (first.indent, True) for item in lines):
            raise _NotPlain
        return Node('seq', first.number, items=tuple(_parse_value(item) for item in lines))
    if any(line.indent < first.indent for line in lines):
        raise _NotPlain
    pairs = []
    # The list below a key need not be indented.
    starts = [at for at, line in enumerate(lines) if line.indent == first.indent and not line.is_item]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        line, nested = lines[start], lines[start + 1 : end]
        if _RESERVED_WORD.fullmatch(line.key) or (nested and line.rest):
            raise _NotPlain
        value = _parse_block(nested, depth + 1) if nested else _parse_value(line)
        pairs.append((Node('str', line.number, line.key), value))
    return Node('map', first.number, pairs=tuple(pairs))


def _parse_value(line: _Line) -> Node:
    if not line.rest:
        if line.is_item:
            raise _NotPlain
        return Node('null', line.number)
    if line.rest.startswith('['):
        if (match := re.fullmatch(_LIST, line.rest)) is None:
            raise _NotPlain
        items = (_parse_scalar(item, line.number) for item in re.findall(_ITEM, match[1]))
        return Node('seq', line.number, items=tuple(items))
    if (match := _SCALAR.fullmatch(line.rest)) is None:
        raise _NotPlain
    return _parse_scalar(match[1], line.number)


def _parse_scalar(text: str, line: int) -> Node:
    if text[0] in '\'"':
        return Node('str', line, text[1:-1])
    if text in _BOOLEANS:
        return Node('bool', line, text)
    if _RESERVED_WORD.fullmatch(text):
        raise _NotPlain
    return Node('int' if text.isdecimal() else 'str', line, text)
