"""What hosts and guests use: the answers of computes, and rates from two of these. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ecomp.model.json_object import load_object
from ecomp.model.parsers import format_reason

# Amounts by name, without unknown or malformed ones. Counters end in `_total`, their rates in `_per_second`.
Amounts = Mapping[str, float]
# The amounts of a compute's guests, by instance, and of the HOST, with `seconds`, the time on its monotonic clock.
Measurement = Mapping[str, Amounts]
HOST = 'host'
# Questions are further apart; a malformed clock must not make rates infinite.
MIN_SECONDS = 0.1


def parse_answer(value: bytes) -> Measurement:
    """Parse {"used": {HOST or instance: amounts}}, or raise ValueError with its "error"."""
    data = load_object(value)
    if not isinstance(data.get('used'), dict):
        raise ValueError(format_reason(data.get('error', 'its answer is malformed')))
    return {name: _parse_amounts(amounts) for name, amounts in data['used'].items()}


def _parse_amounts(data: Any) -> Amounts:
    items = data.items() if isinstance(data, dict) else ()
    return {name: amount for name, amount in items if type(amount) in (int, float) and 0 <= amount < 2**64}


def add_rates(before: Measurement, after: Measurement) -> Measurement:
    """Return `after` with the rate of each counter that both have and that did not decrease."""
    seconds = after.get(HOST, {}).get('seconds', 0) - before.get(HOST, {}).get('seconds', math.inf)
    return {name: {**used, **_compute_rates(before.get(name, {}), used, seconds)} for name, used in after.items()}


def _compute_rates(before: Amounts, after: Amounts, seconds: float) -> Amounts:
    return {
        name.removesuffix('_total') + '_per_second': round((amount - before[name]) / seconds, 3)
        for name, amount in after.items()
        if name.endswith('_total') and seconds > MIN_SECONDS and amount >= before.get(name, math.inf)
    }
