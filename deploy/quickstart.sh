#!/usr/bin/env bash
# Builds Mooncake distribution, starts three masters and three clients on this machine, distributes a model
# to all three clients and checks the copies.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: deploy/quickstart.sh [options] [MODEL_DIR]

Builds everything, starts three masters (HTTP 127.0.0.1:9003, :9013, :9023) and three clients (node ids
127.0.0.1:25001, :25002, :25003), distributes MODEL_DIR to the clients with a live progress display,
checks the staged folders, prints where they are and stops everything. Without MODEL_DIR it makes a
sample model of 256 MiB.

Options:
  --keep                 leave the cluster up until Ctrl-C or SIGTERM
  --no-demo              start the cluster without distributing anything (implies --keep)
  --allow-source PREFIX  let the clients read sources below this folder or URL prefix; repeatable
  --dir DIR              data, logs and cluster.json (default: ./.mooncake)
  --port-offset N        add N to every port
  -h, --help             this text

DIR/cluster.json names, for each process, its role, id, pid, addresses, data folder, and the exact
arguments and environment with which it can be started again by hand.

Exit codes: 0 all copies are staged and equal, 1 something failed (the message says what), 2 bad usage.
USAGE
}

die() {
    echo "quickstart: $*" >&2
    exit 1
}

keep=0 demo=1 dir=./.mooncake offset=0 model=
allow=()
while [ $# -gt 0 ]; do
    case "$1" in
    --keep) keep=1 ;;
    --no-demo) demo=0 keep=1 ;;
    --allow-source | --dir | --port-offset)
        [ $# -ge 2 ] || { echo "quickstart: $1 needs a value" >&2; exit 2; }
        case "$1" in
        --allow-source) allow+=("$2") ;;
        --dir) dir=$2 ;;
        --port-offset) offset=$2 ;;
        esac
        shift
        ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "quickstart: unknown option $1 (see --help)" >&2; exit 2 ;;
    *)
        [ -z "$model" ] || { echo "quickstart: one MODEL_DIR, not two (see --help)" >&2; exit 2; }
        model=$1
        ;;
    esac
    shift
done
[[ "$offset" =~ ^[0-9]+$ ]] && [ "$offset" -le 10000 ] || { echo "quickstart: --port-offset takes 0 to 10000" >&2; exit 2; }
if [ -n "$model" ]; then
    [ -d "$model" ] || die "MODEL_DIR '$model' is not a folder"
    model=$(realpath "$model")
fi
mkdir -p "$dir"
dir=$(realpath "$dir")
cd "$(dirname "$0")/.."

# ---- one quickstart per folder and per set of ports ---------------------------------------------------

exec 9>"$dir/quickstart.lock"
flock -n 9 || die "another quickstart uses $dir: stop it, or give this one --dir and --port-offset"
rpc_ports=(50051 50061 50071) http_ports=(9003 9013 9023)
data_ports=(25001 25002 25003) client_http_ports=(9300 9310 9320)
for list in rpc_ports http_ports data_ports client_http_ports; do
    declare -n ports=$list
    for i in 0 1 2; do
        ports[i]=$((ports[i] + offset))
        if (exec 3<>"/dev/tcp/127.0.0.1/${ports[i]}") 2>/dev/null; then
            die "port ${ports[i]} is taken (by another quickstart?): stop what listens there, or use --port-offset N"
        fi
    done
    unset -n ports
done

# ---- build ---------------------------------------------------------------------------------------------

names=() pids=() roles=() ids=() addresses=() folders=() argvs=()
waited=

# Runs a long command such that a signal to this shell is handled at once, not when the command is done.
watched() {
    local code=0
    "$@" 9>&- &
    waited=$!
    wait "$waited" || code=$?
    waited=
    return $code
}

# Processes that somebody restarted by hand from cluster.json: same binary, same data folder.
restarted_by_hand() {
    local pid i
    for pid in $(pgrep -x 'mooncake_master|mooncake_client' || true); do
        for i in "${!folders[@]}"; do
            if tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qxF -- "${folders[i]}"; then
                echo "$pid"
            fi
        done
    done
}

