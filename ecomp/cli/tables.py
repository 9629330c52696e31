"""What users read: rows of named columns as a table that fits the terminal, JSON, YAML, CSV or bare values. Pure.

Every listing command hands a Listing to Context.show, and a command that tells all of a few things their Details. A
cell is text, a number, or None for what is not there. Each form is safe for a terminal: what is in a cell is one line
of what can be printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from ecomp.cli.options import CSV, JSON, TABLE, VALUE, YAML
from ecomp.errors import UsageError
from ecomp.model.json_object import dump
from ecomp.model.text import escaped, printable

# How text is made to fit: widths, cuts, short uuids, colours; and what cells are sorted by


GAP = '  '
"""What is between two columns."""
SHORTEST = 8
"""Characters of a uuid that are shown at least."""
LEAST = 4
"""Characters that a column has left at least where a line is cut for a narrow terminal."""


class Room(NamedTuple):
    """What a column needs, in characters, and what it can do without.

    `full` is its width as it is, `short` that with the short heading, `least` that to which its cells may be cut;
    where that is not enough, the columns with the largest `rank` are left out, those of rank 0 never.
    """

    full: int
    short: int
    least: int
    rank: int


def fitted(rooms: Sequence[Room], width: int) -> dict[int, int]:
    """The columns that stay, by their numbers, and how wide each is, so that they fit beside each other into `width`.

    Of equal rank the last is left out first. Where even those of rank 0 are too wide, the widest are cut.
    """
    kept = list(range(len(rooms)))
    while True:
        now = {at: rooms[at].full for at in kept}
        spare = width - len(GAP) * (len(kept) - 1)
        if sum(now.values()) > spare:  # all of them or none: a heading says what the next one leaves out
            now = {at: rooms[at].short for at in kept}
        for at in kept:
            if (over := sum(now.values()) - spare) > 0:
                now[at] = max(now[at] - over, min(rooms[at].least, now[at]))
        if sum(now.values()) <= spare:
            return now
        left = [at for at in kept if rooms[at].rank]
        if not left:
            break
        kept.remove(max(left, key=lambda at: (rooms[at].rank, at)))
    while sum(now.values()) > spare and max(now.values()) > LEAST:
        now[max(now, key=lambda at: now[at])] -= 1
    return now


def across(text: str) -> int:
    """How many places of a terminal's line a text takes."""
    return len(text) if text.isascii() else sum(map(_places, text))


def _places(character: str) -> int:
    import unicodedata  # names of hosts and projects may be of any script, and seldom are

    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in 'WF' else 1


def _room(text: str, width: int) -> int:
    """How many characters of the text this width has room for."""
    if text.isascii():
        return min(len(text), max(width, 0))
    for number, each in enumerate(text):
        width -= _places(each)
        if width < 0:
            return number
    return len(text)


def fill(text: str, width: int) -> str:
    """The text with spaces behind it, up to this width."""
    return text + ' ' * (width - across(text))


def cut(text: str, width: int) -> str:
    """The text, or as much of its beginning as this width has room for, with `…` behind it."""
    return text if _room(text, width) == len(text) else f'{text[: _room(text, width - 1)]}…'


def folded(text: str, width: int) -> list[str]:
    """The text in lines no wider than this: broken at spaces where there are some, else anywhere."""
    lines = []
    while (end := max(_room(text, width), 1)) < len(text):
        space = text.rfind(' ', 0, end + 1)
        end = space if space > 0 else end
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]


def natural(cell: str | int | float | None) -> tuple[object, ...]:
    """What cells are sorted by: numbers in a text are numbers, so set-2 is before set-10; what is not there is last."""
    if cell is None:
        return (1,)
    parts = re.split(r'(\d{1,300})', str(cell))
    return 0, tuple((0, int(part), '') if part.isdecimal() else (1, 0, part.casefold()) for part in parts if part)


def short_uuids(texts: Iterable[str]) -> Mapping[str, str]:
    """For each uuid its shortest beginning that no other of them has, of SHORTEST characters or more."""
    found = sorted({text for text in texts if _UUID.fullmatch(text)})
    short = {}
    for number, each in enumerate(found):
        near = [*found[max(number - 1, 0) : number], *found[number + 1 : number + 2]]
        length = max([SHORTEST, *(_alike(each, other) + 1 for other in near)])
        length += each[length - 1] == '-'
        short[each] = each[:length]
    return short


