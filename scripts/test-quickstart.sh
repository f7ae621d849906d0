#!/usr/bin/env bash
# Tests deploy/quickstart.sh with real masters and clients: what it does, and that nothing outlives it. Uses the
# binaries of the workspace, which it builds first. Its last line is as the test runner's, which test.sh counts.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
cd "$repo"
. scripts/env.sh
quickstart=$repo/deploy/quickstart.sh
if [ -z "${QUICKSTART_TEST_NAMESPACE:-}" ]; then
    cargo build --quiet --workspace --bins
    # In a network of its own, in which no port is taken and none of the cluster's is one that the kernel gives to
    # whoever dials: on the machine's own loopback, a client that dials a master that is down can get its port.
    namespace=(unshare --net)
    [ "$(id -u)" = 0 ] || namespace=(unshare --map-root-user --net)
    if "${namespace[@]}" true 2>/dev/null; then
        QUICKSTART_TEST_NAMESPACE=own exec "${namespace[@]}" "$repo/scripts/test-quickstart.sh"
    fi
    echo "test-quickstart: no network namespaces here: on the machine's own loopback" >&2
else
    python3 - <<'PY'
import fcntl, socket, struct
with socket.socket() as s:
    # SIOCSIFFLAGS: up.
    fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 1))
PY
    echo "40000 49999" >/proc/sys/net/ipv4/ip_local_port_range
fi

# A space in every path. Also how processes are recognised as this test's own.
tmp=$(mktemp -d "/tmp/quickstart test.XXXXXX")
dir=$tmp/da\ ta
passed=0 failed=0
# How long a cluster may take to come up, to end, and to be gone after SIGKILL: generous, a pass never takes it.
UP_S=300 END_S=60 GONE_S=60

# ---- helpers -------------------------------------------------------------------------------------------

# Processes that have this test's folder in their arguments, or the mark that `launch` gives to everything that
# quickstart starts.
leftovers() {
    local proc args environment
    for proc in /proc/[0-9]*; do
        { mapfile -d '' -t args <"$proc/cmdline" && mapfile -d '' -t environment <"$proc/environ"; } 2>/dev/null || continue
        if [[ "${args[*]:-}" = *"$tmp"* || "${environment[*]:-}" = *"QUICKSTART_TEST=$tmp"* ]]; then
            echo "${proc#/proc/} ${args[*]:-}"
        fi
    done
}

none_left() { [ -z "$(leftovers)" ]; }

# poll SECONDS COMMAND...: until it succeeds.
poll() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $deadline ] || return 1
        sleep 0.05
    done
}