stop_all() {
    trap - EXIT INT TERM HUP
    local pid deadline=$((SECONDS + 10)) all
    all="$waited ${pids[*]} $(restarted_by_hand)"
    for pid in $all; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in $all; do
        while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $deadline ]; do
            # A child of this shell that ended is a zombie until it is waited for.
            [ "$(ps -o stat= -p "$pid" 2>/dev/null | cut -c1)" = Z ] && break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
    wait 2>/dev/null || true
}
trap 'code=$?; stop_all; exit $code' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

watched scripts/setup.sh
. scripts/env.sh
echo "quickstart: building (the first time takes about 20 minutes, RocksDB most of it)"
watched cargo build --quiet --workspace --bins
bin=$CARGO_TARGET_DIR/debug

# ---- processes -----------------------------------------------------------------------------------------

json_string() {
    local s=${1//\\/\\\\}
    s=${s//\"/\\\"}
    printf '"%s"' "$s"
}

json_list() {
    local sep=
    printf '['
    for item in "$@"; do
        printf '%s' "$sep"
        json_string "$item"
        sep=', '
    done
    printf ']'
}

# start ROLE ID ADDRESSES_JSON FOLDER ARGV...
start() {
    local role=$1 id=$2 where=$3 folder=$4 name
    shift 4
    name=$role-${id##*:}
    mkdir -p "$folder" "$dir/logs"
    # The kernel ends the process with this shell, even if the shell is killed with SIGKILL.
    RUST_LOG="${RUST_LOG:-info}" setpriv --pdeathsig KILL "$@" >>"$dir/logs/$name.log" 2>&1 9>&- &
    pids+=($!)
    names+=("$name") roles+=("$role") ids+=("$id") addresses+=("$where") folders+=("$folder")
    argvs+=("$(json_list "$@")")
}

write_cluster_json() {
    local i sep=
    {
        printf '{\n  "endpoints": %s,\n  "processes": [' "$(json_list "${http_ports[@]/#/http://127.0.0.1:}")"
        for i in "${!names[@]}"; do
            printf '%s\n    {"role": "%s", "id": "%s", "pid": %d, "addresses": %s,\n     "data_dir": %s, "log": %s,\n     "argv": %s,\n     "env": {"RUST_LOG": %s}}' \
                "$sep" "${roles[i]}" "${ids[i]}" "${pids[i]}" "${addresses[i]}" "$(json_string "${folders[i]}")" \
                "$(json_string "$dir/logs/${names[i]}.log")" "${argvs[i]}" "$(json_string "${RUST_LOG:-info}")"
            sep=,
        done
        printf '\n  ]\n}\n'
    } >"$dir/cluster.json.partial"
    mv "$dir/cluster.json.partial" "$dir/cluster.json"
}

initial=
for i in 0 1 2; do
    initial+="${initial:+,}$((i + 1))=127.0.0.1:${rpc_ports[i]}/127.0.0.1:${http_ports[i]}"
done
for i in 0 1 2; do
    start master "$((i + 1))" \
        "{\"rpc\": \"127.0.0.1:${rpc_ports[i]}\", \"http\": \"127.0.0.1:${http_ports[i]}\"}" "$dir/master-$((i + 1))" \
        "$bin/mooncake_master" --node-id "$((i + 1))" --data-dir "$dir/master-$((i + 1))" \
        --rpc-address "127.0.0.1:${rpc_ports[i]}" --http-address "127.0.0.1:${http_ports[i]}" \
        --initial-cluster "$initial" --bootstrap
done
sample=$dir/sample-model
allowed=()
for prefix in ${allow[@]+"${allow[@]}"} "${model:-$sample}"; do
    allowed+=(--allow-source "$prefix")
done
masters=$(printf ',127.0.0.1:%s' "${rpc_ports[@]}")
for i in 0 1 2; do
    node=127.0.0.1:${data_ports[i]}
    start client "$node" \
        "{\"data\": \"$node\", \"http\": \"127.0.0.1:${client_http_ports[i]}\"}" "$dir/client-${data_ports[i]}" \
        "$bin/mooncake_client" --node-id "$node" --data-address "$node" --root "$dir/client-${data_ports[i]}" \
        --http-address "127.0.0.1:${client_http_ports[i]}" --masters "${masters#,}" "${allowed[@]}"
done
write_cluster_json

check_alive() {
    local i
    for i in "${!pids[@]}"; do
        kill -0 "${pids[i]}" 2>/dev/null && continue
        tail -n 20 "$dir/logs/${names[i]}.log" >&2
        die "${names[i]} ended; the end of its log ($dir/logs/${names[i]}.log) is above"
    done
}

ctl=("$bin/mooncakectl")
for port in "${http_ports[@]}"; do
    ctl+=(--endpoint "http://127.0.0.1:$port")
done

echo "quickstart: waiting for three masters and three nodes"
deadline=$((SECONDS + 60))
until ready=0 && for port in "${http_ports[@]}"; do
    curl -sf -o /dev/null --max-time 2 "http://127.0.0.1:$port/readyz" && ready=$((ready + 1))
done; [ "$ready" = 3 ] && [ "$("${ctl[@]}" nodes -o json 2>/dev/null | grep -c '"status": *"up"')" = 3 ]; do
    check_alive
    [ $SECONDS -lt $deadline ] || die "the cluster is not ready after 60 s; logs are in $dir/logs"
    sleep 0.2
done
echo "quickstart: the cluster is up; API at http://127.0.0.1:${http_ports[0]}, processes in $dir/cluster.json"

# ---- the demonstration ---------------------------------------------------------------------------------

make_sample() {
    [ -f "$sample/.complete" ] && return
    rm -rf "$sample"
    mkdir -p "$sample/tokenizer/vocab"
    echo "quickstart: making a sample model of 256 MiB in $sample"
    local n
    for n in 1 2 3; do
        head -c $((80 << 20)) /dev/urandom >"$sample/model-0000$n-of-00003.safetensors"
    done
    head -c $((16 << 20)) /dev/urandom >"$sample/tokenizer/vocab/merges.bin"
    echo '{"model_type": "sample"}' >"$sample/config.json"
    echo '{"version": 1}' >"$sample/tokenizer/tokenizer.json"
    : >"$sample/tokenizer/empty"
    : >"$sample/.complete"
}

if [ $demo = 1 ]; then
    [ -n "$model" ] || make_sample
    source_dir=${model:-$sample}
    echo "quickstart: distributing $source_dir to three nodes"
    job=quickstart-$(date +%s)-$$
    # The revision names the run: the same folder may have other content next time.
    watched "${ctl[@]}" distribute "$source_dir" --job-id "$job" --revision "$job" --all --seed "127.0.0.1:${data_ports[0]}" --watch ||
        die "the distribution failed (see above); logs are in $dir/logs"
    paths=$("${ctl[@]}" jobs get "$job" -o json | sed -n 's/.*"local_path": *"\(.*\)",\{0,1\}$/\1/p')
    [ "$(printf '%s\n' "$paths" | grep -c .)" = 3 ] || die "expected three staged folders, got: ${paths:-none}"
    while IFS= read -r path; do
        watched diff -r "$source_dir" "$path" || die "$path differs from $source_dir"
        echo "quickstart: $path equals $source_dir"
    done <<<"$paths"
fi

if [ $keep = 1 ]; then
    echo "quickstart: running until Ctrl-C or SIGTERM; try: $bin/mooncakectl --endpoint http://127.0.0.1:${http_ports[0]} nodes"
    # Processes that a test kills and restarts by hand are none of this shell's business: it only waits.
    watched sleep infinity
else
    echo "quickstart: done; stopping the cluster (--keep leaves it up)"
fi
