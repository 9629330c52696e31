"""A small guest image from Debian packages: a kernel, busybox, an init and syslinux.

The kernel's package is unpacked, and mtools writes the file system, so root is not needed. Ubuntu is untested.
"""

from __future__ import annotations

import gzip
import lzma
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ecomp.errors import EcompError, UsageError
from ecomp.lab import machine
from ecomp.model.allocation import MIB

# In dependency order; modules built into a kernel have no file and are left out.
MODULES = (
    *('virtio_ring', 'virtio', 'virtio_pci_legacy_dev', 'virtio_pci_modern_dev', 'virtio_pci', 'virtio_blk'),
    *('failover', 'net_failover', 'virtio_net'),
    *('cdrom', 'isofs'),  # for a NoCloud disk; isofs depends on cdrom
    *('button', 'evdev'),  # for the power button: virsh shutdown
    'virtio_console',  # a channel for an agent, which user-data may start
)

# tsc=reliable and no_timer_check: emulation need not verify its clocks. 8250.nr_uarts: only the existing port.
SYSLINUX_CFG = """\
DEFAULT guest
PROMPT 0
TIMEOUT 0
LABEL guest
  KERNEL vmlinuz
  INITRD initrd
  APPEND console=ttyS0 quiet loglevel=1 panic=5 tsc=reliable no_timer_check mitigations=off 8250.nr_uarts=1
"""

INIT = """\
#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp /sbin /usr/bin /usr/sbin
/bin/busybox --install -s
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
exec </dev/ttyS0 >/dev/ttyS0 2>&1
say() { echo "ecomp-guest: $*"; }
# One line of output for each line of stdin.
tell() { while IFS= read -r line || [ -n "$line" ]; do say "$1 $line"; done; }
# This wget has no timeout that works here.
fetch() { timeout 5 wget -q -O - "$1" 2>/dev/null; }
# A file of the NoCloud seed.
part() { if [ -n "$disk" ]; then cat "/seed/$1" 2>/dev/null; else fetch "$seed$1"; fi; }

while read -r module; do insmod "/lib/$module"; done </lib/order
ip link set lo up
mkdir -p /run /var/run /var/log  # acpid wants the last two
for interface in /sys/class/net/eth*; do
    interface=${interface##*/}
    ip link set "$interface" up
    udhcpc -b -i "$interface" -s /bin/on-lease -p "/run/$interface.pid" -t 15 -T 1 -A 2 >/dev/null 2>&1 &
    waiting="$waiting $!"
done
acpid >/dev/null 2>&1
wait $waiting

say "disk $(blockdev --getsize64 /dev/vda)"
# Without a router the metadata server may still be a neighbour.
ip route | grep -q ^default || ip route add 169.254.169.254 dev eth0

disk=$(findfs LABEL=cidata 2>/dev/null)
if [ -n "$disk" ]; then
    mkdir /seed
    mount -t iso9660 -o ro "$disk" /seed
    # mdserver writes a line for each.
    value() { part meta-data | sed -n 's/^ "'"$1"'": "\\(.*\\)",*$/\\1/p'; }
    instance=$(value instance-id)
    name=$(value local-hostname)
    part meta-data | sed -n '/"public-keys"/,/]/s/^  "\\(.*\\)",*$/\\1/p' >/tmp/keys
    part user-data >/tmp/user-data
else
    ec2=http://169.254.169.254/2009-04-04
    tries=0
    until instance=$(fetch $ec2/meta-data/instance-id); do
        tries=$((tries + 1))
        [ $tries -lt 5 ] || break
        sleep 1
    done
    if [ -n "$instance" ]; then
        name=$(fetch $ec2/meta-data/hostname)
        for key in $(fetch $ec2/meta-data/public-keys/); do
            fetch "$ec2/meta-data/public-keys/${key%%=*}/openssh-key"
            echo
        done >/tmp/keys
        fetch $ec2/user-data >/tmp/user-data
        # ds=nocloud-net;s=http://…/
        serial=$(cat /sys/class/dmi/id/product_serial)
        case $serial in *';s='*) seed=${serial##*;s=} ;; esac
    fi
fi
if [ -n "$instance" ]; then
    say "instance-id $instance"
    hostname "${name%%.*}"
    say "hostname $name"
    tell key </tmp/keys
    tell user-data </tmp/user-data
else
    say 'no metadata'
fi
if [ -n "$disk$seed" ]; then
    part meta-data | tell seed
    part network-config | tell network-config
    home=$(part vendor-data | sed -n "s/.*'\\(http[^']*phone-home[^']*\\)'.*/\\1/p")
fi

mkdir -p /www
echo "ecomp-guest $instance" >/www/index.html
httpd -h /www
say ready
if [ "$(head -c 2 /tmp/user-data 2>/dev/null)" = '#!' ]; then
    sh /tmp/user-data || failed="&stage=modules-final&error=user-data+ended+with+$?"
fi
# As the script in vendor-data does after the end of cloud-init.
if [ -n "$home" ] && timeout 5 wget -q -O /dev/null --post-data "instance_id=$instance$failed" "$home"; then
    say "phoned $home"
fi
while :; do sleep 3600; done
"""

