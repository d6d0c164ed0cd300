"""Writes into the pages what is made from files: functions, patches, diffs, outputs.

    python scripts/docs/update_pages.py
    python scripts/docs/update_pages.py --run           # runs all examples before
    python scripts/docs/update_pages.py --run ring_all_reduce.py ...      # runs these examples

The pages are README.md and docs/*.md. No program stands in a page alone. A comment
above a fenced block says where the block comes from:

    <!-- show FILE NAME... -->     these functions or classes of a file
    <!-- excerpt FILE -->          lines of a file, from the block's first line to its last; they
                                   may have less indentation
    <!-- diff A.py B.py -->        the diff from A to B, without docstrings and imports
    <!-- all of A.py B.py -->      the same, with all lines below the docstrings
    <!-- patch NAME -->            the diff of docs/patches/NAME.diff
    <!-- printed by FILE -->       what a file of docs/examples prints. --run writes it into the
                                   folder printed; lines of several processes are sorted
    <!-- run -->                   shell commands that tests/test_docs.py runs
    <!-- run at once -->           the same, each line in a terminal of its own
    <!-- run by FILE -->           shell commands that this file runs
    <!-- not run: REASON -->       shell commands or output that cannot be made here

An example's docstring has the command that starts it. In `printed by scripts/who_hangs.py NAME`,
where NAME is a patch, the line numbers of the patched script are kept up to date. What is not found
in its file is an error that names the page and the line: nothing stale is kept.
"""

import argparse
import ast
import difflib
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import namedtuple
from pathlib import Path

import patches

REPO = Path(__file__).resolve().parents[2]
README = REPO / "README.md"
PAGES = [README, *sorted((REPO / "docs").glob("*.md"))]
EXAMPLES = sorted((REPO / "docs" / "examples").glob("*.py"))
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


# A fenced block: its language, its code, the comment above it, its heading and place.
Block = namedtuple("Block", "language code mark heading start end")


def read_blocks(text):
    """Returns the fenced blocks of a Markdown text in order."""
    blocks, heading, done = [], "", 0
    for match in FENCE.finditer(text):
        headings = re.findall(r"^#+ (.+)$", text[done : match.start()], re.MULTILINE)
        heading, done = [heading, *headings][-1], match.end()
        fields = match["language"], match["code"], match["mark"] or "", heading
        blocks.append(Block(*fields, *match.span("code")))
    return blocks


