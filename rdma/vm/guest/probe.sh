# shellcheck shell=bash
# Sourced in the virtual machine: the transport alone, without masters and models, by its probe.

SERVER=10.77.0.1:7471

# serve FLAG...: the probe's other end, with a file of random bytes in the page cache.
serve() {
    [ -e "$work/blocks" ] || head -c $((64 << 20)) /dev/urandom >"$work/blocks"
    rdma_probe serve $SERVER --file "$work/blocks" "$@" >>"$dir/serve.log" 2>&1 &
    echo $! >"$dir/serve.pid"
    poll grep -q "serving on" "$dir/serve.log"
}

wrong_key() {
    serve
    rdma_probe fetch $SERVER
    if rdma_probe fetch $SERVER --wrong-key >"$dir/fetch.log" 2>&1; then fault "a wrong key read memory"; fi
    grep -iE 'remote access' "$dir/fetch.log" || fault "not the expected error: $(cat "$dir/fetch.log")"
    # And whoever has the right one is served as before.
    rdma_probe fetch $SERVER
}

# Nothing may be left of a connection: not on the side that serves all of them, and, as long as it makes new ones, not
# on the side that reads.
thousand_connections() {
    local kind fetching now left slack=32 count=${CONNECTIONS:-1000} kinds=(pd cq qp mr)
    declare -A before most
    serve
    rdma_probe fetch $SERVER --connections 10
    for kind in "${kinds[@]}"; do before[$kind]=$(objects "$kind"); done
    rdma_probe fetch $SERVER --connections "$count" >"$dir/fetch.log" 2>&1 &
    fetching=$!
    while kill -0 $fetching 2>/dev/null; do
        for kind in "${kinds[@]}"; do
            now=$(objects "$kind")
            [ "$now" -le "${most[$kind]:-0}" ] || most[$kind]=$now
        done
        sleep 0.5
    done
    wait $fetching || fault "the probe: $(tail -n 3 "$dir/fetch.log")"
    for kind in "${kinds[@]}"; do
        # The pool keeps registered memory, as much as was in use at once.
        [ $kind = mr ] && left=2 || left=0
        # What is over is ended behind the last connection.
        now=$(objects "$kind")
        [ "$now" -le $((before[$kind] + left)) ] || sleep 5
        now=$(objects "$kind")
        echo "measured: $kind: ${before[$kind]} before $count connections, at most ${most[$kind]} meanwhile, $now after them"
        at_most "$now" $((before[$kind] + left)) "objects of kind $kind after the connections"
        at_most "${most[$kind]}" $((before[$kind] + slack)) "objects of kind $kind meanwhile"
    done
}

# The transport beside ib_read_bw, turn by turn, five times: the median of the ratios.
bandwidth() {
    local pair ours theirs ratios=()
    serve
    for pair in 1 2 3 4 5; do
        ib_read_bw -d rxe0 -x 1 -s 1048576 -n 128 -F >"$dir/bw-server.log" 2>&1 &
        sleep 1
        theirs=$(ib_read_bw -d rxe0 -x 1 -s 1048576 -n 128 -F --report_gbits 10.77.0.1 | awk '$1 == 1048576 {print $4 * 125}')
        wait $!
        ours=$(rdma_probe fetch $SERVER --bytes $((128 << 20)) | grep -oE '[0-9.]+ MB/s' | cut -d' ' -f1)
        [ -n "$theirs" ] && [ -n "$ours" ] || fault "a measurement gave no number"
        ratios+=("$(awk -v a="$ours" -v b="$theirs" 'BEGIN {printf "%.3f", a / b}')")
        echo "measured: pair $pair: $ours MB/s, ib_read_bw $theirs MB/s, ratio ${ratios[-1]}"
    done
    local median
    median=$(printf '%s\n' "${ratios[@]}" | sort -n | sed -n 3p)
    echo "measured: median ratio $median"
    awk -v m="$median" 'BEGIN {exit !(m >= 0.7)}' || fault "the median is $median, expected 0.7 or more"
}

# ticks: of all processors, in which they did something, in hundredths of a second.
ticks() { awk '$1 == "cpu" {print $2 + $3 + $4 + $7 + $8}' /proc/stat; }

# The whole path, page cache to staged files with digests and syncs, by both transports in turn. Told, not judged: it
# is the emulated processor's.
whole_path() {
    local pair transport cpu begun n=0 seconds
    start_master
    make_model model "$SIZE_MIB"
    for pair in 1 2 3; do
        for transport in rdma tcp; do
            n=$((n + 2))
            start $((n - 1)) --transport $transport
            start $n --transport $transport
            REVISION=r$number-$n post model "first$n" $((n - 1)) $((n - 1)) >/dev/null
            completed "first$n" model >/dev/null
            begun=$(cut -d' ' -f1 /proc/uptime) cpu=$(ticks)
            REVISION=r$number-$n post model "job$n" $((n - 1)) $n >/dev/null
            timeout "$WAIT_S" mooncakectl --endpoint "$endpoint" jobs watch "job$n-$number" >/dev/null
            cpu=$(($(ticks) - cpu)) seconds=$(awk -v b="$begun" '{print $1 - b}' /proc/uptime)
            at_least "$(received $n $transport)" "$size" "bytes over $transport"
            awk -v s="$seconds" -v c=$cpu -v b="$size" -v p=$pair -v t=$transport 'BEGIN {
                printf "measured: pair %d: %-4s %6.1f MB/s, %6.1f s of CPU per GiB, both ends and the kernel\n", p, t, b / s / 1e6, c / 100 * 1073741824 / b }'
            for pid in "$dir/$n.pid" "$dir/$((n - 1)).pid"; do kill -KILL "$(cat "$pid")"; done
            rm -rf "${dir:?}/$n" "${dir:?}/$((n - 1))"
        done
    done
}
