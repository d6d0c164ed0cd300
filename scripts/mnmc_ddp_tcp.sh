#!/usr/bin/env bash
# Starts all ranks of mnmc_ddp_tcp.py on this machine, waits for them, and ends all when one fails.
# Arguments go through to the script. Needs bash 4.3 or newer.
#
#   bash scripts/mnmc_ddp_tcp.sh --dataset synthetic --epochs 1
#   NPROC=4 INIT_METHOD=file:///tmp/meeting-point bash scripts/mnmc_ddp_tcp.sh
#
# Settings: those of env.sh, and
#   INIT_METHOD  where the ranks meet (default: tcp://127.0.0.1 with a free port)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
INIT_METHOD="${INIT_METHOD:-tcp://127.0.0.1:$(free_port)}"

ranks=()
# A stopped process takes SIGTERM only when it continues.
trap 'kill "${ranks[@]}" 2>/dev/null || true; kill -CONT "${ranks[@]}" 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for ((rank = 0; rank < NPROC; rank++)); do
    python "$REPO/mnmc_ddp_tcp.py" --init-method "$INIT_METHOD" --world-size "$NPROC" \
        --rank "$rank" "$@" &
    ranks+=("$!")
done
for ((rank = 0; rank < NPROC; rank++)); do
    wait -n  # the first that fails ends this script, and the trap ends the others
done
