#!/usr/bin/env bash
# A real Slurm on this machine, to learn srun and sbatch with: some virtual nodes, as root or not.
#
#   eval "$(bash scripts/cluster/local_slurm.sh start)"    # sets SLURM_CONF and MASTER_ADDR
#   srun --nodes 2 --ntasks-per-node 2 python mnmc_ddp_slurm.py --dataset synthetic
#   eval "$(bash scripts/cluster/local_slurm.sh settings)" # sets the same in another terminal
#   bash scripts/cluster/local_slurm.sh status             # its nodes and its jobs
#   eval "$(bash scripts/cluster/local_slurm.sh stop)"     # ends its jobs, leaves no process and no file
#
# Needs Debian's packages slurm-wlm and munge. Settings:
#   NODES  number of virtual nodes (default: 2)
#   CPUS   of each node; more than the machine has is fine (default: 4)
#   GPUS   of each node (default: 0). They are links to /dev/null. Slurm hands them out as it would hand out
#          GPUs, and sets CUDA_VISIBLE_DEVICES. The processes still train on the CPU.
#   LOCAL_SLURM  folder of its configuration, state and logs; another one is another cluster, beside
#                the first (default: local_slurm_<user> under /tmp)
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"
NODES="${NODES:-2}"
CPUS="${CPUS:-4}"
GPUS="${GPUS:-0}"
user="$(id -un)"
given="${LOCAL_SLURM:-/tmp/local_slurm_$user}"
# Whoever owns slurm.conf can have Slurm's commands load programs. In /tmp anyone can take the name.
if [ -n "$(find "$given" -maxdepth 0 ! -user "$user" 2>/dev/null)" ]; then
    echo "$given belongs to another user: choose another LOCAL_SLURM" >&2
    exit 1
fi
folder="$(realpath --canonicalize-missing "$given")"
export SLURM_CONF="$folder/slurm.conf"

require() {
    if ! type slurmctld slurmd srun munged &>/dev/null; then
        echo "this needs slurm-wlm and munge (as root: apt-get install slurm-wlm munge)" >&2
        exit 1
    fi
}

# free_ports N: ports that were free a moment ago, all different.
free_ports() {
    python3 -c 'import socket, sys
sockets = [socket.create_server(("", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))' "$1"
}

# eventually SECONDS COMMAND...: whether the command succeeds within that time.
eventually() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.2
    done
}

write_configuration() {
    local host ports number
    host="$(uname -n)"
    read -r -a ports <<<"$(free_ports "$((NODES + 1))")"
    cat >"$SLURM_CONF" <<END
ClusterName=local
SlurmctldHost=${host%%.*}(127.0.0.1)
SlurmctldPort=${ports[0]}
# A job's number makes its port: clusters beside each other need other numbers.
FirstJobId=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
# Without control groups, which containers seldom grant.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# As on most clusters: the shell of salloc runs on the first node.
LaunchParameters=use_interactive_step
# Heterogeneous jobs wait for this round of the scheduler, by default half a minute.
SchedulerParameters=bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Nodes may have more CPUs than the machine.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    [ "$GPUS" = 0 ] || write_fake_gpus
    for ((number = 0; number < NODES; number++)); do
        echo "NodeName=n$number NodeHostname=${host%%.*} NodeAddr=127.0.0.$((number + 1))" \
            "Port=${ports[$((number + 1))]} CPUs=$CPUS RealMemory=1000000 ${gres:-}" >>"$SLURM_CONF"
    done
}

# Slurm asks nothing of a GPU but that its file is a device.
write_fake_gpus() {
    local number
    for ((number = 0; number < GPUS; number++)); do
        ln -s /dev/null "$folder/gpu$number"
    done
    echo "Name=gpu Flags=nvidia_gpu_env File=$folder/gpu[0-$((GPUS - 1))]" >"$folder/gres.conf"
    echo "GresTypes=gpu" >>"$SLURM_CONF"
    gres="Gres=gpu:$GPUS"
}

all_idle() {
    [ "$(sinfo --noheader --Node --states idle --format %N 2>/dev/null | wc -l)" = "$NODES" ]
}

no_jobs() {
    [ -z "$(squeue --noheader 2>/dev/null)" ]
}

start() {
    require
    if [ -e "$folder" ]; then
        echo "$folder exists: stop that cluster first, or choose another LOCAL_SLURM" >&2
        exit 1
    fi
    umask 077  # for this user alone, whose jobs are all that the cluster runs
    mkdir -p "$(dirname "$folder")"
    mkdir "$folder" "$folder/state"  # fails if anyone was faster
    touch "$folder/cluster_of_local_slurm"  # stop deletes no folder without it
    trap give_up EXIT
    (umask 377 && head -c 1024 /dev/urandom >"$folder/munge.key")
    # --force, because munged wants a folder that all users can reach.
    munged --force --key-file "$folder/munge.key" --socket "$folder/munge.socket" \
        --pid-file "$folder/munged.pid" --log-file "$folder/munged.log" \
        --seed-file "$folder/munged.seed" 2>"$folder/munged.stderr.log"
    write_configuration
    slurmctld
    for ((number = 0; number < NODES; number++)); do
        mkdir "$folder/spool-n$number"
        slurmd -N "n$number"
    done
    eventually 60 all_idle
    trap - EXIT
    settings
    echo "in another terminal: eval \"\$(bash scripts/cluster/local_slurm.sh settings)\"" >&2
}

# shellcheck disable=SC2317  # the trap calls it
give_up() {
    tail -n 20 "$folder"/*.log >&2
    stop >&2
    echo "could not start Slurm: what its logs say is above" >&2
}

require_cluster() {
    if [ ! -e "$folder/cluster_of_local_slurm" ]; then
        echo "no cluster in $folder" >&2
        exit 1
    fi
}

stop() {
    local pids=() pid file
    require_cluster
    if [ -e "$folder/slurmctld.pid" ]; then
        scancel --user "$user" || true
        eventually 30 no_jobs || echo "some jobs did not end within 30 s" >&2
    fi
    for file in "$folder"/*.pid; do
        pid="$(cat "$file" 2>/dev/null || true)"
        # After a crash the number may be another program's by now.
        case "$(cat "/proc/$pid/comm" 2>/dev/null || true)" in
            munged | slurmctld | slurmd) pids+=("$pid") ;;
        esac
    done
    for pid in "${pids[@]}"; do
        kill "$pid" 2>/dev/null || true
    done
    for pid in "${pids[@]}"; do
        eventually 10 not_running "$pid" || kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$folder"
    echo "unset SLURM_CONF MASTER_ADDR"
}

not_running() {
    ! kill -0 "$1" 2>/dev/null
}

# The virtual nodes' names do not resolve, so that the address of rank 0 must be given.
settings() {
    require_cluster
    echo "export SLURM_CONF=$SLURM_CONF MASTER_ADDR=127.0.0.1"
}

status() {
    settings
    sinfo --Node --long
    squeue
}

case "${1:-}" in
    start | settings | status | stop) "$1" ;;
    *)
        echo "usage: bash scripts/cluster/local_slurm.sh start|settings|status|stop" >&2
        exit 2
        ;;
esac
