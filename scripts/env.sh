# shellcheck shell=bash
# The environment of the launchers: they source this file, and so can you, in bash.
#
#   source scripts/env.sh
#
# Activates .venv where the active Python lacks a package. Installs nothing: scripts/setup.sh does.
# Sets, unless you have set them:
#   NPROC            processes of this node (default: its GPUs; without a GPU 2)
#   OMP_NUM_THREADS  threads of each process (default: the cores divided by NPROC, at least 1; on a
#                    busy machine only the idle cores)
#   MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_  keep freed memory for the next step: on a CPU
#                    1.3 times the images/s with 256 images to a step
#   OMP_WAIT_POLICY  passive where other programs take half of the cores, and in no Slurm job: a
#                    thread that waits for another frees its core. GOMP_SPINCOUNT counts as set, too
#   PET_LOCAL_ADDR   127.0.0.1 where this machine's own name leads nowhere: torchrun --standalone would wait
#   TQDM_DELAY, TQDM_MININTERVAL, TQDM_MAXINTERVAL  where stderr is no terminal: the progress bar
#                    waits a minute, and then writes once a minute (60)

if [ -z "${BASH_VERSION:-}" ]; then
    echo "scripts/env.sh works in bash alone: type bash, and then source scripts/env.sh" >&2
    return 1
fi
REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# check_python PYTHON: whether the scripts can run in it; prints what is wrong in one line.
check_python() {
    if ! command -v "$1" >/dev/null; then
        echo "there is no $1"
        return 1
    fi
    "$1" -c 'import re, sys
if sys.version_info < (3, 10):
    sys.exit("Python %d.%d is older than 3.10" % sys.version_info[:2])
from importlib.metadata import PackageNotFoundError, version
try:
    torch = [version(name) for name in ("torch", "torchvision", "tqdm")][0]
except PackageNotFoundError as error:
    sys.exit("%s is missing" % error.name)
if [int(number) for number in re.findall("[0-9]+", torch)[:2]] < [2, 8]:
    sys.exit("torch %s is older than 2.8" % torch)' 2>&1
}

# The GPUs that torch sees, NVIDIA's and AMD's. torch is slow to import, so this looks for a driver first.
gpu_count() {
    if [ -e /dev/nvidiactl ] || [ -e /dev/kfd ] || [ -e /dev/dxg ] || command -v nvidia-smi >/dev/null; then
        echo "counting the GPUs that torch sees, which takes some seconds" >&2
        python -c 'import torch; print(torch.cuda.device_count())'
    else
        echo 0
    fi
}

# The cores that this process may use. nproc would also obey the two variables.
core_count() {
    env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc
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

# Whether other programs take about half of the cores that this process may use: looks for 0.4 seconds.
# Prints how many cores they leave idle.
is_busy() {
    python -c 'import os, sys, time
cores = os.sched_getaffinity(0)
def used():
    columns = {line.split()[0]: line.split()[1:9] for line in open("/proc/stat")}
    times = [columns["cpu%d" % core] for core in cores]
    return sum(int(time) for row in times for time in row[:3] + row[5:])  # not idle, no wait for a disk
start, before = time.monotonic(), used()
time.sleep(0.4)
busy = (used() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)
print(max(0, round(len(cores) - busy)))
sys.exit(busy < 0.4 * len(cores))' 2>/dev/null
}

# Threads of OpenMP wait for each other, and spin meanwhile. Where other programs take their cores, that
# slows all of them down. So there are no more threads than idle cores, and none of them spins.
# What an earlier call of this function has set is decided again.
adapt_to_load() {
    local idle
    if [ -n "${ENV_SH_BUSY:-}" ]; then
        unset OMP_WAIT_POLICY ENV_SH_BUSY
        set_threads "$NPROC"
    fi
    if [ -z "${SLURM_JOB_ID:-}${OMP_WAIT_POLICY:-}${GOMP_SPINCOUNT:-}" ] && idle="$(is_busy)"; then
        export OMP_WAIT_POLICY=passive ENV_SH_BUSY=1
        set_threads "$NPROC" "$idle"
        echo "this machine is busy with other programs: training is slower" \
            "(OMP_NUM_THREADS=$OMP_NUM_THREADS OMP_WAIT_POLICY=passive)" >&2
    fi
}

if ! why="$(check_python python)"; then
    if ! check_python "$REPO/.venv/bin/python" >/dev/null; then
        cure="type  bash scripts/setup.sh  or activate an environment with torch, torchvision and tqdm"
        [ -z "${SLURM_JOB_ID:-}" ] ||
            cure="type  bash scripts/setup.sh  on the login node, or load PyTorch by SETUP (docs/slurm.md)"
        echo "$why: $cure" >&2
        return 1
    fi
    # shellcheck source=/dev/null
    source "$REPO/.venv/bin/activate"
fi
if [ -z "${NPROC:-}" ]; then
    NPROC="$(gpu_count)"
    [ "$NPROC" -gt 0 ] || NPROC=2
fi
set_threads "$NPROC"
adapt_to_load
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1000000000}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1000000000}"
if ! timeout 5 getent hosts "$(uname -n)" >/dev/null; then
    export PET_LOCAL_ADDR="${PET_LOCAL_ADDR:-127.0.0.1}"
fi
if [ ! -t 2 ]; then
    export TQDM_DELAY="${TQDM_DELAY:-60}" TQDM_MININTERVAL="${TQDM_MININTERVAL:-60}"
    export TQDM_MAXINTERVAL="${TQDM_MAXINTERVAL:-60}"
fi
