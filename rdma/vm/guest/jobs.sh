# shellcheck shell=bash
# Sourced in the virtual machine: jobs over RDMA, and what nodes do that have none.

# Blocks of all these models are so large: below 512 MiB it is the least.
BLOCK=$((256 << 10))
size=$((SIZE_MIB << 20))

# flag VALUE: to choose the transport, of a client that has a choice.
transport() {
    if mooncake_client --help | grep -q -e --transport; then echo --transport "$1"; fi
}

# Without RDMA at all: what the tests beside it are measured by, and that they can run here.
job_over_tcp() {
    start_master
    make_model model "$SIZE_MIB"
    start 1 $(transport tcp)
    start 2 $(transport tcp)
    post model job 1 1 2
    completed job model
    at_least "$(metric 2 fetched_bytes_total)" "$size" "bytes that node 2 fetched"
    came_by job '"tcp"'
}

job_over_rdma() {
    start_master
    make_model model "$SIZE_MIB"
    start 1
    start 2
    post model job 1 1 2
    completed job model
    at_least "$(received 2 rdma)" "$size" "bytes over RDMA to node 2"
    at_most "$(received 2 tcp)" 0 "bytes over TCP to node 2"
    at_least "$(metric 1 sent_bytes_total 'transport="rdma"')" "$size" "bytes that node 1 gave to be read"
    at_most "$(metric 2 rdma_fallbacks_total)" 0 "fallbacks of node 2"
    came_by job '"rdma"'
}

# Each takes its part from the others, not everything from the seed.
relay() {
    local n all=0
    start_master
    make_model model "$SIZE_MIB"
    for n in 1 2 3 4; do start $n; done
    post model job 1 1 2 3 4
    completed job model
    for n in 2 3 4; do
        at_least "$(received $n rdma)" "$size" "bytes over RDMA to node $n"
        at_most "$(received $n tcp)" 0 "bytes over TCP to node $n"
        all=$((all + $(received $n rdma)))
    done
    at_least "$((all - $(metric 1 served_bytes_total)))" "$size" "bytes that the followers had from each other"
}

# Eight models at once, with less registered memory than they would have outstanding; it is looked at all the while.
pool_bound() {
    local job most=0 now bound n until=$((SECONDS + WAIT_S))
    start_master
    start 1 --rdma-memory 16MiB
    start 2 --rdma-memory 16MiB
    bound=$((16 << 20))
    at_most "$(metric 2 rdma_registered_limit_bytes)" $bound "what node 2 takes for its bound"
    make_model small 8
    for job in 1 2 3 4 5 6 7 8; do REVISION=r$number-$job post small "job$job" 1 1 2 >/dev/null; done
    for job in 1 2 3 4 5 6 7 8; do
        until mooncakectl --endpoint "$endpoint" jobs get "job$job-$number" -o json | grep -q '"status": *"completed"'; do
            [ $SECONDS -lt $until ] || fault "job $job is not completed within $WAIT_S s"
            for n in 1 2; do
                now=$(metric $n rdma_registered_bytes)
                [ "${now:-0}" -le "$most" ] || most=$now
            done
            sleep 0.3
        done
        completed "job$job" small
    done
    for n in 1 2; do
        # What the node itself saw between two looks.
        now=$(metric $n rdma_registered_peak_bytes)
        [ "${now:-0}" -le "$most" ] || most=$now
    done
    at_least "$most" $BLOCK "the most memory that was registered"
    at_most "$most" "$bound" "the most memory that was registered"
    at_least "$(received 2 rdma)" $((64 << 20)) "bytes over RDMA to node 2"
    at_most "$(received 2 tcp)" 0 "bytes over TCP to node 2"
    echo "measured: registered memory under eight transfers at once: at most $most of $bound bytes"
}

# A node that must not use it, among those that do.
tcp_only_peer() {
    start_master
    make_model model "$SIZE_MIB"
    start 1
    start 2
    start 3 --transport tcp
    post model job 1 1 2 3
    completed job model
    at_most "$(received 3 rdma)" 0 "bytes over RDMA to node 3"
    at_least "$(received 3 tcp)" "$size" "bytes over TCP to node 3"
    at_least "$(received 2 rdma)" 1 "bytes over RDMA to node 2"
    # Node 3 may pass on what it has, and then by TCP.
    at_least "$(($(received 2 rdma) + $(received 2 tcp)))" "$size" "bytes to node 2"
}

# job_by_tcp WHY: two nodes of which none can use RDMA do their job without it, and say why in these words.
job_by_tcp() {
    post model job 1 1 2
    completed job model
    at_most "$(received 2 rdma)" 0 "bytes over RDMA to node 2"
    at_least "$(received 2 tcp)" "$size" "bytes over TCP to node 2"
    says 2 "RDMA cannot be used here; blocks go over TCP.*($1)"
}

ended() { ! kill -0 "$1" 2>/dev/null; }

# refused WHY: a node that is told to use RDMA and nothing else ends at its start, and says why.
refused() {
    local code=0
    launch 9 --transport rdma
    poll ended "$(cat "$dir/9.pid")"
    wait "$(cat "$dir/9.pid")" || code=$?
    at_least "$code" 1 "exit status of the client"
    [ $code -lt 124 ] || fault "the client ended with $code"
    says 9 "RDMA cannot be used here.*($1)"
}

no_device() {
    start_master
    make_model model "$SIZE_MIB"
    remove_device
    start 1
    start 2
    job_by_tcp 'no RDMA device.*rdma link add'
    refused 'no RDMA device.*rdma link add'
}

no_library() {
    start_master
    make_model model "$SIZE_MIB"
    mkdir -p /run/hidden
    mv /usr/lib/x86_64-linux-gnu/libibverbs* /run/hidden/
    trap 'mv /run/hidden/* /usr/lib/x86_64-linux-gnu/' EXIT
    start 1
    start 2
    job_by_tcp 'libibverbs'
    refused 'libibverbs'
}

# For everybody but root, locked memory is limited; and a device that may be opened by all.
memlock() {
    start_master
    make_model model "$SIZE_MIB"
    chmod -R a+rX "$work/model"
    chmod 1777 "$work" "$dir"
    chmod 666 /dev/infiniband/uverbs*
    as=(setpriv --reuid 1000 --regid 1000 --clear-groups --inh-caps=-all)
    ulimit -l 64
    start 1
    start 2
    job_by_tcp 'may lock 64 KiB.*LimitMEMLOCK'
    refused 'may lock 64 KiB.*LimitMEMLOCK'
}
