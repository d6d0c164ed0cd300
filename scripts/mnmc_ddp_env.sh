#!/usr/bin/env bash
# Starts mnmc_ddp_env.py under torchrun, on this machine or as one of several nodes. Arguments go
# through to the script.
#
#   bash scripts/mnmc_ddp_env.sh --dataset synthetic --epochs 1
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=192.0.2.1 bash scripts/mnmc_ddp_env.sh   # on the first node
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=192.0.2.1 bash scripts/mnmc_ddp_env.sh   # on the second
#
# Settings: those of env.sh, and
#   NNODES       number of nodes (default: 1)
#   NODE_RANK    which of them this is, from 0 (default: 0)
#   MASTER_ADDR  address of node 0 (default for one node: 127.0.0.1)
#   MASTER_PORT  a port that is free there (default: 29500; for one node any free one)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
NNODES="${NNODES:-1}"
if [ "$NNODES" = 1 ]; then
    MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
    MASTER_PORT="${MASTER_PORT:-$(free_port)}"
fi
: "${MASTER_ADDR:?for several nodes set it to the address of node 0}"
exec torchrun --nnodes "$NNODES" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    "$REPO/mnmc_ddp_env.py" "$@"
