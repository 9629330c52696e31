"""Compare the answers of a real server and of its model to the same call."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ecomp.errors import EcompError

Ask = Callable[[Any], object]


def fresh() -> str:
    return str(uuid.uuid4())


def answer(ask: Ask, of: object) -> object:
    try:
        return ask(of)
    except EcompError as error:
        return type(error).__name__


def differ(calls: Sequence[str], real: object, model: object) -> str:
    return '\n'.join([*calls, f'really: {real}', f'model:  {model}'])
