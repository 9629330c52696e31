"""User output in every format."""

from __future__ import annotations

from collections.abc import Iterator

from ecomp.cli.options import CSV, FORMS, TABLE, VALUE
from ecomp.cli.tables import Details, Listing, Look, document, rendered, rendered_details

LOOKS = (*map(Look, FORMS), *(Look(width=width) for width in (10, 80)))


def text(what: Listing | Details, form: str = TABLE, width: int | None = None) -> str:
    look = Look(form, width=width)
    return rendered(what, look) if isinstance(what, Listing) else rendered_details([what], look, several=False)


def texts(what: Listing | Details) -> Iterator[str]:
    """Render in each format and at several terminal widths, without the tabs of bare values."""
    for look in LOOKS:
        yield text(what, look.form, look.width).replace('\t', ' ' if look.form == VALUE else '\t')


def documents(value: object) -> Iterator[str]:
    return (document(value, form) for form in FORMS if form not in (TABLE, CSV, VALUE))
