"""The reader of eschedule's command lines: every allowed form of a line, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.commands import parse
from ecomp.cli.options import FLAGS, OPTIONS, Option, Options, read
from ecomp.errors import UsageError

ANY = [*FLAGS, '', '-', '--', '-5', '--nam', '--coun=3', '-fjson', '-n5', '-x', '--=', 'list', 'log', 'web1', 'a=b']
FIELDS = sorted(OPTIONS)


def is_word(text: str) -> bool:
    return not text.startswith('-') or text == '-' or text[1:].isdecimal()


def shortest(flag: str) -> int:
    """Characters of a long flag that no other flag begins with."""
    others = [each for each in FLAGS if each != flag]
    lengths = range(3, len(flag))
    return next((n for n in lengths if not any(each.startswith(flag[:n]) for each in others)), len(flag))


def values(option: Option) -> st.SearchStrategy[Any]:
    if option.choices:
        return st.sampled_from(option.choices)
    if option.parse is str:
        return st.text(max_size=5) | st.sampled_from(['-', '-5', '-x', '--all', 'a=b'])
    if option.parse in (int, float):
        return st.integers() if option.parse is int else st.floats(-100, 100)
    return st.uuids(version=4).map(str)


@st.composite
def option_forms(draw: st.DrawFn, option: Option, value: Any) -> list[str]:
    """One option in one of the forms that it may be written in."""
    flag = draw(st.sampled_from(option.flags))
    if flag.startswith('--'):
        flag = flag[: draw(st.integers(shortest(flag), len(flag)))]
    text = str(value)
    if not option.metavar or (option.metavar.startswith('[') and not text):
        return [flag]
    forms = [[f'{flag}={text}']]
    if not flag.startswith('--') and text and text[0] != '=':
        forms.append([f'{flag}{text}'])
    if is_word(text) and not option.metavar.startswith('['):
        forms.append([flag, text])
    return draw(st.sampled_from(forms))


@st.composite
def written_lines(draw: st.DrawFn) -> tuple[list[str], list[str], Options]:
    """A line as it may be written, its words and its options."""
    parts, given_options = list[list[str]](), dict[str, Any]()
    for field in draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=5)):
        option = draw(st.sampled_from(OPTIONS[field]))
        if option.repeats:
            each = draw(st.lists(values(option), min_size=1, max_size=3))
            parts += [draw(option_forms(option, value)) for value in each]
            given_options[field] = each
            continue
        value = draw(values(option)) if option.metavar else option.const
        parts += [draw(option_forms(option, value))]
        given_options[field] = value
    # -f means something else behind log.
    texts = st.text(max_size=5).filter(lambda text: is_word(text) and text != 'log')
    words = draw(st.lists(texts | st.just('list'), max_size=4))
    for word in reversed(words):
        parts.insert(draw(st.integers(0, len(parts))), [word])
    argv = [word for part in parts for word in part]
    words = [part[0] for part in parts if len(part) == 1 and is_word(part[0])]
    behind = draw(st.lists(st.sampled_from(ANY), max_size=3))
    return [*argv, *(['--', *behind] if behind else [])], [*words, *behind], Options(**given_options)


@given(written_lines())
def test_line_is_read_back_from_every_form_it_may_be_written_in(line: tuple[list[str], list[str], Options]) -> None:
    argv, words, options = line
    assert read(argv) == (words, options)


@given(st.lists(st.one_of(st.sampled_from(ANY), st.builds('{}={}'.format, st.sampled_from(ANY), st.sampled_from(ANY)),
                          st.text(max_size=5)), max_size=6))  # fmt: skip
def test_any_line_is_read_or_refused_in_one_line(argv: list[str]) -> None:
    said = ''
    try:
        parse(argv)
    except UsageError as error:
        said = str(error)
    assert said == '' or said.isprintable()


@pytest.mark.parametrize(
    ('line', 'follows', 'form'),
    [('log web1 -f', True, None), ('log -f web1', True, None), ('log web1 -fjson', False, 'json'),
     ('list -f json', False, 'json'), ('-f json log', False, 'json')],
)  # fmt: skip
def test_f_behind_log_follows(line: str, follows: bool, form: str | None) -> None:
    _, options = read(line.split())
    assert (options.follow, options.format) == (follows, form)


@pytest.mark.parametrize(
    ('line', 'refusal'),
    [
        ('--frobnicate', '--frobnicate is no option; --help shows all'),
        ('--formt=json', '--formt is no option (did you mean --format?); --help shows all'),
        ('-x5', '-x5 is no option; --help shows all'),
        ('--=5', '-- is no option; --help shows all'),
        ('--co 5', '--co is ambiguous: it may be --count, --column or --config. Fix: write the whole option'),
        ('--name', '--name needs a value. Fix: write --name NAME'),
        ('--name --all', '--name needs a value. Fix: write --name NAME'),
        ('--name -- a', '--name needs a value. Fix: write --name NAME'),
        ('-f', '-f needs a value. Fix: write -f FORM'),
        ('--all=yes', '--all takes no value. Fix: leave out =yes'),
        ('-fxml', "-f: 'xml' is not a valid FORM. Fix: give one of table, json, yaml, csv, value"),
        ('--policy afinity', "--policy: 'afinity' is not a valid POLICY (did you mean affinity?). Fix: give one of "
                             'affinity, anti-affinity'),
        ('--count x', "--count: 'x' is no whole number"),
        ('--lines=1.5', "-n: '1.5' is no whole number"),
        ('--timeout 5m', "--timeout: '5m' is no number of seconds"),
        ('--strict --soft', '--soft cannot be combined with --strict. Fix: give one of them'),
        ('--name a --name b', '--name is given twice'),
        ('--wait --wait=ready', '--wait is given twice'),
    ],
)  # fmt: skip
def test_wrong_option_is_refused_with_what_to_do(line: str, refusal: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(line.split())
    assert str(refused.value) == refusal
