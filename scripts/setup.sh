#!/usr/bin/env bash
# Installs torch, torchvision and tqdm where one of them is missing. run_all.sh and test.sh begin
# with it.
#
#   bash scripts/setup.sh
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash scripts/setup.sh   # the CPU build
#
# Installs into the active environment, and where none is active into .venv, which it makes.
# pip prefers the CPU build because its version has an addition, as in 2.14.0+cpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if why="$(source scripts/env.sh 2>&1)"; then
    exit
fi
why="${why%%: *}"
# The torch that requirements.txt brings is for NVIDIA's GPUs: with AMD's it trains on the CPU.
if ! command -v nvidia-smi >/dev/null &&
    { [ -d "${ROCM_PATH:-/opt/rocm}" ] || command -v rocm-smi >/dev/null; }; then
    echo "$why, and for AMD's GPUs nothing is installed: use your computing centre's PyTorch, or activate an" \
        "environment with tqdm and the build for ROCm (https://pytorch.org/get-started/locally/)" >&2
    exit 1
fi
python=python
# conda's base is always active. A Python that lacks tqdm alone has a torch of its own, as in a container.
if [ -z "${VIRTUAL_ENV:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" = base ] && [ "$why" != "tqdm is missing" ]; then
    python=python3
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "the scripts need Python 3.10 or newer, and this is $("$python" --version 2>&1)" >&2
    exit 1
fi
if [ "$python" = python3 ]; then
    # Without Debian's package python3-venv this leaves a .venv without pip, which it completes later.
    .venv/bin/python -m pip --version &>/dev/null || python3 -m venv .venv
    python=.venv/bin/python
fi
echo "$why: installing torch, torchvision and tqdm with $(command -v "$python"): some minutes, once" >&2
"$python" -m pip install --quiet -r requirements.txt
# torch and torchvision of different places are installed without a word, and fail in the first script.
if ! why="$("$python" -c 'import torch, torchvision' 2>&1)"; then
    echo "torch and torchvision are installed, but cannot be imported (${why##*$'\n'}): type " \
        "$python -m pip uninstall --yes torch torchvision && bash scripts/setup.sh" >&2
    exit 1
fi
