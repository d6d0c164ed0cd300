"""Keeps docs/patches current: each file there is a change of one script that a page teaches.

    python scripts/docs/patches.py                  # says which do not fit their script any more
    python scripts/docs/patches.py --take NAME      # writes NAME.diff from patched/NAME.py

A patch begins with a sentence and the command that runs the changed script. Below that stands a
diff with one line of context, which git apply takes, also where its lines have moved. Where the
script has changed at these lines, the patch does not apply. patched/NAME.py gets what fits, and
patched/NAME.py.rej the rest. Mend the first by hand, and use --take. To make a new patch: write
docs/patches/NAME.diff with the sentence, the command and a line `--- a/SCRIPT`; copy the script to
patched/NAME.py, change it, and use --take.
"""

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "docs" / "patches"
PATCHED = REPO / "patched"
NAMES = sorted(path.stem for path in FOLDER.glob("*.diff"))


# A file of docs/patches: its header, the diff below it, and the script that it changes.
Patch = namedtuple("Patch", "name header diff script")


def read_patch(name):
    """Returns the patch of that name."""
    text = (FOLDER / f"{name}.diff").read_text()
    start = re.search(r"^--- a/(\S+)", text, re.MULTILINE)
    return Patch(name, text[: start.start()], text[start.start() :], start[1])


def apply_patch(patch, text):
    """Returns the text of a script with the patch applied. Raises RuntimeError if it does not."""
    with tempfile.TemporaryDirectory() as folder:  # outside the repository, whose paths git adds
        path = Path(folder, patch.script)
        path.write_text(text)
        process = subprocess.run(
            ["git", "apply", "--reject", "-"],
            input=patch.diff, text=True, cwd=folder, capture_output=True,
        )  # fmt: skip
        if process.returncode:
            PATCHED.mkdir(exist_ok=True)
            (PATCHED / f"{patch.name}.py").write_text(path.read_text())
            for rejected in Path(folder).glob("*.rej"):
                (PATCHED / f"{patch.name}.py.rej").write_text(rejected.read_text())
            raise RuntimeError(f"{patch.name} does not apply\n{process.stderr}")
        return path.read_text()


def write_patched(names, folder):
    """Writes a script with these patches, as scripts/patch.sh does; returns the path."""
    text = (REPO / read_patch(names[0]).script).read_text()
    for name in names:
        text = apply_patch(read_patch(name), text)
    path = Path(folder, f"{names[-1]}.py")
    path.write_text(text)
    return path


def make_diff(script, changed):
    """Returns the diff from a script to its changed text, as docs/patches has it."""
    sides = (text.splitlines(keepends=True) for text in ((REPO / script).read_text(), changed))
    return "".join(difflib.unified_diff(*sides, f"a/{script}", f"b/{script}", n=1))


def find_mistakes(text):
    """Returns what ruff says of a patched script, such as a name that is gone."""
    argv = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format", "concise"]
    argv += ["--ignore", "E501"]  # The scripts themselves are held to the width of a line.
    argv += ["--config", str(REPO / ".ruff.toml"), "-"]
    return subprocess.run(argv, input=text, capture_output=True, text=True).stdout


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--take", metavar="NAME")
    args = parser.parse_args()
    failed = False
    for name in [args.take] if args.take else NAMES:
        patch = read_patch(name)
        try:
            if args.take:
                changed = (PATCHED / f"{name}.py").read_text()
            else:
                changed = apply_patch(patch, (REPO / patch.script).read_text())
            if mistakes := find_mistakes(changed):
                raise RuntimeError(f"{name}: {mistakes}")
            if args.take:
                diff = make_diff(patch.script, changed)
                (FOLDER / f"{name}.diff").write_text(patch.header + diff)
        except RuntimeError as error:
            failed = True
            print(f"{error}mend patched/{name}.py, then: patches.py --take {name}\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
