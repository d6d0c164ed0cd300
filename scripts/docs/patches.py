"""Keeps docs/patches current: each file there is a change of one script that a page teaches.

    python scripts/docs/patches.py                  # rebases all after a script has changed
    python scripts/docs/patches.py --rename OLD NEW # the same, where a name has changed
    python scripts/docs/patches.py --take NAME      # writes NAME.diff from patched/NAME.py

A patch begins with a sentence and the command that runs the changed script. Below that it is a
diff as git writes it. Its index line names the version of the script that the patch was made for,
so rebasing is a merge of three texts: that version, its patched form, and the script of today.
What does not merge, or leaves an undefined name, is written to patched/NAME.py for a hand to mend,
and --take makes the patch from there. To make a new patch: write docs/patches/NAME.diff with the
sentence, the command, and a line `--- a/SCRIPT`; copy the script to patched/NAME.py, change it, and
use --take.
"""

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "docs" / "patches"
PATCHED = REPO / "patched"
NAMES = sorted(path.stem for path in FOLDER.glob("*.diff"))


@dataclass
class Patch:
    """A file of docs/patches: its header, the diff below them, and the script it changes."""

    name: str
    header: str
    diff: str
    script: str


def git(*argv, folder=REPO, may_differ=False):
    """Runs git; returns what it prints. Raises RuntimeError with what it complains of."""
    argv = ["git", *map(str, argv)]
    process = subprocess.run(argv, capture_output=True, text=True, cwd=folder)
    if process.returncode > may_differ:  # git diff ends with 1 where files differ
        raise RuntimeError(process.stderr)
    return process.stdout


def read_patch(name):
    """Returns the patch of that name."""
    text = (FOLDER / f"{name}.diff").read_text()
    start = re.search(r"^(diff --git|---) ", text, re.MULTILINE).start()
    script = re.search(r"^--- a/(\S+)", text, re.MULTILINE)[1]
    return Patch(name, text[:start], text[start:], script)


def apply_patch(patch, text):
    """Returns the text of a script with the patch applied. Raises RuntimeError if it does not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, patch.script)
        path.write_text(text)
        argv = ["git", "apply", "-"]
        process = subprocess.run(argv, input=patch.diff, text=True, cwd=folder, capture_output=True)
        if process.returncode:
            raise RuntimeError(f"{patch.name}: {process.stderr}")
        return path.read_text()


def write_patched(names, folder):
    """Writes a script with these patches, as scripts/patch.sh does; returns the path."""
    text = (REPO / read_patch(names[0]).script).read_text()
    for name in names:
        text = apply_patch(read_patch(name), text)
    path = Path(folder, f"{names[-1]}.py")
    path.write_text(text)
    return path


def made_for(patch):
    """Returns the text of the script for which the patch was made, from git's objects."""
    return git("cat-file", "blob", re.search(r"^index (\w+)\.\.", patch.diff, re.MULTILINE)[1])


