# shellcheck shell=bash
# Sourced in the virtual machines that a link joins: a job from one host to the other. The first runs the master and
# the seed, the second the follower; each makes the same model for itself, to compare with.

FOLLOWER_SIDE=10.77.0.2

# follower_is STATUS
follower_is() {
    mooncakectl --endpoint "$endpoint" nodes | grep -F "$FOLLOWER_SIDE:$(data_port 2)" | grep -qw "$1"
}

follower_has_left() { ! follower_is up; }

between_hosts_seed() {
    start_master
    REPEATABLE=1 make_model model "$SIZE_MIB"
    start 1
    poll follower_is up
    sed "s/REVISION/r1/g" "$work/model.json" >"$dir/job.json"
    mooncakectl --endpoint "$endpoint" distribute "$dir/job.json" --job-id "job-$number" --seed "$(node 1)" \
        --to "$(node 1),$FOLLOWER_SIDE:$(data_port 2)"
    HERE=$dir/1 completed job model
    # It looks at what it has, and ends.
    poll follower_has_left
}

between_hosts_follower() {
    local copy
    REPEATABLE=1 make_model model "$SIZE_MIB"
    poll get "$endpoint/leaderz" >/dev/null
    start 2
    poll eval "mooncakectl --endpoint $endpoint jobs get job-$number -o json 2>/dev/null | grep -q '\"status\": *\"completed\"'"
    at_least "$(received 2 rdma)" "$size" "bytes over RDMA to node 2"
    at_most "$(received 2 tcp)" 0 "bytes over TCP to node 2"
    copy=$(find "$dir/2" -name weights.bin | head -n 1)
    cmp "$work/model/weights.bin" "$copy"
}
