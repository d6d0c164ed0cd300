"""Writes docs/side_by_side.html, a page that shows any two of the six scripts side by side.

    python scripts/docs/side_by_side.py              # the page
    python scripts/docs/side_by_side.py --picture    # and the README's picture of it, with Chromium

The page is one file and needs no network. Its looks are in side_by_side.css, its behaviour in
side_by_side.js, and its frame in side_by_side.template.html, beside this file. All that it says of
the scripts is read from elsewhere: the steps from docs/diffs.md, the sentence for each of the eight
marks from the README's recipe, the marks from the scripts' comments.
"""

import argparse
import ast
import difflib
import functools
import html
import io
import itertools
import json
import re
import sys
from pathlib import Path

from browser import open_browser, set_screen
from pygments.lexers import PythonLexer
from pygments.token import Token
from statements import changed_statements
from update_pages import README, REPO, read_blocks

HERE = Path(__file__).parent
PAGE = REPO / "docs" / "side_by_side.html"
PICTURE = REPO / "docs" / "images" / "side_by_side.png"
PICTURED = "#snmc_dp..mnmc_ddp_tcp@4"
MARK = re.compile(r"# ([1-9]) ")
# What is coloured, and the letter for it in the page's data.
COLOURS = {
    Token.Comment: "c",
    Token.Literal.String: "s",
    Token.Literal.Number: "n",
    Token.Keyword: "k",
    Token.Operator.Word: "k",
    Token.Name.Function: "f",
    Token.Name.Class: "f",
    Token.Name.Decorator: "f",
}


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
    """Returns for each line the runs of its colours: "k3x1" is three letters k, then one plain."""
    painted = [[]]
    for kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
        letter = next((COLOURS[known] for known in COLOURS if kind in known), "x")
        mark = MARK.match(text) if letter == "c" else None
        for number, part in enumerate(text.split("\n")):
            if number:
                painted.append([])
            painted[-1].append("mmm" + letter * (len(part) - 3) if mark else letter * len(part))
    groups = (itertools.groupby("".join(line)) for line in painted)
    return ["".join(f"{letter}{len(list(run))}" for letter, run in line) for line in groups]


def find_parts(source):
    """Returns the parts of a script as [name, first line, line after the last]."""
    tree = ast.parse(source).body
    imports = [node for node in tree if isinstance(node, (ast.Import, ast.ImportFrom))]
    docstring_end = tree[0].end_lineno
    parts = [["docstring", 0, docstring_end], ["imports", docstring_end, imports[-1].end_lineno]]
    for node in tree:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            parts.append([node.name, first - 1, node.end_lineno])
    return parts


def find_marks(source):
    """Returns the places of the marks as [number, first line, line after the last].

    A mark is a comment that begins with its number. A place is the statement at whose end it
    stands; of a mark on a line of its own, the next statement, and those directly after it that
    use a name that it assigns.
    """
    lines = source.splitlines()
    body = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    statements = {node.lineno: node for node in reversed(body)}  # the outermost wins
    places = []
    for number, line in enumerate(lines, 1):
        mark = MARK.search(line)
        if not mark:
            continue
        last = number
        if is_comment(line):
            while is_comment(lines[last]):
                last += 1
            node = statements[last + 1]
            assigned = find_names(node, ast.Store)
            last = node.end_lineno
            while (node := statements.get(last + 1)) and assigned & find_names(node):
                last = node.end_lineno
        places.append([mark[1], number - 1, last])
    return places


