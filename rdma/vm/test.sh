#!/usr/bin/env bash
# Tests RDMA on a real RDMA stack, without RDMA hardware: masters, nodes and the transport's probe in virtual machines
# with soft-RoCE. Builds the workspace's binaries first. Its last line is as the test runner's, which test.sh counts.
#
# Usage: test.sh              the short set, on the stock kernel
#        test.sh --all        everything: larger models, relays, faults, figures, two machines, two kernels
#        test.sh NAME ...     these tests, on the stock kernel or RDMA_VM_KERNEL; between_hosts: the one in two machines
#   RDMA_TEST_LIMIT_S    how long one machine may run: 600, with --all 3600; a busy host needs more
#   RDMA_TEST_SIZE_MIB   size of the model: 64, with --all 256
#   RDMA_TEST_KERNELS    of --all: "stock 6.12"; see run.sh for what can stand there
#   RDMA_TEST_BIN_DIR    test the programs that are in this folder, build none
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
. scripts/env.sh

SHORT=(job_over_rdma pool_bound device_removed_and_back no_device no_library memlock)
# In machines of their own kind or by the host, so not by name.
LONG=("${SHORT[@]}" job_over_tcp relay tcp_only_peer killed_peer frozen_peer corrupt_bytes wrong_key thousand_connections)
FIGURES=(bandwidth whole_path)

all='' tests=()
while [ $# -gt 0 ]; do
    case $1 in
    --all) all=1 ;;
    -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' "$0"; exit 0 ;;
    -*)
        echo "rdma/vm/test.sh: unknown option $1" >&2
        exit 2
        ;;
    *) tests+=("$1") ;;
    esac
    shift
