#!/usr/bin/env bash
# Measures the figures of the page on performance on this machine: the scripts against the bare
# arithmetic, the usual pipeline, and processes that do not communicate. Then many processes with a
# tiny batch, which shows what communication costs. Arguments go through to both benchmark.py runs,
# but the second always has --images 80.
#
#   bash scripts/measure/scaling.sh                        # about ten minutes on two cores
#   DATASETS=cifar10 JSON=. bash scripts/measure/scaling.sh --repeats 3 --images 1280
#
# Settings: those of env.sh, and
#   DATASETS    mnist (default), cifar10, or both
#   SIZES       images of a step in each process; default: 64 256
#   WORLDS      numbers of processes of the first table; default: 1 and 2, as far as GPUs go
#   MANY        numbers of processes of the second table; default: 1 2 4 8 16 32, none with GPUs
#   JSON        a folder for speed.json and many.json; default: none
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
# One thread for each process, unless the user asked for more.
set_threads 1 1
benchmark="$REPO/scripts/measure/benchmark.py"
read -ra datasets <<<"${DATASETS:-mnist}"
read -ra sizes <<<"${SIZES:-64 256}"
read -ra worlds <<<"${WORLDS:-}"
read -ra many <<<"${MANY:-1 2 4 8 16 32}"

options=(--dataset "${datasets[@]}" --batch-size "${sizes[@]}")
[ -z "${WORLDS:-}" ] || options+=(--world-size "${worlds[@]}")
[ -z "${JSON:-}" ] || options+=(--json "$JSON/speed.json")
python "$benchmark" "${options[@]}" "$@"

if [ "$(gpu_count)" -eq 0 ]; then
    options=(--variants ours_ddp --batch-size 4 --world-size "${many[@]}")
    [ -z "${JSON:-}" ] || options+=(--json "$JSON/many.json")
    echo
    python "$benchmark" "${options[@]}" "$@" --images 80
fi