def write_patch(patch, base, changed):
    """Writes the patch that turns base into changed; its header stays."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, side, patch.script) for side in "ab"]
        for path, text in zip(paths, (base, changed), strict=True):
            path.parent.mkdir()
            path.write_text(text)
        argv = ["diff", "--no-index", "--no-prefix", "--full-index", "--no-color", "-U1"]
        argv += [path.relative_to(folder) for path in paths]
        diff = git(*argv, folder=folder, may_differ=True)
        # The next rebase finds base among git's objects, also where it is not committed yet.
        git("hash-object", "-w", paths[0])
    diff = re.sub(r"^(@@ .*? @@).*$", r"\1", diff, flags=re.MULTILINE)
    (FOLDER / f"{patch.name}.diff").write_text(patch.header + diff)


def strip_comments(lines):
    """Returns the code of lines, without comments and empty lines."""
    bare = (line.partition("  #")[0].strip() for line in lines)
    return [line for line in bare if line and not line.startswith("#")]


def find_span(current, base, today, first, last):
    """Returns where in current the lines first to last of base are; None if they have changed.

    today maps the lines of base that are unchanged to their numbers in current. Comments may have
    changed, and so may the neighbours of what a patch puts between two lines.
    """
    above = today.get(first - 1) if first else -1
    below = today.get(last)
    if first == last:
        position = above + 1 if above is not None else below
        return None if position is None else (position, position)
    numbers = [today.get(line) for line in range(first, last)]
    if None not in numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return numbers[0], numbers[-1] + 1
    if above is None or below is None:
        return None
    same = strip_comments(base[first:last]) == strip_comments(current[above + 1 : below])
    return (above + 1, below) if same else None


def merge(current, base, changed):
    """Returns the changes from base to changed made to current, and how many did not fit.

    Unlike git's merge it accepts changes of neighbouring lines, because a patch is a lesson beside
    a script's own lines. What replaces code that has changed does not fit.
    """
    current, base, changed = (text.splitlines(keepends=True) for text in (current, base, changed))
    blocks = difflib.SequenceMatcher(None, base, current, autojunk=False).get_matching_blocks()
    today = {old + i: new + i for old, new, size in blocks for i in range(size)}
    conflicts = 0
    changes = difflib.SequenceMatcher(None, base, changed, autojunk=False).get_opcodes()
    for tag, first, last, start, end in reversed(changes):
        if tag == "equal":
            continue
        new = changed[start:end]
        span = find_span(current, base, today, first, last)
        if span is None:
            conflicts += 1
            above = max((line for line in today if line < first), default=None)
            span = (0 if above is None else today[above] + 1,) * 2
            old = ["<<<<<<< the script was\n", *base[first:last], "=======\n"]
            new = [*old, *new, ">>>>>>> the patch makes it\n"]
        current[slice(*span)] = new
    return "".join(current), conflicts


def find_mistakes(text):
    """Returns what ruff says of a patched script, such as a name that is gone."""
    argv = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format", "concise"]
    argv += ["--config", str(REPO / ".ruff.toml"), "-"]
    return subprocess.run(argv, input=text, capture_output=True, text=True).stdout


def rebase(name, renames=()):
    """Rebases a patch; returns what is left for a hand to do, or an empty string."""
    patch = read_patch(name)
    current, base = (REPO / patch.script).read_text(), made_for(patch)
    changed = apply_patch(patch, base)
    for old, new in renames:
        base, changed = (re.sub(rf"\b{re.escape(old)}\b", new, text) for text in (base, changed))
    merged, conflicts = merge(current, base, changed)
    mistakes = "" if conflicts else find_mistakes(merged)
    if conflicts or mistakes:
        PATCHED.mkdir(exist_ok=True)
        (PATCHED / f"{name}.py").write_text(merged)
        return f"{conflicts} conflicts" if conflicts else mistakes.strip()
    write_patch(patch, current, merged)
    return ""


def take(name):
    """Makes a patch from patched/NAME.py, which a hand has changed."""
    patch = read_patch(name)
    changed = (PATCHED / f"{name}.py").read_text()
    if mistakes := find_mistakes(changed):
        sys.exit(mistakes)
    write_patch(patch, (REPO / patch.script).read_text(), changed)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rename", nargs=2, action="append", default=[], metavar=("OLD", "NEW"))
    parser.add_argument("--take", metavar="NAME")
    args = parser.parse_args()
    if args.take:
        take(args.take)
        return
    left = {name: rebase(name, args.rename) for name in NAMES}
    for name, reason in left.items():
        if reason:
            print(f"{name}: {reason}\n  mend patched/{name}.py, then: patches.py --take {name}")
    print(f"{len(left)} patches, {sum(map(bool, left.values()))} left for a hand")
    sys.exit(any(left.values()))


if __name__ == "__main__":
    main()
