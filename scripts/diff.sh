#!/usr/bin/env bash
# Shows two scripts side by side; lines that differ are marked in the middle, in colour on a terminal.
#
#   bash scripts/diff.sh snsc.py snmc_dp.py
#   WIDTH=180 bash scripts/diff.sh mnmc_ddp_tcp.py mnmc_ddp_env.py
#
# Settings:
#   WIDTH  columns of the output (default: the terminal's)
set -euo pipefail
if [ "$#" -ne 2 ]; then
    echo "usage: bash scripts/diff.sh A.py B.py" >&2
    exit 2
fi
WIDTH="${WIDTH:-$(tput cols 2>/dev/null || echo 200)}"

# Colours a line by the mark between its halves: | changed, < only left, > only right.
colour() {
    awk -v middle="$(((WIDTH + 1) / 2))" '{
        mark = substr($0, middle, 1)
        code = mark == "|" ? 33 : mark == "<" ? 31 : mark == ">" ? 32 : 0
        print code ? "\033[" code "m" $0 "\033[0m" : $0
    }'
}

filter="cat"
if [ -t 1 ]; then
    filter=colour
fi
# diff exits with 1 where the files differ, which is what we came to see.
{ diff --side-by-side --expand-tabs --width="$WIDTH" -- "$1" "$2" || [ "$?" -eq 1 ]; } | "$filter"
