#!/usr/bin/env bash
# Runs a command in a virtual machine of its own with Debian's stock kernel and an RDMA device (soft-RoCE, rxe0), on
# hosts without RDMA hardware, without RDMA in their kernel and without KVM.
#
# Usage: run.sh [OPTION ...] -- COMMAND [ARG ...]
#
#   --bin PATH[=NAME]   put this program and its libraries into the machine, as /opt/bin/NAME; repeatable
#   --file PATH=DEST    put this file or folder there; repeatable
#   --env NAME=VALUE    set this for the command; repeatable
#   --kernel KERNEL     'stock' (default), a series such as 6.12, or a Debian package; also RDMA_VM_KERNEL
#   --memory MIB        default 1024
#   --cpus N            default 2
#   --limit SECONDS     the whole run may take so long (default 600; also RDMA_TEST_LIMIT_S). Seconds in which this
#                       host does not let the runner run (stopped, suspended) do not count
#   --no-device         no RDMA device: a host that has TCP only
#   --no-libraries      no libibverbs
#   --devices N         so many interfaces, each with its device rxe0, rxe1, ... (default 1)
#   --link MINE:OTHER   join eth0 to that of another machine, started with --link OTHER:MINE; two paths of sockets
#   --address A.B.C.D   of the first interface (default 10.77.0.1, /24); the next has the next one
#   --mtu BYTES         of the interfaces (default 4200, with which RoCE's own is 4096)
#   --log FILE          keep the console's log
#
# Prints what the command prints, on standard output. Exits with the command's status; 124: past the limit; 125: there
# was no machine, the message says why; 2: bad usage. A kernel that dies or hangs before the command began is
# started again, at most BOOT_TRIES times, and each time is said.
#
#   RDMA_VM_ACCEL=kvm   not by emulation; for a host whose KVM boots a stock kernel
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/rootfs.sh"

# 6.12 panics now and then on its way up under emulation; 6.1 was not seen to.
BOOT_TRIES=4
# The part of the limit after which a boot hangs. It takes 10 s on a quiet host.
BOOT_PART=3