def find_names(tree, context=ast.expr_context):
    """Returns the names in a tree, such as those that it assigns: ast.Store."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {node.id for node in nodes if isinstance(node.ctx, context)}


def is_comment(line):
    """Whether there is nothing but a comment in a line."""
    return line.lstrip().startswith("#")


@functools.cache
def similarity(a, b):
    """Returns how well two lines fit into one row, from 0 for not at all to 1 for equal."""
    if is_comment(a) != is_comment(b):
        return 0
    a, b = a.strip(), b.strip()
    ratio = difflib.SequenceMatcher(None, split_words(a), split_words(b), autojunk=False).ratio()
    begins = [re.match(r"def \w+|\w+ ?[+*]?=", line) for line in (a, b)]
    if all(begins) and begins[0][0] == begins[1][0]:
        ratio = max(0.55, ratio + 0.3)  # They define or assign the same name.
    calls = [set(re.findall(r"[a-z]([A-Z][a-z]+)\(", line)) for line in (a, b)]
    if calls[0] & calls[1]:
        ratio += 0.3  # They call relatives, such as RandomSampler and DistributedSampler.
    # In a comment that is mostly another one, marked words would tear the sentence apart.
    return ratio if ratio >= (0.8 if is_comment(a) else 0.55) else 0


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


def put_beside(left, right, a, b):
    """Returns rows for unlike lines: in common rows, unless a comment would be beside code."""
    if any(is_comment(a[i]) != is_comment(b[j]) for i, j in zip(left, right, strict=False)):
        return [(i, None) for i in left] + [(None, j) for j in right]
    return list(itertools.zip_longest(left, right))


def align(a, b):
    """Returns rows (line of a or None, line of b or None) in which equal lines stand together.

    difflib finds the equal lines. Between them, similar lines share a row, and put_beside
    places what is left over.
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
        rows += [*put_beside(range(i, i_pair), range(j, j_pair), a, b), (i_pair, j_pair)]
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

    A row is [line, line], and of similar lines [line, line, changed words, changed words].
    """
    a, b = before.splitlines(), after.splitlines()
    rows = []
    for i, j in align(a, b):
        is_similar = None not in (i, j) and a[i] != b[j] and similarity(a[i], b[j])
        rows.append([i, j, *(changed_words(a[i], b[j]) if is_similar else ())])
    return {"rows": rows, "statements": changed_statements(before, after)}


def describe_script(source):
    """Returns what the page must know of a script."""
    lines = source.splitlines()
    parts, marks = find_parts(source), find_marks(source)
    return {"lines": lines, "colours": paint(source), "parts": parts, "marks": marks}


def show_door(before, after, names):
    """Returns the link to a step as HTML."""
    numbers = f"{names.index(before) + 1} → {names.index(after) + 1}"
    return f'<a href="#{before}..{after}">{numbers} <small>{after}</small></a>'


def gather_data(steps, names):
    """Returns all that the page's JavaScript must know."""
    sources = {name: (REPO / f"{name}.py").read_text() for name in names}
    scripts = {name: describe_script(source) for name, source in sources.items()}
    recipe = read_recipe()
    used = {mark for script in scripts.values() for mark, *_ in script["marks"]}
    if used != recipe.keys():
        sys.exit(f"marks {sorted(used)} in the scripts, but {sorted(recipe)} in README's recipe")
    pairs = {
        f"{before}..{after}": describe_pair(sources[before], sources[after])
        for before, after in itertools.combinations(names, 2)
    }
    return {"steps": steps, "recipe": recipe, "scripts": scripts, "pairs": pairs}


def build_page():
    """Returns the page."""
    steps = read_steps()
    names = list(dict.fromkeys(name for step in steps for name in step[:2]))
    data = json.dumps(gather_data(steps, names), ensure_ascii=False, separators=(",", ":"))
    parts = {
        "style": (HERE / "side_by_side.css").read_text(),
        "script": (HERE / "side_by_side.js").read_text(),
        "doors": "\n".join(show_door(*step[:2], names) for step in steps),
        # A "<" could end the element that holds the data.
        "data": data.replace("<", "\\u003c"),
    }
    template = (HERE / "side_by_side.template.html").read_text()
    return re.sub(r"{(style|script|doors|data)}", lambda key: parts[key[1]], template)


def make_picture():
    """Makes the README's picture of the page with Chromium, in few colours to keep it small."""
    from PIL import Image  # comes with torchvision

    with open_browser() as browser:
        set_screen(browser, 1440, 600)
        browser.get(f"{PAGE.as_uri()}{PICTURED}")
        picture = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
    picture.convert("RGB").quantize(64).save(PICTURE, optimize=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--picture", action="store_true", help="make the README's picture, too")
    args = parser.parse_args()
    PAGE.write_text(build_page())
    if args.picture:
        make_picture()


if __name__ == "__main__":
    main()
