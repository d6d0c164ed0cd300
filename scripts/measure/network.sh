#!/usr/bin/env bash
# Measures what a slow network costs, and what helps: network.py on two hosts, at one speed of the
# cable after the other. Arguments go through to network.py. Needs root and the package iproute2.
#
#   bash scripts/measure/network.sh                      # about fifteen minutes on two cores
#   RATES=100mbit bash scripts/measure/network.sh --model convnet
#
# Settings: those of two_hosts.sh but RATE and NPROC, and
#   RATES  speeds of the cable; default: none 1gbit 100mbit, where none sets no limit
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
read -ra rates <<<"${RATES:-none 1gbit 100mbit}"
export NPROC=1
for rate in "${rates[@]}"; do
    RATE="${rate#none}" bash "$here/../cluster/two_hosts.sh" scripts/measure/network.py "$@"
done
