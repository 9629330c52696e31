"""The plain part of YAML, in which configurations are written mostly: keys, words, numbers, lists, a line each. Pure.

For a command, which would be over before PyYAML is loaded. What is not plain beyond doubt is left to PyYAML.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Node(NamedTuple):
    """A value in the file. `kind` is str, int, float, bool, null, map or seq, or YAML's name of another type."""

    kind: str
    line: int
    text: str = ''
    items: tuple[Node, ...] = ()
    pairs: tuple[tuple[Node, Node], ...] = ()


class _Line(NamedTuple):
    """A line that says something: how far it is indented, whether it is of a list, its key, and what follows."""

    number: int
    indent: int
    is_item: bool
    key: str
    rest: str


_LINE = re.compile(r'( *)(?:(- +)|([A-Za-z_][A-Za-z0-9_]*):(?: +|$))([^ #].*|)')
_PASSED_OVER = re.compile(' *(#.*)?')
_WORD = r"[A-Za-z_/][A-Za-z0-9_./:@%+=~#-]*(?<!:)|[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+(?::[0-9]+)?"
_ALONE = r"[A-Za-z_/][A-Za-z0-9_./:@%+=~#,&!-]*(?<!:)"
"""A word, and one that is in no list with brackets."""
_QUOTED = r"""'[ !#-&(-~]*'|"[ !#-\[\]-~]*\""""
_SCALAR = re.compile(f'({_WORD}|{_ALONE}|0|[1-9][0-9]{{0,17}}|{_QUOTED})(?: +#.*)?')
_LIST = rf'\[ *((?:(?:{_WORD}|{_QUOTED})(?: *, *(?:{_WORD}|{_QUOTED}))*)?) *\](?: +#.*)?'
_ITEM = f'{_WORD}|{_QUOTED}'
_BOOLEANS = {'true', 'True', 'false', 'False'}
_OTHERS = re.compile('yes|no|on|off|true|false|null', re.IGNORECASE)
"""Words that YAML takes for something else, in some of their spellings."""


class _NotPlain(Exception):
    """Here is something that only PyYAML knows."""


def plain(text: str) -> Node | None:
    """The document's node, as PyYAML would have it, but null where nothing is in it; None: it is not plain."""
    if not text.isascii() or any(each < ' ' and each != '\n' for each in text):
        return None
    lines: list[_Line] = []
    for number, line in enumerate(text.split('\n'), 1):
        if _PASSED_OVER.fullmatch(line):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            return None
        spaces, item, key, rest = found.groups()
        lines.append(_Line(number, len(spaces), item is not None, key or '', rest))
    if not lines:
        return Node('null', 1)
    try:
        return _block(lines) if lines[0].indent == 0 else None
    except _NotPlain:
        return None


def _block(lines: list[_Line]) -> Node:
    """A mapping or a list: all the lines, which are indented as the first one, or deeper below one of these."""
    first = lines[0]
    if first.is_item:
        if any((each.indent, each.is_item) != (first.indent, True) for each in lines):
            raise _NotPlain
        return Node('seq', first.number, items=tuple(_value(each) for each in lines))
    pairs = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.indent != first.indent or line.is_item or _OTHERS.fullmatch(line.key):
            raise _NotPlain
        end = at + 1
        # A list may stand below its key without being indented.
        while end < len(lines) and (lines[end].indent > line.indent or (lines[end].is_item and not line.rest)):
            if lines[end].indent < line.indent:
                break
            end += 1
        below = lines[at + 1 : end]
        if below and line.rest:
            raise _NotPlain
        key = Node('str', line.number, line.key)
        pairs.append((key, _block(below) if below else _value(line)))
        at = end
    return Node('map', first.number, pairs=tuple(pairs))


def _value(line: _Line) -> Node:
    if not line.rest:
        if line.is_item:
            raise _NotPlain
        return Node('null', line.number)
    if line.rest.startswith('['):
        found = re.fullmatch(_LIST, line.rest)
        if found is None:
            raise _NotPlain
        return Node('seq', line.number, items=tuple(_scalar(each, line.number) for each in re.findall(_ITEM, found[1])))
    found = _SCALAR.fullmatch(line.rest)
    if found is None:
        raise _NotPlain
    return _scalar(found[1], line.number)


def _scalar(text: str, line: int) -> Node:
    if text[0] in '\'"':
        return Node('str', line, text[1:-1])
    if text in _BOOLEANS:
        return Node('bool', line, text)
    if _OTHERS.fullmatch(text):
        raise _NotPlain
    return Node('int' if text.isdecimal() else 'str', line, text)
