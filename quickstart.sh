#!/usr/bin/env bash
# quickstart.sh: from a machine with git and Python to a cluster that schedules VMs
#
#   ./quickstart.sh         install what is missing, make a lab of hypervisors and schedule a VM; where this machine
#                           cannot have them, say why, and do as with --fake
#   ./quickstart.sh --fake  the same with fake hosts and guests, which needs neither root nor libvirt
#   ./quickstart.sh down    remove the lab and the fakes; .venv and the Debian packages stay
#   ./quickstart.sh --help  print this text
#
# For Debian 12 or 13 on x86-64; Ubuntu is not tested. First it prints what this machine has, then each step and its
# duration; another run does only what is missing. Debian packages and the lab need root: if you are another user, sudo
# asks for your password. The environment variable PYTHON selects the python3 (3.11 or newer) that creates .venv. Exit
# codes: 0 done, 1 failed, 2 usage; if elab or eschedule fails, its exit code (docs/reference/exit-codes.md).

set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

PYTHON=${PYTHON:-python3}
LAB=/var/lib/elab/lab
FAKES=${XDG_STATE_HOME:-$HOME/.local/state}/elab/fake
QUERY='resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
PACKAGES=(
    gcc pkg-config libvirt-dev # to build libvirt-python
    etcd-server stunnel4 libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients qemu-system-x86 qemu-utils
    dnsmasq-base iptables iproute2 busybox-static syslinux mtools curl openssh-client
)
export PIP_RETRIES=1 PIP_TIMEOUT=10 PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { printf 'quickstart.sh: %s\n' "$1" >&2; exit "${2:-1}"; }

