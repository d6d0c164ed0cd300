# shellcheck shell=bash
# The environment of the launchers: they source this file, and so can you, in bash.
#
#   source scripts/env.sh
#
# Uses the active Python environment where the scripts can run in it, and otherwise the repository's
# .venv, which it makes from requirements.txt on first use, but never inside a Slurm job and never
# where AMD's ROCm is installed. Sets, unless you have set them:
#   NPROC            processes of this node (default: its GPUs; without a GPU 2)
#   OMP_NUM_THREADS  threads of each process (default: the cores divided by NPROC, at least 1)
#   MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_  keep freed memory for the next step: on a CPU
#                    1.3 times the images/s with 256 images to a step

if [ -z "${BASH_VERSION:-}" ]; then
    echo "scripts/env.sh works in bash alone: type bash, and then source scripts/env.sh" >&2
    return 1
fi
REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# is_new_enough PYTHON: whether it is there and new enough; prints what is wrong.
is_new_enough() {
    if ! command -v "$1" >/dev/null; then
        echo "there is no $1"
        return 1
    fi
    "$1" -c 'import sys
if sys.version_info < (3, 10):
    print("Python {}.{} is older than 3.10".format(*sys.version_info))
    sys.exit(1)'
}

# has_packages PYTHON: whether it has torch, torchvision and tqdm, new enough; prints what is wrong.
has_packages() {
    "$1" -c 'import re, sys
from importlib.metadata import PackageNotFoundError, version
trouble = None
try:
    torch, *_ = map(version, ("torch", "torchvision", "tqdm"))
    if [int(number) for number in re.findall(r"\d+", torch)[:2]] < [2, 8]:
        trouble = f"torch {torch} is older than 2.8"
except PackageNotFoundError as error:
    trouble = f"{error.name} is missing"
if trouble:
    print(trouble)
    sys.exit(1)'
}

# make_venv WHY: makes .venv and installs what requirements.txt lists.
make_venv() {
    local python="$REPO/.venv/bin/python" trouble
    # The torch that requirements.txt brings is for NVIDIA's GPUs: with AMD's it trains on the CPU.
    if ! command -v nvidia-smi >/dev/null &&
        { [ -d "${ROCM_PATH:-/opt/rocm}" ] || command -v rocm-smi >/dev/null; }; then
        echo "$1, and for AMD's GPUs nothing is installed: use the PyTorch of your computing centre" \
            "(module load, or for sbatch PYTHON with a container), or activate an environment with" \
            "tqdm and PyTorch's build for ROCm (https://pytorch.org/get-started/locally/)" >&2
        return 1
    fi
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        echo "$1, and inside a Slurm job nothing is installed: use module load, or for sbatch set" \
            "PYTHON to the command of a container, or activate a conda environment, or type" \
            "source scripts/env.sh on the login node, which makes .venv" >&2
        return 1
    fi
    if ! "$python" -m pip --version &>/dev/null; then
        if ! trouble="$(is_new_enough python3)"; then
            echo "$trouble: the scripts need Python 3.10 or newer" >&2
            return 1
        fi
        # Where Debian's package python3-venv is missing, this line fails and leaves a .venv without
        # pip. When the package is there, the line completes that .venv.
        python3 -m venv "$REPO/.venv" || return 1
    fi
    echo "$1: installing torch, torchvision and tqdm into .venv: some minutes, once" >&2
    "$python" -m pip install --quiet -r "$REPO/requirements.txt"
}

# The GPUs that torch sees: NVIDIA's and AMD's. CUDA_VISIBLE_DEVICES can hide some of the machine's.
gpu_count() {
    python -c 'import torch; print(torch.cuda.device_count())'
}

# set_threads PROCESSES [CORES]: shares the cores among processes, unless you have set OMP_NUM_THREADS.
# What an earlier call of this function has set is counted again.
set_threads() {
    local threads
    if [ -n "${OMP_NUM_THREADS:-}" ] && [ "$OMP_NUM_THREADS" != "${ENV_SH_THREADS:-}" ]; then
        return
    fi
    threads="$((${2:-$(core_count)} / $1))"
    export OMP_NUM_THREADS="$((threads > 0 ? threads : 1))"
    export ENV_SH_THREADS="$OMP_NUM_THREADS"
}

# nproc counts the cores that this process may use, which can be fewer in a container or a job. It
# would also obey the two variables. macOS has no nproc.
core_count() {
    env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
}

if ! why="$(is_new_enough python && has_packages python)"; then
    if ! has_packages "$REPO/.venv/bin/python" &>/dev/null; then
        make_venv "${why:-python does not start}" || return 1
    fi
    # shellcheck source=/dev/null
    source "$REPO/.venv/bin/activate"
fi
if [ -z "${NPROC:-}" ]; then
    NPROC="$(gpu_count)"
    [ "$NPROC" -gt 0 ] || NPROC=2
fi
set_threads "$NPROC"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1000000000}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1000000000}"
