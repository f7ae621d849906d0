#!/usr/bin/env bash
# Makes what the virtual machine boots from, and prints the folder it is in: `vmlinux` (Debian's stock kernel,
# uncompressed) and `base.cpio` (an initramfs with busybox, bash, the kernel modules of soft-RoCE, libibverbs and the
# tools). Does again only what is missing or has changed. The kernel's package is unpacked, never installed.
#
# Usage: image.sh
#   RDMA_VM_KERNEL   'stock' (default): what the distribution's linux-image-amd64 depends on, 6.1 on Debian 12;
#                    a series such as 6.12: its newest package; or the name of a package
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# depmod and modprobe are there.
PATH=$PATH:/usr/sbin:/sbin
. "$here/rootfs.sh"

kernel=${RDMA_VM_KERNEL:-stock}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mooncake-distribution/rdma-vm
mkdir -p "$cache"
[ "$(uname -m)" = x86_64 ] || { echo "rdma-vm: the machine is built from amd64 packages, this host is $(uname -m): run it on an amd64 host" >&2; exit 1; }
# Callers at the same time wait for the one that builds.
exec 9>"$cache/lock"
flock 9
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT

packages=(qemu-system-x86 busybox-static cpio kmod xz-utils zstd binutils iproute2 ibverbs-utils ibverbs-providers perftest bash ca-certificates)
"$here/../../scripts/setup.sh" "${packages[@]}" >&2

# ---- the kernel ----------------------------------------------------------------------------------------

# package_of KERNEL: the name of its package; empty if the package lists know none.
package_of() {
    case $1 in
    stock) apt-cache depends linux-image-amd64 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ {print $2; exit}' ;;
    [0-9]*) apt-cache search --names-only "^linux-image-${1//./\\.}\.[0-9].*-amd64\$" | awk '{print $1}' |
        grep -vE -- '-(cloud|rt)-|-unsigned$' | sort -V | tail -n 1 ;;
    *) echo "$1" ;;
    esac
}

