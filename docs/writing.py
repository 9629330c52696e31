"""Blocks and sections of the generated pages, rendered as Markdown and as man pages."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ecomp import __version__

# Date of the man pages: when they were last read as a whole.
MAN_PAGE_DATE = '2026-11-27'


class Code(NamedTuple):
    """Lines shown verbatim; `kind` is Markdown's name of their language."""

    text: str
    kind: str = ''


class Terms(NamedTuple):
    """Terms with their meanings, below `head`."""

    head: tuple[str, str]
    rows: Sequence[tuple[str, str]]


class Table(NamedTuple):
    """A table of more than two columns; man pages cannot have one."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = str | Code | Terms | Table


class Section(NamedTuple):
    title: str
    blocks: Sequence[Block]


class ManPage(NamedTuple):
    """A man page: its name, section number, one-line description, sections and related pages."""

    name: str
    number: int
    about: str
    sections: Sequence[Section]
    related_pages: Sequence[str]


def read_docstring(target: object) -> str:
    return inspect.getdoc(target) or ''


def parse_docstring(source: object) -> list[Block]:
    """Split a text or docstring into paragraphs; indented ones become Code."""
    blocks: list[Block] = []
    text = source if isinstance(source, str) else read_docstring(source)
    text = re.sub(r'\(rule: ([a-z-]+)\)', r'(rule: [\1](../explanation/protocol.md#\1))', text)
    for part in re.sub(r' ?Pure(?:, and light to import)?\.', '', text).split('\n\n'):
        if part.startswith('  '):
            blocks.append(Code(textwrap.dedent(part)))
        elif part.strip():
            blocks.append(part.replace('\n', ' '))
    return blocks


def make_link(title: str) -> str:
    return f'[{title.removeprefix("eschedule ")}](#{make_anchor(title)})'


def make_anchor(title: str) -> str:
    return re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-')


def render_markdown(title: str, top: Sequence[Block], sections: Iterable[Section]) -> str:
    parts = [f'# {title}', '<!-- made by docs.generate -->', *map(_render_block, top)]
    for section in sections:
        parts += [f'## {section.title}', *map(_render_block, filter(None, section.blocks))]
    return '\n\n'.join(part.rstrip() for part in parts) + '\n'


def _render_block(block: Block) -> str:
    if isinstance(block, str):
        # Escape <, so that <word> is not HTML, except in backticks.
        return re.sub('(`[^`]*`)|<', lambda found: found[1] or '&lt;', block)
    if isinstance(block, Code):
        return f'```{block.kind}\n{block.text}\n```'
    if isinstance(block, Terms):
        return _render_block(Table(block.head, [[f'`{term}`', meaning] for term, meaning in block.rows]))
    rows = [block.head, ['---'] * len(block.head), *block.rows]
    # GitHub splits cells at each |, also in backticks, where it decodes no entities.
    escaped = [[_render_block(cell.replace('|', '\\|')) for cell in row] for row in rows]
    return '\n'.join(f'| {" | ".join(row)} |' for row in escaped)


def render_man_page(page: ManPage) -> str:
    """Render a man page with groff's man macros; raise TypeError if it has a table."""
    name = f'{page.name}({page.number})'
    lines = [
        '.\\" made by docs.generate',
        f'.TH {page.name.upper()} {page.number} {MAN_PAGE_DATE} "ecomp {__version__}" "ecomp"',
        '.SH NAME',
        f'{_render_text(page.name)} \\- {_render_text(page.about)}',
    ]
    for section in page.sections:
        lines.append(f'.SH "{_render_text(section.title)}"')
        words = [line for block in filter(None, section.blocks) for line in _render_roff_block(block)]
        lines += words[words[:1] == ['.PP'] :]  # a section starts a paragraph itself
    see = ', '.join(_render_text(related) for related in page.related_pages if related != name)
    return '\n'.join([*lines, '.SH "SEE ALSO"', see]) + '\n'


def _render_roff_block(block: Block) -> list[str]:
    if isinstance(block, str):
        return ['.PP', _render_text(block)]
    if isinstance(block, Code):
        return ['.PP', '.nf', *(_render_line(line) for line in block.text.split('\n')), '.fi']
    if isinstance(block, Terms):
        return [
            line for term, meaning in block.rows for line in ('.TP', f'.B "{_escape(term)}"', _render_text(meaning))
        ]
    raise TypeError('man pages have no tables')


def _render_text(text: str) -> str:
    """Render a paragraph: code bold, links as their text, no roff command at the start."""
    text = re.sub(r'\[([^]]+)\]\([^)]+\)', r'\1', text)
    parts = re.split(r'`([^`]+)`', text)
    bold = [_escape(part) if number % 2 == 0 else f'\\fB{_escape(part)}\\fR' for number, part in enumerate(parts)]
    return _guard_first_character(''.join(bold))


def _render_line(text: str) -> str:
    return _guard_first_character(_escape(text))


def _guard_first_character(text: str) -> str:
    return f'\\&{text}' if text.startswith(('.', "'")) else text


def _escape(text: str) -> str:
    return text.replace('\\', '\\e').replace('-', '\\-').replace('"', '\\(dq').replace("'", '\\(aq').replace('…', '...')
