#!/usr/bin/env bash
# docker.sh: etcd, PostgreSQL and placement in Docker containers
#
#   ./docker.sh [up]     start the containers that do not run, and wait until all servers answer
#   ./docker.sh down     stop and remove the containers and their network; the data stays
#   ./docker.sh --help   print this text
#
# Placement is then at http://localhost:8080/, etcd at localhost:2379. The data is in the volumes
# ecomp-etcd and ecomp-postgres until you delete them. Another run recreates only the containers
# whose settings below changed, with the same data.
#
# Settings are environment variables:
#
#   BIND_ADDRESS        127.0.0.1     the address that both listen on. If other machines reach it (0.0.0.0, or
#                                     this machine's address on a network), certificates are required. ufw
#                                     does not protect ports that Docker publishes
#   CERTS               (unset)       the directory of `elab certs`. Default: ./certs if other machines reach
#                                     the servers, else none. If it is missing and elab is installed, it is
#                                     created, unless BIND_ADDRESS is 0.0.0.0 or [::]. With it, etcd and
#                                     placement require a client certificate, and placement also its token;
#                                     if you replace files in it, both use the new ones without a restart.
#                                     Without it, every user of this machine can do everything; Docker before
#                                     28 then needs root, for iptables rules that keep guests out, and never
#                                     starts the containers by itself: run ./docker.sh again after each boot
#   INSECURE            (unset)       1: require no certificates; all who reach the servers can do everything
#   ETCD_PORT           2379
#   PLACEMENT_PORT      8080
#   PLACEMENT_WORKERS   one a core    gunicorn processes, about 75 MB each
#   PLACEMENT_DATABASE  (unset)       your own database, postgresql+psycopg2://USER:PASSWORD@HOST/NAME, as
#                                     seen from a container, where this machine is host.docker.internal, not
#                                     localhost. Then no PostgreSQL container is started
#   PLACEMENT_BUILD_CA  (unset)       a file of CA certificates (PEM) that pip trusts while it builds the
#                                     placement image, if a proxy decrypts TLS. It is not part of the image
#   ETCD_IMAGE          quay.io/coreos/etcd:v3.6.14
#   POSTGRES_IMAGE      postgres:17   or 16, the version of the existing data; not 18, whose data directory differs
#   PYTHON_IMAGE        python:3.11-slim-bookworm   the base of the placement image; CPython 3.11 to 3.13. Each of
#                                     the three images can have a digest, as NAME@sha256:...
#
# Exit codes: 0 done, 1 failed, 2 usage (or no docker command), 5 a port is in use, 7 no Docker daemon.

set -euo pipefail
umask 022 # another user reads the files of the image; secrets have modes of their own

BIND_ADDRESS=${BIND_ADDRESS:-127.0.0.1}
ETCD_PORT=${ETCD_PORT:-2379}
PLACEMENT_PORT=${PLACEMENT_PORT:-8080}
PLACEMENT_WORKERS=${PLACEMENT_WORKERS:-$(nproc)}
PLACEMENT_DATABASE=${PLACEMENT_DATABASE:-}
PLACEMENT_BUILD_CA=${PLACEMENT_BUILD_CA:-}
CERTS=${CERTS:-}
INSECURE=${INSECURE:-}
ETCD_IMAGE=${ETCD_IMAGE:-quay.io/coreos/etcd:v3.6.14}
POSTGRES_IMAGE=${POSTGRES_IMAGE:-postgres:17}
PYTHON_IMAGE=${PYTHON_IMAGE:-python:3.11-slim-bookworm}

