#!/usr/bin/env bash
# Makes a Debian or Ubuntu machine ready to build: installs what is missing, says so, and checks the Rust
# toolchain. Does nothing where nothing is missing. Usage: scripts/setup.sh [extra Debian package ...]
set -euo pipefail
cd "$(dirname "$0")/.."

# libclang-dev: RocksDB's bindings are generated with it; g++: RocksDB; ccache: rebuilds of it become cheap;
# curl, procps and util-linux: the scripts wait for probes, find processes and start them.
packages=()
for package in libclang-dev g++ ccache curl procps util-linux "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || packages+=("$package")
done
if [ ${#packages[@]} -gt 0 ]; then
    echo "setup: installing Debian packages: ${packages[*]}"
    sudo=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || {
            echo "setup: not root and no sudo; as root run: apt-get install ${packages[*]}" >&2
            exit 1
        }
        sudo=(sudo)
    fi
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    # RUNLEVEL=1: a package that is a service (haproxy, nginx) is installed and not started.
    if ! { "${sudo[@]}" apt-get update && "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install -y --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "setup: apt-get could not install: ${packages[*]}" >&2
        exit 1
    fi
    # Nor at the next boot: what we installed, we run by hand.
    for package in "${packages[@]}"; do
        case $package in
        haproxy) unit=haproxy ;;
        nginx*) unit=nginx ;;
        *) continue ;;
        esac
        if command -v systemctl >/dev/null; then "${sudo[@]}" systemctl disable --now "$unit" >/dev/null 2>&1 || true; fi
    done
fi

want=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if ! command -v cargo >/dev/null; then
    echo "setup: no Rust toolchain; install Rust $want or newer with rustup (see rustup.rs), then run this again" >&2
    exit 1
fi
have=$(rustc --version | sed 's/^rustc \([0-9.]*\).*/\1/')
if [ "$(printf '%s\n' "$want" "$have" | sort -V | head -n 1)" != "$want" ]; then
    echo "setup: Rust $have is too old, $want or newer is needed: run 'rustup update stable'" >&2
    exit 1
fi
