"""What is in the small guest beside the kernel and busybox: its boot menu, its init and what init calls.

Everything the guest has to say is a line on the serial console that begins with `ecomp-guest: `:

    address eth0 10.200.1.57     for each interface, as soon as it has one
    instance-id | hostname | key | user-data …     a line for each line, from its NoCloud disk if it has one, else from
                                 EC2 paths; `no metadata` if neither is there
    seed | network-config …      each line of the NoCloud seed's, on that disk or at the address in the SMBIOS serial
    disk 1073741824              the size of /dev/vda in bytes
    ready                        then user-data that begins with #! is run, its output as it comes
    phoned http://…              it was told at the address in vendor-data, if that has one, how user-data ended
"""

from __future__ import annotations

# In this order each finds what it needs; what a kernel has built in is no file and left out.
MODULES = (
    *('virtio_ring', 'virtio', 'virtio_pci_legacy_dev', 'virtio_pci_modern_dev', 'virtio_pci', 'virtio_blk'),
    *('failover', 'net_failover', 'virtio_net'),
    *('cdrom', 'isofs'),  # for a NoCloud disk; the first is only what the second was built with
    *('button', 'evdev'),  # for the power button: virsh shutdown
    'virtio_console',  # a channel for an agent, which user-data may be
)

# tsc=reliable and no_timer_check: emulation need not prove its clocks. 8250.nr_uarts: only the one that is there.
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
# wget has no time-out that works here.
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
# As the script in vendor-data does when cloud-init is through.
if [ -n "$home" ] && timeout 5 wget -q -O /dev/null --post-data "instance_id=$instance$failed" "$home"; then
    say "phoned $home"
fi
while :; do sleep 3600; done
"""

ON_LEASE = """\
#!/bin/sh
# udhcpc calls this with what happened and the lease in the environment.
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
