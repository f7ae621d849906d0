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
  --port-offset N        add N (0 to 10000) to every port; each offset is a cluster with data of its own
  -h, --help             this text

DIR/cluster.json names, for each process, its role, id, pid, addresses, data folder, and the exact
arguments and environment with which it can be started again by hand. The processes get RUST_LOG,
RUST_BACKTRACE, proxy and SSL_CERT_* variables from yours, nothing else. Processes that you started again by
hand are stopped with the others.

Running it again with the same DIR starts the same cluster: a model that is staged already is not copied again.
Copies stay in DIR; remove the folder to be rid of them.

Exit codes:
  0    all copies are staged and equal; or, with --keep and --no-demo, ended by Ctrl-C, SIGTERM or SIGHUP
  1    something failed; the message says what
  2    bad usage
  129, 130, 143   ended by SIGHUP, Ctrl-C, SIGTERM before it was done
USAGE
}

die() {
    echo "quickstart: $*" >&2
    exit 1
}

bad_usage() {
    echo "quickstart: $* (see --help)" >&2
    exit 2
}

keep=0 demo=1 dir=./.mooncake offset=0 model=
allow=()
while [ $# -gt 0 ]; do
    case "$1" in
    --keep) keep=1 ;;
    --no-demo) demo=0 keep=1 ;;
    --allow-source | --dir | --port-offset)
        [ -n "${2:-}" ] || bad_usage "$1 needs a value"
        case "$1" in
        --allow-source)
            # Below, the working directory is another one.
            case "$2" in
            *://*) allow+=("$2") ;;
            *) allow+=("$(realpath -ms -- "$2")") ;;
            esac
            ;;
        --dir) dir=$2 ;;
        --port-offset) offset=$2 ;;
        esac
        shift
        ;;
    -h | --help) usage; exit 0 ;;
    -*) bad_usage "unknown option $1" ;;
    *)
        [ -z "$model" ] || bad_usage "one MODEL_DIR, not two"
        model=$1
        ;;
    esac
    shift