# The choice is remembered, so that a machine without network goes on with the kernel that it has.
chosen=$cache/chosen-${kernel//[^A-Za-z0-9.+-]/_}
if [ ! -s "$chosen" ]; then
    package=$(package_of "$kernel")
    if [ -z "$package" ]; then
        sudo=()
        [ "$(id -u)" = 0 ] || sudo=(sudo)
        "${sudo[@]}" apt-get update >"$work/apt.log" 2>&1 || { tail -n 5 "$work/apt.log" >&2; exit 1; }
        package=$(package_of "$kernel")
    fi
    if [ -z "$package" ]; then
        echo "rdma-vm: no package of kernel '$kernel' in this machine's package lists: give RDMA_VM_KERNEL another series (6.1, 6.12) or a package, or add the suite that has it (backports) to the lists" >&2
        exit 1
    fi
    echo "$package" >"$chosen"
fi
package=$(cat "$chosen")
image=$cache/$package

# unpacked BZIMAGE OUT: the ELF inside. qemu boots it through its PVH entry at once, where emulation takes 11 s for
# the kernel's own decompression. Its compressed form is found by the magic number of each format.
unpacked() {
    local magic unpack at
    while read -r magic unpack; do
        for at in $(LC_ALL=C grep -obUaP "$magic" "$1" | cut -d: -f1); do
            # What follows the image makes the tool fail: the result tells.
            tail -c "+$((at + 1))" "$1" | $unpack >"$2" 2>/dev/null || true
            [ "$(head -c 4 "$2" | tr -d '\0')" != $'\x7fELF' ] || return 0
        done
    done <<'FORMATS'
\xfd7zXZ\x00 xz --decompress --stdout
\x28\xb5\x2f\xfd zstd --decompress --quiet --stdout
\x1f\x8b\x08 gzip --decompress --stdout
FORMATS
    echo "rdma-vm: no ELF kernel found in $1: give RDMA_VM_KERNEL another kernel" >&2
    return 1
}

# What is loaded by name; modprobe knows what these need, and the crypto modules that rxe asks for by alias.
modules=(virtio_pci virtio_console virtio_rng virtio_net dummy rdma_rxe ib_uverbs rdma_ucm crc32_generic crc32-pclmul loop ext4 crc32c_generic)

if [ ! -e "$image/complete" ]; then
    echo "rdma-vm: downloading and unpacking $package" >&2
    if ! (cd "$work" && apt-get download "$package") >"$work/apt.log" 2>&1; then
        tail -n 5 "$work/apt.log" >&2
        rm -f "$chosen"
        echo "rdma-vm: cannot download $package: run 'apt-get update', or see whether its archive can be reached" >&2
        exit 1
    fi
    dpkg -x "$work"/linux-image-*.deb "$work/unpacked"
    version=$(basename "$work"/unpacked/lib/modules/*)
    rm -rf "$image"
    mkdir -p "$image/modules/lib/modules/$version"
    unpacked "$work/unpacked/boot/vmlinuz-$version" "$image/vmlinux"
    depmod -b "$work/unpacked" "$version"
    for module in "${modules[@]}"; do
        # Built into another kernel's image, or gone from it: the machine's init finds out whether it matters.
        modprobe -d "$work/unpacked" -S "$version" --show-depends "$module" 2>/dev/null |
            awk '$1 == "insmod" {print $2}' || echo "rdma-vm: $package has no module $module" >&2
    done | sort -u | while read -r path; do
        install -D -m 644 "$path" "$image/modules/lib/modules/$version/${path##*/"$version"/}"
    done
    cp "$work"/unpacked/lib/modules/"$version"/modules.{builtin,builtin.modinfo,order} "$image/modules/lib/modules/$version/"
    find "$image/modules" -name '*.ko' -exec strip --strip-debug {} +
    depmod -b "$image/modules" "$version"
    touch "$image/complete"
fi

# ---- the initramfs -------------------------------------------------------------------------------------

stamp=$({ cat "$here"/{image.sh,rootfs.sh,init}; dpkg-query -W "${packages[@]}"; echo "$package"; } | sha256sum)
if [ "$(cat "$image/base.stamp" 2>/dev/null)" != "$stamp" ]; then
    root=$work/root
    new_root "$root"
    for applet in $(busybox --list); do ln -s busybox "$root/usr/bin/$applet"; done
    # Over busybox's of the same name, which know less.
    for program in busybox bash ip rdma modprobe setpriv ibv_devinfo ibv_rc_pingpong ib_read_bw; do
        add_program "$root" "$(command -v "$program")" "/usr/bin/$program"
    done
    ln -sf bash "$root/usr/bin/sh"
    cp -r "$image/modules/lib/modules" "$root/usr/lib/"
    # Loaded by name at run time, so that no program's list of libraries has them: the verbs and rxe's part of them,
    # and what glibc takes to end a thread.
    libraries=/usr/lib/x86_64-linux-gnu
    for library in "$libraries"/{libibverbs.so.1,librdmacm.so.1,libgcc_s.so.1} "$libraries"/libibverbs/librxe-*.so; do
        add_library "$root" "$library"
    done
    mkdir -p "$root/etc/libibverbs.d"
    cp /etc/libibverbs.d/rxe.driver "$root/etc/libibverbs.d/"
    printf 'root:x:0:0::/root:/bin/bash\nuser:x:1000:1000::/tmp:/bin/bash\n' >"$root/etc/passwd"
    printf 'root:x:0:\nuser:x:1000:\n' >"$root/etc/group"
    echo "127.0.0.1 localhost" >"$root/etc/hosts"
    # HTTP clients want to know whom to trust before they know whether they need to.
    install -D -m 644 /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    install -m 755 "$here/init" "$root/init"
    pack "$root" >"$image/base.cpio.partial"
    mv "$image/base.cpio.partial" "$image/base.cpio"
    echo "$stamp" >"$image/base.stamp"
fi
echo "$image"
