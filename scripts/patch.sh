#!/usr/bin/env bash
# Writes a copy of a script with a change that a page teaches, and says how to run it.
#
#   bash scripts/patch.sh                    # lists the changes
#   bash scripts/patch.sh set_epoch_left_out # writes patched/set_epoch_left_out.py
#   bash scripts/patch.sh zero1 accumulate_4  # two changes, one after the other
#
# The changes are docs/patches/*.diff. The copy has the name of the last of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "$#" -eq 0 ]; then
    for file in docs/patches/*.diff; do
        printf '%-36s %s\n' "$(basename "$file" .diff)" "$(sed -n 1p "$file")"
    done
    exit
fi
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
for name in "$@"; do
    file="docs/patches/$name.diff"
    if [ ! -f "$file" ]; then
        echo "there is no $file: bash scripts/patch.sh lists those that there are" >&2
        exit 2
    fi
    script="$(sed -n 's#^--- a/##p' "$file")"
    [ -f "$scratch/$script" ] || cp "$script" "$scratch"
    # Outside the repository, where git apply reads the file names of the patch as they are.
    (cd "$scratch" && git apply -) <"$file"
done
mkdir -p patched
mv "$scratch/$script" "patched/$name.py"
echo "wrote patched/$name.py. Run it:"
sed -n '/^---\|^diff/q; s/^    /  /p' "$file"