# All that pip installs, pinned by hash for a reproducible image: what placement needs of constraints.txt, and packages
# only for this image. SQLAlchemy uses psycopg2: with psycopg 3 placement starts, but fails on every claim.
NAMES='
alembic attrs bcrypt certifi charset-normalizer debtcollector decorator dogpile-cache fasteners greenlet idna iso8601
jinja2 jsonschema jsonschema-specifications keystoneauth1 keystonemiddleware legacy-cgi mako markupsafe
microversion-parse msgpack netaddr openstack-placement os-resource-classes os-service-types os-traits oslo-cache
oslo-concurrency oslo-config oslo-context oslo-db oslo-i18n oslo-log oslo-middleware oslo-policy oslo-serialization
oslo-upgradecheck oslo-utils packaging pbr prettytable psutil pycadf pyjwt pyparsing python-dateutil
python-keystoneclient pyyaml referencing repoze-lru requests rfc3986 routes rpds-py six sqlalchemy statsd stevedore
testresources testscenarios typing-extensions tzdata urllib3 wcwidth webob wrapt'
PINS='gunicorn==27.0.1 --hash=sha256:378b26b9a38adcf4592f28828233c1716acc55e833ea06bf48719782efaa0d10
psycopg2-binary==2.9.13 \
    --hash=sha256:930e7e58b33a4f9c39e7532d7a40147925cf3372baed4229cbebe0cf3ba9ce6b \
    --hash=sha256:3aea95340825f5ff236e7b40f0b5602c2c77a1e95943f71fae34909834043d29 \
    --hash=sha256:e3861eba31f8ea8663fd876166b032fd89179e42aa63764d6feb281f13f9eb60 \
    --hash=sha256:3dc3372b3731b3ef23407fe06b94f640ef87a2bda242fa386033d5589c87514a \
    --hash=sha256:f04ada42bcd537adbaf8b7f3140237a204e452a88d0c1831cfce69f7d2e59f4e \
    --hash=sha256:aa37089795bd9701576edc2eb5849ce77a439eda9dfdfa47857449332cfa5292'

# The CA file is only in the install stage: the last stage copies the virtual environment. Docker expands $, not bash.
# shellcheck disable=SC2016
DOCKERFILE='ARG BASE
FROM ${BASE} AS install
LABEL ecomp.stage=install
COPY . /build/
RUN if [ -f /build/ca.crt ]; then export PIP_CERT=/build/ca.crt; fi; \
    python3 -m venv /opt/placement && \
    /opt/placement/bin/pip install --no-cache-dir --only-binary :all: --no-deps --require-hashes -r /build/pins.txt && \
    /opt/placement/bin/pip check
