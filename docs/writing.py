"""How the pages that are made from the code are written: blocks and sections, as Markdown and as man pages."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ecomp import __version__

DATE = '2026-11-23'
"""What man pages say of their age: the day on which they were last read as a whole."""


class Code(NamedTuple):
    """Lines that are shown as they are; `kind` is what Markdown calls their language."""

    text: str
    kind: str = ''


class Terms(NamedTuple):
    """Terms, each with what it means, below `head`."""

    head: tuple[str, str]
    rows: Sequence[tuple[str, str]]


class Table(NamedTuple):
    """A table of more columns than two; man pages have none."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = str | Code | Terms | Table


class Section(NamedTuple):
    """A title, and what is below it."""

    title: str
    blocks: Sequence[Block]


class ManPage(NamedTuple):
    """A man page: its name and number, a line about it, and its sections; `see` are other pages."""

    name: str
    number: int
    about: str
    sections: Sequence[Section]
    see: Sequence[str]


def doc(of: object) -> str:
    """The docstring."""
    return inspect.getdoc(of) or ''


def docstring(of: object) -> list[Block]:
    """The paragraphs of a text, or of a docstring; what is indented in it is shown as it is."""
    found: list[Block] = []
    text = of if isinstance(of, str) else doc(of)
    for part in re.sub(r' ?Pure(?:, and light to import)?\.', '', text).split('\n\n'):
        if part.startswith('  '):
            found.append(Code(textwrap.dedent(part)))
        elif part.strip():
            found.append(part.replace('\n', ' '))
    return found


def link(title: str) -> str:
    """A link to a section of the same page, as GitHub names it."""
    return f'[{title.removeprefix("eschedule ")}](#{anchor(title)})'


def anchor(title: str) -> str:
    """What GitHub calls a section."""
    return re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-')


def markdown(title: str, top: Sequence[Block], sections: Iterable[Section]) -> str:
    """A page in Markdown."""
    parts = [f'# {title}', '<!-- made by docs.generate -->', *map(_markdown, top)]
    for section in sections:
        parts += [f'## {section.title}', *map(_markdown, filter(None, section.blocks))]
    return '\n\n'.join(part.rstrip() for part in parts) + '\n'


def _markdown(block: Block) -> str:
    if isinstance(block, str):
        # A word in angle brackets is no HTML; in backticks it is shown as it is.
        return re.sub('(`[^`]*`)|<', lambda found: found[1] or '&lt;', block)
    if isinstance(block, Code):
        return f'```{block.kind}\n{block.text}\n```'
    if isinstance(block, Terms):
        return _markdown(Table(block.head, [[f'`{term}`', said] for term, said in block.rows]))
    rows = [block.head, ['---'] * len(block.head), *block.rows]
    return '\n'.join(f'| {" | ".join(_markdown(cell.replace("|", "&#124;")) for cell in row)} |' for row in rows)


def roff(page: ManPage) -> str:
    """A man page, as groff's man macros have it."""
    name = f'{page.name}({page.number})'
    lines = [
        '.\\" made by docs.generate',
        f'.TH {page.name.upper()} {page.number} {DATE} "ecomp {__version__}" "ecomp"',
        '.SH NAME',
        f'{_text(page.name)} \\- {_text(page.about)}',
    ]
    for section in page.sections:
        lines.append(f'.SH "{_text(section.title)}"')
        words = [line for block in filter(None, section.blocks) for line in _roff(block)]
        lines += words[words[:1] == ['.PP'] :]  # a section begins with a paragraph as it is
    see = ', '.join(_text(each) for each in page.see if each != name)
    return '\n'.join([*lines, '.SH "SEE ALSO"', see]) + '\n'


def _roff(block: Block) -> list[str]:
    if isinstance(block, str):
        return ['.PP', _text(block)]
    if isinstance(block, Code):
        return ['.PP', '.nf', *(_line(line) for line in block.text.split('\n')), '.fi']
    if isinstance(block, Terms):
        return [line for term, said in block.rows for line in ('.TP', f'.B "{_plain(term)}"', _text(said))]
    raise TypeError('man pages have no tables')


def _text(text: str) -> str:
    """A paragraph: code in bold, links as their words, nothing at a line's beginning that roff would obey."""
    text = re.sub(r'\[([^]]+)\]\([^)]+\)', r'\1', text)
    parts = re.split(r'`([^`]+)`', text)
    bold = [_plain(part) if number % 2 == 0 else f'\\fB{_plain(part)}\\fR' for number, part in enumerate(parts)]
    return _guarded(''.join(bold))


def _line(text: str) -> str:
    return _guarded(_plain(text))


def _guarded(text: str) -> str:
    return f'\\&{text}' if text.startswith(('.', "'")) else text


def _plain(text: str) -> str:
    return text.replace('\\', '\\e').replace('-', '\\-').replace('"', '\\(dq').replace("'", '\\(aq').replace('…', '...')
