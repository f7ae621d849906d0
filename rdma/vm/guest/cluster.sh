# shellcheck shell=bash
# Sourced in the virtual machine: masters, nodes, models and what they say, for the tests.
#
# In the environment: SIZE_MIB of a model; WAIT_S, how long one thing may take; HOST, the address that processes
# listen on; SECRET, a file, if that is not loopback.

: "${SIZE_MIB:=64}" "${WAIT_S:=300}" "${HOST:=127.0.0.1}" "${SECRET:=}"
MASTER_HOST=${MASTER_HOST:-$HOST}
work=/tmp/work
mkdir -p "$work"
endpoint=http://$MASTER_HOST:9003
secret=()
[ -z "$SECRET" ] || secret=(--cluster-secret-file "$SECRET")
export RUST_BACKTRACE=0 NO_COLOR=1

fault() {
    echo "$*" >&2
    return 1
}

# check NAME: runs the function in a shell of its own, in which an error ends it; then nothing of it is left.
check() {
    local before=$SECONDS code
    # Each test has its folder and its ports, so that no node is taken for one of an earlier test.
    dir=$work/$number
    mkdir -p "$dir"
    (
        set -e
        "$1"
    ) >"$dir/test.log" 2>&1
    code=$?
    stop_nodes "$dir"
    restore_device >>"$dir/test.log" 2>&1 || code=1
    # What a test measured is told whether it passed or not.
    sed -n 's/^measured: /  /p' "$dir/test.log"
    if [ $code = 0 ]; then
        echo "test $1 ... ok ($((SECONDS - before)) s)"
    else
        echo "test $1 ... FAILED ($((SECONDS - before)) s)"
        local log
        for log in "$dir"/test.log "$dir"/*.node.log "$work"/master.log; do
            [ ! -s "$log" ] || { echo "---- the end of ${log##*/}"; tail -n 40 "$log"; }
        done
        echo "---- the end of the kernel's log"
        dmesg | grep -v 'speed is unknown' | tail -n 15
    fi
    rm -rf "$dir"
    return $code
}

# poll COMMAND...: until it succeeds, for WAIT_S at most.
poll() {
    local until=$((SECONDS + WAIT_S))
    until "$@"; do
        [ $SECONDS -lt $until ] || fault "not within $WAIT_S s: $*" || return 1
        sleep 0.1
    done
}

# get URL: the body, if the status is 200. By hand: busybox, being static, cannot look up even a literal address.
get() { timeout 20 /bin/bash "$here/get.sh" "$1" 2>/dev/null; }

# ---- masters and nodes -----------------------------------------------------------------------------------

# One for all tests of a machine.
start_master() {
    [ ! -e "$work/master.log" ] || return 0
    mooncake_master --node-id 1 --data-dir "$work/master" --rpc-address "$HOST:50051" --http-address "$HOST:9003" \
        --initial-cluster "1=$HOST:50051/$HOST:9003" --bootstrap "${secret[@]}" >"$work/master.log" 2>&1 &
    echo $! >"$work/master.pid"
    # Not /readyz: a master that is alone hears of no quorum while nobody writes.
    poll get "$endpoint/leaderz" >/dev/null
}

data_port() { echo $((20000 + number * 10 + $1)); }
http_port() { echo $((30000 + number * 10 + $1)); }
node() { echo "$HOST:$(data_port "$1")"; }

# launch N FLAG...: node N of this test, as $as (empty: root), not waited for.
as=()
launch() {
    local n=$1
    shift
    mkdir -p "$dir/$n"
    [ ${#as[@]} = 0 ] || chown 1000:1000 "$dir/$n"
    "${as[@]}" mooncake_client --node-id "$(node "$n")" --data-address "$(node "$n")" \
        --http-address "$HOST:$(http_port "$n")" --root "$dir/$n" --masters "$MASTER_HOST:50051" \
        --allow-source "$work" "${secret[@]}" "$@" >>"$dir/$n.node.log" 2>&1 &
    echo $! >"$dir/$n.pid"
}

registered() { get "http://$HOST:$(http_port "$1")/metrics" | grep -q '^mooncake_client_session_registered 1'; }

# start N FLAG...: and it is known to the master.
start() {
    launch "$@"
    up "$1"
}

up() {
    local until=$((SECONDS + WAIT_S))
    until registered "$1"; do
        kill -0 "$(cat "$dir/$1.pid")" 2>/dev/null || fault "node $1 ended at its start" || return 1
        [ $SECONDS -lt $until ] || fault "node $1 is not up within $WAIT_S s" || return 1
        sleep 0.1
    done
}

# stop_nodes DIR: all of this test.
stop_nodes() {
    local file pid
    for file in "$1"/*.pid; do
        [ -e "$file" ] || continue
        pid=$(cat "$file")
        kill -CONT "$pid" 2>/dev/null
        kill -KILL "$pid" 2>/dev/null
        # The nodes were started by a shell that has ended.
        while [ -e "/proc/$pid" ] && ! grep -qs '^State:.Z' "/proc/$pid/status"; do sleep 0.02; done
    done
}

# metric N NAME [LABEL]: the sum of the lines of this name that have the label; nothing where the node shows none.
metric() {
    get "http://$HOST:$(http_port "$1")/metrics" |
        awk -v name="mooncake_client_$2" -v label="${3:-}" '
            { key = $1; sub(/\{.*/, "", key) }
            key == name && (label == "" || index($1, label)) { sum += $2; found = 1 }
            END { if (found) printf "%.0f\n", sum }'
}

