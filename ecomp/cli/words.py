"""Which words may follow a command: each function takes the command's name and its words, and returns them checked.

Every one of them raises UsageError. A whole uuid comes out in its canonical form. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecomp.errors import UsageError
from ecomp.model import keys
from ecomp.model.reach import check_user
from ecomp.model.text import is_name, uuid_prefix

LONGEST_PROJECT = 255
"""Characters of a project's id, placement's own limit: a longer one is a UsageError."""

SHELLS = ('bash', 'zsh', 'fish')
"""Those that eschedule completes in."""

Words = tuple[str, ...]


def parse_uuid(word: str) -> str:
    """A uuid in its canonical form."""
    found = _canonical_uuid(word)
    if found is None:
        raise UsageError(f'{word!r} is not a uuid that an instance can have; --help shows all')
    return found


def nothing(name: str, words: Sequence[str]) -> Words:
    """No words at all."""
    if words:
        raise UsageError(f'{name} takes no further words: {" ".join(words)}')
    return ()


def instances(name: str, words: Sequence[str]) -> Words:
    """One instance or more, each by its name, its uuid or the beginning of its uuid."""
    if not words:
        raise UsageError(f'{name}: which instance? Give one name or uuid, or more')
    found = {word: _instance(word) for word in words}
    wrong = next((word for word, each in found.items() if each is None), None)
    if wrong is not None:
        raise UsageError(f'{wrong!r} is no instance: give its name, its uuid or the beginning of its uuid')
    return tuple(each for word in words if (each := found[word]) is not None)


def any_instances(name: str, words: Sequence[str]) -> Words:
    """Any number of instances, none too."""
    return instances(name, words) if words else ()


def one_instance(_: str, words: Sequence[str]) -> Words:
    """One instance, with no command before it. Whoever asks says which command may have been meant."""
    if len(words) > 1:
        raise UsageError(f'{words[0]!r} is not a command')
    found = _instance(words[0])
    if found is None:
        raise UsageError(f'{words[0]!r} is neither a command nor an instance')
    return (found,)


def just_one_instance(name: str, words: Sequence[str]) -> Words:
    """One instance, behind a command that takes no more."""
    if len(words) != 1:
        raise UsageError(f'{name}: which instance? Give one name or uuid')
    return instances(name, words)


def instance_and_command(name: str, words: Sequence[str]) -> Words:
    """An instance, perhaps with a user before it, and a command, which is whatever it is."""
    if not words:
        raise UsageError(f'{name}: which instance? Give one name or uuid')
    user, word = user_and_instance(words[0])
    [instance] = instances(name, [word])
    return (f'{user}@{instance}' if user else instance, *words[1:])


def user_and_instance(word: str) -> tuple[str, str]:
    """The user, '' for none, and the instance of `[USER@]<id>`."""
    user, at, instance = word.rpartition('@')
    try:
        return check_user(user) if at else '', instance
    except ValueError as error:
        raise UsageError(str(error)) from error


def _instance(word: str) -> str | None:
    if is_name(word) or uuid_prefix(word):
        return word
    return _canonical_uuid(word)


def _canonical_uuid(word: str) -> str | None:
    if keys.is_uuid(word):
        return word
    import uuid  # it knows the other forms, and takes its time

    try:
        found = str(uuid.UUID(word))
    except ValueError:
        return None
    return found if keys.is_uuid(found) else None


def query_and_image(name: str, words: Sequence[str]) -> Words:
    """A placement query, '' where there is none beside a flavor, and perhaps the URL of an image."""
    words = ['', *words] if not words or is_image(words[0]) else list(words)
    if len(words) > 2:
        raise UsageError(f'one query and one image URL, and then comes {words[2]!r}: is the query in quotes?')
    if words[0] and '=' not in words[0]:
        wrong = f'{name}: {words[0]!r} is not a placement query'
        raise UsageError(f"{wrong}. Try: 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'")
    return tuple(words)


def is_image(word: str) -> bool:
    """Whether it is an image's URL rather than a query: both may have a = in them."""
    return '://' in word.partition('=')[0]


def planned(name: str, words: Sequence[str]) -> Words:
    """The query alone, of the words of the command that is planned: the image decides nothing."""
    return perhaps_query_and_image(name, words)[:1]


def perhaps_query_and_image(name: str, words: Sequence[str]) -> Words:
    """The words of the nameless form behind a name; without any, a query of ''."""
    query, *image = query_and_image(name, words)
    if not all(is_image(word) for word in image):
        raise UsageError(f'{name}: give one placement query, in quotes, and at most one image URL')
    return (query, *image)


def _words(least: int, most: int, says: str) -> Callable[[str, Sequence[str]], Words]:
    """So many words, as they are; `says` is what is said of any other number."""

    def take(name: str, words: Sequence[str]) -> Words:
        if not least <= len(words) <= most:
            raise UsageError(f'{name}: ' + says.format(name=name, what=name.partition(' ')[0]))
        return tuple(words)

    return take


flavor_and_query = _words(2, 2, "give a name and what it asks for: {name} small 'resources=VCPU:1,…&required=…'")
names = _words(1, 10**9, 'which {what}? Give one name, or more')
_one_compute = _words(1, 1, 'which compute? Give one host name or uuid')
_computes = _words(1, 10**9, 'which compute? Give one host name or uuid, or more')


def compute(name: str, words: Sequence[str]) -> Words:
    """One compute, by its host's name, its uuid or the beginning of its uuid."""
    return tuple(map(_canonical, _one_compute(name, words)))


def computes(name: str, words: Sequence[str]) -> Words:
    """One compute or more, each as compute() takes it."""
    return tuple(map(_canonical, _computes(name, words)))


def _canonical(word: str) -> str:
    return _canonical_uuid(word) or word


def project_and_limits(name: str, words: Sequence[str]) -> Words:
    """A project's id and its limits."""
    if len(words) < 2 or '=' in words[0]:
        raise UsageError(f'{name}: give a project and its limits: {name} web VCPU=10 instances=5')
    check_project(words[0])
    return tuple(words)


def check_project(project: str) -> None:
    """UsageError for what cannot be a project's id."""
    if not 1 <= len(project) <= LONGEST_PROJECT or not project.isprintable():
        raise UsageError(f'{project[:80]!r} is no project: it has 1 to {LONGEST_PROJECT} characters, all printable')
