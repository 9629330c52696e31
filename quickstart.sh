#!/usr/bin/env bash
# quickstart.sh: from a machine with git and Python to a cluster of hypervisors with a VM that answers
#
#   ./quickstart.sh         install what is missing, make the lab, schedule a VM and wait for its address
#   ./quickstart.sh down    remove the lab and its VMs; .venv and the Debian packages stay
#   ./quickstart.sh --help  this text
#
# For Debian 12 or newer and current Ubuntu, on x86-64. Says each step and how long it took; run again, it does only
# what is missing. Debian packages and the lab need root: as another user, it asks by sudo. PYTHON names the python3
# to make .venv with (3.11 or newer). Exit codes: 0 done, 1 failed, 2 usage; where elab or eschedule fails, theirs
# (docs/reference/exit-codes.md).

set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

PYTHON=${PYTHON:-python3}
LAB=/var/lib/elab/lab
QUERY='resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
PACKAGES=(
    gcc pkg-config libvirt-dev                                                             # to build libvirt-python
    etcd-server stunnel4                                                                   # the control plane
    libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients qemu-system-x86 qemu-utils  # the hypervisors
    dnsmasq-base iptables iproute2                                                         # their networks
    busybox-static syslinux mtools                                                         # the small guest
    curl openssh-client                                                                    # what the tutorial types
)

fail() { printf 'quickstart.sh: %s\n' "$1" >&2; exit "${2:-1}"; }

# The start of a step, and its end with how long it took.
begin() {
    began=${EPOCHREALTIME//[.,]/}
    printf '== %s\n' "$1"
}
finish() {
    local tenths=$(((${EPOCHREALTIME//[.,]/} - began) / 100000))
    printf '   done in %d.%d s\n' $((tenths / 10)) $((tenths % 10))
}

# What a command prints is shown only if it fails.
quietly() {
    local said
    said=$("$@" 2>&1 </dev/null) || { printf '%s\n' "$said" >&2; fail "failed: $*"; }
}

# Run a command as root.
root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo "$@"
    fi
}

eschedule() { .venv/bin/eschedule --config "$LAB/schedule.yaml" "$@"; }

check_machine() {
    [ "$(uname -m)" = x86_64 ] || fail "this is $(uname -m); the lab's guests and packages are for x86_64"
    command -v apt-get >/dev/null || fail 'this is neither Debian nor Ubuntu: there is no apt-get'
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null || fail 'needs root, and there is no sudo: run it as root'
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$PYTHON is $("$PYTHON" --version 2>&1 | tail -n 1); 3.11 or newer is needed, name one with PYTHON=..."
}

update_packages() {
    [ -n "${updated-}" ] || quietly root apt-get update
    updated=1
}

install_packages() {
    local package missing=()
    # These belong to Debian's own Python; another brings them itself.
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || PACKAGES+=(python3-venv)
    "$PYTHON" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
        PACKAGES+=(python3-dev)
    for package in "${PACKAGES[@]}"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    begin "installing Debian packages: ${missing[*]}"
    update_packages
    quietly root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
    finish
}

make_venv() {
    local wanted stamp=.venv/installed-quickstart
    # pip comes last, and of it what says its version: without, the making of .venv was ended in between.
    if ! .venv/bin/python -c 'import pip, importlib.metadata as m; m.version("pip")' 2>/dev/null; then
        begin "making .venv with $("$PYTHON" --version)"
        # The pip that comes with Python 3.11 takes twice as long for all that follows.
        quietly "$PYTHON" -m venv --clear --upgrade-deps .venv
        finish
    fi
    wanted=$(cat setup.py constraints.txt | sha256sum)
    # tests/run installs the same and more.
    if [ "$wanted" != "$(cat "$stamp" 2>/dev/null)" ] &&
        [ "$(sha256sum <setup.py)" != "$(cat .venv/installed 2>/dev/null)" ]; then
        begin 'installing ecomp and what it needs into .venv'
        # What it was tested with, to the byte.
        quietly .venv/bin/python -m pip install --disable-pip-version-check --require-hashes -r constraints.txt
        # In place, so that a git pull is all it takes to have the newest.
        quietly .venv/bin/python -m pip install --disable-pip-version-check --use-pep517 --no-deps -e .
        printf '%s\n' "$wanted" >"$stamp"
        finish
    fi
}

make_lab() {
    if root .venv/bin/elab status --name lab >/dev/null 2>&1; then
        printf '== the lab is up\n'
    else
        begin 'starting the lab: etcd, placement and 3 hypervisor hosts'
        root .venv/bin/elab up --name lab >/dev/null
        finish
    fi
    if [ ! -e "$LAB/images/guest.qcow2" ]; then
        begin 'making a small guest image'
        # Its kernel comes by apt-get download, which needs to know the newest.
        update_packages
        root .venv/bin/elab guest "$LAB/images/guest.qcow2"
        finish
    fi
}

# The uuid of an instance that runs already; nothing if none does.
running_instance() {
    eschedule list -f json | .venv/bin/python -c '
import json, sys
print(*[each["instance"] for each in json.load(sys.stdin) if each["state"] == "active"][:1])'
}

schedule() {
    image=$(sed -n 's/^image: //p' "$LAB/schedule.yaml")
    instance=$(running_instance)
    if [ -n "$instance" ]; then
        printf '== a VM runs: %s at %s\n' "$instance" "$(eschedule "$instance" || true)"
    else
        begin "scheduling a VM: eschedule '$QUERY' $image"
        eschedule "$QUERY" "$image" --wait
        finish
        made=$(running_instance) # there was none before
    fi
    printf '== eschedule list\n'
    eschedule list
}

try_next() {
    local sudo='sudo '
    [ "$(id -u)" = 0 ] && sudo=''
    cat <<END

Try next (./quickstart.sh down removes it all):
  .venv/bin/eschedule --config $LAB/schedule.yaml '$QUERY'
  ${sudo}.venv/bin/elab status
END
    # Nothing but what was made just now: what ran before is somebody's.
    [ -z "${made-}" ] || printf '  %s destroy %s\n' ".venv/bin/eschedule --config $LAB/schedule.yaml" "$made"
}

case ${1-} in
    '')
        check_machine
        install_packages
        make_venv
        make_lab
        schedule
        try_next
        printf '\nThis took %d s.\n' "$SECONDS"
        ;;
    down)
        [ -x .venv/bin/elab ] || fail 'there is no .venv/bin/elab, so no lab was made from here'
        root .venv/bin/elab down --name lab
        ;;
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
    *) fail "$1: there is only 'down', and nothing; --help shows all" 2 ;;
esac