# received N TRANSPORT: bytes that node N took from other nodes over it.
received() {
    local bytes
    bytes=$(metric "$1" received_bytes_total "transport=\"$2\"")
    echo "${bytes:-0}"
}

says() { grep -qE -- "$2" "$dir/$1.node.log" || fault "the log of node $1 does not say '$2'"; }

# ---- models and jobs -------------------------------------------------------------------------------------

# repeatable MIB: bytes that are the same in every machine, and of which no two blocks are.
repeatable() {
    local i
    seq 1000000 1400000 >"$work/numbers"
    for ((i = 0; i < $1; i++)); do
        dd if="$work/numbers" bs=1048576 count=1 skip=$((i * 4097)) iflag=skip_bytes,fullblock 2>/dev/null
    done
}

# make_model NAME MIB: files of random bytes, and their manifest with the revision REVISION; once per machine.
make_model() {
    [ ! -e "$work/$1.json" ] || return 0
    mkdir -p "$work/$1"
    if [ -z "${REPEATABLE:-}" ]; then
        head -c $(($2 << 20)) /dev/urandom >"$work/$1/weights.bin"
    else
        repeatable "$2" >"$work/$1/weights.bin"
    fi
    echo '{}' >"$work/$1/config.json"
    mooncakectl manifest create "$work/$1" --model-id "$1" --revision REVISION -o "$work/$1.json.partial"
    mv "$work/$1.json.partial" "$work/$1.json"
}

# post NAME JOB SEED NODE...: a job that copies the model NAME, as a version of its own, from node SEED to these.
post() {
    local name=$1 job=$2 seed=$3 to='' n
    shift 3
    for n in "$@"; do to+=,$(node "$n"); done
    sed "s/REVISION/${REVISION:-r$number}/g" "$work/$name.json" >"$dir/$job.json"
    mooncakectl --endpoint "$endpoint" distribute "$dir/$job.json" --job-id "$job-$number" --seed "$(node "$seed")" --to "${to#,}"
}

# completed JOB MODEL: waits for it, and every copy equals the model byte for byte.
completed() {
    local paths path
    timeout "$WAIT_S" mooncakectl --endpoint "$endpoint" jobs watch "$1-$number" || fault "job $1 did not complete" || return 1
    mooncakectl --endpoint "$endpoint" jobs get "$1-$number" -o json >"$dir/$1.answer"
    mapfile -t paths < <(sed -n 's/.*"local_path": *"\(.*\)",\{0,1\}$/\1/p' "$dir/$1.answer")
    [ ${#paths[@]} -gt 0 ] || fault "job $1 names no folders"
    if grep '"checksum_verified": *false' "$dir/$1.answer"; then fault "not every checksum was verified"; fi
    for path in "${paths[@]}"; do
        # Of a job between machines only those of this one.
        [ -z "${HERE:-}" ] || [[ $path = $HERE/* ]] || continue
        cmp "$work/$2/weights.bin" "$path/weights.bin"
        cmp "$work/$2/config.json" "$path/config.json"
    done
}

# came_by JOB TRANSPORTS: what the completed job's one placement that came from a peer says of itself.
came_by() {
    local said
    said=$(tr -d ' \n' <"$dir/$1.answer" | grep -o '"transports":\[[^]]*\]' | sort)
    [ "$said" = "\"transports\":[$2]" ] || fault "job $1: its placements came by '$said', not $2"
}

# at_least NUMBER BOUND WHAT, at_most: compares integers, and says what was compared.
at_least() { [ "${1:-0}" -ge "$2" ] || fault "$3: ${1:-nothing}, expected $2 or more"; }
at_most() { [ -n "$1" ] && [ "$1" -le "$2" ] || fault "$3: ${1:-nothing}, expected $2 or less"; }

# ---- the device ------------------------------------------------------------------------------------------

remove_device() { rdma link delete rxe0; }

restore_device() {
    [ "${DEVICE:-rxe}" != none ] || return 0
    [ -e /sys/class/infiniband/rxe0 ] || rdma link add rxe0 type rxe netdev "$(ls /sys/class/net | grep -vx lo | head -n 1)" || return 1
    poll grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
}

# objects KIND: how many of them (qp, mr, pd, cq, ctx) rxe0 has.
objects() { rdma resource show rxe0 | grep -oE "\b$1 [0-9]+" | cut -d' ' -f2; }