done
limit=${RDMA_TEST_LIMIT_S:-$([ -n "$all" ] && echo 3600 || echo 600)}
size=${RDMA_TEST_SIZE_MIB:-$([ -n "$all" ] && echo 256 || echo 64)}
# Five copies of the model, the programs, and the processes.
memory=$((size * 6 + 1024))
passed=0 failed=0 ignored=0
tmp=$(mktemp -d "${TMPDIR:-/tmp}/rdma-test.XXXXXX")
running=()
clean_up() {
    [ ${#running[@]} = 0 ] || kill -TERM "${running[@]}" 2>/dev/null || true
    wait
    rm -rf "$tmp"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

finish() {
    local result=ok
    [ $failed = 0 ] || result=FAILED
    echo "test result: $result. $passed passed; $failed failed; $ignored ignored"
    [ $failed = 0 ]
}

# Only what no command of this host can change is a reason to skip.
cannot=
if [ "$(uname -m)" != x86_64 ]; then
    cannot="the machine's packages are for amd64, this host is $(uname -m)"
elif ! command -v qemu-system-x86_64 >/dev/null && ! scripts/setup.sh qemu-system-x86; then
    cannot="there is no qemu on this host, and its package manager has none"
fi
if [ -n "$cannot" ]; then
    ignored=${#SHORT[@]}
    echo "SKIPPED, SKIPPED: no test of RDMA was run: $cannot" >&2
    finish
    exit
fi

bin=${RDMA_TEST_BIN_DIR:-}
if [ -z "$bin" ]; then
    cargo build --quiet --workspace --bins --examples
    bin=$CARGO_TARGET_DIR/debug
fi
programs=()
for program in mooncake_master mooncake_client mooncakectl rdma_probe; do
    path=$bin/$program
    [ -e "$path" ] || path=$bin/examples/$program
    # run.sh says what is missing.
    programs+=(--bin "$path=$program")
done

# machine KERNEL OPTION ...: sets $machine to the start of the command that runs another one in a virtual machine which
# has the programs and the tests in it. An array, not a function that runs it: what is started in the background is
# then the runner itself, which ends its machine with it.
machine() {
    machine=("$here/run.sh" --kernel "$1" --limit "$limit" --memory "$memory" --file "$here/guest=/vm/guest" "${programs[@]}"
        --env "SIZE_MIB=$size" --env "WAIT_S=$((limit / 3))" "${@:2}" -- /bin/bash /vm/guest/main.sh)
}

# count KERNEL LOG CODE TEST ...: what the machine's log says of each test; of which it says nothing, that failed.
count() {
    local kernel=$1 log=$2 code=$3 test
    shift 3
    for test in "$@"; do
        if grep -q "^test $test \.\.\. ok" "$log"; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            grep -q "^test $test \.\.\. FAILED" "$log" ||
                echo "test $test ... FAILED: its machine ended with $code before it did (kernel $kernel)"
        fi
    done
}

# in_machine KERNEL TEST ...
in_machine() {
    local kernel=$1 code=0
    shift
    echo "in a machine with kernel $kernel, models of $size MiB:"
    machine "$kernel"
    "${machine[@]}" "$@" | tee "$tmp/log" || code=${PIPESTATUS[0]}
    count "$kernel" "$tmp/log" $code "$@"
}

# between_machines KERNEL: two of them with a link between; each side is a test.
between_machines() {
    local kernel=$1 side code names=(between_hosts_seed between_hosts_follower)
    echo "in two machines with kernel $kernel, a model of $size MiB:"
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$tmp/secret"
    chmod 600 "$tmp/secret"
    running=()
    for side in 1 2; do
        machine "$kernel" --link "$tmp/link$side:$tmp/link$((3 - side))" --address 10.77.0.$side \
            --file "$tmp/secret=/vm/secret" --env SECRET=/vm/secret --env HOST=10.77.0.$side --env MASTER_HOST=10.77.0.1
        "${machine[@]}" "${names[side - 1]}" >"$tmp/log$side" 2>&1 &
        running+=($!)
    done
    for side in 1 2; do
        code=0
        wait "${running[side - 1]}" || code=$?
        cat "$tmp/log$side"
        count "$kernel" "$tmp/log$side" $code "${names[side - 1]}"
    done
    running=()
}

# expect NAME STATUS COMMAND ...: a test of the runner itself.
expect() {
    local name=$1 status=$2 code=0
    shift 2
    "$@" >"$tmp/log" 2>&1 || code=$?
    if [ $code = "$status" ]; then
        passed=$((passed + 1))
        echo "test $name ... ok"
    else
        failed=$((failed + 1))
        cat "$tmp/log"
        echo "test $name ... FAILED: exit status $code, expected $status"
    fi
}

runner() {
    expect runner_passes_on_the_status 7 "$here/run.sh" --limit "$limit" -- bash -c 'rdma link show rxe0/1 | grep -q ACTIVE && exit 7'
    expect runner_says_that_the_machine_died 125 "$here/run.sh" --limit "$limit" -- bash -c 'echo c >/proc/sysrq-trigger; sleep 60'
    expect runner_stops_at_the_limit 124 "$here/run.sh" --limit 60 -- sleep 3600
    expect runner_has_hosts_without_libraries_and_devices 0 "$here/run.sh" --limit "$limit" --no-device --no-libraries -- \
        bash -c '! ibv_devinfo && [ -z "$(ls /sys/class/infiniband 2>/dev/null)" ]'
}

if [[ " ${tests[*]} " = *" between_hosts "* ]]; then
    between_machines "${RDMA_VM_KERNEL:-stock}"
    rest=()
    for test in "${tests[@]}"; do [ "$test" = between_hosts ] || rest+=("$test"); done
    [ ${#rest[@]} = 0 ] || in_machine "${RDMA_VM_KERNEL:-stock}" "${rest[@]}"
elif [ ${#tests[@]} -gt 0 ]; then
    in_machine "${RDMA_VM_KERNEL:-stock}" "${tests[@]}"
elif [ -z "$all" ]; then
    in_machine stock "${SHORT[@]}"
else
    runner
    for kernel in ${RDMA_TEST_KERNELS:-stock 6.12}; do
        in_machine "$kernel" "${LONG[@]}"
        in_machine "$kernel" "${FIGURES[@]}"
        between_machines "$kernel"
    done
fi
finish
