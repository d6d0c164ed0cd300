"""Writes docs/side_by_side.html, a page that shows any two of the six scripts side by side.

    python scripts/docs/side_by_side.py

The page is one file and needs no network. Its looks and its behaviour are those of
side_by_side.template.html. All that it says of the scripts is read from elsewhere: the steps from
docs/diffs.md, the sentence for each of the eight marks from the README's recipe, the marks from the
scripts' comments. Where a browser called chromium is, it makes the README's picture of the page,
if that shows something else now.
"""

import difflib
import functools
import hashlib
import html
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops, PngImagePlugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from statements import changed_statements
from update_pages import README, REPO, read_blocks, read_body

PAGE = REPO / "docs" / "side_by_side.html"
TEMPLATE = Path(__file__).with_name("side_by_side.template.html")
PICTURE = REPO / "docs" / "images" / "side_by_side.png"
PICTURED = ("snmc_dp", "mnmc_ddp_tcp", "5")  # the pair, and the mark that is open
MARK = re.compile(r"# ([1-8]) ")


def read_steps():
    """Returns the steps as (from, to, sentence), in the order of docs/diffs.md."""
    text = (REPO / "docs" / "diffs.md").read_text()
    steps = []
    for block in read_blocks(text):
        if block.mark.startswith("diff "):
            before, after = (name.removesuffix(".py") for name in block.mark.split()[1:])
            section = text[: block.start].rpartition(f"## {block.heading}\n")[2].strip()
            steps.append((before, after, to_html(" ".join(section.split("\n\n")[0].split()))))
    return steps


def read_recipe():
    """Returns for each number of the README's recipe its title and its sentences."""
    section = README.read_text().partition("\n## The recipe\n")[2].partition("\n## ")[0]
    items = re.findall(r"^(\d)\. \*\*(.+)\.\*\* (.+(?:\n {3}.+)*)", section, re.MULTILINE)
    return {
        number: [title.replace("`", ""), to_html(" ".join(sentences.split()))]
        for number, title, sentences in items
    }