FROM ${BASE}
COPY --from=install /opt/placement /opt/placement
COPY placement_server.py gunicorn_tls.py /opt/server/
RUN chmod 644 /opt/server/*.py
ENV PYTHONPATH=/opt/server PATH=/opt/placement/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
USER 65534:65534
'

# gunicorn with certificates: a client that stalls in the handshake occupies a thread for at most ten seconds.
TLS='certfile, keyfile, ca_certs, cert_reqs = "/certs/server.crt", "/certs/server.key", "/certs/ca.crt", 2
threads, keepalive = 32, 30


def ssl_context(_config, default):
    context = default()
    wrap = context.wrap_socket

    def wrap_socket(connection, **options):
        connection.settimeout(10)
        return wrap(connection, **options)

    context.wrap_socket = wrap_socket
    return context
'

# Check that placement answers a query that reaches its database: / answers 200 without one.
ASK='import ssl, urllib.request
context = ssl.create_default_context(cafile="/certs/ca.crt")
context.check_hostname = False
context.load_cert_chain("/certs/server.crt", "/certs/server.key")
token = open("/certs/token").read().strip()
request = urllib.request.Request("https://127.0.0.1:8080/resource_providers", headers={"x-auth-token": token})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
opener.open(request, timeout=5)'

say() { printf '%s\n' "$*"; }

fail() { # CODE MESSAGE
    local code=$1
    shift
    printf 'docker.sh: %s\n' "$*" >&2
    exit "$code"
}

digest() { printf '%s\0' "$@" | sha256sum | cut -c 1-16; }

last_line() { printf '%s\n' "$1" | sed '/^[[:space:]]*$/d; /^See .docker run --help/d' | tail -n 1; }

indented() { sed 's/^/    /' >&2; }

there() { docker inspect --type container "$1" >/dev/null 2>&1; }

# The address to connect to, and the one to print: 0.0.0.0 is neither, and brackets are Docker's syntax.
SHOWN=$BIND_ADDRESS
case $BIND_ADDRESS in
127.0.0.1 | 0.0.0.0) REACH=127.0.0.1 SHOWN=localhost ;;
'[::]') REACH=::1 SHOWN=localhost ;;
*) REACH=${BIND_ADDRESS#[} REACH=${REACH%]} ;;
esac

# 1 if other machines reach the servers.
OPEN=
if [[ ! $BIND_ADDRESS =~ ^(127\.|\[::1\]$) ]]; then OPEN=1; fi

listening() { (exec 3<>"/dev/tcp/$REACH/$1") 2>/dev/null; }

answers() { # PORT PATH: whether a server answers 200. In a subshell, because writing to a closed connection is a signal
    (
        exec 3<>"/dev/tcp/$REACH/$1"
        printf 'GET %s HTTP/1.0\r\nHost: localhost\r\nX-Auth-Token: admin\r\n\r\n' "$2" >&3
        IFS= read -r -t 5 -u 3 status
        [[ $status == HTTP/*' 200 '* ]]
    ) 2>/dev/null
}

usable_port() { # CONTAINER PORT VARIABLE: fail unless it is free, or published by our own container
    if [[ ! $2 =~ ^[1-9][0-9]{0,4}$ ]] || (($2 > 65535)); then fail 2 "$3 is '$2', not a port number"; fi
    if docker port "$1" 2>/dev/null | grep -q ":$2\$"; then return; fi
    if listening "$2"; then
        fail 5 "port $2 on $BIND_ADDRESS is in use by another program. Fix: stop it, or choose another port with $3=…"
    fi
}

image() { # IMAGE: pull it if it is missing
    local error start=$SECONDS
    if docker image inspect "$1" >/dev/null 2>&1; then return; fi
    say "$1: pulling …"
    error=$(docker pull --quiet "$1" 2>&1 >/dev/null) || fail 1 "cannot pull $1: $(last_line "$error")." \
        "Try: without a registry, \`docker load\` it from a file, or run both servers without Docker by" \
        "\`elab control\` (pip install '.[lab]')"
    say "$1: pulled in $((SECONDS - start)) s"
}

placement_image() { # sets IMAGE. Its tag is a digest of its sources, so a changed pin or base makes a new image
    local work server base pins tree start=$SECONDS
    tree=$(dirname "$(readlink -f "$0")")
    server=$(cat "$tree/ecomp/lab/placement_server.py")
    pins=$PINS$(awk -v "names= ${NAMES//$'\n'/ } " '
        /^[a-z]/ { split($0, word, "=="); found = index(names, " " word[1] " ") } found { printf "\n%s", $0 }
        ' "$tree/constraints.txt")
    image "$PYTHON_IMAGE"
    base=$(docker image inspect -f '{{.Id}}' "$PYTHON_IMAGE")
    IMAGE=ecomp-placement:$(digest "$DOCKERFILE" "$server" "$TLS" "$pins" "$base")
    if docker image inspect "$IMAGE" >/dev/null 2>&1; then
        say "placement image: exists ($IMAGE)"
        return
    fi
    say "placement image: building from $PYTHON_IMAGE and PyPI …"
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # the value now: the variable is gone when the trap runs
    trap "rm -rf '$work'" EXIT
    mkdir "$work/build"
    printf '%s' "$DOCKERFILE" >"$work/build/Dockerfile"
    printf '%s\n' "$pins" >"$work/build/pins.txt"
    printf '%s\n' "$server" >"$work/build/placement_server.py"
    printf '%s' "$TLS" >"$work/build/gunicorn_tls.py"
    if [ -n "$PLACEMENT_BUILD_CA" ]; then cp -- "$PLACEMENT_BUILD_CA" "$work/build/ca.crt"; fi
    if ! docker build --build-arg "BASE=$PYTHON_IMAGE" --tag "$IMAGE" "$work/build" >"$work/log" 2>&1; then
        tail -n 12 "$work/log" | indented
        fail 1 "the placement image could not be built (the end of the log is above)." \
            "Try: if certificates are the problem, set PLACEMENT_BUILD_CA"
    fi
    # The classic builder leaves the install stage behind; BuildKit does not.
    docker image prune --force --filter label=ecomp.stage=install >/dev/null
    say "placement image: built in $((SECONDS - start)) s ($IMAGE)"
}

running_as_wanted() { # NAME ARGUMENTS…
    local name=$1
    shift
    [ "$(docker inspect -f '{{.State.Status}} {{index .Config.Labels "ecomp.settings"}}' "$name" 2>/dev/null)" = \
        "running $(digest "$@")" ]
}

remove() { # NAME: stop it in an orderly way, then remove it
    docker stop "$1" >/dev/null
    docker rm "$1" >/dev/null
}

start() { # NAME ARGUMENTS…: run it with these arguments. Containers hold no data: it is in volumes
    local name=$1 id error
    shift
    if running_as_wanted "$name" "$@"; then
        docker update --restart "$RESTART" "$name" >/dev/null
        say "$name: already running"
        return
    fi
    if there "$name"; then
        say "$name: stopped or with other settings, recreating it"
        remove "$name"
    fi
    # Create and start separately: if create fails, there is nothing to remove.
    # The log driver `local` rotates its files; placement logs every request.
    id=$(docker create --name "$name" --network ecomp --restart "$RESTART" --log-driver local \
        --label "ecomp.settings=$(digest "$@")" "$@" 2>&1) || fail 1 "cannot create $name: $(last_line "$id")"
    if ! error=$(docker start "$name" 2>&1); then
        docker rm "$name" >/dev/null
        fail 1 "cannot start $name: $(printf '%s\n' "$error" | grep -m 1 . || :)"
    fi
}

wait_for() { # NAME COMMAND…: wait until the command succeeds; fail if the container stops, or after 60 s
    local name=$1 begin=$SECONDS state before
    shift
    before=$(docker inspect -f '{{.State.Running}} {{.RestartCount}}' "$name")
    until "$@" >/dev/null 2>&1; do
        state=$(docker inspect -f '{{.State.Running}} {{.RestartCount}}' "$name")
        if [[ $state != "$before" || $state != true* ]]; then
            state='does not stay up'
        elif ((SECONDS - begin >= 60)); then
            state='does not answer after 60 s'
        else
            sleep 0.3
            continue
        fi
        # Before the stop, which logs lines, too. The stopped container stays for `docker logs`.
        docker logs --tail 10 "$name" 2>&1 | indented
        docker stop "$name" >/dev/null
        fail 1 "$name $state (the end of its log is above)"
    done
    say "$name: ready after $((SECONDS - begin)) s"
}

postgres_password() { # generated once and kept as a label of the volume, so it lasts as long as the data
    local password
    if ! docker volume inspect ecomp-postgres >/dev/null 2>&1; then
        password=$(od -An -N 16 -t x1 /dev/urandom | tr -d ' \n')
        docker volume create --label "ecomp.password=$password" ecomp-postgres >/dev/null
    fi
    docker volume inspect -f '{{index .Labels "ecomp.password"}}' ecomp-postgres
}

fence_rule() { # sets BRIDGE and RULES. Packets of this machine to itself or to a container match neither rule
    local drop='-m comment --comment docker.sh -j DROP'
    BRIDGE=br-$(docker network inspect -f '{{slice .Id 0 12}}' ecomp)
    # In `raw`, as in Docker 28, no chain of libvirt or a firewall accepts a packet first. The second rule is for ports
    # published on 127.0.0.1: Docker rewrites that destination before the kernel can reject it as coming from outside.
    RULES=("PREROUTING -t raw -d $(docker network inspect -f '{{(index .IPAM.Config 0).Subnet}}' ecomp) ! -i $BRIDGE $drop"
        "PREROUTING -t raw -d 127.0.0.0/8 ! -i lo $drop")
    grep -q "^ *$BRIDGE:" /proc/net/dev # false if Docker runs on another machine
}

# shellcheck disable=SC2086  # a rule is several arguments
fence() { # Docker before 28 lets all that route through this machine, also its guests, reach the containers
    local rule added='' failed=''
    RESTART=unless-stopped
    if [[ -n $CERTS || $INSECURE = 1 || ! $SERVER =~ ^([0-9]+)\. ]] || ((BASH_REMATCH[1] >= 28)); then
        unfence
        return
    fi
    # After a boot no container may start before the rules are set again. Not on-failure: Docker starts after a power
    # cut what it could not stop, because a container that was cut off counts as failed.
    RESTART=no
    if fence_rule; then
        for rule in "${RULES[@]}"; do
            if iptables -w -C $rule 2>/dev/null; then continue; fi
            if iptables -w -I $rule 2>/dev/null; then added=1; else failed=1; fi
        done
    else
        failed=1
    fi
    [ -z "$failed" ] ||
        fail 1 "Docker $SERVER lets guests and neighbours reach these containers at their own addresses, and the" \
            "iptables rules against it cannot be set here. Fix: run docker.sh as root on Docker's own machine," \
            "install Docker 28, or set CERTS=certs"
    if [ -n "$added" ]; then
        say "Docker $SERVER: iptables rules keep guests and neighbours from the containers until the next boot;" \
            'run docker.sh again after it'
    fi
}

# shellcheck disable=SC2086
unfence() {
    local rule
    fence_rule || return 0
    for rule in "${RULES[@]}"; do iptables -w -D $rule 2>/dev/null || :; done
}

certificates() { # sets CERTS to the absolute path of the directory, or to '' if none is needed
    local name servers=("$REACH")
    if [ -z "$CERTS" ]; then
        if [ -z "$OPEN" ] || [ "$INSECURE" = 1 ]; then return; fi
        CERTS=certs
    fi
    if [ -z "$OPEN" ]; then servers=(localhost "$REACH"); fi
    if [ ! -e "$CERTS/placement/server.crt" ] && [[ $BIND_ADDRESS != 0.0.0.0 && $BIND_ADDRESS != '[::]' ]] &&
        command -v elab >/dev/null; then
        elab certs "$CERTS" --control "${servers[@]}" --etcd-port "$ETCD_PORT" --placement-port "$PLACEMENT_PORT" || exit 1
    fi
    for name in etcd/ca.crt etcd/server.crt etcd/server.key placement/ca.crt placement/server.crt placement/server.key \
        placement/token; do
        [ -r "$CERTS/$name" ] || fail 2 "$CERTS/$name cannot be read." \
            "Fix: run \`elab certs $CERTS --control ADDRESS\` (pip install '.[lab]')," \
            "or set INSECURE=1 to admit all who reach $BIND_ADDRESS"
    done
    CERTS=$(readlink -f "$CERTS")
}

up() {
    local begin=$SECONDS placement error url owner ports='' names='' etcd_names='*' etcd_tls=() scheme=http
    [[ $BIND_ADDRESS =~ ^([0-9]{1,3}\.){3}[0-9]{1,3}$ || $BIND_ADDRESS =~ ^\[[0-9a-fA-F:.]+\]$ ]] ||
        fail 2 "BIND_ADDRESS is '$BIND_ADDRESS', not an address of this machine like 192.0.2.7, 0.0.0.0 or [::1]"
    [[ $PLACEMENT_WORKERS =~ ^[1-9][0-9]*$ ]] || fail 2 "PLACEMENT_WORKERS is '$PLACEMENT_WORKERS', not a number from 1"
    case $PLACEMENT_DATABASE in
    '' | postgresql+psycopg2://*) ;;
    *) fail 2 'PLACEMENT_DATABASE must begin with postgresql+psycopg2://, the only driver in the image' ;;
    esac
    if [ -n "$PLACEMENT_BUILD_CA" ] && [ ! -r "$PLACEMENT_BUILD_CA" ]; then
        fail 2 "PLACEMENT_BUILD_CA: cannot read $PLACEMENT_BUILD_CA"
    fi
    usable_port ecomp-etcd "$ETCD_PORT" ETCD_PORT
    usable_port ecomp-placement "$PLACEMENT_PORT" PLACEMENT_PORT

    certificates
    if [ -n "$CERTS" ]; then
        names="token_file='/certs/token'" scheme=https
        etcd_tls=(--cert-file /certs/server.crt --key-file /certs/server.key --trusted-ca-file /certs/ca.crt
            --client-cert-auth)
    elif [ -z "$OPEN" ]; then
        names="'localhost', '127.0.0.1', '::1', '$REACH', 'ecomp-placement'" etcd_names="localhost,127.0.0.1,::1,$REACH"
    fi
    image "$ETCD_IMAGE"
    placement_image
    if ! docker network inspect ecomp >/dev/null 2>&1; then docker network create ecomp >/dev/null; fi
    fence

    # Without the JSON gateway a malicious web page can only request /health, /metrics and /version of etcd, and cannot
    # read the answer: browsers refuse port 1, so no page has that origin.
    start ecomp-etcd --publish "$BIND_ADDRESS:$ETCD_PORT:2379" --volume ecomp-etcd:/etcd-data \
        ${CERTS:+--volume "$CERTS/etcd:/certs:ro"} --entrypoint etcd \
        "$ETCD_IMAGE" --name ecomp --data-dir /etcd-data "${etcd_tls[@]}" \
        --listen-client-urls "$scheme://0.0.0.0:2379" --advertise-client-urls "$scheme://ecomp-etcd:2379" \
        --auto-compaction-mode periodic --auto-compaction-retention 1h --max-txn-ops 2048 \
        --enable-grpc-gateway=false --host-whitelist "$etcd_names" --cors http://localhost:1
    if [ -z "$CERTS" ]; then
        wait_for ecomp-etcd answers "$ETCD_PORT" /health
    else # with its own certificate, which is for another name than 127.0.0.1
        wait_for ecomp-etcd docker exec ecomp-etcd etcdctl --endpoints https://127.0.0.1:2379 \
            --insecure-skip-tls-verify --cert /certs/server.crt --key /certs/server.key endpoint health
    fi

    url=$PLACEMENT_DATABASE
    if [ -z "$url" ]; then
        image "$POSTGRES_IMAGE"
        POSTGRES_PASSWORD=$(postgres_password)
        [ -n "$POSTGRES_PASSWORD" ] || fail 1 'the volume ecomp-postgres has no label ecomp.password with the' \
            'password of its user placement: docker.sh did not create it. Fix: set PLACEMENT_DATABASE'
        export POSTGRES_PASSWORD # passed by name, so that no process list shows it
        start ecomp-postgres --volume ecomp-postgres:/var/lib/postgresql/data \
            --env POSTGRES_USER=placement --env POSTGRES_DB=placement --env POSTGRES_PASSWORD "$POSTGRES_IMAGE"
        # By TCP: while it sets up its data, the server of the official image listens on its socket only.
        wait_for ecomp-postgres docker exec ecomp-postgres pg_isready -h 127.0.0.1 -U placement -d placement
        url=postgresql+psycopg2://placement:$POSTGRES_PASSWORD@ecomp-postgres/placement
    fi

    export OS_PLACEMENT_DATABASE__CONNECTION=$url
    placement=(--publish "$BIND_ADDRESS:$PLACEMENT_PORT:8080" --add-host host.docker.internal:host-gateway
        --label "ecomp.database=$(digest "$url")" --env OS_PLACEMENT_DATABASE__CONNECTION
        --env OS_API__AUTH_STRATEGY=noauth2)
    if [ -n "$CERTS" ]; then
        # As the owner of the key, which only that user may read.
        owner=$(stat -c %u:%g "$CERTS/placement/server.key")
        placement+=(--volume "$CERTS/placement:/certs:ro" --user "$owner" --cap-drop ALL
            --security-opt no-new-privileges)
    fi
    placement+=("$IMAGE" gunicorn --no-control-socket --workers "$PLACEMENT_WORKERS" --bind 0.0.0.0:8080
        ${CERTS:+--config /opt/server/gunicorn_tls.py} "placement_server:application($names)")
    if ! running_as_wanted ecomp-placement "${placement[@]}"; then
        # Once, before the workers: workers that sync an empty database concurrently conflict.
        if ! error=$(docker run --rm --network ecomp --add-host host.docker.internal:host-gateway \
            --env OS_PLACEMENT_DATABASE__CONNECTION "$IMAGE" placement-manage db sync 2>&1); then
            printf '%s\n' "$error" | grep '^[^[:space:]]' | tail -n 4 | indented || :
            fail 1 "placement's tables could not be created in ${url##*@} (the end of the log is above)"
        fi
        say "placement's tables: up to date"
    fi
    start ecomp-placement "${placement[@]}"
    if [ -z "$CERTS" ]; then
        # A query that reaches the database: / answers 200 without one.
        wait_for ecomp-placement answers "$PLACEMENT_PORT" \
            '/resource_providers?uuid=00000000-0000-0000-0000-000000000000'
    else
        wait_for ecomp-placement docker exec ecomp-placement python3 -c "$ASK"
    fi

    say "ready after $((SECONDS - begin)) s: etcd at $SHOWN:$ETCD_PORT, placement at $scheme://$SHOWN:$PLACEMENT_PORT/"
    if [ -n "$CERTS" ]; then
        if [ "$ETCD_PORT $PLACEMENT_PORT" != '2379 8080' ]; then
            ports=" --etcd-port $ETCD_PORT --placement-port $PLACEMENT_PORT"
        fi
        say "to make certificates for clients:" \
            "elab certs $CERTS$ports --compute HOST... --scheduler NAME... --operator NAME..."
    elif [ -n "$OPEN" ]; then
        printf 'docker.sh: neither requires a password: all who reach %s can do everything\n' "$BIND_ADDRESS" >&2
    else
        say 'without certificates, every user of this machine can write to etcd and placement. Fix: CERTS=certs ./docker.sh'
    fi
}

down() {
    local name volumes found=''
    for name in ecomp-placement ecomp-postgres ecomp-etcd; do
        if there "$name"; then
            remove "$name"
            say "$name: stopped and removed"
            found=1
        fi
    done
    if docker network inspect ecomp >/dev/null 2>&1; then
        unfence
        docker network rm ecomp >/dev/null
        say 'network ecomp: removed'
    fi
    if [ -z "$found" ]; then say 'nothing was running'; fi
    volumes=$(docker volume ls --quiet --filter name='^ecomp-etcd$' --filter name='^ecomp-postgres$' | tr '\n' ' ')
    if [ -n "$volumes" ]; then say "the data stays. To delete it, too: docker volume rm ${volumes% }"; fi
}

usage() { fail 2 'usage: ./docker.sh [up | down | --help]'; }

[ $# -le 1 ] || usage
case ${1-up} in
up | down) ;;
-h | --help)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
*) usage ;;
esac
command -v docker >/dev/null ||
    fail 2 'the docker command is missing. Fix: install Docker Engine (Debian, Ubuntu: docker.io)'
SERVER=$(docker version --format '{{.Server.Version}}' 2>&1) ||
    fail 7 "no Docker daemon answers (is it running, and may you use it?): $(last_line "$SERVER")"
"${1-up}"
