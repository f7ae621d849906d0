# Sourced by every script: one target folder for all checkouts, outside them, because RocksDB takes many
# minutes to compile; and ccache (where it is installed) so that even a rebuild of it is cheap.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/mooncake-distribution/target}"
if [ -z "${CXX:-}" ] && command -v ccache >/dev/null 2>&1; then
    export CXX="ccache g++"
fi
