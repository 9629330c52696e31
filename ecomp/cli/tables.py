"""Render named columns as a table, JSON, YAML, CSV or bare values. Pure.

Commands pass a Listing to Context.show, or Details for all fields of a few things. A cell is text, a number, or None
for no value. Every form is safe for a terminal: a cell is printed as one line without control characters.
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

# Fitting text: widths, cuts, short uuids, colours; and the sorting of cells


GAP = '  '
SHORTEST = 8
# Characters that a column keeps at least when lines are cut for a narrow terminal.
LEAST = 4


class Room(NamedTuple):
    """The widths that a column can have, in characters, and the rank by which it is omitted.

    `full` is its own width, `short` that with the short heading, `minimum` that to which cells may be cut. If this is
    not enough, the columns with the largest `rank` are omitted; those of rank 0 stay.
    """

    full: int
    short: int
    least: int
    rank: int


def fitted(rooms: Sequence[Room], width: int) -> dict[int, int]:
    """Return by index the columns that fit into `width`, each with its width.

    Among columns of equal rank the last is omitted first. If those of rank 0 are still too wide, the widest are cut.
    """
    indexes = list(range(len(rooms)))
    while True:
        widths = {index: rooms[index].full for index in indexes}
        spare = width - len(GAP) * (len(indexes) - 1)
        if sum(widths.values()) > spare:  # all or none: each short heading omits what the heading before it says
            widths = {index: rooms[index].short for index in indexes}
        for index in indexes:
            if (over := sum(widths.values()) - spare) > 0:
                widths[index] = max(widths[index] - over, min(rooms[index].least, widths[index]))
        if sum(widths.values()) <= spare:
            return widths
        removable = [index for index in indexes if rooms[index].rank]
        if not removable:
            break
        indexes.remove(max(removable, key=lambda at: (rooms[at].rank, at)))
    while sum(widths.values()) > spare and max(widths.values()) > LEAST:
        widths[max(widths, key=lambda at: widths[at])] -= 1
    return widths


def across(text: str) -> int:
    return len(text) if text.isascii() else sum(map(_places, text))


def _places(character: str) -> int:
    import unicodedata  # imported late: few names of hosts and projects are not ASCII

    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in 'WF' else 1


def _room(text: str, width: int) -> int:
    """Return how many characters of the text fit into this width."""
    if text.isascii():
        return min(len(text), max(width, 0))
    for number, character in enumerate(text):
        width -= _places(character)
        if width < 0:
            return number
    return len(text)


def fill(text: str, width: int) -> str:
    return text + ' ' * (width - across(text))


def cut(text: str, width: int) -> str:
    """Return the text, cut to this width with `…` at the end if it is longer."""
    return text if _room(text, width) == len(text) else f'{text[: _room(text, width - 1)]}…'


def folded(text: str, width: int) -> list[str]:
    """Fold a text into lines of this width, at spaces where possible."""
    lines = []
    while (end := max(_room(text, width), 1)) < len(text):
        space = text.rfind(' ', 0, end + 1)
        end = space if space > 0 else end
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]


def natural(cell: str | int | float | None) -> tuple[object, ...]:
    """Return a sort key: numbers in a text count as numbers (set-2 < set-10), None is last."""
    if cell is None:
        return (1,)
    parts = re.split(r'(\d{1,300})', str(cell))
    return 0, tuple((0, int(part), '') if part.isdecimal() else (1, 0, part.casefold()) for part in parts if part)


def short_uuids(texts: Iterable[str]) -> Mapping[str, str]:
    """Map each uuid to its shortest unique beginning, of MIN_UUID_LENGTH characters or more."""
    uuids = sorted({text for text in texts if _UUID.fullmatch(text)})
    short = {}
    for index, uuid in enumerate(uuids):
        neighbours = [*uuids[max(index - 1, 0) : index], *uuids[index + 1 : index + 2]]
        length = max([SHORTEST, *(_alike(uuid, other) + 1 for other in neighbours)])
        length += uuid[length - 1] == '-'
        short[uuid] = uuid[:length]
    return short


def _alike(one: str, other: str) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def short_times(texts: Iterable[str]) -> Mapping[str, str]:
    return {text: f'{text[:10]} {text[11:16]}' for text in texts if _TIMESTAMP.fullmatch(text)}


def coloured(cell: str) -> str:
    """Colour a state: green is fine, yellow is in transition or off, red needs attention."""
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


# The data of an output, and its style


# Kinds of columns. On a terminal a uuid is cut to a unique beginning, a state is coloured, a time is cut to the minute.
TEXT = 'text'
UUID = 'uuid'
STATE = 'state'
TIME = 'time'

Cell: TypeAlias = str | int | float | None


class Column(NamedTuple):
    """A column, whose name is its heading, and how it adapts to a narrow terminal.

    First `short` replaces the heading, and cells are cut to `min_width` characters (0: not cut), or folded at that
    width if it `folds`. Then columns are omitted, largest `rank` first, among equals the last; rank 0 stays. A `wide`
    column is in a table only with --wide or -c.
    """

    name: str
    rank: int = 0
    kind: str = TEXT
    short: str = ''
    least: int = 0
    folds: bool = False
    wide: bool = False


class Row(NamedTuple):
    """A cell for each column, the row's value in JSON, and the title of its table, '' for none."""

    cells: Sequence[Cell]
    value: object = None
    title: str = ''


