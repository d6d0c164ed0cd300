#!/usr/bin/env bash
# Starts all ranks of mnmc_ddp_tcp.py on this machine, waits for them, and ends all when one fails.
# Arguments go through to the script.
#
#   bash scripts/mnmc_ddp_tcp.sh --dataset synthetic --epochs 1
#   NPROC=4 INIT_METHOD=file:///tmp/meeting-point bash scripts/mnmc_ddp_tcp.sh
#
# Settings: those of env.sh, and
#   INIT_METHOD  where the ranks meet (default: file:// of a new temporary file)
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME  the interface that gloo and nccl use (default: lo)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
meeting_point="$(mktemp)"
INIT_METHOD="${INIT_METHOD:-file://$meeting_point}"
# On lo no other machine reaches the ranks (docs/security.md).
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"

ranks=()
# shellcheck disable=SC2317  # the trap calls it
end_ranks() {
    kill "${ranks[@]}" 2>/dev/null || true
    kill -CONT "${ranks[@]}" 2>/dev/null || true  # A stopped process takes SIGTERM when it continues.
    wait
    rm -f "$meeting_point"
}
trap end_ranks EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start=(python)
# A rank ends with this script, even if that is killed.
! command -v setpriv >/dev/null || start=(setpriv --pdeathsig TERM python)
for ((rank = 0; rank < NPROC; rank++)); do
    "${start[@]}" "$REPO/mnmc_ddp_tcp.py" --init-method "$INIT_METHOD" --world-size "$NPROC" \
        --rank "$rank" "$@" &
    ranks+=("$!")
done
# The first rank that fails ends this script with its status, and the trap ends the others. wait -n
# would do it, but it can forget a rank that ends at the same moment as another.
running=("${ranks[@]}")
while [ "${#running[@]}" -gt 0 ]; do
    sleep 0.1
    for rank in "${!running[@]}"; do
        if ! kill -0 "${running[rank]}" 2>/dev/null; then
            wait "${running[rank]}"
            unset "running[rank]"
        fi
    done
done