ON_LEASE = """\
#!/bin/sh
# udhcpc calls this with the name of the event; the lease is in the environment.
case $1 in
deconfig)
    ip addr flush dev "$interface" ;;
bound)
    ip addr add "$ip/$mask" dev "$interface"
    for gateway in $router; do ip route add default via "$gateway" dev "$interface"; break; done
    echo "ecomp-guest: address $interface $ip" >/dev/ttyS0 ;;
esac
"""

POWER_BUTTON = """\
#!/bin/sh
echo 'ecomp-guest: power button' >/dev/ttyS0
poweroff -f
"""

PROGRAMS = {
    **{'apt-get': 'apt', 'dpkg-deb': 'dpkg', 'busybox': 'busybox-static', 'mformat': 'mtools', 'mcopy': 'mtools'},
    **{'syslinux': 'syslinux', 'qemu-img': 'qemu-utils'},
}
# Packages that depend on the newest kernel for guests, Debian's first.
KERNELS = ('linux-image-cloud-amd64', 'linux-image-virtual', 'linux-image-kvm')
# Geometry of the disk: heads, sectors a track, bytes a sector.
HEADS = 64
SECTORS = 32
SECTOR_BYTES = 512


def make_image(output: Path, say: Callable[[str], None]) -> None:
    """Download a kernel, and write the image to `output` as qcow2, atomically."""
    if output.is_dir():
        raise UsageError(f'{output} is a directory. Fix: give the name of the image file')
    if not output.parent.is_dir():
        raise UsageError(f'{output}: directory {output.parent} does not exist')
    machine.require(PROGRAMS)
    busybox = _find_static_busybox()
    with tempfile.TemporaryDirectory(prefix='elab-guest-') as name:
        work = Path(name)
        kernel, modules = _fetch_kernel(work, say)
        initrd = work / 'initrd'
        _write_initrd(initrd, busybox, modules, work / 'initrd.d')
        raw = work / 'guest.raw'
        _write_boot_disk(raw, kernel, initrd, work)
        part = output.with_name(f'.{output.name}.part')
        try:
            machine.run(['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(part)])
            part.rename(output)
        finally:
            part.unlink(missing_ok=True)
    say(f'{output}: {output.stat().st_size / MIB:.0f} MiB, kernel {kernel.name.removeprefix("vmlinuz-")}')


def _write_initrd(initrd: Path, busybox: Path, modules: list[tuple[str, bytes]], tree: Path) -> None:
    for directory in ('bin', 'dev', 'etc/acpi/PWRF', 'lib'):
        (tree / directory).mkdir(parents=True)
    files = {
        'bin/busybox': busybox.read_bytes(),
        'init': INIT.encode(),
        'bin/on-lease': ON_LEASE.encode(),
        'etc/acpi/PWRF/00000080': POWER_BUTTON.encode(),  # where busybox's acpid looks
        'lib/order': ''.join(f'{name}\n' for name, _ in modules).encode(),
        **{f'lib/{name}': content for name, content in modules},
    }
    for path, content in files.items():
        (tree / path).write_bytes(content)
        (tree / path).chmod(0o755)
    # Not compressed: emulation unpacks slower than it reads. /dev/console is in the kernel's own initramfs.
    script = 'cd "$0" && find . | "$1" cpio -o -H newc -R 0:0 >"$2"'
    machine.run(['sh', '-c', script, str(tree), str(busybox), str(initrd)])


def _find_static_busybox() -> Path:
    # Debian's dynamic busybox has the same name, and cannot run as init without its libraries.
    for path in map(Path, ('/bin/busybox', '/usr/bin/busybox')):
        if path.exists() and is_static(path.read_bytes()):
            return path
    raise UsageError('found no static busybox. Fix: apt-get install busybox-static')


def is_static(program: bytes) -> bool:
    # Linkers put the name of the dynamic loader into the first page.
    return program.startswith(b'\x7fELF') and b'/ld-' not in program[:4096]


def _fetch_kernel(work: Path, say: Callable[[str], None]) -> tuple[Path, list[tuple[str, bytes]]]:
    packages = _find_kernel_packages()
    say(f'downloading {" ".join(packages)}')
    downloads, tree = work / 'packages', work / 'tree'
    downloads.mkdir()
    machine.run(['sh', '-c', 'cd "$1"; shift; exec apt-get -q download "$@"', 'sh', str(downloads), *packages])
    for package in downloads.glob('*.deb'):
        machine.run(['dpkg-deb', '-x', str(package), str(tree)])
    if not (kernels := sorted(tree.glob('boot/vmlinuz-*'))):
        raise EcompError(f'no kernel is in the packages {" ".join(packages)}')
    files = {path.name.partition('.')[0].replace('-', '_'): path for path in tree.rglob('*.ko*')}
    modules = [(f'{name}.ko', _unpack_module(files[name])) for name in MODULES if name in files]
    return kernels[-1], modules


def _find_kernel_packages() -> list[str]:
    for name in KERNELS:
        if images := _find_dependencies(name, 'linux-image-'):
            # Ubuntu has the modules in a separate package.
            return [*images[:1], *_find_dependencies(images[0], 'linux-modules-')[:1]]
    raise EcompError(f'apt has no kernel for guests ({", ".join(KERNELS)}). Fix: apt-get update')


def _find_dependencies(package: str, prefix: str) -> list[str]:
    try:
        lines = machine.run(['apt-cache', 'depends', '--important', package]).splitlines()
    except EcompError:
        return []  # apt-cache fails for an unknown package
    names = (line.partition('Depends: ')[2].strip() for line in lines)
    return [name for name in names if name.startswith(prefix)]


def _unpack_module(path: Path) -> bytes:
    if path.suffix == '.zst':
        machine.require({'zstd': 'zstd'})
        machine.run(['zstd', '-q', '-d', str(path), '-o', str(path.with_suffix(''))])
        return path.with_suffix('').read_bytes()
    unpack = {'.xz': lzma.decompress, '.gz': gzip.decompress}.get(path.suffix, bytes)
    return unpack(path.read_bytes())


def _write_boot_disk(raw: Path, kernel: Path, initrd: Path, work: Path) -> None:
    config = work / 'syslinux.cfg'
    config.write_text(SYSLINUX_CFG, encoding='utf-8')
    size = kernel.stat().st_size + initrd.stat().st_size + 2 * MIB
    cylinder = HEADS * SECTORS * SECTOR_BYTES
    cylinders = -(-size // cylinder)
    with raw.open('wb') as disk:
        os.truncate(disk.fileno(), cylinders * cylinder)
    geometry = ['-t', str(cylinders), '-h', str(HEADS), '-s', str(SECTORS)]
    machine.run(['mformat', '-i', str(raw), *geometry, '-v', 'ECOMP', '::'])
    for path, name in ((kernel, 'vmlinuz'), (initrd, 'initrd'), (config, 'syslinux.cfg')):
        machine.run(['mcopy', '-i', str(raw), str(path), f'::{name}'])
    machine.run(['syslinux', '--install', str(raw)])
