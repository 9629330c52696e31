"""Fake ecomputes with other constants (shorter intervals), other environment, or a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.kit.commands import Control
from tests.kit.hands import ArmedEcompute

PATCHED_PROGRAM = """
import sys
from importlib import import_module
for setting in filter(None, '{numbers}'.split(',')):
    where, _, value = setting.partition('=')
    module, _, name = where.rpartition('.')
    module = import_module('.' + (module or 'compute'), 'ecomp.agent')
    assert hasattr(module, name), name
    setattr(module, name, type(getattr(module, name))(float(value)))
from ecomp.compute import main
sys.exit(main())
"""


def make_patched_program(numbers: Mapping[str, float]) -> str:
    return PATCHED_PROGRAM.format(numbers=','.join(f'{name}={value}' for name, value in numbers.items()))


class TunedEcompute(ArmedEcompute):
    """A fake ecompute with other constants.

    `numbers` are constants of ecomp.agent.compute such as {'PLAN_INTERVAL_SECONDS': 1}, or of another module of
    ecomp.agent, such as {'host.claims.CONFIRMATION_SECONDS': 1}, or, with a dot before it, of ecomp.
    `prefix` is a command that runs it.
    """

    numbers: Mapping[str, float]
    extra: Mapping[str, str]
    prefix: Sequence[str]

    def command(self) -> list[str]:
        python, *words = super().command()
        if self.numbers:
            words = ['-c', make_patched_program(self.numbers), *words[2:]]
        return [*self.prefix, python, *words]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self.extra}


def make_tuned(  # noqa: PLR0913
    control: Control,
    inventory: str = 'VCPU:4,DISK_GB:10,MEMORY_MB:512',
    failpoint: str = '',
    numbers: Mapping[str, float] | None = None,
    extra: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    start: bool = True,
    **settings: Any,
) -> TunedEcompute:
    """Make a fake ecompute that is stopped with `control`, and start it if `start`.

    `settings` are those of its compute.yaml. `placement` may be a URL other than the control's.
    """
    compute = TunedEcompute(
        control.etcd.endpoint, settings.pop('placement', control.placement.url), inventory, **settings
    )
    compute.failpoint, compute.numbers, compute.extra, compute.prefix = failpoint, numbers or {}, extra or {}, prefix
    if start:
        control.at_exit.enter_context(compute)
    else:
        control.at_exit.callback(compute.close)
    return compute
