#!/usr/bin/env bash
# Measures the speed of the scripts on this machine, and prints tables to paste: against the bare
# arithmetic, a textbook's loop, and processes that do not communicate. Without GPUs it adds many
# processes with a tiny batch, which shows what communication costs. Arguments go to benchmark.py,
# but the second table always has --images 80.
#
#   bash scripts/measure/scaling.sh                       # about ten minutes on two cores
#   WORLDS="1 2 4 8" bash scripts/measure/scaling.sh --dataset cifar10 --images 1280
#
# Settings: those of env.sh, and
#   SIZES   images of a step in each process; default: 64 256
#   WORLDS  numbers of processes of the first table; default: 1 and 2, as far as GPUs go
#   MANY    numbers of processes of the second table; default: 1 2 4 8 16 32, none with GPUs
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # for each process
source "$here/../env.sh"
read -ra sizes <<<"${SIZES:-64 256}"
read -ra worlds <<<"${WORLDS:+--world-size $WORLDS}"
read -ra many <<<"${MANY:-1 2 4 8 16 32}"
python "$here/benchmark.py" --batch-size "${sizes[@]}" ${worlds[@]+"${worlds[@]}"} "$@"
if ! python -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    echo
    python "$here/benchmark.py" --variants ddp --batch-size 4 --world-size "${many[@]}" "$@" --images 80
fi
