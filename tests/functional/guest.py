"""Guests of one compute, and how they are built."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from ecomp.model.guest import GuestSpec
from ecomp.virt import Hypervisor

COMPUTE = str(uuid4())

# A boot sector that turns the machine off when its power button is pressed, by the ACPI registers of QEMU's `pc`.
POWER_BUTTON = bytes.fromhex(
    'fb'  # sti
    'ba0206 b80001 ef'  # PM1 enable (0x602): the power button's bit
    'ba0006'  # PM1 status
    'f4 ed'  # wait: hlt; in ax, dx
    'f6c401 74f9'  # test ah, 1; jz wait
    'ba0406 b80020 ef'  # PM1a control: SLP_EN, S5
    'fa f4 ebfd'  # cli; hlt; jmp
)
MakeSpec = Callable[[], GuestSpec]


def build(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    hypervisor.create_disk(spec)
    hypervisor.start(spec)
