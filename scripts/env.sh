# shellcheck shell=bash
# The environment of the launchers: they source this file, and so can you.
#
#   source scripts/env.sh
#
# Uses the active Python environment when it has torch, torchvision and tqdm, else the repository's
# .venv, which it makes from requirements.txt on first use. Sets, unless you have set them:
#   NPROC            processes of this node (default: its GPUs; without a GPU 2)
#   OMP_NUM_THREADS  threads of each process (default: the cores divided by NPROC, at least 1)
#   MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_  keep freed memory for the next step: on a CPU
#                    1.3 times the images/s with 256 images to a step

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

has_packages() {
    "$1" -c 'import sys; from importlib.util import find_spec
sys.exit(not all(map(find_spec, ("torch", "torchvision", "tqdm"))))' 2>/dev/null
}

# A port that was free a moment ago, for runs on one machine.
free_port() {
    python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

if ! has_packages python; then
    [ -x "$REPO/.venv/bin/python" ] || python3 -m venv "$REPO/.venv"
    if ! has_packages "$REPO/.venv/bin/python"; then
        echo "installing torch, torchvision and tqdm into .venv: some minutes, once" >&2
        "$REPO/.venv/bin/python" -m pip install --quiet -r "$REPO/requirements.txt"
    fi
    # shellcheck source=/dev/null
    source "$REPO/.venv/bin/activate"
fi

# The GPUs that torch sees, which CUDA_VISIBLE_DEVICES can make fewer than the machine has.
gpu_count() {
    if command -v nvidia-smi >/dev/null; then
        python -c 'import torch; print(torch.cuda.device_count())'
    else
        echo 0
    fi
}

if [ -z "${NPROC:-}" ]; then
    NPROC="$(gpu_count)"
    [ "$NPROC" -gt 0 ] || NPROC=2
fi
# What an earlier call of this file has set is counted anew, for another NPROC.
if [ -z "${OMP_NUM_THREADS:-}" ] || [ "$OMP_NUM_THREADS" = "${ENV_SH_THREADS:-}" ]; then
    # nproc knows how many cores a container may use. It would also obey these two variables.
    threads="$(($(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) / NPROC))"
    export OMP_NUM_THREADS="$((threads > 0 ? threads : 1))"
    export ENV_SH_THREADS="$OMP_NUM_THREADS"
fi
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1000000000}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1000000000}"
