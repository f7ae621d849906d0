#!/usr/bin/env bash
# Every check of the project: format, lints, unit, property, integration and crash tests, and the end-to-end
# tests with real processes. Installs what it needs. Ends with one summary; exits 0 only if all of it passed.
#
# Usage: ./test.sh            everything
#        ./test.sh NAME ...   only the named steps (fmt, clippy, crash, sabotage, tests, quickstart, rdma)
set -euo pipefail
cd "$(dirname "$0")"

only=("$@")
for name in "$@"; do
    case "$name" in
    fmt | clippy | crash | sabotage | tests | quickstart | rdma) ;;
    *)
        echo "test.sh: there is no step '$name'; the steps are fmt, clippy, crash, sabotage, tests, quickstart, rdma" >&2
        exit 2
        ;;
    esac
done

# python3-venv: the real model is loaded with the safetensors package; e2fsprogs, mount: disks that fail; iproute2,
# nftables: hosts and what happens between them; haproxy, nginx-light: deploy/; libfaketime: wall clocks that jump.
scripts/setup.sh python3-venv e2fsprogs mount iproute2 nftables haproxy nginx-light libfaketime
. scripts/env.sh
logs=$CARGO_TARGET_DIR/test-logs
mkdir -p "$logs"

passed=0 failed=0 skipped=0 table=()

# step NAME COMMAND...: runs it, shows it live, counts the test runner's results.
step() {
    local name=$1 log=$logs/$1.log started=$SECONDS ok=ok
    shift
    if [ ${#only[@]} -gt 0 ] && [[ " ${only[*]} " != *" $name "* ]]; then return; fi
    printf '\n==== %s: %s\n' "$name" "$*"
    if ! "$@" 2>&1 | tee "$log"; then ok=FAILED; fi
    local p f s
    read -r p f s < <(sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed; \([0-9]*\) ignored.*/\1 \2 \3/p' "$log" |
        awk '{p += $1; f += $2; s += $3} END {print p + 0, f + 0, s + 0}')
    if [ $((p + f + s)) = 0 ]; then
        # A step that is one check: it passed or failed as a whole.
        if [ $ok = ok ]; then p=1; else f=1; fi
    elif [ $ok = FAILED ] && [ "$f" = 0 ]; then
        f=1 # it did not get as far as a result line: a build failed or a test program died
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    table+=("$(printf '%-10s %-7s %4d passed %3d failed %3d skipped  %4d s' "$name" "$ok" "$p" "$f" "$s" $((SECONDS - started)))")
}

step fmt cargo fmt --check
step clippy cargo clippy --quiet --workspace --all-targets -- -D warnings
# First, because they build the product with failpoints and with switches that break it on purpose, which the binaries
# under test must not have.
broken=mooncake-client/failpoints,mooncake-master/sabotage,mooncake-chaos/sabotage
step crash cargo test --quiet --workspace --features $broken --test store_crash
step sabotage bash -c "cargo build --quiet --workspace --bins --features $broken && cargo test --quiet --workspace --features $broken --test sabotage"
step tests bash -c 'cargo build --quiet --workspace --bins --examples && cargo test --workspace --all-targets --no-fail-fast'
step quickstart scripts/test-quickstart.sh
# In virtual machines; where this host cannot run any it says so, loudly.
step rdma rdma/vm/test.sh

printf '\n==== summary\n'
printf '%s\n' "${table[@]}"
if [ "$skipped" != 0 ]; then
    echo "WARNING: $skipped tests were skipped; a skipped check counts as not done"
fi
echo "$passed passed, $failed failed, $skipped skipped"
if [ "$passed" = 0 ]; then
    echo "FAILED: nothing was checked"
fi
[ "$failed" = 0 ] && [ "$skipped" = 0 ] && [ "$passed" -gt 0 ]
