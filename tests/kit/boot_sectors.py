"""Disks of 1 MiB that boot a few bytes of machine code, if a running QEMU is enough."""

from __future__ import annotations

# cli; hlt; jmp: uses no processor time.
HALT = bytes.fromhex('fa f4 ebfd')
# Powers off when the power button is pressed, by the ACPI registers of QEMU's `pc`.
POWER_BUTTON = bytes.fromhex(
    'fb'  # sti
    'ba0206 b80001 ef'  # PM1 enable (0x602): the power button's bit
    'ba0006'  # PM1 status
    'f4 ed'  # wait: hlt; in ax, dx
    'f6c401 74f9'  # test ah, 1; jz wait
    'ba0406 b80020 ef'  # PM1a control: SLP_EN, S5
    'fa f4 ebfd'  # cli; hlt; jmp
)


def make_boot_disk(sector: bytes) -> bytes:
    return sector.ljust(510, b'\0') + b'\x55\xaa' + bytes(2**20 - 512)
