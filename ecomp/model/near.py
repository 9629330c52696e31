"""What was probably meant by a word that nobody knows. Pure, and light to import."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 60
"""Characters of a word that are compared; what is longer is no typing error."""
LIKE = 0.7
"""How much of two words has to be the same, from 0 to 1: hv9 is no hv2."""


def near(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like this one, whatever the case of its letters; None if none is."""
    import difflib  # only for a mistake

    by_lower = {each.lower(): each for each in known}
    typed = word[:LONGEST].lower()
    swapped = [each for each in by_lower if sorted(each) == sorted(typed)]
    close = swapped or difflib.get_close_matches(typed, by_lower, 1, LIKE)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, to stand behind the word, or nothing where no known word is like it."""
    close = near(word, known)
    return f' (did you mean {close}?)' if close is not None else ''