bins=() files=() variables=() memory=1024 cpus=2 limit=${RDMA_TEST_LIMIT_S:-600}
KIND=rxe NO_LIBRARIES='' DEVICES=1 LINK='' ADDRESS=10.77.0.1 MTU=4200 log=
bad_usage() {
    echo "rdma-vm: $*; see the head of $0" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --no-device) KIND=none ;;
    --no-libraries) NO_LIBRARIES=1 ;;
    --) shift; break ;;
    -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' "$0"; exit 0 ;;
    --bin | --file | --env | --kernel | --memory | --cpus | --limit | --devices | --link | --address | --mtu | --log)
        [ $# -ge 2 ] || bad_usage "$1 needs a value"
        case $1 in
        --bin) bins+=("$2") ;;
        --file) [[ $2 = *=/* ]] || bad_usage "--file PATH=/DEST, not '$2'"; files+=("$2") ;;
        --env) [[ $2 = [A-Za-z_]*=* ]] || bad_usage "--env NAME=VALUE, not '$2'"; variables+=("$2") ;;
        --kernel) export RDMA_VM_KERNEL=$2 ;;
        --memory) memory=$2 ;;
        --cpus) cpus=$2 ;;
        --limit) limit=$2 ;;
        --devices) DEVICES=$2 ;;
        --link) [[ $2 = *:* ]] || bad_usage "--link MINE:OTHER, not '$2'"; LINK=$2 ;;
        --address) ADDRESS=$2 ;;
        --mtu) MTU=$2 ;;
        --log) log=$2 ;;
        esac
        shift
        ;;
    *) bad_usage "unknown option '$1'" ;;
    esac
    shift
done
[ $# -gt 0 ] || bad_usage "no command"
for number in "$memory" "$cpus" "$limit" "$DEVICES" "$MTU"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || bad_usage "'$number' is not a number above 0"
done
[ -z "$LINK" ] || [ "$DEVICES" = 1 ] || bad_usage "--link joins one device"

image=$("$here/image.sh") || exit 125
tmp=$(mktemp -d "${TMPDIR:-/tmp}/rdma-vm.XXXXXX")
qemu='' watchdog=''
clean_up() {
    local process
    for process in $watchdog $qemu; do
        kill -TERM "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    rm -rf "$tmp"
    [ -z "$LINK" ] || rm -f "${LINK%%:*}"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# ---- what this run adds to the initramfs ----------------------------------------------------------------

root=$tmp/root
mkdir -p "$root"/{vm,opt/bin}
for bin in ${bins[@]+"${bins[@]}"}; do
    path=${bin%%=*} name=${bin#*=}
    [ -f "$path" ] || { echo "rdma-vm: --bin $path: there is no such file: build it first" >&2; exit 125; }
    add_program "$root" "$path" "/opt/bin/${name##*/}"
done
for file in ${files[@]+"${files[@]}"}; do
    [ -e "${file%%=*}" ] || { echo "rdma-vm: --file ${file%%=*}: there is no such file" >&2; exit 125; }
    mkdir -p "$root$(dirname "${file#*=}")"
    cp -rL "${file%%=*}" "$root${file#*=}"
done
{
    for name in KIND NO_LIBRARIES DEVICES LINK ADDRESS MTU; do echo "$name=${!name@Q}"; done
    for variable in ${variables[@]+"${variables[@]}"}; do
        value=${variable#*=}
        echo "export ${variable%%=*}=${value@Q}"
    done
} >"$root/vm/settings"
echo "exec ${*@Q}" >"$root/vm/command"
{ cat "$image/base.cpio"; pack "$root"; } >"$tmp/initramfs"
rm -rf "$root"

# ---- boot -----------------------------------------------------------------------------------------------

accel=${RDMA_VM_ACCEL:-tcg}
# rxe computes a checksum of every packet; emulated carry-less multiplication is slower than none, which this
# processor does not have.
[ "$accel" = kvm ] && cpu=host || cpu=Nehalem
network=()
if [ -n "$LINK" ]; then
    mac=$(printf '52:54:00:%02x:%02x:%02x' $(cut -d. -f2- <<<"$ADDRESS" | tr . ' '))
    network=(-netdev "dgram,id=link,local.type=unix,local.path=${LINK%%:*},remote.type=unix,remote.path=${LINK#*:}"
        -device "virtio-net-pci,netdev=link,mac=$mac,host_mtu=$MTU")
fi
[ -n "$log" ] || log=$tmp/console
spent=0

# boot: one machine from power-on to power-off. Sets $state to what it came to: `exit N`, `limit`, `dead` (after the
# command began) or `no boot`.
boot() {
    local boot_limit=$((limit / BOOT_PART)) printer
    [ -z "$LINK" ] || rm -f "${LINK%%:*}"
    rm -f "$tmp/output" "$tmp/late"
    mkfifo "$tmp/output"
    : >"$tmp/status"
    : >"$log"
    cat "$tmp/output" &
    printer=$!
    # With this script dies the machine. Its standard streams are not ours: it would make them non-blocking for all.
    setpriv --pdeathsig KILL qemu-system-x86_64 -nodefaults -no-user-config -no-reboot -display none \
        -machine "q35,accel=$accel,usb=off,smbus=off,sata=off" -cpu "$cpu" -smp "$cpus" -m "$memory" \
        -kernel "$image/vmlinux" -initrd "$tmp/initramfs" \
        -append "console=ttyS0 quiet panic=-1 oops=panic mitigations=off random.trust_cpu=on net.ifnames=0 no_timer_check rdinit=/init" \
        -serial "file:$log" -device virtio-serial-pci -device virtio-rng-pci \
        -chardev "file,id=output,path=$tmp/output" -device virtserialport,chardev=output,name=output \
        -chardev "file,id=status,path=$tmp/status" -device virtserialport,chardev=status,name=status \
        ${network[@]+"${network[@]}"} </dev/null >"$tmp/qemu.log" 2>&1 &
    qemu=$!
    # Seconds are counted one by one: a host that stops all of us for a while does not use up the limit.
    (
        for ((second = spent; second < limit; second++)); do
            sleep 1
            echo "$second" >"$tmp/spent"
            if ((second - spent >= boot_limit)) && ! [ -s "$tmp/status" ]; then
                echo boot >"$tmp/late"
                break
            fi
        done
        [ -e "$tmp/late" ] || echo limit >"$tmp/late"
        kill -TERM $qemu
    ) &
    watchdog=$!
    wait $qemu || true
    qemu=''
    kill -TERM $watchdog 2>/dev/null || true
    wait $watchdog 2>/dev/null || true
    watchdog=''
    spent=$(cat "$tmp/spent" 2>/dev/null || echo 0)
    # If the machine died before it opened the pipe, its reader would wait for ever.
    : <>"$tmp/output"
    wait $printer || true
    state=$(sed -n 's/^exit /exit /p; s/^fault .*/fault/p' "$tmp/status")
    if [ -z "$state" ]; then
        if [ -e "$tmp/late" ] && [ "$(cat "$tmp/late")" = limit ]; then
            state=limit
        elif [ -s "$tmp/status" ]; then
            state=dead
        else
            state="no boot"
        fi
    fi
}

show_logs() {
    cat "$tmp/qemu.log" >&2
    echo "rdma-vm: the end of the console:" >&2
    tail -n 40 "$log" | tr -d '\r' >&2
}

for ((try = 1; ; try++)); do
    boot
    [ "$state" = "no boot" ] && [ $try -lt $BOOT_TRIES ] || break
    if [ -e "$tmp/late" ]; then
        why="nothing within $((limit / BOOT_PART)) s"
    else
        why=$(grep -aoE 'Kernel panic.*|BUG:.*|general protection.*' "$log" | head -n 1 | tr -d '\r')
    fi
    echo "rdma-vm: kernel $(basename "$image") did not come up (try $try of $BOOT_TRIES), starting it again: ${why:-qemu ended, $(tail -n 1 "$tmp/qemu.log")}" >&2
done
case $state in
exit\ *) exit "${state#exit }" ;;
limit)
    show_logs
    echo "rdma-vm: stopped after $limit s, the limit (--limit, RDMA_TEST_LIMIT_S: give a busy host more)" >&2
    exit 124
    ;;
*)
    show_logs
    echo "rdma-vm: the machine with kernel $(basename "$image") ended ($state) without the command's status" >&2
    exit 125
    ;;
esac
