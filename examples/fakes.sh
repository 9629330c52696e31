#!/bin/bash
# A cluster of fakes: a refusal, a stack, a host that dies and comes back. Run it in the clone, after ./quickstart.sh.
set -eu
PATH=$PWD/.venv/bin:$PATH
export ECOMP_CONFIG=${XDG_STATE_HOME:-$HOME/.local/state}/elab/fake

# Print a command, and run it.
tell() { printf '$ %s\n' "$*"; "$@"; }

tell elab up --fake --fetch
tell eschedule 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:32768' || true # no fake has so much memory
tell eschedule apply examples/shop.yaml --wait
tell eschedule list
host=$(eschedule list --name shop-db -f value -c host)
tell elab kill --name fake "$host"
echo '# after 30 s it counts as silent'
until eschedule hosts -f value -c host -c state | grep -qx "$host[[:space:]]silent"; do sleep 1; done
tell eschedule evacuate "$host" --fenced --yes --wait
tell elab up --name fake
tell eschedule host enable "$host"
tell eschedule check --now
