"""Render named columns as a table, JSON, YAML, CSV or bare values. Pure.

Every form is safe for a terminal: a cell is printed as one line without control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from ecomp.cli.options import CSV, JSON, TABLE, VALUE, YAML
from ecomp.errors import UsageError
from ecomp.model.json_object import dump
from ecomp.model.text import escape_characters, make_printable

# Fitting text: widths, cuts, short uuids, colours; and the sorting of cells


COLUMN_GAP = '  '
MIN_UUID_LENGTH = 8
# Characters that a column keeps at least when lines are cut for a narrow terminal.
MIN_COLUMN_WIDTH = 4


def measure_width(text: str) -> int:
    """Return the terminal columns of a text: 2 for a wide character, 0 for an accent."""
    return len(text) if text.isascii() else sum(map(_measure_character, text))


def _measure_character(character: str) -> int:
    import unicodedata  # imported late: few names of hosts and projects are not ASCII

    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in 'WF' else 1


def _count_fitting(text: str, width: int) -> int:
    if text.isascii():
        return min(len(text), max(width, 0))
    for number, character in enumerate(text):
        width -= _measure_character(character)
        if width < 0:
            return number
    return len(text)


def pad(text: str, width: int) -> str:
    return text + ' ' * (width - measure_width(text))


def cut(text: str, width: int) -> str:
    """Return the text, cut to this width with `…` at the end if it is longer."""
    return text if _count_fitting(text, width) == len(text) else f'{text[: _count_fitting(text, width - 1)]}…'


def fold(text: str, width: int) -> list[str]:
    """Fold a text into lines of this width, at spaces where possible."""
    lines = []
    while (end := max(_count_fitting(text, width), 1)) < len(text):
        space = text.rfind(' ', 0, end + 1)
        end = space if space > 0 else end
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]


def make_sort_key(cell: str | int | float | None) -> tuple[object, ...]:
    """Return a key that sorts numbers by value (set-2 before set-10), and None last."""
    if cell is None:
        return (1,)
    parts = re.split(r'(\d{1,300})', str(cell))
    return 0, tuple((0, int(part), '') if part.isdecimal() else (1, 0, part.casefold()) for part in parts if part)


def shorten_uuids(texts: Iterable[str]) -> Mapping[str, str]:
    """Map each uuid to a unique beginning of at least 8 characters, and omit other texts."""
    uuids = sorted({text for text in texts if re.fullmatch(_UUID, text)})
    short = {}
    for index, uuid in enumerate(uuids):
        neighbours = [*uuids[max(index - 1, 0) : index], *uuids[index + 1 : index + 2]]
        length = max([MIN_UUID_LENGTH, *(_count_common_prefix(uuid, other) + 1 for other in neighbours)])
        length += uuid[length - 1] == '-'
        short[uuid] = uuid[:length]
    return short


def _count_common_prefix(first: str, second: str) -> int:
    return next((index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


def shorten_times(texts: Iterable[str]) -> Mapping[str, str]:
    """Map each timestamp in UTC to `YYYY-MM-DD HH:MM`, and omit other texts."""
    return {text: f'{text[:10]} {text[11:16]}' for text in texts if re.fullmatch(_TIMESTAMP, text)}


def colour_state(cell: str) -> str:
    """Colour a state: green is fine, yellow in transition or off, red needs attention."""
    text = cell.rstrip()
    colour = next((colour for colour, states in _COLOURS.items() if text.partition(',')[0] in states), '')
    return f'\x1b[{colour}m{text}\x1b[0m{cell[len(text) :]}' if colour else cell


_UUID = '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}'
_TIMESTAMP = r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z'
_COLOURS = {
    '32': {'active', 'up'},
    '33': {'queued', 'scheduled', 'building', 'stopped', 'destroying', 'disabled', 'closed'},
    '31': {'error', 'unknown', 'silent', 'orphaned'},
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

    First `short` replaces the heading. Cells are cut to `min_width` characters (0: not), or folded there if it `folds`.
    Then columns are omitted, those of the largest `rank` first. Rank 0 stays.
    A `wide` column is in a table only with --wide or -c.
    """

    name: str
    rank: int = 0
    kind: str = TEXT
    short: str = ''
    min_width: int = 0
    folds: bool = False
    wide: bool = False


class Row(NamedTuple):
    """A cell for each column, the row's value in JSON, and the title of its table, '' for none."""

    cells: Sequence[Cell]
    value: object = None
    title: str = ''


