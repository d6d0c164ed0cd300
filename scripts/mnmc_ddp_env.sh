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
#   MASTER_ADDR  address of node 0, for several nodes
#   MASTER_PORT  a port that is free there (default: 29500)
#   MAX_RESTARTS  on one node: how often torchrun starts all ranks again when one fails
#                 (default: 0); with --checkpoint they go on from the last epoch
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
if [ "${NNODES:-1}" = 1 ]; then
    # Else restarted ranks find the dead ones' addresses, and fail or hang (torch 2.15).
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # --local-addr: a machine need not know its own name.
    where=(--standalone --local-addr 127.0.0.1 --max-restarts "${MAX_RESTARTS:-0}")
else
    : "${MASTER_ADDR:?for several nodes set it to the address of node 0}"
    where=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-0}")
    where+=(--master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
# nohup ignores SIGHUP, but torchrun would end its ranks when the terminal closes.
if [[ "$(trap -p HUP)" == *"''"* ]]; then
    export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT  # since torch 2.10
fi
exec torchrun "${where[@]}" --nproc-per-node "$NPROC" "$REPO/mnmc_ddp_env.py" "$@"
