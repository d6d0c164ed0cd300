#!/usr/bin/env bash
# The main job: sets everything up, trains with all six scripts, and ends with a table of them.
# Arguments go through to every script.
#
#   bash scripts/run_all.sh
#   DATASET=mnist EPOCHS=2 bash scripts/run_all.sh --amp
#
# Without a GPU the first row is one process with one core: what several processes have to beat.
# Settings: those of env.sh, and
#   DATASET  synthetic (default: needs no download), mnist or cifar10
#   EPOCHS   default: 1
#   NPROC    processes of the DDP scripts (default here: 2)
#   SRUN     1: start mnmc_ddp_slurm.py by srun, as a job or in the job that you are in (default: by
#            torchrun, because on a login node srun would queue a job and wait for it)
set -euo pipefail
case " $*" in
    *" --c"*)
        echo "--checkpoint names one file, and each of the six scripts needs its own: start them one by one" >&2
        exit 2
        ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export NPROC="${NPROC:-2}"
bash scripts/setup.sh
source scripts/env.sh
echo "Each script prints [init] when it has started, its progress once a minute, and a line at the end of an epoch."
options=(--dataset "${DATASET:-synthetic}" --epochs "${EPOCHS:-1}" "$@")
ddp_options=("${options[@]}")
gpus="$(gpu_count)"
if [ "$gpus" -gt 0 ] && [ "$gpus" -lt "$NPROC" ]; then
    ddp_options+=(--backend gloo)  # nccl takes one process per GPU, gloo lets them share
fi
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
rows=()
notes=()
expected="with synthetic images some ten seconds on two idle cores, minutes on busy ones or with cifar10"

# run SCRIPT LAUNCHED_BY PROCESSES COMMAND...: says what it runs and about how long that takes, runs the
# command, and adds a row to the table.
run() {
    local script="$1" launched_by="$2" processes="$3" start="$SECONDS" plural=es
    shift 3
    [ "$processes" -gt 1 ] || plural=
    printf '\n== %s with %s process%s, launched by %s\n' "$script" "$processes" "$plural" "$launched_by"
    printf '   %s\n' "$expected"
    if ! "$@" 2>&1 | tee "$log"; then
        echo "$script failed: its output is above" >&2
        exit 1
    fi
    if grep -q "^this machine is busy" "$log"; then
        notes=("other programs kept this machine busy: do not compare these speeds")
    fi
    rows+=("$(awk -v script="$script" -v launched_by="$launched_by" -v processes="$processes" '
        match($0, /test acc [0-9.]+%/) { accuracy = substr($0, RSTART + 9, RLENGTH - 9) }
        match($0, /[0-9]+ img\/s/) { speed = substr($0, RSTART, RLENGTH - 6) }
        /^epoch / { seconds += $(NF - 1) }
        END { printf "%-18s %-24s %9d %13s %9d %9.1f", script, launched_by, processes, accuracy, speed, seconds }
    ' "$log")")
    expected="about as long as $script, which took $((SECONDS - start)) seconds"
}

run_torchrun() {
    adapt_to_load
    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "$NPROC" "$@"
}

if [ "$gpus" -eq 0 ]; then
    run snsc.py "python, on one core" 1 env -u ENV_SH_THREADS OMP_NUM_THREADS=1 \
        bash scripts/snsc.sh "${options[@]}"
fi
run snsc.py python 1 bash scripts/snsc.sh "${options[@]}"
run snmc_dp.py python 1 bash scripts/snmc_dp.sh "${options[@]}"
run mnmc_ddp_tcp.py "python, once per rank" "$NPROC" bash scripts/mnmc_ddp_tcp.sh "${ddp_options[@]}"
run mnmc_ddp_env.py torchrun "$NPROC" bash scripts/mnmc_ddp_env.sh "${ddp_options[@]}"
run mnmc_ddp_mp.py "python, spawns workers" "$NPROC" bash scripts/mnmc_ddp_mp.sh "${ddp_options[@]}"
if [ "${SRUN:-0}" = 1 ]; then
    run mnmc_ddp_slurm.py srun "$NPROC" srun --ntasks "$NPROC" python mnmc_ddp_slurm.py "${ddp_options[@]}"
else
    run mnmc_ddp_slurm.py "torchrun (SRUN=1: srun)" "$NPROC" run_torchrun mnmc_ddp_slurm.py "${ddp_options[@]}"
fi

printf '\n%-18s %-24s %9s %13s %9s %9s\n' script "launched by" processes "test accuracy" images/s seconds
printf '%s\n' "${rows[@]}"
if [ "$gpus" -eq 0 ] && [ "$(core_count)" -lt "$NPROC" ]; then
    notes+=("the cores are fewer than $NPROC, so $NPROC processes share them: they cannot show what DDP gains")
fi
[ "${#notes[@]}" -eq 0 ] || printf '%s\n' "${notes[@]}"
