#!/usr/bin/env bash
# Trains on one GPU, or on the CPU. Arguments go through to snsc.py.
#
#   bash scripts/snsc.sh --dataset synthetic --epochs 1
#   CUDA_VISIBLE_DEVICES=1 bash scripts/snsc.sh
#
# Settings: those of env.sh; here NPROC is 1.
set -euo pipefail
export NPROC=1
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python "$REPO/snsc.py" "$@"
