# shellcheck shell=bash
# Sourced in the virtual machine: what goes wrong in the middle of a transfer.

# A receiver takes so many bytes per second, so that there is a middle.
SLOWLY=(--download-limit "${SLOW_MIB:-8}MiB")

# moving N TRANSPORT BYTES: node N has so many over it. For `poll`.
moving() { [ "$(received "$1" "$2")" -ge "$3" ]; }

# Most that may come twice after a fault: DESIGN's bound, twice what was on its way from the peer, which is --rdma-depth
# blocks.
again() { echo $((2 * 16 * BLOCK)); }

device_removed_and_back() {
    local before
    start_master
    make_model model "$SIZE_MIB"
    start 1
    start 2 "${SLOWLY[@]}"
    post model job 1 1 2
    poll moving 2 rdma $((size / 8))
    remove_device
    completed job model
    at_least "$(received 2 tcp)" 1 "bytes over TCP to node 2"
    at_most "$(received 2 rdma)" $((size - 1)) "bytes over RDMA to node 2"
    came_by job '"rdma","tcp"'
    at_most "$(($(metric 2 refetched_bytes_total) + $(metric 2 duplicate_bytes_total)))" "$(again)" "bytes that came twice"
    # Which of the two sees it first is chance; the receiver tells what it does instead.
    says 2 'blocks go over TCP'
    grep -q 'RDMA failed; blocks go over TCP for now' "$dir"/[12].node.log || fault "neither node says that RDMA failed"
    at_least $(($(metric 1 rdma_fallbacks_total) + $(metric 2 rdma_fallbacks_total))) 1 "fallbacks"
    echo "measured: $(received 2 rdma) bytes over RDMA, then $(received 2 tcp) over TCP, $(metric 2 refetched_bytes_total) of them again"

    # Its pause grows by every attempt that failed; jobs go on meanwhile.
    restore_device
    make_model small 8
    before=$(received 2 rdma)
    local until=$((SECONDS + WAIT_S)) try=0
    until [ "$(received 2 rdma)" -gt "$before" ]; do
        [ $SECONDS -lt $until ] || fault "no byte over RDMA within $WAIT_S s of the device's return"
        try=$((try + 1))
        REVISION=back$number-$try post small "back$try" 1 1 2
        completed "back$try" small
        sleep 1
    done
    echo "measured: over RDMA again with job $try after the device's return"
}

# interrupted COMMAND...: three nodes; two have the model, the third is fetching it when this is done to the second.
interrupted() {
    start_master
    make_model model "$SIZE_MIB"
    start 1
    start 2
    post model first 1 1 2
    completed first model
    start 3 "${SLOWLY[@]}"
    post model second 1 3
    poll moving 3 rdma $((size / 8))
    "$@"
    completed second model
    at_least "$(received 3 rdma)" $((size / 2)) "bytes over RDMA to node 3"
    at_most "$(($(metric 3 refetched_bytes_total) + $(metric 3 duplicate_bytes_total)))" "$(again)" "bytes that came twice"
}

killed_peer() { interrupted eval 'kill -KILL $(cat "$dir/2.pid")'; }

# The kernel of a frozen process goes on answering reads of its memory; its promises end.
frozen_peer() { interrupted eval 'kill -STOP $(cat "$dir/2.pid")'; }

# Node 2 holds what it should not; whoever gets that takes it from somebody else.
corrupt_bytes() {
    local file at
    start_master
    make_model model "$SIZE_MIB"
    start 1
    start 2
    post model first 1 1 2
    completed first model
    file=$(find "$dir/2" -name weights.bin | head -n 1)
    # One byte of every block, so that whichever is asked of it is damaged. Same inode, same size, as a failing disk.
    chmod u+w "$file"
    for ((at = 100; at < size; at += BLOCK)); do
        printf 'damaged' | dd of="$file" bs=1 seek=$at conv=notrunc 2>/dev/null
    done
    start 3
    post model second 1 3
    completed second model
    says 3 'sent bytes that are not what it had announced'
    at_most "$(received 3 tcp)" 0 "bytes over TCP to node 3"
}
