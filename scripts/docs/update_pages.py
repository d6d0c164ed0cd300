"""Writes into the pages what is made from files: functions, patches, diffs, outputs.

    python scripts/docs/update_pages.py
    python scripts/docs/update_pages.py --run           # runs all examples before
    python scripts/docs/update_pages.py --run ring_all_reduce.py ...      # runs these examples

The pages are README.md, docs/*.md and tests/README.md. No program stands in a page alone. A comment
above a fenced block says where the block comes from:

    <!-- show FILE NAME... -->     these functions or classes of a file
    <!-- program FILE -->          all of a short file below its docstring
    <!-- excerpt FILE -->          lines of a file, from the block's first line to its last; they
                                   may have less indentation
    <!-- diff A.py B.py -->        the diff from A to B, without docstrings and imports
    <!-- all of A.py B.py -->      the same, with all lines below the docstrings
    <!-- patch NAME -->            the diff of docs/patches/NAME.diff
    <!-- printed by FILE -->       what a file of docs/examples prints. --run writes it into the
                                   folder printed; lines of several processes are sorted
    <!-- run -->                   shell commands that tests/test_pages.py runs
    <!-- run at once -->           the same, each line in a terminal of its own
    <!-- run by FILE -->           shell commands that this file runs
    <!-- not run: REASON -->       shell commands or output that cannot be made here

An example's docstring has the command that starts it. In `printed by scripts/who_hangs.py NAME...`,
where NAME is a patch, the line numbers of the patched script are kept up to date.
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
from dataclasses import dataclass
from pathlib import Path

import patches

REPO = Path(__file__).resolve().parents[2]
README = REPO / "README.md"
PAGES = [README, *sorted((REPO / "docs").glob("*.md")), REPO / "tests" / "README.md"]
EXAMPLES = sorted((REPO / "docs" / "examples").glob("*.py"))
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    """A fenced block: its language, its code, the comment above it, its heading and place."""

    language: str
    code: str
    mark: str
    heading: str
    start: int
    end: int


def read_blocks(text):
    """Returns the fenced blocks of a Markdown text in order."""
    blocks, heading, done = [], "", 0
    for match in FENCE.finditer(text):
        headings = re.findall(r"^#+ (.+)$", text[done : match.start()], re.MULTILINE)
        heading, done = [heading, *headings][-1], match.end()
        fields = match["language"], match["code"], match["mark"] or "", heading
        blocks.append(Block(*fields, *match.span("code")))
    return blocks


def find_definition(module, name):
    """Returns the node of a function or class; "ConvNet.forward" is a method of a class."""
    node = module
    for part in name.split("."):
        (node,) = (n for n in node.body if getattr(n, "name", None) == part)
    return node


def show(file, *names):
    """Returns the source of functions and classes of a file."""
    text = (REPO / file).read_text()
    lines, module, parts = text.splitlines(), ast.parse(text), []
    for name in names:
        node = find_definition(module, name)
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        parts.append(textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])))
    return "\n\n\n".join(parts) + "\n"


def find_line(line, lines):
    """Returns the index of a line, or of the one that it has probably become; None if unsure."""
    code = line.partition("#")[0].strip()
    if code:  # Only the comment behind it may have changed.
        same = [n for n, other in enumerate(lines) if other.partition("#")[0].strip() == code]
    else:
        similar = difflib.get_close_matches(line, lines, n=1, cutoff=0.5)
        same = [n for n, other in enumerate(lines) if other in similar]
    return same[0] if len(same) == 1 else None


def excerpt(code, file):
    """Returns the lines of a file between the first and the last line of code; code if unsure."""
    shown = [line.strip() for line in code.strip().splitlines()]
    lines = (REPO / file).read_text().splitlines()
    bare = [line.strip() for line in lines]
    first = find_line(shown[0], bare)
    rest = bare[first:]
    last = rest.index(shown[-1]) if shown[-1] in rest else find_line(shown[-1], rest)
    if first is None or last is None:
        return code
    return textwrap.dedent("\n".join(lines[first : first + last + 1])) + "\n"


def read_body(script, imports=False):
    """Returns the lines of a script below its imports, or below its docstring alone."""
    text = (REPO / script).read_text()
    kinds = ast.Expr if imports else (ast.Import, ast.ImportFrom)
    above = [node for node in ast.parse(text).body if isinstance(node, kinds)]
    return text.splitlines()[(above[0] if imports else above[-1]).end_lineno :]


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
    sides = (read_body(name, imports=True)[1:] for name in (a, b))
    rows = list(difflib.unified_diff(*sides, lineterm="", n=1000))[3:]
    # One empty line where the files have two.
    rows = [
        row for above, row in zip(["", *rows], rows, strict=False) if row.strip() or above.strip()
    ]
    return "\n".join(rows) + "\n"


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


def renumber(printed, names):
    """Returns what who_hangs.py prints of a patched script, with the line numbers of today."""
    with tempfile.TemporaryDirectory() as folder:
        text = patches.write_patched(names, folder).read_text()
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]

    def find_nearest(match):
        name, old, statement = match.groups()
        numbers = [number for number, line in enumerate(lines, 1) if line == statement]
        if not numbers:
            return match[0]
        return f"{name}:{min(numbers, key=lambda number: abs(number - int(old)))}: {statement}"

    return re.sub(rf"({names[-1]}\.py):(\d+): (.+)", find_nearest, printed)


def make(block):
    """Returns what the mark of a block says that should stand in it."""
    kind, *rest = block.mark.split()
    if kind == "show":
        return show(*rest)
    if kind == "program":
        return "\n".join(read_body(*rest, imports=True)[1:]) + "\n"
    if kind == "excerpt":
        return excerpt(block.code, *rest)
    if kind == "patch":
        return re.search(r"^--- .*", patches.read_patch(*rest).diff, re.MULTILINE | re.DOTALL)[0]
    if kind == "diff":
        return diff(*rest)
    if kind == "all":
        return diff_all(*rest[1:])
    if block.mark.startswith("printed by scripts/who_hangs.py "):
        return renumber(block.code, rest[2:])
    if block.mark.startswith("printed by docs/examples/"):
        return printed_file(REPO / rest[1]).read_text()
    return block.code


def update(text):
    """Returns a page's text with its blocks made new."""
    for block in reversed(read_blocks(text)):
        if block.mark:
            text = text[: block.start] + make(block) + text[block.end :]
    return text


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
    for page in PAGES:
        page.write_text(update(page.read_text()))


if __name__ == "__main__":
    main()