done
[[ "$offset" =~ ^[0-9]{1,5}$ ]] && offset=$((10#$offset)) && [ "$offset" -le 10000 ] || bad_usage "--port-offset takes 0 to 10000"
dir=$(realpath -m -- "$dir")
if [ -n "$model" ]; then
    [ -d "$model" ] || bad_usage "MODEL_DIR '$model' is not a folder"
    model=$(realpath -- "$model")
    # The copies would become part of the model, and its files change while they are read.
    [[ "$dir/" != "${model%/}/"* ]] || bad_usage "the data folder $dir lies inside MODEL_DIR $model: give --dir a folder outside of it"
fi
cd "$(dirname "$0")/.."

# ---- one quickstart per set of ports and per folder -----------------------------------------------------

rpc_ports=(50051 50061 50071) http_ports=(9003 9013 9023)
data_ports=(25001 25002 25003) client_http_ports=(9300 9310 9320)
for i in 0 1 2; do
    for list in rpc_ports http_ports data_ports client_http_ports; do
        declare -n ports=$list
        ports[i]=$((ports[i] + offset))
        unset -n ports
    done
done
elsewhere="stop it, or give this one other ports with --port-offset N and a folder of its own with --dir DIR"

# From the kernel's table of sockets: a connection attempt would disturb whoever listens there.
check_ports() {
    local where state port taken=()
    while read -r _ where _ state _; do
        # Listening, on 127.0.0.1 or on every address; IPv4 or IPv6 that takes IPv4 too.
        [[ $state = 0A && $where =~ ^(0100007F|7F000001|0{8}|0{32}|0{16}(FFFF0000|0000FFFF)(0100007F|7F000001)):(.*)$ ]] || continue
        port=$((16#${BASH_REMATCH[4]}))
        [[ " ${rpc_ports[*]} ${http_ports[*]} ${data_ports[*]} ${client_http_ports[*]} " = *" $port "* ]] && taken+=("$port")
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    [ ${#taken[@]} = 0 ] || die "ports are taken on 127.0.0.1 (by another quickstart?): ${taken[*]}; $elsewhere"
}

check_ports
mkdir -p "$dir"
exec 9>"$dir/quickstart.lock"
flock -n 9 || die "another quickstart uses $dir, its ports are taken or will be: $elsewhere"
# What the last run left behind would name the wrong processes.
rm -f "$dir/cluster.json"
# Addresses are part of a cluster's identity: other ports, another cluster.
data=$dir/offset-$offset
mkdir -p "$data" "$dir/logs"

# ---- processes: none outlives this script ---------------------------------------------------------------

names=() pids=() roles=() ids=() addresses=() folders=() argvs=()
waited= serving=0

# Runs a command in a process group of its own, away from the terminal's signals: this shell alone decides
# when it ends. TERM ends the whole group; the kernel sends it if this shell is killed with SIGKILL. The
# comparison is for the case that this happened before `setpriv` asked for it.
guard='trap "kill -KILL 0" TERM; [ "$PPID" = "$0" ] || exit 1; "$@" & wait $!'

# Runs a long command such that a signal to this shell is handled at once, not when the command is done.
watched() {
    local code=0
    setsid setpriv --pdeathsig TERM bash -c "$guard" $$ "$@" 9>&- &
    waited=$!
    wait "$waited" || code=$?
    waited=
    return $code
}

# Whether the process is a child of this shell and alive: a recorded pid may be a stranger's by now.
is_child() {
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
    stat=${stat##*) }
    [[ $stat = [!ZX]" $$ "* ]]
}

# Every master and client of this cluster, whoever started it: recognised by its data folder.
members() {
    local proc args folder i
    for proc in /proc/[0-9]*; do
        { mapfile -d '' -t args <"$proc/cmdline"; } 2>/dev/null || continue
        [[ ${args[0]:-} = *mooncake_@(master|client) ]] || continue
        for i in "${!args[@]}"; do
            [[ ${args[i]} = --data-dir || ${args[i]} = --root ]] || continue
            for folder in ${folders[@]+"${folders[@]}"}; do
                [ "${args[i + 1]:-}" != "$folder" ] || echo "${proc#/proc/}"
            done
        done
    done
}

stop_all() {
    local pid all now deadline=$((SECONDS + 10)) told=" "
    # Asked again: at once.
    trap 'deadline=0' INT TERM HUP
    trap - EXIT
    while :; do
        all=()
        for pid in $waited ${pids[@]+"${pids[@]}"}; do
            ! is_child "$pid" || all+=("$pid")
        done
        mapfile -t -O ${#all[@]} all < <(members)
        [ ${#all[@]} -gt 0 ] || break
        now=$SECONDS
        for pid in "${all[@]}"; do
            if [ "$now" -ge "$deadline" ]; then
                # Of a watched command the whole group.
                [ "$pid" != "$waited" ] || kill -KILL -- "-$pid" 2>/dev/null || true
                kill -KILL "$pid" 2>/dev/null || true
            elif [[ $told != *" $pid "* ]]; then
                kill -TERM "$pid" 2>/dev/null || true
                told+="$pid "
            fi
        done
        if [ "$deadline" -gt 0 ] && [ "$now" -ge $((deadline + 5)) ]; then
            echo "quickstart: cannot stop: ${all[*]}" >&2
            break
        fi
        sleep 0.1
    done
}
# A cluster that was to run until a signal ends well with it.
ended_by() { [ $serving = 1 ] && exit 0 || exit "$1"; }
trap 'code=$?; stop_all; exit $code' EXIT
trap 'ended_by 129' HUP
trap 'ended_by 130' INT
trap 'ended_by 143' TERM

# ---- build ---------------------------------------------------------------------------------------------

# In the foreground: sudo may ask for a password.
scripts/setup.sh 9>&-
. scripts/env.sh
echo "quickstart: building (the first time takes about 20 minutes, RocksDB most of it)"
watched cargo build --quiet --workspace --bins || die "the build failed, see above"
bin=$CARGO_TARGET_DIR/debug
[[ $bin = /* ]] || bin=$PWD/$bin

# ---- masters and clients -------------------------------------------------------------------------------

# What the processes may know of this environment, so that cluster.json can tell all of it.
environment=()
for name in RUST_LOG RUST_BACKTRACE {http,https,all,no}_proxy {HTTP,HTTPS,ALL,NO}_PROXY SSL_CERT_FILE SSL_CERT_DIR; do
    [ -z "${!name+set}" ] || environment+=("$name=${!name}")
done

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

json_object() {
    local sep=
    printf '{'
    for item in "$@"; do
        printf '%s%s: %s' "$sep" "$(json_string "${item%%=*}")" "$(json_string "${item#*=}")"
        sep=', '
    done
    printf '}'
}

# start ROLE ID ADDRESSES_JSON FOLDER ARGV...
start() {
    local role=$1 id=$2 where=$3 folder=$4 name
    shift 4
    name=$role-${id##*:}
    mkdir -p "$folder"
    # As in `watched`, but the process is exactly the command, in exactly this environment.
    setsid setpriv --pdeathsig KILL bash -c '[ "$PPID" = "$0" ] && exec "$@"' $$ \
        env -i ${environment[@]+"${environment[@]}"} "$@" >>"$dir/logs/$name.log" 2>&1 9>&- &
    pids+=($!)
    names+=("$name") roles+=("$role") ids+=("$id") addresses+=("$where") folders+=("$folder")
    argvs+=("$(json_list "$@")")
}

write_cluster_json() {
    local i sep=
    # A proxy's URL may hold a password.
    rm -f "$dir/cluster.json.partial"
    (
        umask 077
        exec >"$dir/cluster.json.partial"
        printf '{\n  "endpoints": %s,\n  "processes": [' "$(json_list "${http_ports[@]/#/http://127.0.0.1:}")"
        for i in "${!names[@]}"; do
            printf '%s\n    {"role": "%s", "id": "%s", "pid": %d, "addresses": %s,\n     "data_dir": %s, "log": %s,\n     "argv": %s,\n     "env": %s}' \
                "$sep" "${roles[i]}" "${ids[i]}" "${pids[i]}" "${addresses[i]}" "$(json_string "${folders[i]}")" \
                "$(json_string "$dir/logs/${names[i]}.log")" "${argvs[i]}" "$(json_object ${environment[@]+"${environment[@]}"})"
            sep=,
        done
        printf '\n  ]\n}\n'
    )
    mv "$dir/cluster.json.partial" "$dir/cluster.json"
}

# The build may have taken long.
check_ports
initial=
for i in 0 1 2; do
    initial+="${initial:+,}$((i + 1))=127.0.0.1:${rpc_ports[i]}/127.0.0.1:${http_ports[i]}"
done
for i in 0 1 2; do
    start master "$((i + 1))" \
        "{\"rpc\": \"127.0.0.1:${rpc_ports[i]}\", \"http\": \"127.0.0.1:${http_ports[i]}\"}" "$data/master-$((i + 1))" \
        "$bin/mooncake_master" --node-id "$((i + 1))" --data-dir "$data/master-$((i + 1))" \
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
        "{\"data\": \"$node\", \"http\": \"127.0.0.1:${client_http_ports[i]}\"}" "$data/client-${data_ports[i]}" \
        "$bin/mooncake_client" --node-id "$node" --data-address "$node" --root "$data/client-${data_ports[i]}" \
        --http-address "127.0.0.1:${client_http_ports[i]}" --masters "${masters#,}" "${allowed[@]}"
done
write_cluster_json

check_alive() {
    local i
    for i in "${!pids[@]}"; do
        is_child "${pids[i]}" && continue
        tail -n 20 "$dir/logs/${names[i]}.log" >&2
        die "${names[i]} ended; the end of its log ($dir/logs/${names[i]}.log) is above"
    done
}

# get PORT PATH: never through a proxy.
get() { curl -sf --noproxy '*' --max-time 2 "http://127.0.0.1:$1$2"; }

is_ready() {
    local port nodes
    for port in "${http_ports[@]}"; do
        get "$port" /readyz >/dev/null || return 1
    done
    nodes=$(get "${http_ports[0]}" /api/v1/nodes) || return 1
    [ "$(grep -oE '"status": *"up"' <<<"$nodes" | wc -l)" = 3 ]
}

echo "quickstart: waiting for three masters and three nodes"
deadline=$((SECONDS + 60))
until is_ready; do
    check_alive
    [ $SECONDS -lt $deadline ] || die "the cluster is not ready after 60 s; logs are in $dir/logs"
    sleep 0.2
done
echo "quickstart: the cluster is up; API at http://127.0.0.1:${http_ports[0]}, processes in $dir/cluster.json"

# ---- the demonstration ---------------------------------------------------------------------------------

# The same bytes every time: the same model, which nobody has to copy twice.
sample_model='
set -eu
rm -rf "$1" "$1.partial"
mkdir -p "$1.partial/tokenizer/vocab"
cd "$1.partial"
numbers() { seq "${1}00000000" "${1}99999999" 2>/dev/null | head -c $(($2 << 20)); }
for n in 1 2 3; do
    numbers $n 80 >"model-0000$n-of-00003.safetensors"
done
numbers 4 16 >tokenizer/vocab/merges.bin
echo "{\"model_type\": \"sample\"}" >config.json
echo "{\"version\": 1}" >tokenizer/tokenizer.json
echo "*.safetensors binary" >.gitattributes
: >tokenizer/empty
mv "$1.partial" "$1"'

# The files only: a model has no empty folders.
compare='
set -euo pipefail
list() { (cd -- "$1" && find -L . -type f -print0 | LC_ALL=C sort -z); }
diff --text <(list "$1" | tr "\0" "\n") <(list "$2" | tr "\0" "\n") >&2
list "$1" | while IFS= read -r -d "" file; do cmp -- "$1/$file" "$2/$file" >&2; done'

if [ $demo = 1 ]; then
    if [ -z "$model" ] && [ ! -d "$sample" ]; then
        echo "quickstart: making a sample model of 256 MiB in $sample"
        watched bash -c "$sample_model" - "$sample" || die "cannot make the sample model, see above"
    fi
    source_dir=${model:-$sample}
    ctl=("$bin/mooncakectl")
    for port in "${http_ports[@]}"; do
        ctl+=(--endpoint "http://127.0.0.1:$port")
    done
    echo "quickstart: distributing $source_dir to three nodes"
    job=quickstart-$(date +%s)-$$
    # Without --revision: it is made from the content, which may be another one next time.
    watched "${ctl[@]}" distribute "$source_dir" --job-id "$job" --all --seed "127.0.0.1:${data_ports[0]}" --watch ||
        die "the distribution failed (see above); logs are in $dir/logs"
    watched "${ctl[@]}" jobs get "$job" -o json >"$data/job.json" || die "cannot read job $job (see above)"
    paths=$(sed -n 's/.*"local_path": *"\(.*\)",\{0,1\}$/\1/p' "$data/job.json")
    [ "$(printf '%s\n' "$paths" | grep -c .)" = 3 ] || die "expected three staged folders, got: ${paths:-none}"
    while IFS= read -r path; do
        watched bash -c "$compare" - "$source_dir" "$path" || die "$path differs from $source_dir"
        echo "quickstart: $path equals $source_dir"
    done <<<"$paths"
fi

if [ $keep = 1 ]; then
    serving=1
    echo "quickstart: running until Ctrl-C or SIGTERM; try: $bin/mooncakectl --endpoint http://127.0.0.1:${http_ports[0]} nodes"
    # Processes that a test kills and restarts by hand are none of this shell's business: it only waits.
    watched sleep infinity
else
    echo "quickstart: done; stopping the cluster (--keep leaves it up)"
fi