def to_html(text):
    """Returns a Markdown sentence as HTML: code stays code, a link is only its text."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\*\*?([^*]+)\*\*?", r"<em>\1</em>", text)


def paint(source):
    """Returns the lines of a script as HTML, with colours by Pygments, and the marks in <b>."""
    lines = highlight(source, PythonLexer(), HtmlFormatter(nowrap=True))
    # Names, operators and signs have the colour of the text, so they need no element.
    lines = re.sub(r'<span class="[nopw]">(.*?)</span>', r"\1", lines)
    return re.sub(r'(<span class="c1">)(# [1-8]) ', r"\1<b>\2</b> ", lines).splitlines()


def find_marks(source):
    """Returns the places of the marks as [number, first line, line after the last].

    A mark is a comment that begins with its number. Behind a statement it stands for this statement
    and what is indented under it. Else its place ends above the next empty line, or the next
    comment with the same indentation.
    """
    lines = source.splitlines()
    places = []
    for number, line in enumerate(lines):
        if mark := MARK.search(line):
            end = number + 1
            while is_comment(line) and is_comment(lines[end]):
                end += 1
            indentation = re.match(" *", line)[0]
            stop = f"{indentation}#|$" if is_comment(lines[number]) else f"(?!{indentation} )"
            while not re.match(stop, lines[end]):
                end += 1
            places.append([mark[1], number, end])
    return places


def is_comment(line):
    """Whether there is nothing but a comment in a line."""
    return line.lstrip().startswith("#")


@functools.cache
def similarity(a, b):
    """Returns how well two lines fit into one row, from 0 for not at all to 1 for equal."""
    if is_comment(a) != is_comment(b):
        return 0
    a, b = (
        line.strip() if is_comment(line) else line.partition("  # ")[0].strip() for line in (a, b)
    )
    # By words DataParallel and DistributedDataParallel have nothing in common, and by letters two
    # calls with the same arguments have too much. So both count.
    kinds = (split_words(a), split_words(b)), (a, b)
    ratios = [difflib.SequenceMatcher(None, *kind, autojunk=False).ratio() for kind in kinds]
    ratio = sum(ratios) / 2
    # In a comment that is mostly another one, marked words would tear the sentence apart.
    return ratio if ratio >= (0.8 if is_comment(a) else 0.5) else 0


def split_words(line):
    """Returns the words, steps of indentation, other blanks, and signs of a line."""
    return re.findall(r"\w+| {4}|\s+|[^\w\s]", line)


def pair_lines(a, b):
    """Returns the pairs (line of a, line of b), in order, that fit best into common rows."""
    best = [[(0, ()) for _ in range(len(b) + 1)] for _ in range(len(a) + 1)]
    for i, j in itertools.product(range(len(a)), range(len(b))):
        score, pairs = best[i][j]
        fit = similarity(a[i], b[j])
        choices = [best[i][j + 1], best[i + 1][j]]
        if fit:
            choices.append((score + fit, (*pairs, (i, j))))
        best[i + 1][j + 1] = max(choices, key=lambda choice: choice[0])
    return best[-1][-1][1]


def align(a, b):
    """Returns rows (line of a or None, line of b or None) in which equal lines stand together.

    difflib finds the equal lines. Between them, similar lines share a row, and what is left over
    stands side by side, comments above a statement at their ends.
    """
    pairs = []
    matcher = difflib.SequenceMatcher(lambda line: not line.strip(), a, b, autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            pairs += zip(range(i, i_end), range(j, j_end), strict=True)
        else:
            pairs += [(i + m, j + n) for m, n in pair_lines(a[i:i_end], b[j:j_end])]
    rows, i, j = [], 0, 0
    for i_pair, j_pair in [*pairs, (len(a), len(b))]:
        order = -1 if is_comment(a[i_pair - 1]) and is_comment(b[j_pair - 1]) else 1
        gap = list(itertools.zip_longest(range(i, i_pair)[::order], range(j, j_pair)[::order]))
        rows += [*gap[::order], (i_pair, j_pair)]
        i, j = i_pair + 1, j_pair + 1
    return rows[:-1]  # without the ends


def changed_words(a, b):
    """Returns for two similar lines the ranges of letters that differ, [begin, end, begin, …]."""
    sides = [split_words(line) for line in (a, b)]
    places = [[0, *itertools.accumulate(map(len, words))] for words in sides]
    changes = [], []
    for kind, *span in difflib.SequenceMatcher(str.isspace, *sides, autojunk=False).get_opcodes():
        for side, (begin, end) in enumerate((span[:2], span[2:])):
            if kind != "equal" and begin < end:
                changes[side].extend((places[side][begin], places[side][end]))
    return changes


def describe_pair(before, after):
    """Returns what the page must know of two scripts: their rows, and how much changes.

    A row is [line, line], and of lines that differ [line, line, changed words, changed words].
    """
    a, b = before.splitlines(), after.splitlines()
    rows = []
    for i, j in align(a, b):
        row = [i, j]
        if None not in row and a[i] != b[j]:
            row += changed_words(a[i], b[j]) if similarity(a[i], b[j]) else ([], [])
        rows.append(row)
    return {"rows": rows, "statements": changed_statements(before, after)}


def describe_script(name, source):
    """Returns what the page must know of a script; its head is the docstring and the imports."""
    lines = paint(source)
    head = len(lines) - len(read_body(f"{name}.py"))
    return {"lines": lines, "head": head, "marks": find_marks(source)}


def collect_data():
    """Returns all that the page must know."""
    steps = read_steps()
    names = list(dict.fromkeys(name for step in steps for name in step[:2]))
    sources = {name: (REPO / f"{name}.py").read_text() for name in names}
    scripts = {name: describe_script(name, source) for name, source in sources.items()}
    recipe = read_recipe()
    used = {mark for script in scripts.values() for mark, *_ in script["marks"]}
    if used != recipe.keys():
        sys.exit(f"marks {sorted(used)} in the scripts, but {sorted(recipe)} in README's recipe")
    pairs = {
        f"{before}..{after}": describe_pair(sources[before], sources[after])
        for before, after in itertools.combinations(names, 2)
    }
    return {"steps": steps, "recipe": recipe, "scripts": scripts, "pairs": pairs}


def build_page(data):
    """Returns the page."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # A "<" could end the element that holds the data.
    return TEMPLATE.read_text().replace("{data}", text.replace("<", "\\u003c"))


def sign_picture(data):
    """Returns a hash of what the picture shows: the rows of its mark, and what stands above."""
    before, after, mark = PICTURED
    pair = data["pairs"][f"{before}..{after}"]
    left, right = data["scripts"][before], data["scripts"][after]
    places = [range(first, end) for number, first, end in right["marks"] if number == mark]
    rows = [row for row in pair["rows"] if any(row[1] in place for place in places)]
    lines = [left["lines"][row[0]] for row in rows if row[0] is not None]
    lines += [right["lines"][row[1]] for row in rows]
    shown = [data["steps"], data["recipe"], pair["statements"], rows, lines, TEMPLATE.read_text()]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def read_signature():
    """Returns the hash that was written into the picture."""
    with Image.open(PICTURE) as image:
        return image.info.get("view")


def take_picture(signature):
    """Lets the browser draw the page, cuts off what is empty below, and signs the picture."""
    before, after, mark = PICTURED
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--window-size=1000,1000", "--force-device-scale-factor=2"]
        command += [f"--screenshot={file.name}", f"{PAGE.as_uri()}#{before}..{after}@{mark}"]
        subprocess.run(command, check=True, capture_output=True)
        image = Image.open(file.name).convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    *_, bottom = ImageChops.difference(image, empty).getbbox()
    text = PngImagePlugin.PngInfo()
    text.add_text("view", signature)
    image.crop((0, 0, image.width, bottom)).quantize(64).save(PICTURE, pnginfo=text, optimize=True)


def main():
    data = collect_data()
    PAGE.write_text(build_page(data))
    signature = sign_picture(data)
    if read_signature() == signature:
        return
    if not shutil.which("chromium"):
        sys.exit(f"{PICTURE} shows an older page: install chromium, and start this again")
    take_picture(signature)


if __name__ == "__main__":
    main()
