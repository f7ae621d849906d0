#!/usr/bin/env bash
# Installs Mooncake Store, the peer of the loopback benchmark, into a Python environment of its own and prints the Python
# that has it. Does nothing where it is there. Needs Debian's python3-venv. Usage: scripts/mooncake-store.sh
set -euo pipefail

# The one that was measured beside: what is compared must not change by itself.
wheel=mooncake-transfer-engine-non-cuda==0.3.13.post1
environment=${XDG_CACHE_HOME:-$HOME/.cache}/mooncake-distribution/mooncake-store
python=$environment/bin/python

if ! "$python" -c 'import mooncake.store' 2>/dev/null; then
    echo "mooncake-store: installing $wheel into $environment" >&2
    rm -rf "$environment"
    python3 -m venv "$environment" >&2 || {
        echo "mooncake-store: python3 cannot make an environment: install Debian's python3-venv" >&2
        exit 1
    }
    "$environment/bin/pip" install --quiet "$wheel" >&2 || {
        echo "mooncake-store: $wheel cannot be installed: there are wheels for Linux on x86-64 and some versions of Python" >&2
        exit 1
    }
fi
echo "$python"
