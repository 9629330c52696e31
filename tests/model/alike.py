"""Compare the answers of a real server and of its model to the same call."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ecomp.errors import EcompError

Query = Callable[[Any], object]


def make_random_uuid() -> str:
    return str(uuid.uuid4())


def get_answer(ask: Query, client: object) -> object:
    try:
        return ask(client)
    except EcompError as error:
        return type(error).__name__


def format_difference(calls: Sequence[str], real: object, model: object) -> str:
    return '\n'.join([*calls, f'really: {real}', f'model:  {model}'])