ended() {
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 0
    stat=${stat##*) }
    [[ $stat = [ZX]* ]]
}

# launch LOG ARG...: starts quickstart as a terminal would, with SIGINT not ignored; sets $pid.
launch() {
    local log=$1
    shift
    # Before anybody reads it: the new process may not have come that far.
    : >"$log"
    env --default-signal=INT,QUIT,HUP,TERM QUICKSTART_TEST="$tmp" "$quickstart" "$@" >"$log" 2>&1 &
    pid=$!
}

# expect_end PID CODE: it ends in time, with that code.
expect_end() {
    local code=0
    poll $END_S ended "$1" || { echo "still running after $END_S s" >&2; return 1; }
    wait "$1" || code=$?
    [ "$code" = "$2" ] || { echo "exit code $code, expected $2" >&2; return 1; }
}

says() { grep -qF -- "$2" "$1" || { echo "$1 does not say '$2'" >&2; return 1; }; }

# until_says PID LOG TEXT: the running script prints it.
until_says() {
    local deadline=$((SECONDS + UP_S))
    until grep -qF -- "$3" "$2"; do
        ! ended "$1" || { echo "ended before it said '$3'" >&2; return 1; }
        [ $SECONDS -lt $deadline ] || { echo "does not say '$3' within $UP_S s" >&2; return 1; }
        sleep 0.05
    done
}

nothing_left() {
    none_left || { echo "still running:"; leftovers; return 1; } >&2
}

clean_up() {
    local left
    left=$(leftovers | cut -d' ' -f1)
    [ -z "$left" ] || kill -KILL $left 2>/dev/null || true
    rm -rf "$tmp"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# check NAME FUNCTION: one test, in a shell of its own; errors end it.
check() {
    local ok=ok before=$SECONDS code=0
    # Not as a condition: that would switch `set -e` off inside.
    set +e
    (
        set -e
        trap - EXIT
        "$2"
    ) >"$tmp/check.log" 2>&1
    code=$?
    set -e
    if [ $code = 0 ]; then
        passed=$((passed + 1))
    else
        ok=FAILED failed=$((failed + 1))
    fi
    echo "test $1 ... $ok ($((SECONDS - before)) s)"
    if [ $code != 0 ]; then
        tail -n 60 "$tmp/check.log" "$tmp"/*.out 2>/dev/null || true
        # The next test starts from nothing.
        local left
        left=$(leftovers | cut -d' ' -f1)
        [ -z "$left" ] || kill -KILL $left 2>/dev/null || true
        poll $GONE_S none_left || true
    fi
}

# An offset where every port is free, above the ports of the end-to-end tests.
free_offset() {
    python3 - "$@" <<'PY'
import socket, sys
bases = [50051, 50061, 50071, 9003, 9013, 9023, 25001, 25002, 25003, 9300, 9310, 9320]
for offset in range(int(sys.argv[1]), 7700, 7):
    held = []
    try:
        for base in bases:
            s = socket.socket()
            held.append(s)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", base + offset))
    except OSError:
        continue
    finally:
        for s in held:
            s.close()
    print(offset)
    break
else:
    sys.exit("no free ports")
PY
}

# cluster_tool COMMAND ...: what a test does with cluster.json.
cluster_tool() {
    python3 - "$dir/cluster.json" "$@" <<'PY'
import json, os, signal, subprocess, sys, time, urllib.request
path, command, *rest = sys.argv[1:]
with open(path) as f:
    cluster = json.load(f)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

def get(url):
    with opener.open(url, timeout=60) as answer:
        return answer.read()

def node_status(node):
    for endpoint in cluster["endpoints"]:
        try:
            nodes = json.loads(get(endpoint + "/api/v1/nodes"))["nodes"]
            return [n["status"] for n in nodes if n["node_id"] == node][0]
        except (OSError, IndexError):
            pass
    return None

def ready(process):
    try:
        get("http://%s/readyz" % process["addresses"]["http"])
    except OSError:
        return False
    return process["role"] == "master" or node_status(process["id"]) == "up"

def poll(what, condition, seconds=300):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"not within {seconds} s: {what}")
        time.sleep(0.05)

def processes(role):
    return [p for p in cluster["processes"] if p["role"] == role]

if command == "endpoints":
    print("\n".join(cluster["endpoints"]))
elif command == "verify":
    # What it says of each process is what the kernel says.
    assert [p["role"] for p in cluster["processes"]] == ["master"] * 3 + ["client"] * 3, cluster
    for p in cluster["processes"]:
        proc = "/proc/%d/" % p["pid"]
        with open(proc + "cmdline", "rb") as f:
            assert f.read().decode().split("\0")[:-1] == p["argv"], p
        with open(proc + "environ", "rb") as f:
            pairs = [e.split("=", 1) for e in f.read().decode().split("\0") if e]
        assert dict(pairs) == p["env"], (pairs, p["env"])
        assert os.path.isdir(p["data_dir"]) and os.path.isfile(p["log"]), p
        assert ready(p), p
        # The filter reaches both programs: what they tell of a start is of level INFO.
        with open(p["log"]) as f:
            assert (" INFO " in f.read()) != bool(rest), p["log"]
        assert p["env"].get("RUST_LOG") == (rest[0] if rest else None), p["env"]
elif command == "restart":
    # Killed, noticed, and started again by hand from what the file says.
    victim = processes(rest[0])[1]
    os.kill(victim["pid"], signal.SIGKILL)
    poll("the death is noticed", lambda: not ready(victim))
    with open(victim["log"], "ab") as log:
        again = subprocess.Popen(victim["argv"], env=victim["env"], stdin=subprocess.DEVNULL,
                                 stdout=log, stderr=log, start_new_session=True)
    poll("ready again", lambda: ready(victim))
    assert again.poll() is None, "it ended"
    print(again.pid)
else:
    sys.exit("what is " + command + "?")
PY
}

# same_files A B: the same regular files, byte for byte.
same_files() {
    python3 - "$@" <<'PY'
import os, sys
def files(root):
    found = {}
    for at, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(at, name), "rb") as f:
                found[os.path.relpath(os.path.join(at, name), root)] = f.read()
    return found
a, b = map(files, sys.argv[1:])
assert a, "no files"
assert a == b, [k for k in a.keys() | b.keys() if a.get(k) != b.get(k)]
PY
}

disk_bytes() { du -sb --total "$dir/offset-$1"/client-* | tail -n 1 | cut -f1; }

model=$tmp/a\ model
mkdir -p "$model/sub/folder" "$model/empty folder"
head -c 15000000 /dev/urandom >"$model/model.safetensors"
head -c 5000001 /dev/urandom >"$model/sub/folder/vocab.bin"
echo '{}' >"$model/.config.json"
: >"$model/empty"
: >"$tmp/forever"
unset RUST_LOG
offset=$(free_offset 6100)
other=$(free_offset $((offset + 7)))

# ---- tests ---------------------------------------------------------------------------------------------

bad_usage() {
    local code=0
    (cd "$model" && "$quickstart" .) >"$tmp/1.out" 2>&1 || code=$?
    [ $code = 2 ]
    says "$tmp/1.out" "lies inside MODEL_DIR"
    [ ! -e "$model/.mooncake" ]
    for args in --dir --no-such "--port-offset x" "--port-offset 10001" "$tmp/nowhere"; do
        code=0
        "$quickstart" $args >"$tmp/1.out" 2>&1 || code=$?
        [ $code = 2 ]
    done
}

# A `cargo` that has a child of its own and never ends.
interrupted_build() {
    local bin=$tmp/bin signal
    mkdir -p "$bin"
    printf '#!/bin/bash\ntail -f "%s/forever" &\necho started\nwait\n' "$tmp" >"$bin/cargo"
    chmod +x "$bin/cargo"
    building() { [ "$(leftovers | grep -cE 'bin/cargo build|tail -f')" -ge 2 ]; }
    for signal in INT:130 TERM:143 HUP:129 KILL:137; do
        PATH=$bin:$PATH launch "$tmp/2.out" --dir "$dir" --port-offset "$offset"
        poll $UP_S building
        if [ $signal = INT:130 ]; then
            # Its ports are not taken yet.
            local code=0
            "$quickstart" --dir "$dir" --port-offset "$offset" >"$tmp/3.out" 2>&1 || code=$?
            [ $code = 1 ]
            says "$tmp/3.out" "ports are taken or will be"
            says "$tmp/3.out" --port-offset
            says "$tmp/3.out" --dir
        fi
        kill "-${signal%:*}" $pid
        expect_end $pid "${signal#*:}"
        poll $GONE_S none_left || nothing_left
    done
}

# With a proxy in the environment that nobody can reach: loopback needs none.
demonstration() {
    local paths path before
    http_proxy=http://127.0.0.1:1 ALL_PROXY=http://127.0.0.1:1 timeout $UP_S "$quickstart" --dir "$dir" \
        --port-offset "$offset" "$model" >"$tmp/1.out" 2>&1
    nothing_left
    mapfile -t paths < <(sed -n 's/^quickstart: \(\/.*\) equals .*/\1/p' "$tmp/1.out")
    [ ${#paths[@]} = 3 ]
    for path in "${paths[@]}"; do
        [[ $path = "$dir"/* ]]
        same_files "$model" "$path"
    done
    # Again, the model being there: no more space is taken; and Ctrl-C is the normal end.
    before=$(disk_bytes "$offset")
    launch "$tmp/2.out" --keep --dir "$dir" --port-offset "$offset" "$model"
    until_says $pid "$tmp/2.out" "running until Ctrl-C"
    [ "$(grep -c ' equals ' "$tmp/2.out")" = 3 ]
    [ "$(disk_bytes "$offset")" -lt $((before + (1 << 20))) ]
    kill -INT $pid
    expect_end $pid 0
    nothing_left
}

by_hand() {
    local ctl code=0 job stranger restarted endpoint
    # A model of its own, allowed by a path relative to another folder than the script's.
    mkdir -p "$tmp/else where/models/m"
    head -c 3000000 /dev/urandom >"$tmp/else where/models/m/weights.bin"
    pushd "$tmp/else where" >/dev/null
    launch "$tmp/1.out" --no-demo --allow-source ./models --allow-source http://127.0.0.1:1/models --dir "../da ta" --port-offset "$offset"
    popd >/dev/null
    until_says $pid "$tmp/1.out" "running until Ctrl-C"
    cluster_tool verify
    ctl=("$CARGO_TARGET_DIR/debug/mooncakectl")
    for endpoint in $(cluster_tool endpoints); do ctl+=(--endpoint "$endpoint"); done
    job=by-hand
    timeout $UP_S "${ctl[@]}" distribute "$tmp/else where/models/m" --job-id $job --all --watch
    timeout $UP_S "${ctl[@]}" jobs get $job -o json | python3 -c 'import json, sys
job = json.load(sys.stdin)
assert job["status"] == "completed", job
print("\n".join(p["local_path"] for p in job["placements"]))' >"$tmp/paths"
    [ "$(wc -l <"$tmp/paths")" = 3 ]
    while IFS= read -r path; do same_files "$tmp/else where/models/m" "$path"; done <"$tmp/paths"

    restarted=$(cluster_tool restart client)
    restarted+=" $(cluster_tool restart master)"

    "$quickstart" --dir "$dir" --port-offset "$offset" >"$tmp/2.out" 2>&1 || code=$?
    [ $code = 1 ]
    says "$tmp/2.out" "ports are taken on 127.0.0.1"
    says "$tmp/2.out" --port-offset
    says "$tmp/2.out" --dir

    # Somebody else's process that looks into a data folder is not stopped.
    tail -f --pid=$BASHPID -- "$tmp/forever" --data-dir "$dir/offset-$offset/master-1" >/dev/null 2>&1 &
    stranger=$!
    kill -TERM $pid
    expect_end $pid 0
    for process in $restarted; do ended "$process"; done
    if ended $stranger; then
        echo "a stranger's process was stopped" >&2
        return 1
    fi
    kill -KILL $stranger
    poll $GONE_S none_left || nothing_left
}

# The same folder, other ports: another cluster, which forms; and a killed script takes all with it.
killed() {
    rm -rf "$dir/logs"
    RUST_LOG=warn launch "$tmp/1.out" --no-demo --dir "$dir" --port-offset "$other"
    until_says $pid "$tmp/1.out" "running until Ctrl-C"
    cluster_tool verify warn
    kill -KILL $pid
    poll $GONE_S none_left || nothing_left
}

check bad_usage bad_usage
check interrupted_build interrupted_build
check demonstration demonstration
check restarted_by_hand by_hand
check killed killed

result=ok
[ $failed = 0 ] || result=FAILED
echo "test result: $result. $passed passed; $failed failed; 0 ignored"
[ $failed = 0 ]
