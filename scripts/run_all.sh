#!/usr/bin/env bash
# The main job: sets everything up, trains with all six scripts, and ends with a table of them.
# Arguments go through to every script.
#
#   bash scripts/run_all.sh
#   DATASET=mnist EPOCHS=2 bash scripts/run_all.sh --amp
#
# Settings: those of env.sh, and
#   DATASET  synthetic (default: needs no download), mnist or cifar10
#   EPOCHS   default: 1
#   NPROC    processes of the DDP scripts (default here: 2)
set -euo pipefail
export NPROC="${NPROC:-2}"
threads_asked_for="${OMP_NUM_THREADS:-}"
[ "$threads_asked_for" != "${ENV_SH_THREADS:-}" ] || threads_asked_for=""  # env.sh counted them
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
options=(--dataset "${DATASET:-synthetic}" --epochs "${EPOCHS:-1}" "$@")
ddp_options=("${options[@]}")
gpus="$(gpu_count)"
if [ "$gpus" -gt 0 ] && [ "$gpus" -lt "$NPROC" ]; then
    ddp_options+=(--backend gloo)  # nccl takes one process per GPU, gloo lets them share
fi
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
rows=()

# run SCRIPT LAUNCHED_BY PROCESSES COMMAND...: runs the command and adds a row to the table.
run() {
    local script="$1" launched_by="$2" processes="$3"
    shift 3
    printf '\n== %s, launched by %s\n' "$script" "$launched_by"
    if ! "$@" 2>&1 | tee "$log"; then
        echo "$script failed: its output is above" >&2
        exit 1
    fi
    rows+=("$(awk -v script="$script" -v launched_by="$launched_by" -v processes="$processes" '
        match($0, /test acc [0-9.]+%/) { accuracy = substr($0, RSTART + 9, RLENGTH - 9) }
        match($0, /[0-9]+ img\/s/) { speed = substr($0, RSTART, RLENGTH - 6) }
        /^epoch / { seconds += $(NF - 1) }
        END { printf "%-18s %-24s %9d %13s %9d %9.1f", script, launched_by, processes, accuracy, speed, seconds }
    ' "$log")")
}

cd "$REPO"
# One process may have all the cores: env.sh above has counted the threads of NPROC processes.
OMP_NUM_THREADS="$threads_asked_for" run snsc.py python 1 bash scripts/snsc.sh "${options[@]}"
OMP_NUM_THREADS="$threads_asked_for" run snmc_dp.py python 1 bash scripts/snmc_dp.sh "${options[@]}"
run mnmc_ddp_tcp.py "python, once per rank" "$NPROC" bash scripts/mnmc_ddp_tcp.sh "${ddp_options[@]}"
run mnmc_ddp_env.py torchrun "$NPROC" bash scripts/mnmc_ddp_env.sh "${ddp_options[@]}"
run mnmc_ddp_mp.py "python, spawns workers" "$NPROC" bash scripts/mnmc_ddp_mp.sh "${ddp_options[@]}"
if command -v scontrol >/dev/null && timeout 5 scontrol ping >/dev/null 2>&1; then
    run mnmc_ddp_slurm.py srun "$NPROC" srun --ntasks "$NPROC" python mnmc_ddp_slurm.py "${ddp_options[@]}"
else
    run mnmc_ddp_slurm.py "torchrun (no Slurm here)" "$NPROC" torchrun --standalone \
        --nproc-per-node "$NPROC" mnmc_ddp_slurm.py "${ddp_options[@]}"
fi

printf '\n%-18s %-24s %9s %13s %9s %9s\n' script "launched by" processes "test accuracy" images/s seconds
printf '%s\n' "${rows[@]}"