class Listing(NamedTuple):
    """Rows of named columns; in JSON `document`, or an array of the rows' values if it is None."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    document: object = None


class Details(NamedTuple):
    """All fields of one thing, a line each, and its value in JSON.

    -c accepts every field of `possible_fields`, even if this thing lacks it, and `numbered_fields` with any number.
    """

    fields: Sequence[tuple[str, Cell]]
    value: object
    may_have: Sequence[str] = ()
    numbered: Sequence[str] = ()

    def named(self, name: str) -> Column:
        """Return the field with this name or a unique beginning; UsageError if there is none."""
        word, _, number = name.casefold().strip().rpartition(' ')
        if word in self.numbered and number.isdecimal():
            return Column(f'{word} {number}')
        own_fields = [field for field, _ in self.fields if field.rpartition(' ')[0] not in self.numbered]
        folded_name = name.casefold().strip()
        filled = [field for field, cell in self.fields if cell is not None and field in own_fields]
        matches = [field for field in filled if folded_name and field.casefold().startswith(folded_name)]
        # A beginning refers to the fields that have a value, if one of them matches.
        candidates = matches if matches and folded_name not in self.may_have else [*self.may_have, *own_fields]
        return _named(name, [Column(field) for field in dict.fromkeys(candidates)], '-c')


class Look(NamedTuple):
    """How an output looks; empty `columns` means all, empty `sort` the order as it is.

    `width` None means no terminal, or --wide: nothing is shortened, cut or omitted.
    """

    form: str = TABLE
    columns: Sequence[str] = ()
    header: bool = True
    sort: str = ''
    wide: bool = False
    width: int | None = None
    colour: bool = False


def rendered(listing: Listing, look: Look) -> str:
    """Render a listing without a final line break; UsageError for an unknown column."""
    rows = listing.rows
    if look.sort:
        at = listing.columns.index(_named(look.sort, listing.columns, '--sort'))
        rows = sorted(rows, key=lambda row: natural(row.cells[at]))
    if look.form in (JSON, YAML):
        return document([row.value for row in rows] if listing.document is None else listing.document, look.form)
    columns = [_named(name, listing.columns, '-c') for name in look.columns]
    columns = columns or [item for item in listing.columns if look.wide or look.form != TABLE or not item.wide]
    indexes = [listing.columns.index(column) for column in columns]
    parts: dict[str, list[list[Cell]]] = {} if rows else {'': []}
    for row in rows:
        title = row.title if look.form == TABLE and look.header else ''
        parts.setdefault(title, []).append([row.cells[index] for index in indexes])
    headings = {title: f'{printable(title)}\n' if title else '' for title in parts}
    return '\n\n'.join(headings[title] + _drawn(columns, cells, look) for title, cells in parts.items())


def rendered_details(found: Sequence[Details], look: Look, several: bool) -> str:
    """Render all fields of things: a line each; in CSV and bare values a row for each thing.

    JSON is one object, or an array if `is_array`. Raises UsageError for an unknown column.
    """
    if look.form in (JSON, YAML):
        values = [details.value for details in found]
        return document(values if several else values[0], look.form)
    # Fields keep the order of the first thing that has them.
    merged = found[0]._replace(fields=[field for details in found for field in details.fields])
    columns = [merged.named(name) for name in look.columns]
    if look.form != TABLE:
        names = merged.may_have or dict.fromkeys(name for name, _ in merged.fields)
        columns = columns or [Column(name) for name in names]
        # A listing omits rows without values; here each word needs a row, so bare values get a -.
        placeholder = '-' if look.form == VALUE else None
        fields = [{name: cell for name, cell in reversed(item.fields) if cell is not None} for item in found]
        rows = [Row([cells.get(column.name, placeholder) for column in columns]) for cells in fields]
        return rendered(Listing(columns, rows), look._replace(columns=()))
    return '\n\n'.join(_whole(details, [column.name for column in columns], look) for details in found)


def document(value: object, form: str) -> str:
    if form == YAML:
        from ecomp.yaml_file import dump_yaml  # imported late: seldom needed

        return dump_yaml(value)
    return dump(value, indent=2)


# The forms


def _drawn(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], look: Look) -> str:
    if look.form == CSV:
        headings = [[_value(column.name) for column in columns]] * look.header
        return _as_csv([*headings, *(list(map(_value, row)) for row in rows)])
    if look.form == VALUE:
        texts = [[_value(cell) for cell in row] for row in rows]
        return '\n'.join('\t'.join(cell or '-' for cell in row) for row in texts if any(row))
    return _table(columns, rows, look)


def _as_csv(rows: Iterable[Sequence[str]]) -> str:
    import csv  # imported late: seldom needed
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(rows)
    return text.getvalue().removesuffix('\n')


def _value(cell: Cell) -> str:
    """Return a cell on one line for scripts, never cut."""
    return '' if cell is None else escaped(str(cell))


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], look: Look) -> str:
    texts = [['-' if cell is None else printable(str(cell)) for cell in cells] for cells in zip(*rows, strict=True)]
    texts = texts or [[] for _ in columns]
    if look.width is not None:
        for i, column in enumerate(columns):
            short = _SHORT[column.kind](texts[i]) if column.kind in _SHORT else {}
            texts[i] = [short.get(text, text) for text in texts[i]]
    rooms = [_room_of(column, texts[i], look) for i, column in enumerate(columns)]
    widths = {i: room.full for i, room in enumerate(rooms)} if look.width is None else fitted(rooms, look.width)
    drawn: list[list[list[str]]] = []
    for i, width in widths.items():
        column = columns[i]
        head = column.short if column.short and across(column.name) > width else column.name
        cells = [folded(text, width) if column.folds else [cut(text, width)] for text in _column(head, texts[i], look)]
        padded = [[fill(text, width) for text in lines] for lines in cells]
        if look.colour and column.kind == STATE:
            padded = [*padded[: look.header], *([coloured(text) for text in lines] for lines in padded[look.header :])]
        drawn.append(padded)
    # A row has as many lines as its cell with the most lines.
    blanks = [' ' * width for width in widths.values()]
    rows_of_lines = (zip_longest(*cells) for cells in zip(*drawn, strict=True))
    return '\n'.join(
        GAP.join(blank if part is None else part for part, blank in zip(line, blanks, strict=True)).rstrip()
        for lines in rows_of_lines
        for line in lines
    )


def _column(heading: str, cells: Sequence[str], look: Look) -> list[str]:
    return [*[printable(heading)] * look.header, *cells]  # headings may be resource classes from placement


def _room_of(column: Column, cells: Sequence[str], look: Look) -> Room:
    full, short = (
        max(map(across, _column(heading, cells, look)), default=0)
        for heading in (column.name, column.short or column.name)
    )
    # A column chosen with -c may be cut, but is never omitted.
    return Room(full, short, column.least or short, 0 if look.columns else column.rank)


def _whole(found: Details, chosen: Sequence[str], look: Look) -> str:
    fields = [(printable(name), '-' if cell is None else printable(str(cell))) for name, cell in _chosen(found, chosen)]
    name_width = max((across(name) + len(GAP) for name, _ in fields), default=0) if look.header else 0
    lines = []
    for name, text in fields:
        first, *more = folded(text, across(text) if look.width is None else max(look.width - name_width, LEAST))
        first = coloured(first) if look.colour and name == 'state' else first
        lines += [(fill(name, name_width) if look.header else '') + first, *(' ' * name_width + line for line in more)]
    return '\n'.join(lines)


def _chosen(found: Details, chosen: Sequence[str]) -> Iterable[tuple[str, Cell]]:
    """Return the chosen fields in that order, or all for (); the first if a name occurs twice."""
    if not chosen:
        return found.fields
    cells = dict(reversed(found.fields))
    return [(name, cells.get(name)) for name in chosen]


def _named(name: str, columns: Sequence[Column], option: str) -> Column:
    """Return the column with this name or a unique beginning, in any case; else UsageError."""
    folded_name = name.casefold().strip()
    exact = [column for column in columns if column.name.casefold() == folded_name]
    matches = exact or [column for column in columns if folded_name and column.name.casefold().startswith(folded_name)]
    if len(matches) != 1:
        names = ', '.join(column.name for column in columns)
        problem = f'{len(matches)} columns begin so' if matches else 'there is no such column'
        raise UsageError(f'{option} {printable(name, 80)}: {problem}; there are {printable(names)}')
    return matches[0]


_SHORT = {UUID: short_uuids, TIME: short_times}
