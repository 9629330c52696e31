"""A cloud image made of Debian's packages.

It has systemd, sshd, cloud-init and netplan as Debian's own images have them.
It needs neither a loop device nor a mount: mmdebstrap makes the tree, mke2fs makes the root file system from it, and
syslinux boots from a small FAT partition before it. The root partition is the last one, so that it can grow.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.kit.kept import cache_file

RELEASE = 'bookworm'
PACKAGES = (
    *('systemd-sysv', 'dbus', 'udev', 'openssh-server', 'sudo', 'linux-image-cloud-amd64', 'initramfs-tools'),
    *('cloud-init', 'cloud-guest-utils', 'e2fsprogs', 'fdisk'),
    *('netplan.io', 'systemd-resolved', 'iproute2', 'ca-certificates'),
)
MIB = 1024**2
BOOT_MIB = 64
ROOT_MIB = 1024
LABEL = 'cloudroot'

# A minimal initramfs: emulation takes long to unpack a larger one.
INITRAMFS = {
    'etc/initramfs-tools/conf.d/small': 'MODULES=list\nCOMPRESS=lz4\n',
    'etc/initramfs-tools/modules': 'virtio_pci\nvirtio_blk\next4\n',
}
# The relevant settings of Debian's own cloud images, without locales, which are not installed. There is only one host
# key, because emulation takes long to generate an RSA key.
FILES = {
    'etc/fstab': f'LABEL={LABEL} / ext4 rw,discard,errors=remount-ro 0 1\n',
    'etc/hostname': 'localhost\n',
    'etc/cloud/cloud.cfg.d/01_image.cfg': 'manage_etc_hosts: true\nlocale: false\nssh_genkeytypes: [ed25519]\n',
    'etc/machine-id': '',
}
SYSLINUX_CFG = f"""\
DEFAULT debian
PROMPT 0
TIMEOUT 0
LABEL debian
  KERNEL vmlinuz
  INITRD initrd
  APPEND root=LABEL={LABEL} ro console=ttyS0 tsc=reliable no_timer_check mitigations=off 8250.nr_uarts=1
"""
# Version of the recipe below: part of the key under which the image is cached.
VERSION = 1


def get_debian_image() -> Path:
    return cache_file('debian.qcow2', (VERSION, RELEASE, PACKAGES, INITRAMFS, FILES, SYSLINUX_CFG), _make_image)


def _make_image(work: Path) -> Path:
    tree, raw = work / 'tree', work / 'raw'
    early = ' && '.join(
        f'mkdir -p "$(dirname "$1/{path}")" && printf {text!r} >"$1/{path}"' for path, text in INITRAMFS.items()
    )
    _run(
        'mmdebstrap', '--quiet', '--mode=root', '--variant=minbase', f'--include={",".join(PACKAGES)}',
        '--aptopt=Apt::Install-Recommends "false"',
        *(f'--dpkgopt=path-exclude=/usr/share/{part}/*' for part in ('doc', 'man', 'locale')),
        f'--essential-hook={early}', RELEASE, str(tree),
    )  # fmt: skip
    for path, text in FILES.items():
        (tree / path).write_text(text)
    for key in tree.glob('etc/ssh/ssh_host_*'):
        key.unlink()
    boot, root = BOOT_MIB * MIB, ROOT_MIB * MIB
    with raw.open('wb') as disk:
        os.truncate(disk.fileno(), MIB + boot + root)
        disk.write(Path('/usr/lib/SYSLINUX/mbr.bin').read_bytes())
    # The partitions, in sectors of 512 bytes.
    sectors = f'label: dos\nstart=2048, size={boot // 512}, type=e, bootable\nstart={(MIB + boot) // 512}, type=83\n'
    _run('sfdisk', '--quiet', str(raw), stdin_text=sectors)
    fat = f'{raw}@@{MIB}'
    (work / 'syslinux.cfg').write_text(SYSLINUX_CFG)
    _run('mformat', '-i', fat, '-T', str(boot // 512), '-h', '64', '-s', '32', '-H', '2048', '::')
    kernels = (*tree.glob('boot/vmlinuz-*'), 'vmlinuz'), (*tree.glob('boot/initrd.img-*'), 'initrd')
    for path, name in (*kernels, (work / 'syslinux.cfg', 'syslinux.cfg')):
        _run('mcopy', '-i', fat, str(path), f'::{name}')
    _run('syslinux', '--install', '--offset', str(MIB), str(raw))
    _run(
        'mke2fs', '-q', '-t', 'ext4', '-L', LABEL, '-d', str(tree), '-E', f'offset={MIB + boot}',
        str(raw), f'{root // 1024}k',
    )  # fmt: skip
    image = work / 'image.qcow2'
    _run('qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(image))
    return image


def _run(*command: str, stdin_text: str = '') -> None:
    path = f'{os.environ["PATH"]}:/usr/sbin:/sbin'
    done = subprocess.run(
        command, check=False, input=stdin_text, capture_output=True, text=True, env={**os.environ, 'PATH': path}
    )
    assert done.returncode == 0, f'{" ".join(command[:3])} ... fails: {done.stderr[-2000:]}'
