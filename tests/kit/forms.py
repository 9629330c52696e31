"""User output in every format."""

from __future__ import annotations

from collections.abc import Iterator

from ecomp.cli.options import CSV, FORMS, TABLE, VALUE
from ecomp.cli.tables import Details, Listing, OutputStyle, format_document, render_details, render_listing

ALL_LOOKS = (*map(OutputStyle, FORMS), *(OutputStyle(width=width) for width in (10, 80)))


def render(content: Listing | Details, form: str = TABLE, width: int | None = None) -> str:
    look = OutputStyle(form, width=width)
    return (
        render_listing(content, look)
        if isinstance(content, Listing)
        else render_details([content], look, is_array=False)
    )


def render_all(content: Listing | Details) -> Iterator[str]:
    for look in ALL_LOOKS:
        yield render(content, look.form, look.width).replace('\t', ' ' if look.form == VALUE else '\t')


def make_documents(value: object) -> Iterator[str]:
    return (format_document(value, form) for form in FORMS if form not in (TABLE, CSV, VALUE))
