#!/usr/bin/env bash
# quickstart.sh: from a machine with git and Python to a cluster of hypervisors with a VM that answers
#
#   ./quickstart.sh         install what is missing, make the lab, schedule a VM and wait for its address
#   ./quickstart.sh down    remove the lab and its VMs; .venv and the Debian packages stay
#   ./quickstart.sh --help  print this text
#
# For Debian 12 or newer and current Ubuntu, on x86-64. It prints each step and its duration; another run does only
# what is missing. Debian packages and the lab need root: if you are another user, sudo asks for your password. The
# environment variable PYTHON selects the python3 (3.11 or newer) that creates .venv. Exit codes: 0 done, 1 failed,
# 2 usage; if elab or eschedule fails, its exit code (docs/reference/exit-codes.md).

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
    curl openssh-client                                                                    # for the tutorial
)

fail() { printf 'quickstart.sh: %s\n' "$1" >&2; exit "${2:-1}"; }

# Print the start of a step, and its end with its duration.
begin() {
    began=${EPOCHREALTIME//[.,]/}
    printf '== %s\n' "$1"
}
finish() {
    local tenths=$(((${EPOCHREALTIME//[.,]/} - began) / 100000))
    printf '   done in %d.%d s\n' $((tenths / 10)) $((tenths % 10))
}

# Run a command, and print its output only if it fails.
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
    [ "$(uname -m)" = x86_64 ] || fail "this machine is $(uname -m), but the lab's guests and packages are for x86_64"
    command -v apt-get >/dev/null || fail 'apt-get is missing: this is neither Debian nor Ubuntu'
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null || fail 'it needs root, but sudo is missing. Fix: run it as root'
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$PYTHON is $("$PYTHON" --version 2>&1 | tail -n 1), not 3.11 or newer. Fix: name one with PYTHON=..."
}

update_packages() {
    [ -n "${updated-}" ] || quietly root apt-get update
    updated=1
}

install_packages() {
    local package missing=()
    # Debian's own Python needs these packages; another one has their content.
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
    # pip's version is installed last: without it, the making of .venv was interrupted.
    if ! .venv/bin/python -c 'import pip, importlib.metadata as m; m.version("pip")' 2>/dev/null; then
        begin "making .venv with $("$PYTHON" --version)"
        # The pip of Python 3.11 takes twice as long for all that follows.
        quietly "$PYTHON" -m venv --clear --upgrade-deps .venv
        finish
    fi
    wanted=$(cat setup.py constraints.txt | sha256sum)
    # tests/run installs the same packages and more.
    if [ "$wanted" != "$(cat "$stamp" 2>/dev/null)" ] &&
        [ "$(sha256sum <setup.py)" != "$(cat .venv/installed 2>/dev/null)" ]; then
        begin 'installing ecomp and what it needs into .venv'
        # The tested versions, pinned by hash: also setuptools, with which pip builds libvirt-python and ecomp.
        PIP_BUILD_CONSTRAINT=constraints.txt \
            quietly .venv/bin/python -m pip install --disable-pip-version-check --require-hashes -r constraints.txt
        # Up to 1.1 the package's name was ecomp. Removed later, that one would take its successor's files with it.
        quietly .venv/bin/python -m pip uninstall --disable-pip-version-check -y ecomp
        # In place, so that git pull alone updates it.
        PIP_BUILD_CONSTRAINT=constraints.txt \
            quietly .venv/bin/python -m pip install --disable-pip-version-check --use-pep517 --no-deps -e .
        printf '%s\n' "$wanted" >"$stamp"
        finish
    fi
}

make_lab() {
    if root .venv/bin/elab status --name lab >/dev/null 2>&1; then
        printf '== the lab is already up\n'
    else
        begin 'starting the lab: etcd, placement and 3 hypervisor hosts'
        root .venv/bin/elab up --name lab >/dev/null
        finish
    fi
    if [ ! -e "$LAB/images/guest.qcow2" ]; then
        begin 'making a small guest image'
        # apt-get downloads its kernel, and must know the newest version.
        update_packages
        root .venv/bin/elab guest "$LAB/images/guest.qcow2"
        finish
    fi
}

# Print the uuid of an active instance, or nothing.
running_instance() {
    eschedule list -f json | .venv/bin/python -c '
import json, sys
print(*[each["instance"] for each in json.load(sys.stdin) if each["state"] == "active"][:1])'
}

schedule() {
    image=$(sed -n 's/^image: //p' "$LAB/schedule.yaml")
    instance=$(running_instance)
    if [ -n "$instance" ]; then
        printf '== a VM already runs: %s at %s\n' "$instance" "$(eschedule "$instance" || true)"
    else
        begin "scheduling a VM: eschedule '$QUERY' $image"
        eschedule "$QUERY" "$image" --wait
        finish
        made=$(running_instance) # none was active before
    fi
    printf '== eschedule list\n'
    eschedule list
}

try_next() {
    local sudo='sudo '
    [ "$(id -u)" = 0 ] && sudo=''
    cat <<END

Try next (./quickstart.sh down removes everything):
  .venv/bin/eschedule --config $LAB/schedule.yaml '$QUERY'
  ${sudo}.venv/bin/elab status
END
    # Only the instance of this run: an older one may be in use.
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
        [ -x .venv/bin/elab ] || fail '.venv/bin/elab is missing: no lab was made from this directory'
        root .venv/bin/elab down --name lab
        ;;
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
    *) fail "'$1' is not a command: the only one is down. Try: --help" 2 ;;
esac
