# shellcheck shell=bash
# Sourced: puts programs with the libraries that they need into the root of an initramfs.

# new_root ROOT: the folders, with everything below /usr, as Debian has it.
new_root() {
    mkdir -p "$1"/usr/{bin,lib,lib64} "$1"/{etc,proc,sys,dev,tmp,run,root,opt/bin,vm}
    ln -s usr/bin "$1/bin"
    ln -s usr/bin "$1/sbin"
    ln -s bin "$1/usr/sbin"
    ln -s usr/lib "$1/lib"
    ln -s usr/lib64 "$1/lib64"
}

# add_library ROOT FILE: under the path that it has here, and what it needs.
add_library() {
    local path=$2
    [[ $path = /usr/* ]] || path=/usr$path
    if [ ! -e "$1$path" ]; then
        install -D -m 755 "$2" "$1$path"
        add_needed "$1" "$2"
    fi
}

# add_needed ROOT FILE: the libraries of a program or a library; a static one has none.
add_needed() {
    local needed
    needed=$(ldd "$2" 2>/dev/null) || return 0
    if grep -F 'not found' <<<"$needed" >&2; then
        echo "rdma-vm: $2 needs libraries that this host does not have: install them" >&2
        return 1
    fi
    for needed in $(grep -oE '/[^ ]+' <<<"$needed"); do add_library "$1" "$needed"; done
}

# add_program ROOT FILE DESTINATION: without its debug information, which nobody reads in the machine.
add_program() {
    mkdir -p "$1${3%/*}"
    # A link to busybox would be written through.
    rm -f "$1$3"
    cp -L "$2" "$1$3"
    strip --strip-all "$1$3" 2>/dev/null || true
    chmod 755 "$1$3"
    add_needed "$1" "$2"
}

# pack ROOT: the archive on standard output; archives can be written one after the other.
pack() { (cd "$1" && find . -mindepth 1 -print0 | LC_ALL=C sort -z | cpio --quiet --null --create --format=newc --owner=0:0); }
