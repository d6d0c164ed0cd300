#!/usr/bin/env bash
# Trains with DataParallel on all visible GPUs, or on the CPU. Arguments go through to snmc_dp.py.
#
#   bash scripts/snmc_dp.sh --dataset synthetic --epochs 1
#   CUDA_VISIBLE_DEVICES=0,1 bash scripts/snmc_dp.sh --batch-size 256
#
# Settings: those of env.sh; here NPROC is 1, because DataParallel is one process.
set -euo pipefail
export NPROC=1
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python "$REPO/snmc_dp.py" "$@"