def show(file, *names):
    """Returns the source of functions and classes of a file."""
    text = (REPO / file).read_text()
    nodes = {getattr(node, "name", None): node for node in ast.parse(text).body}
    parts = []
    for name in names:
        node = nodes[name]
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        parts.append("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    return "\n\n\n".join(parts) + "\n"


def strip_comment(line):
    """Returns a line's code without the comment behind it; a comment alone stays as it is."""
    return line.partition("  #")[0].strip()


def excerpt(code, file):
    """Returns the lines of a file from the first line of code to the last, found without comments.

    Raises LookupError where one of them is not in the file, or the first is there twice.
    """
    shown = [strip_comment(line) for line in code.strip().splitlines()]
    first, last = shown[0], shown[-1]
    lines = (REPO / file).read_text().splitlines()
    bare = [strip_comment(line) for line in lines]
    if bare.count(first) != 1:
        raise LookupError(f"{file} has {bare.count(first)} lines `{first}`")
    start = bare.index(first)
    if last not in bare[start:]:
        raise LookupError(f"{file} has no line `{last}` below `{first}`")
    return textwrap.dedent("\n".join(lines[start : bare.index(last, start) + 1])) + "\n"


def read_body(script):
    """Returns the lines of a script below its imports."""
    text = (REPO / script).read_text()
    imports = [n for n in ast.parse(text).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    return text.splitlines()[imports[-1].end_lineno :]


def diff(a, b):
    """Returns the unified diff of two scripts below their imports; hunks name functions."""
    before, after = read_body(a), read_body(b)
    rows = list(difflib.unified_diff(before, after, a, b, lineterm="", n=1))
    for index, row in enumerate(rows):
        if row.startswith("@@"):  # Line numbers would change with every docstring.
            first_changed = int(re.search(r"\+(\d+)", row)[1])  # The line above it is context.
            functions = re.findall(r"^def \w+", "\n".join(after[: first_changed + 1]), re.MULTILINE)
            rows[index] = " ".join(["@@", *functions[-1:]])
    return "\n".join(rows) + "\n"


def diff_all(a, b):
    """Returns all lines of two programs below their docstrings, as a diff."""
    texts = ((REPO / name).read_text().split('"""\n\n', 1)[1] for name in (a, b))
    rows = difflib.unified_diff(*(text.splitlines() for text in texts), lineterm="", n=1000)
    # One empty line where the files have two.
    return ("\n".join(list(rows)[3:]) + "\n").replace(" \n \n", " \n")


def sort_lines(output):
    """Returns printed lines in the order in which the pages show those of several processes."""
    return "\n".join(sorted(output.splitlines())) + "\n"


def count_processes(path):
    """Returns how many processes an example's own command starts, 0 for plain python."""
    command = re.search(rf"--nproc-per-node (\d+) .*{path.name}", path.read_text())
    return int(command[1]) if command else 0


def run_example(path):
    """Runs an example; returns what it prints. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        processes = count_processes(path)
        if not processes:
            return subprocess.check_output([sys.executable, path], text=True, cwd=folder)
        # A file for each rank, or their lines would mix.
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects", "1"]
        argv += ["--log-dir", "log", "--nproc-per-node", str(processes), path]
        env = os.environ | {"OMP_NUM_THREADS": "1"}  # else torchrun says that it sets it
        subprocess.run(argv, check=True, cwd=folder, env=env)
        return sort_lines("".join(f.read_text() for f in Path(folder).rglob("stdout.log")))


def printed_file(path):
    """Returns the file that holds what an example prints."""
    return path.parent / "printed" / f"{path.stem}.txt"


def renumber(printed, name):
    """Returns what who_hangs.py prints of a patched script, with the line numbers of today."""
    with tempfile.TemporaryDirectory() as folder:
        text = patches.write_patched([name], folder).read_text()
    lines = [strip_comment(line) for line in text.splitlines()]

    def find_nearest(match):
        old, statement = match.groups()
        numbers = [number for number, line in enumerate(lines, 1) if line == statement]
        if not numbers:
            raise LookupError(f"{name}.py has no line `{statement}`: run the program again")
        return f"{name}.py:{min(numbers, key=lambda number: abs(number - int(old)))}: {statement}"

    return re.sub(rf"{name}\.py:(\d+): (.+)", find_nearest, printed)


def make(block):
    """Returns what the mark of a block says that should stand in it."""
    kind, *rest = block.mark.split()
    if kind == "show":
        return show(*rest)
    if kind == "excerpt":
        return excerpt(block.code, *rest)
    if kind == "patch":
        return patches.read_patch(*rest).diff
    if kind == "diff":
        return diff(*rest)
    if kind == "all":
        return diff_all(*rest[1:])
    if block.mark.startswith("printed by scripts/who_hangs.py "):
        return renumber(block.code, *rest[2:])
    if block.mark.startswith("printed by docs/examples/"):
        return printed_file(REPO / rest[1]).read_text()
    return block.code


def update(text):
    """Returns (a page's text with its blocks made new, errors as "LINE: what is not found")."""
    errors = []
    for block in reversed(read_blocks(text)):
        if block.mark:
            try:
                made = make(block)
            except (LookupError, OSError, RuntimeError, ValueError) as error:
                line = text[: block.start].count("\n")
                errors.append(f"{line}: <!-- {block.mark} -->: {error}")
                continue
            text = text[: block.start] + made + text[block.end :]
    return text, errors


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="*", metavar="EXAMPLE", help="run these examples, or all")
    args = parser.parse_args()
    if args.run is not None:
        for path in EXAMPLES:
            if printed_file(path).exists() if args.run == [] else path.name in args.run:
                printed_file(path).write_text(run_example(path))
    failed = False
    for page in PAGES:
        text, errors = update(page.read_text())
        page.write_text(text)
        for error in errors:
            failed = True
            print(f"{page.relative_to(REPO)}:{error}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
