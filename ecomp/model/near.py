"""What was probably meant by a word that nobody knows. Pure, and light to import."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 60
"""Characters of a word that are compared; what is longer is no typing error."""
LIKE = 0.7
"""How much of two words has to be the same, from 0 to 1: hv9 is no hv2."""


NEGATION = '^(un|dis|de|non?|in)-?'
"""The beginnings that turn the meaning of a word round."""


def near(word: str, known: Iterable[str], like: float = LIKE) -> str | None:
    """The known word that is most like this one, whatever the case of its letters; None if none is.

    It is never the opposite: not `drain` for undrain, and not `--wait` for --no-wait.
    """
    import difflib  # only for a mistake

    typed = word[:LONGEST].lower()
    by_lower = {each.lower(): each for each in known if not _are_opposites(typed, each.lower())}
    swapped = [each for each in by_lower if sorted(each) == sorted(typed)]
    close = swapped or difflib.get_close_matches(typed, by_lower, 1, like)
    return by_lower[close[0]] if close else None


def _are_opposites(one: str, other: str) -> bool:
    """True if they are more alike once one of them has lost a beginning that turns its meaning round."""
    import re
    from difflib import SequenceMatcher

    def compare(left: str, right: str) -> float:
        return SequenceMatcher(None, left, right.lstrip('-')).ratio()

    pairs = ((one.lstrip('-'), other), (other.lstrip('-'), one))
    return any(compare(re.sub(NEGATION, '', left), right) > compare(left, right) for left, right in pairs)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, to stand behind the word, or nothing where no known word is like it."""
    close = near(word, known)
    return f' (did you mean {close}?)' if close is not None else ''