def _alike(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def short_times(texts: Iterable[str]) -> Mapping[str, str]:
    """Times to the minute."""
    return {text: f'{text[:10]} {text[11:16]}' for text in texts if _TIMESTAMP.fullmatch(text)}


def coloured(cell: str) -> str:
    """A state in its colour: green is well, yellow on its way or off, red wants somebody. Others stay as they are."""
    text = cell.rstrip()
    colour = next((colour for colour, states in _COLOURS.items() if text.partition(',')[0] in states), '')
    return f'\x1b[{colour}m{text}\x1b[0m{cell[len(text):]}' if colour else cell


_UUID = re.compile('[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')
_TIMESTAMP = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z')
_COLOURS = {
    '32': {'active', 'up'},
    '33': {'queued', 'scheduled', 'building', 'stopped', 'destroying', 'disabled', 'closed'},
    '31': {'error', 'silent', 'orphaned'},
}


# What is shown, and how it is to look


TEXT, UUID, STATE, TIME = 'text', 'uuid', 'state', 'time'
"""Kinds of columns. On a terminal a uuid is its shortest unique beginning, a state has a colour, a time its minutes."""

Cell: TypeAlias = str | int | float | None


class Column(NamedTuple):
    """A column: its name, which is its heading, and what becomes of it where a terminal has no room for all.

    First `short` takes the place of its heading, and its cells are cut to `least` characters (0: they are not cut), or,
    where it `folds`, broken into lines of that width; then columns are left out, the one with the largest `rank` first,
    and of equals the last; rank 0 always stays. One that is `wide` is in a table with --wide or -c alone.
    """

    name: str
    rank: int = 0
    kind: str = TEXT
    short: str = ''
    least: int = 0
    folds: bool = False
    wide: bool = False


class Row(NamedTuple):
    """The cells, one for each column; what stands for them in JSON; the title of the table it is in, '' for none."""

    cells: Sequence[Cell]
    value: object = None
    title: str = ''


class Listing(NamedTuple):
    """Rows of named columns. As JSON it is an array of its rows' values, or `document` where that is given."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    document: object = None


class Details(NamedTuple):
    """One thing whole: its fields in their order, a line each, and what stands for it in JSON.

    `may_have` are the fields that a thing of its kind may have: these may be asked for, whichever of them this one has,
    and so may those of a word that is `numbered`, and any number.
    """

    fields: Sequence[tuple[str, Cell]]
    value: object
    may_have: Sequence[str] = ()
    numbered: Sequence[str] = ()

    def named(self, name: str) -> Column:
        """The field that is asked for by this name. UsageError."""
        word, _, number = name.casefold().strip().rpartition(' ')
        if word in self.numbered and number.isdecimal():
            return Column(f'{word} {number}')
        there = [field for field, _ in self.fields if field.rpartition(' ')[0] not in self.numbered]
        wanted = name.casefold().strip()
        has = [field for field, cell in self.fields if cell is not None and field in there]
        begin = [field for field in has if wanted and field.casefold().startswith(wanted)]
        # The beginning of a name is that of one that is there, if any of these begins so.
        known = begin if begin and wanted not in self.may_have else [*self.may_have, *there]
        return _named(name, [Column(field) for field in dict.fromkeys(known)], '-c')


class Look(NamedTuple):
    """How it is to look: the form, the columns asked for, and what the terminal is like.

    `columns` () are all that the form has; `sort` '' is the order as it is. `width` is that of the terminal in
    characters, None where there is none or all is to be seen: then nothing is shortened, cut or left out.
    """

    form: str = TABLE
    columns: Sequence[str] = ()
    header: bool = True
    sort: str = ''
    wide: bool = False
    width: int | None = None
    colour: bool = False


def rendered(listing: Listing, look: Look) -> str:
    """A listing in its form, without a line break at its end. UsageError for a column that it does not have."""
    rows = listing.rows
    if look.sort:
        at = listing.columns.index(_named(look.sort, listing.columns, '--sort'))
        rows = sorted(rows, key=lambda row: natural(row.cells[at]))
    if look.form in (JSON, YAML):
        return document([row.value for row in rows] if listing.document is None else listing.document, look.form)
    columns = [_named(name, listing.columns, '-c') for name in look.columns]
    columns = columns or [each for each in listing.columns if look.wide or look.form != TABLE or not each.wide]
    at_all = [listing.columns.index(each) for each in columns]
    parts: dict[str, list[list[Cell]]] = {} if rows else {'': []}
    for row in rows:
        title = row.title if look.form == TABLE and look.header else ''
        parts.setdefault(title, []).append([row.cells[at] for at in at_all])
    headings = {title: f'{printable(title)}\n' if title else '' for title in parts}
    return '\n\n'.join(headings[title] + _drawn(columns, cells, look) for title, cells in parts.items())


def rendered_details(found: Sequence[Details], look: Look, several: bool) -> str:
    """Things whole, one below the other: a line a field. As JSON one object, or, where there are `several`, an array.

    As CSV and bare values each is a line. The columns are all fields that a thing of its kind may have.
    """
    if look.form in (JSON, YAML):
        values = [each.value for each in found]
        return document(values if several else values[0], look.form)
    # In the order of the first that has it.
    all_of_them = found[0]._replace(fields=[field for each in found for field in each.fields])
    columns = [all_of_them.named(name) for name in look.columns]
    if look.form != TABLE:
        names = all_of_them.may_have or dict.fromkeys(name for name, _ in all_of_them.fields)
        columns = columns or [Column(name) for name in names]
        # Of a list a row without any value is left out; here there is one for each word.
        none = '-' if look.form == VALUE else None
        fields = [{name: cell for name, cell in reversed(each.fields) if cell is not None} for each in found]
        rows = [Row([each.get(one.name, none) for one in columns]) for each in fields]
        return rendered(Listing(columns, rows), look._replace(columns=()))
    return '\n\n'.join(_whole(each, [one.name for one in columns], look) for each in found)


def document(value: object, form: str) -> str:
    """A value as JSON, or as YAML."""
    if form == YAML:
        from ecomp.yaml_file import dump_yaml  # few ask for it

        return dump_yaml(value)
    return dump(value, indent=2)


# The forms


def _drawn(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], look: Look) -> str:
    if look.form == CSV:
        headings = [[_value(each.name) for each in columns]] * look.header
        return _as_csv([*headings, *(list(map(_value, row)) for row in rows)])
    if look.form == VALUE:
        found = [[_value(cell) for cell in row] for row in rows]
        return '\n'.join('\t'.join(cell or '-' for cell in row) for row in found if any(row))
    return _table(columns, rows, look)


def _as_csv(rows: Iterable[Sequence[str]]) -> str:
    import csv  # few ask for it
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(rows)
    return text.getvalue().removesuffix('\n')


def _value(cell: Cell) -> str:
    """The cell as scripts read it, with all of it: nothing is cut here."""
    return '' if cell is None else escaped(str(cell))


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], look: Look) -> str:
    down = [['-' if cell is None else printable(str(cell)) for cell in cells] for cells in zip(*rows, strict=True)]
    down = down or [[] for _ in columns]
    if look.width is not None:
        for at, each in enumerate(columns):
            short = _SHORT[each.kind](down[at]) if each.kind in _SHORT else {}
            down[at] = [short.get(text, text) for text in down[at]]
    rooms = [_room_of(each, down[at], look) for at, each in enumerate(columns)]
    widths = {at: each.full for at, each in enumerate(rooms)} if look.width is None else fitted(rooms, look.width)
    drawn: list[list[list[str]]] = []
    for at, width in widths.items():
        each = columns[at]
        heading = each.short if each.short and across(each.name) > width else each.name
        cells = [folded(text, width) if each.folds else [cut(text, width)] for text in _column(heading, down[at], look)]
        padded = [[fill(text, width) for text in lines] for lines in cells]
        if look.colour and each.kind == STATE:
            padded = [*padded[: look.header], *([coloured(text) for text in lines] for lines in padded[look.header :])]
        drawn.append(padded)
    # A cell that is folded has several lines, and its row as many as the longest of its cells.
    blank = [' ' * width for width in widths.values()]
    tall = (zip_longest(*cells) for cells in zip(*drawn, strict=True))
    return '\n'.join(
        GAP.join(space if part is None else part for part, space in zip(line, blank, strict=True)).rstrip()
        for lines in tall
        for line in lines
    )


def _column(heading: str, cells: Sequence[str], look: Look) -> list[str]:
    return [*[printable(heading)] * look.header, *cells]  # placement's classes are headings, too


def _room_of(column: Column, cells: Sequence[str], look: Look) -> Room:
    full, short = (
        max(map(across, _column(heading, cells, look)), default=0)
        for heading in (column.name, column.short or column.name)
    )
    # What was asked for by -c is cut, and never left out.
    return Room(full, short, column.least or short, 0 if look.columns else column.rank)


def _whole(found: Details, chosen: Sequence[str], look: Look) -> str:
    fields = [(printable(name), '-' if cell is None else printable(str(cell))) for name, cell in _chosen(found, chosen)]
    left = max((across(name) + len(GAP) for name, _ in fields), default=0) if look.header else 0
    lines = []
    for name, text in fields:
        first, *more = folded(text, across(text) if look.width is None else max(look.width - left, LEAST))
        first = coloured(first) if look.colour and name == 'state' else first
        lines += [(fill(name, left) if look.header else '') + first, *(' ' * left + each for each in more)]
    return '\n'.join(lines)


def _chosen(found: Details, chosen: Sequence[str]) -> Iterable[tuple[str, Cell]]:
    """The fields that are chosen, in that order; all for (). One that a record has twice is the first of that name."""
    if not chosen:
        return found.fields
    first = dict(reversed(found.fields))
    return [(name, first.get(name)) for name in chosen]


def _named(name: str, columns: Sequence[Column], option: str) -> Column:
    """The column that is called so, in capitals or not, or the only one whose name begins so."""
    wanted = name.casefold().strip()
    exact = [each for each in columns if each.name.casefold() == wanted]
    found = exact or [each for each in columns if wanted and each.name.casefold().startswith(wanted)]
    if len(found) != 1:
        known = ', '.join(each.name for each in columns)
        wrong = f'{len(found)} columns begin so' if found else 'there is no such column'
        raise UsageError(f'{option} {printable(name, 80)}: {wrong}; there are {printable(known)}')
    return found[0]


_SHORT = {UUID: short_uuids, TIME: short_times}
