"""Disks of 1 MiB that boot a little machine code, for a running QEMU or its address."""

from __future__ import annotations

import subprocess
from pathlib import Path

# A guest that asks for an address.
DHCP_SOURCE = Path(__file__).with_name('dhcp_guest.c')

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


def make_dhcp_image(directory: Path) -> Path:
    program, disk, image = (directory / name for name in ('program', 'disk', 'image.qcow2'))
    # Code and data are in one segment from the boot sector on, in the order of the source.
    flags = ['-m16', '-march=i386', '-Os', '-ffreestanding', '-fno-pic', '-fno-stack-protector']
    order = ['-fno-toplevel-reorder', '-fno-asynchronous-unwind-tables', '-fno-strict-aliasing']
    subprocess.run(['gcc', *flags, *order, '-c', DHCP_SOURCE, '-o', f'{program}.o'], check=True)
    link = ['ld', '-m', 'elf_i386', '-Ttext=0x7c00', '-e', '_start', '--oformat', 'binary']
    subprocess.run([*link, '-o', program, f'{program}.o'], check=True)
    code = program.read_bytes()
    # The boot sector reads seven more.
    assert len(code) <= 8 * 512
    disk.write_bytes(code + bytes(2**20 - len(code)))
    subprocess.run(['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', disk, image], check=True)
    return image
