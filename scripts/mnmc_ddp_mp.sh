#!/usr/bin/env bash
# Starts mnmc_ddp_mp.py, which spawns its own workers, on this machine or as one of several nodes.
# Arguments go through to the script.
#
#   bash scripts/mnmc_ddp_mp.sh --dataset synthetic --epochs 1
#   NNODES=2 NODE_RANK=0 INIT_METHOD=tcp://192.0.2.1:18888 bash scripts/mnmc_ddp_mp.sh   # first node
#   NNODES=2 NODE_RANK=1 INIT_METHOD=tcp://192.0.2.1:18888 bash scripts/mnmc_ddp_mp.sh   # second
#
# Settings: those of env.sh, and
#   NNODES       number of nodes (default: 1)
#   NODE_RANK    which of them this is, from 0 (default: 0)
#   INIT_METHOD  where the ranks meet (default: file:// of a new temporary file, for one node)
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME  the interface that gloo and nccl use (default: lo, for
#                one node)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
if [ "${NNODES:-1}" = 1 ]; then
    INIT_METHOD="${INIT_METHOD:-file://$(mktemp)}"  # torch deletes the file when the last rank leaves
    # On lo no other machine reaches the ranks (docs/security.md).
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"
fi
: "${INIT_METHOD:?for several nodes set it to tcp:// with the address and a free port of node 0}"
exec python "$REPO/mnmc_ddp_mp.py" --nodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "$NPROC" --init-method "$INIT_METHOD" "$@"