class Listing(NamedTuple):
    """Rows of named columns, and the JSON `document`, by default an array of the rows' values."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    document: object = None


class Details(NamedTuple):
    """All fields of one thing, a line each, and its value in JSON.

    -c accepts `possible_fields`, even absent ones, and `numbered_fields` followed by a space and a number.
    """

    fields: Sequence[tuple[str, Cell]]
    value: object
    possible_fields: Sequence[str] = ()
    numbered_fields: Sequence[str] = ()

    def find_field(self, name: str) -> str:
        """Return the only field with this name or beginning, or raise UsageError."""
        folded_name = name.casefold().strip()
        word, _, number = folded_name.rpartition(' ')
        if word in self.numbered_fields and number.isdecimal():
            return folded_name
        own = [each for each in self.fields if each[0].rpartition(' ')[0] not in self.numbered_fields]
        filled = dict.fromkeys(field for field, cell in own if cell is not None)
        matches = [field for field in filled if field.casefold().startswith(folded_name)]
        # A beginning refers to the fields that have a value, if it matches any of these, else to all possible fields.
        is_beginning = folded_name and folded_name not in self.possible_fields
        candidates = matches if matches and is_beginning else dict.fromkeys([*self.possible_fields, *dict(own)])
        return _find_column(name, list(map(Column, candidates)), '-c').name


class OutputStyle(NamedTuple):
    """How to print an output: all usual columns for (), and nothing is cut for width None."""

    form: str = TABLE
    columns: Sequence[str] = ()
    header: bool = True
    sort: str = ''
    wide: bool = False
    width: int | None = None
    colour: bool = False


def render_listing(listing: Listing, style: OutputStyle) -> str:
    """Render a listing without a final line break."""
    rows = listing.rows
    if style.sort:
        at = listing.columns.index(_find_column(style.sort, listing.columns, '--sort'))
        rows = sorted(rows, key=lambda row: make_sort_key(row.cells[at]))
    if style.form in (JSON, YAML):
        values = [row.value for row in rows]
        return format_document(values if listing.document is None else listing.document, style.form)
    columns = _choose_columns(listing, style)
    indexes = list(map(listing.columns.index, columns))
    parts: dict[str, list[list[Cell]]] = {} if rows else {'': []}
    for row in rows:
        title = row.title if style.form == TABLE and style.header else ''
        parts.setdefault(title, []).append([row.cells[index] for index in indexes])
    headings = {title: f'{make_printable(title)}\n' if title else '' for title in parts}
    return '\n\n'.join(headings[title] + _format_rows(columns, cells, style) for title, cells in parts.items())


def _choose_columns(listing: Listing, style: OutputStyle) -> list[Column]:
    columns = [_find_column(name, listing.columns, '-c') for name in style.columns]
    return columns or [item for item in listing.columns if style.wide or style.form != TABLE or not item.wide]


def render_details(things: Sequence[Details], style: OutputStyle, is_array: bool) -> str:
    """Render one thing or more: a line for each field or, in CSV and values, a row a thing."""
    if style.form in (JSON, YAML):
        values = [details.value for details in things]
        return format_document(values if is_array else values[0], style.form)
    # Fields keep the order of the first thing that has them.
    merged = things[0]._replace(fields=[field for details in things for field in details.fields])
    names = [merged.find_field(name) for name in style.columns]
    if style.form == TABLE:
        return '\n\n'.join(_format_details(details, names, style) for details in things)
    names = names or list(merged.possible_fields or dict.fromkeys(name for name, _ in merged.fields))
    # A listing omits rows without values; here each word needs a row, so bare values get a -.
    placeholder = '-' if style.form == VALUE else None
    filled = [{name: cell for name, cell in reversed(item.fields) if cell is not None} for item in things]
    rows = [Row([cells.get(name, placeholder) for name in names]) for cells in filled]
    return render_listing(Listing(list(map(Column, names)), rows), style._replace(columns=()))


def format_document(value: object, form: str) -> str:
    """Format a value as YAML if `form` is YAML, else as indented JSON."""
    if form == YAML:
        from ecomp.yaml_graph import dump_yaml  # imported late: seldom needed

        return dump_yaml(value)
    return dump(value, indent=2)


def _format_rows(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], style: OutputStyle) -> str:
    if style.form == TABLE:
        return _format_table(columns, rows, style)
    texts = [list(map(_format_value, row)) for row in rows]
    if style.form == CSV:
        headings = [[_format_value(column.name) for column in columns]] * style.header
        return _format_csv([*headings, *texts])
    return '\n'.join('\t'.join(cell or '-' for cell in row) for row in texts if any(row))


def _format_csv(rows: Iterable[Sequence[str]]) -> str:
    import csv  # imported late: seldom needed
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(rows)
    return text.getvalue().removesuffix('\n')


def _format_value(cell: Cell) -> str:
    return '' if cell is None else escape_characters(str(cell))


class _DrawnColumn:
    def __init__(self, column: Column, cells: Sequence[Cell], style: OutputStyle) -> None:
        self._column, self._style = column, style
        self._texts = ['-' if cell is None else make_printable(str(cell)) for cell in cells]
        if style.width is not None and column.kind in _SHORTENERS:
            short = _SHORTENERS[column.kind](self._texts)
            self._texts = [short.get(text, text) for text in self._texts]
        text_width = max(map(measure_width, self._texts), default=0)
        # Headings may be resource classes from placement.
        headings = [make_printable(column.name), make_printable(column.short or column.name)]
        self.full, self.short = (max(text_width, measure_width(text) * style.header) for text in headings)
        self.minimum = column.min_width or self.short
        # A column chosen with -c may be cut, but is never omitted.
        self.rank = 0 if style.columns else column.rank

    def draw(self, width: int) -> list[list[str]]:
        """Return the lines of the heading, if there is one, and of each cell."""
        name, short = self._column.name, self._column.short
        heading = make_printable(short if short and measure_width(name) > width else name)
        texts = [*[heading] * self._style.header, *self._texts]
        cells = [fold(text, width) if self._column.folds else [cut(text, width)] for text in texts]
        padded = [[pad(text, width) for text in lines] for lines in cells]
        if self._style.colour and self._column.kind == STATE:
            body = slice(int(self._style.header), None)
            padded[body] = [[colour_state(text) for text in lines] for lines in padded[body]]
        return padded


def _fit_columns(columns: Sequence[_DrawnColumn], width: int) -> list[tuple[_DrawnColumn, int]]:
    """Return the columns to show in `width`, each with its width.

    The result may be too wide: columns of rank 0 stay, and none is cut below MIN_COLUMN_WIDTH.
    """
    shown = list(columns)
    while True:
        widths = [column.full for column in shown]
        spare = width - len(COLUMN_GAP) * (len(shown) - 1)
        if sum(widths) > spare:  # all or none: each short heading omits what the heading before it says
            widths = [column.short for column in shown]
        for index, column in enumerate(shown):
            if (over := sum(widths) - spare) > 0:
                widths[index] = max(widths[index] - over, min(column.minimum, widths[index]))
        removable = [column for column in reversed(shown) if column.rank]
        if sum(widths) <= spare or not removable:
            break
        shown.remove(max(removable, key=lambda column: column.rank))
    while sum(widths) > spare and max(widths) > MIN_COLUMN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return list(zip(shown, widths, strict=True))


def _format_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], style: OutputStyle) -> str:
    drawn = [_DrawnColumn(column, [row[at] for row in rows], style) for at, column in enumerate(columns)]
    fitted = [(each, each.full) for each in drawn] if style.width is None else _fit_columns(drawn, style.width)
    # A row has as many lines as its cell with the most lines.
    blanks = [' ' * width for _, width in fitted]
    rows_of_lines = (zip_longest(*cells) for cells in zip(*(each.draw(width) for each, width in fitted), strict=True))
    return '\n'.join(
        COLUMN_GAP.join(blank if part is None else part for part, blank in zip(line, blanks, strict=True)).rstrip()
        for lines in rows_of_lines
        for line in lines
    )


def _format_details(details: Details, names: Sequence[str], style: OutputStyle) -> str:
    cells = dict(reversed(details.fields))
    selected = [(name, cells.get(name)) for name in names] or details.fields
    fields = [(make_printable(name), '-' if cell is None else make_printable(str(cell))) for name, cell in selected]
    name_width = max((measure_width(name) + len(COLUMN_GAP) for name, _ in fields), default=0) if style.header else 0
    lines = []
    for name, text in fields:
        width = measure_width(text) if style.width is None else max(style.width - name_width, MIN_COLUMN_WIDTH)
        first, *more = fold(text, width)
        first = colour_state(first) if style.colour and name == 'state' else first
        lines += [(pad(name, name_width) if style.header else '') + first, *(' ' * name_width + line for line in more)]
    return '\n'.join(lines)


def _find_column(name: str, columns: Sequence[Column], option: str) -> Column:
    folded_name = name.casefold().strip()
    exact = [column for column in columns if column.name.casefold() == folded_name]
    matches = exact or [column for column in columns if folded_name and column.name.casefold().startswith(folded_name)]
    if len(matches) != 1:
        names = ', '.join(column.name for column in columns)
        problem = f'{len(matches)} columns begin with this text' if matches else 'no such column'
        raise UsageError(f'{option} {make_printable(name, 80)}: {problem}. Fix: give one of {make_printable(names)}')
    return matches[0]


_SHORTENERS = {UUID: shorten_uuids, TIME: shorten_times}
