"""Writes into the pages what is made from the code: diffs between scripts, what examples print.

    python scripts/docs/update_pages.py            # the diffs
    python scripts/docs/update_pages.py --run      # and the output under each Python example

The pages are README.md, docs/*.md and tests/README.md.

A comment above a fenced block says what it is:

    <!-- diff A.py B.py -->        the diff from A to B, without docstrings and imports
    <!-- torchrun N -->            a Python example for N processes; without it, for one
    <!-- excerpt FILE -->          consecutive lines of that file, perhaps with less indentation
    <!-- patch FILE -->            a change of that file, in the form of git apply -p0
    <!-- recipe -->                a diff whose two sides are whole programs
    <!-- run -->                   shell commands that tests/test_pages.py runs
    <!-- run at once -->           the same, each line in a terminal of its own
    <!-- run by FILE -->           shell commands that this file runs
    <!-- not run: REASON -->       shell commands or output that cannot be made here

A text block right under a Python example is what the example prints, its lines sorted when several
processes print. Of what scripts/who_hangs.py printed, the line numbers are kept up to date.
"""

import argparse
import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
README = REPO / "README.md"
PAGES = [README, *sorted((REPO / "docs").glob("*.md")), REPO / "tests" / "README.md"]
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
        words = match["language"], match["code"], match["mark"] or "", heading
        blocks.append(Block(*words, *match.span("code")))
    return blocks


def examples(text):
    """Returns the Python examples as (block, processes, block with the expected output or None)."""
    blocks = read_blocks(text)
    found = []
    for block, below in zip(blocks, [*blocks, None][1:], strict=True):
        if block.language == "python" and not block.mark.startswith("excerpt "):
            launcher, _, number = block.mark.partition(" ")
            adjoins = below and below.language == "text"
            adjoins = adjoins and text[block.end : below.start].split() == ["```", "```text"]
            processes = int(number) if launcher == "torchrun" else 0
            found.append((block, processes, below if adjoins else None))
    return found


def body(script):
    """Returns the lines of a script below its imports."""
    text = (REPO / script).read_text()
    imports = [n for n in ast.parse(text).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    return text.splitlines()[imports[-1].end_lineno :]


def diff(a, b):
    """Returns the unified diff between two scripts below their imports, one line of context."""
    rows = difflib.unified_diff(body(a), body(b), a, b, lineterm="", n=1)
    # Line numbers would change with every docstring.
    return "\n".join(re.sub(r"^@@.*", "@@", row) for row in rows) + "\n"


def sort_lines(output):
    """Returns printed lines in the order in which the pages show those of several processes."""
    return "\n".join(sorted(output.splitlines())) + "\n"


def run_example(code, processes):
    """Runs a Python example; returns what it prints. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "example.py").write_text(code)
        if not processes:
            return subprocess.check_output([sys.executable, "example.py"], text=True, cwd=folder)
        # A file for each rank, or their lines would mix.
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--redirects",
            "1",
        ]
        command += ["--log-dir", "log", "--nproc-per-node", str(processes), "example.py"]
        env = os.environ | {"OMP_NUM_THREADS": "1"}  # else torchrun says that it sets it
        subprocess.run(command, check=True, cwd=folder, env=env)
        return sort_lines("".join(f.read_text() for f in Path(folder).rglob("stdout.log")))


def apply_patch(patch, path):
    """Changes a file as a patch on a page says."""
    command = ["git", "apply", "-p0", "-"]
    subprocess.run(command, input=patch, text=True, cwd=path.parent, check=True)


def patched(block, folder):
    """Copies the script of a patch block into folder and applies the patch; returns the copy."""
    script = Path(shutil.copy(REPO / block.mark.split()[1], folder))
    apply_patch(block.code, script)
    return script


def watched(script, text):
    """Returns the code of a script with the page's lines that make its ranks write notes."""
    (lines,) = (block.code for block in read_blocks(text) if "def watch(" in block.code)
    imports, function, start = lines.split("\n\n\n")
    start = start.partition("\n\n")[0]
    code = (REPO / script).read_text()
    new = [line for line in imports.splitlines() if line not in code.splitlines()]
    code = code.replace("import argparse\n", "\n".join(["import argparse", *new, ""]), 1)
    begin = "def main():\n    args = parse_args()\n"
    assert code.count(begin) == 1
    start = textwrap.indent(start, "    ")
    return code.replace(begin, f"{function}\n\n\n{begin}{start}\n")


def renumber(printed, patch, script, text):
    """Returns what who_hangs.py prints of a patched script, with the line numbers of today."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, script)
        path.write_text(watched(script, text))
        apply_patch(patch, path)
        lines = [line.partition("  #")[0].strip() for line in path.read_text().splitlines()]

    def nearest(place):
        name, old, statement = place.groups()
        numbers = [number for number, line in enumerate(lines, 1) if line == statement]
        return f"{name}:{min(numbers, key=lambda number: abs(number - int(old)))}: {statement}"

    return re.sub(r"([\w.]+\.py):(\d+): (.+)", nearest, printed)


def update(text, run):
    """Returns a page's text with its diffs made new, and with run the examples' output."""
    changes = []
    for block in read_blocks(text):
        if block.language == "diff" and block.mark.startswith("diff "):
            changes.append((block, diff(*block.mark.split()[1:])))
        if block.mark.startswith("patch "):
            patch = block
        elif block.mark == "printed by scripts/who_hangs.py":
            changes.append((block, renumber(block.code, patch.code, patch.mark.split()[1], text)))
    for block, processes, output in examples(text):
        if run and output:
            changes.append((output, run_example(block.code, processes)))
    for block, code in sorted(changes, key=lambda change: -change[0].start):
        text = text[: block.start] + code + text[block.end :]
    return text


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="run the Python examples, too")
    args = parser.parse_args()
    for page in PAGES:
        page.write_text(update(page.read_text(), args.run))


if __name__ == "__main__":
    main()
