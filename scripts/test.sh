#!/usr/bin/env bash
# Sets the tests up and runs them. Arguments go through to pytest, after --all where that is given.
#
#   bash scripts/test.sh                 # a few minutes on two cores
#   bash scripts/test.sh --all           # those marked slow too
#   bash scripts/test.sh tests/test_train.py -k resume -x
#   bash scripts/test.sh -m gpu          # what needs a GPU
#
# Settings: those of env.sh but NPROC, and
#   CI  when true, a test that cannot run on this machine fails, unless it needs a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export NPROC=2
bash scripts/setup.sh
source scripts/env.sh
if ! python -c 'import re
from importlib.metadata import version
for name in re.findall(r"(?m)^[\w-]+", open("tests/requirements.txt").read()): version(name)' 2>/dev/null; then
    python -m pip install --quiet -r tests/requirements.txt
fi
markers="not slow"
if [ "${1:-}" = --all ]; then
    markers=""
    shift
fi
# All tests, unless some are named.
files=(tests)
for word in "$@"; do
    case "$word" in tests/*) files=() ;; esac
done
# Three test files at a time: launches spend much of their time waiting.
exec python -m pytest -n 3 --dist loadfile -m "$markers" "${files[@]}" "$@"