# Print a step, run its command, and print how long it took; if it fails, the line of its output that names the cause.
step() {
    local began=${EPOCHREALTIME//[.,]/} tenths log cause cure=''
    local pattern='no space left|name resolution|could not resolve|unreachable|timed out|permission denied'
    printf '== %s\n' "$1"
    shift
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1 </dev/null; then
        cause=$(grep -iE "$pattern" "$log" | tail -n 1) || cause=$(grep . "$log" | tail -n 1) || cause='it printed nothing'
        case ${cause,,} in
            *'no space left'*) cure='. Fix: free space on this disk' ;;
            *resol* | *unreachable* | *'timed out'*) cure='. Fix: connect this machine, or set its proxy or mirror' ;;
        esac
        rm "$log"
        fail "$* failed: ${cause:0:300}$cure"
    fi
    rm "$log"
    tenths=$(((${EPOCHREALTIME//[.,]/} - began) / 100000))
    printf '   done in %d.%d s\n' $((tenths / 10)) $((tenths % 10))
}

root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# Print a line about this machine; `why` is the first reason why it cannot have real hosts.
report() {
    printf '   %-11s %s\n' "$1" "$2"
    [ -z "${3-}" ] || why=${why:-$3}
}

# Find out what this machine can do before anything is installed.
check_machine() {
    local memory free output
    printf '== what this machine has\n'
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$PYTHON is $("$PYTHON" --version 2>&1 | tail -n 1), not 3.11 or newer. Fix: name one with PYTHON=..."
    report Python "$("$PYTHON" --version)"
    if [ "$(id -u)" = 0 ]; then
        report root yes
    elif { [ -t 0 ] && sudo -v || sudo -n true; } 2>/dev/null; then
        report root 'by sudo'
    else
        report root 'no. Fix: run this as root, or as a user with sudo' 'you are not root, and cannot use sudo'
        "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || [ -x .venv/bin/pip ] ||
            fail "$PYTHON has no module venv. Fix: apt-get install python3-venv, or name another with PYTHON=..."
    fi
    if [ -z "$why" ]; then
        output=$(root unshare --net --mount true 2>&1) && report namespaces yes ||
            report namespaces "no (${output##*: }). Fix: a virtual machine, or a privileged container" \
                "this machine makes no namespaces (${output##*: })"
    fi
    memory=$(awk '/^MemAvailable:/ {print int($2 / 1024)}' /proc/meminfo) free=$(df --output=avail -B1M . | tail -n 1)
    report memory "$memory MiB available" "$([ "$memory" -ge 2048 ] || echo 'less than 2 GiB of memory are available')"
    report disk "$free MiB free here" "$([ "$free" -ge 3072 ] || echo 'less than 3 GiB are free here')"
    [ "$free" -ge 700 ] || fail "less than 700 MiB are free in $PWD, for .venv and etcd. Fix: free space on this disk"
    # pip itself would retry for minutes.
    output=$(mktemp -d)
    if [ -z "$(cat .venv/installed* 2>/dev/null)" ] && "$PYTHON" -c 'import pip' 2>/dev/null; then
        "$PYTHON" -m pip download -q --no-deps --no-cache-dir --retries 0 --timeout 4 -d "$output" os-traits 2>/dev/null ||
            fail 'PyPI does not answer. Fix: connect this machine, or set its proxy or mirror'
        report PyPI answers
    fi
    rm -r "$output"
    if [ "$(uname -m)" != x86_64 ] || ! command -v apt-get >/dev/null; then
        report system "$(uname -sm)" 'the packages and guests of the lab are for Debian or Ubuntu on x86-64'
    fi
}

update_packages() {
    [ -n "${updated-}" ] || step "reading the lists of Debian's packages" root apt-get -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=10 -o APT::Update::Error-Mode=any update
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
    update_packages
    step "installing Debian packages: ${missing[*]}" root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "${missing[@]}"
}

# Make .venv; `fake` leaves out libvirt-python, which is built from source.
make_venv() {
    local wanted stamp=.venv/installed-quickstart constraints=constraints.txt
    # pip's version is installed last: without it, the making of .venv was interrupted.
    if ! .venv/bin/python -c 'import pip, importlib.metadata as m; m.version("pip")' 2>/dev/null; then
        # The pip of Python 3.11 takes twice as long for all that follows.
        step "making .venv with $("$PYTHON" --version)" "$PYTHON" -m venv --clear --upgrade-deps .venv
    fi
    wanted=$(cat setup.py constraints.txt | sha256sum)
    # tests/run installs the same packages and more; so does a run without --fake.
    case $(cat "$stamp" .venv/installed 2>/dev/null) in
        *"$wanted real"* | *"$(sha256sum <setup.py)"*) return 0 ;;
        *"$wanted fake"*) [ "$1" = real ] || return 0 ;;
    esac
    # The tested versions, pinned by hash: also setuptools, with which pip builds libvirt-python and ecomp.
    export PIP_BUILD_CONSTRAINT=constraints.txt
    [ "$1" = real ] || { constraints=.venv/fake.txt; sed '/^libvirt-python/,/[^\\]$/d' constraints.txt >$constraints; }
    step 'installing what ecomp needs into .venv' .venv/bin/python -m pip install --require-hashes -r $constraints
    # In place, so that git pull alone updates it.
    step 'installing ecomp into .venv' .venv/bin/python -m pip install --use-pep517 --no-deps -e .
    printf '%s %s\n' "$wanted" "$1" >"$stamp"
}

make_lab() {
    step 'starting the lab: etcd, placement and 3 hypervisor hosts' root .venv/bin/elab up --name lab
    if [ ! -e "$LAB/images/guest.qcow2" ]; then
        # apt-get downloads its kernel, and must know the newest version.
        update_packages
        step 'making a small guest image' root .venv/bin/elab guest "$LAB/images/guest.qcow2"
    fi
}

eschedule() { .venv/bin/eschedule --config "$config" "$@"; }
schedule() {
    if [ -z "$(eschedule list --state active -f value -c instance)" ]; then
        printf "== scheduling a VM: eschedule '%s' --wait\n" "$QUERY"
        eschedule "$QUERY" --wait
    fi
    printf '== eschedule list\n'
    eschedule list
}

why='' config=$LAB/schedule.yaml
case ${1-} in
    '' | --fake)
        check_machine
        [ "${1-}" != --fake ] || why='you asked for fakes'
        if [ -n "$why" ]; then
            printf '== %s: so hosts and guests are fake\n' "$why"
            config=$FAKES/schedule.yaml
            # Without root, `elab up --fetch` unpacks them.
            PACKAGES=(etcd-server stunnel4)
            [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || install_packages
            make_venv fake
            printf '== examples/fakes.sh: a cluster of fakes\n'
            examples/fakes.sh
            printf '\netcd, placement and all decisions were real. Hosts and guests were fake: nothing booted.\n'
        else
            install_packages
            make_venv real
            make_lab
            schedule
        fi
        cat <<END

Try next (./quickstart.sh down removes everything):
  . .venv/bin/activate; export ECOMP_CONFIG=${config%/*}
  eschedule '$QUERY' --wait
  eschedule apply examples/shop.yaml --wait

This took $SECONDS s.
END
        ;;
    down)
        [ -x .venv/bin/elab ] || fail '.venv/bin/elab is missing: no lab was made from this directory'
        [ ! -e "$FAKES" ] || .venv/bin/elab down --name fake
        [ ! -e "$LAB" ] || root .venv/bin/elab down --name lab
        ;;
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
    *) fail "'$1' is not a command: the only ones are --fake and down. Try: --help" 2 ;;
esac
