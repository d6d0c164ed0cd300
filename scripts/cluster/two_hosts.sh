#!/usr/bin/env bash
# Runs a DDP script across two hosts: two network namespaces of this machine, joined by a virtual
# cable, 10.77.0.1 and 10.77.0.2. Takes them down at the end. Further arguments go to the script.
#
#   bash scripts/cluster/two_hosts.sh mnmc_ddp_tcp.py --dataset synthetic --epochs 1
#   NPROC=1 bash scripts/cluster/two_hosts.sh patched/zero1.py --dataset synthetic
#
# mnmc_ddp_tcp.py and mnmc_ddp_mp.py start in their own way, and all other files by torchrun. Needs
# root and Debian's package iproute2. With GPUs add --backend gloo, or for the programs of
# scripts/measure set CUDA_VISIBLE_DEVICES="", because both hosts have the same GPUs.
# Settings: those of env.sh, and
#   HOSTS  the namespaces are called so, with 0 and 1 appended (default: ddp and the process id);
#          "ip -n <name>0 link set eth0 down" cuts the cable
#   RATE   the cable's bandwidth, such as 100mbit (default: as fast as the machine)
#   OMP_NUM_THREADS  threads of each process (default: half of what env.sh counts, at least 1,
#          because the hosts share the cores)
#   GLOO_SOCKET_IFNAME  the interface that gloo uses (default: eth0, which both hosts have)
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v ip >/dev/null; then
    echo "two_hosts.sh needs root and the package iproute2 (apt-get install iproute2)" >&2
    exit 1
fi
RATE="${RATE:-}"
# tc takes "100" for a hundred bits a second, and a negative rate without a word.
if ! [[ "$RATE" =~ ^([1-9][0-9]*[kmg]bit)?$ ]]; then
    echo "RATE=$RATE: give a number with a unit, such as RATE=100mbit" >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
script="$REPO/${1:-}"
if [ ! -f "$script" ]; then
    echo "usage: bash scripts/cluster/two_hosts.sh mnmc_ddp_tcp.py [OPTIONS], or another script" >&2
    exit 2
fi
shift
set_threads "$((2 * NPROC))"  # because both hosts have the same cores
export CABLE="${RATE:-no limit}"  # for the results of scripts/measure
HOSTS="${HOSTS:-ddp$$}"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME-eth0}"
# Else torchrun warns that the hosts' addresses have no names.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-FATAL}"

# shellcheck disable=SC2317  # the trap calls it
take_down() {
    local host pids
    for host in "${HOSTS}0" "${HOSTS}1"; do
        # Again until none is left, because a process can start another meanwhile.
        while pids="$(ip netns pids "$host" 2>/dev/null)" && [ -n "$pids" ]; do
            # shellcheck disable=SC2086  # one word for each process
            kill -KILL $pids 2>/dev/null || true
            sleep 0.1  # The kernel needs a moment to end them.
        done
        ip netns delete "$host" 2>/dev/null || true
    done
}

# Another run with hosts of that name ends here, before the trap would take them down.
ip netns add "${HOSTS}0"
trap take_down EXIT
# A second signal must not stop take_down half-way: timeout sends two, and a person may, too.
trap 'trap "" INT TERM; exit 130' INT
trap 'trap "" INT TERM; exit 143' TERM
ip netns add "${HOSTS}1"
ip -n "${HOSTS}0" link add eth0 type veth peer name eth0 netns "${HOSTS}1"
for host in 0 1; do
    ip -n "$HOSTS$host" address add "10.77.0.$((host + 1))/24" dev eth0
    ip -n "$HOSTS$host" link set eth0 up
    ip -n "$HOSTS$host" link set lo up
    if [ -n "$RATE" ]; then
        # A burst passes at once after a pause: what the cable sends in a millisecond, and one large
        # packet at least, which tc would never let pass otherwise.
        rate="${RATE//kbit/000}" && rate="${rate//mbit/000000}" && rate="${rate//gbit/000000000}"
        burst="$((rate / 8000 > 8000 ? rate / 8000 : 8000))"
        tc -n "$HOSTS$host" qdisc add dev eth0 root tbf rate "$RATE" burst "$burst" latency 50ms
    fi
done

commands=()
for host in 0 1; do
    on_host=(ip netns exec "$HOSTS$host")
    store=(--init-method tcp://10.77.0.1:29500)  # The port is free for sure: the hosts are new.
    case "$script" in
        "$REPO/mnmc_ddp_tcp.py")
            for ((local_rank = 0; local_rank < NPROC; local_rank++)); do
                "${on_host[@]}" python "$script" "${store[@]}" --world-size "$((2 * NPROC))" \
                    --rank "$((host * NPROC + local_rank))" --local-rank "$local_rank" "$@" &
                commands+=("$!")
            done
            ;;
        "$REPO/mnmc_ddp_mp.py")
            "${on_host[@]}" python "$script" "${store[@]}" --nodes 2 --node-rank "$host" \
                --nproc-per-node "$NPROC" "$@" &
            commands+=("$!")
            ;;
        *)
            "${on_host[@]}" torchrun --nnodes 2 --node-rank "$host" --master-addr 10.77.0.1 \
                --master-port 29500 --nproc-per-node "$NPROC" "$script" "$@" &
            commands+=("$!")
            ;;
    esac
done
failed=0
for pid in "${commands[@]}"; do
    wait "$pid" || failed=1  # for all: each host ends by itself when the other is gone
done
exit "$failed"
