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
import os
import re
import sys
import tokenize
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
CONTEXT = 3  # equal lines that stay open around a difference
MARK = re.compile(r"# ([1-9]) ")
# What is coloured, and the letter for it in the page's data. A more special kind comes first.
COLOURS = {
    Token.Comment: "c",
    Token.Literal.String.Interpol: "x",
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


def read_recipe(docstring):
    """Returns for each mark its title and its sentences.

    The titles are the list in a DDP script's docstring. The README's recipe, a numbered list or a
    table with the numbers in front, has better titles, and sentences. An item of the recipe that
    speaks of something else under the same number is left out; a test finds that.
    """
    section = README.read_text().partition("\n## The recipe\n")[2].partition("\n## ")[0]
    items = re.findall(r"^(\d)\. (.+(?:\n(?!\d\. |[#|<]).+)*)", section, re.MULTILINE)
    items += re.findall(r"^\| *(\d) *\| *(.+?) *\|$", section, re.MULTILINE)
    listed = dict(re.findall(r"^ *([1-9])[.:]? +(\w.+)$", docstring, re.MULTILINE))
    recipe = {number: [line[0].upper() + line[1:], ""] for number, line in listed.items()}
    for number, text in items:
        match = re.match(r"\*\*(.+?)\*\*[ |]*|[^|]+", text)
        title = (match[1] or match[0]).replace("`", "").strip(" .")
        if find_stems(title) & find_stems(listed.get(number, title)):
            sentences = " ".join(text[match.end() :].replace("|", " ").split())
            recipe[number] = [title, to_html(sentences)]
    return dict(sorted(recipe.items()))


def find_stems(text):
    """Returns the beginnings of a text's longer words, by which two texts can be compared."""
    return {word[:5].lower() for word in re.findall(r"\w{4,}", text)}


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
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        mark = MARK.match(token.string) if token.type == tokenize.COMMENT else None
        if not mark:
            continue
        first = last = token.start[0]
        if token.line.lstrip().startswith("#"):
            while lines[last].lstrip().startswith("#"):
                last += 1
            node = statements.get(last + 1)
            assigned = find_names(node, ast.Store) if node else set()
            while node and node.col_offset == token.start[1]:
                last = node.end_lineno
                node = statements.get(last + 1)
                if node and not assigned & find_names(node):
                    break
        places.append([mark[1], first - 1, last])
    return places


def find_names(tree, context=ast.expr_context):
    """Returns the names in a tree, such as those that it assigns: ast.Store."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {node.id for node in nodes if isinstance(node.ctx, context)}


def find_assigned(source):
    """Returns the names that a source assigns as (line, name)."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    return [(node.lineno - 1, node.id) for node in nodes if isinstance(node.ctx, ast.Store)]


@functools.cache
def similarity(a, b):
    """Returns how well two lines fit into one row, from 0 for not at all to 1 for equal."""
    a, b = a.strip(), b.strip()
    is_comment = a.startswith("#")
    if not a or not b or is_comment != b.startswith("#"):
        return 0.1 if a == b else 0
    ratio = difflib.SequenceMatcher(None, split_words(a), split_words(b), autojunk=False).ratio()
    begins = [re.match(r"(def )?\w+( [+*]?= ?|=)?", line) for line in (a, b)]
    if all(begins) and begins[0][0] == begins[1][0] and (begins[0][1] or begins[0][2]):
        ratio = max(0.55, ratio + 0.3)  # They define or assign the same name.
    calls = [set(re.findall(r"[a-z]([A-Z][a-z]+)\(", line)) for line in (a, b)]
    if calls[0] & calls[1]:
        ratio += 0.3  # They call relatives, such as RandomSampler and DistributedSampler.
    if ratio < 0.55:
        return 0
    return ratio / 2 if is_comment else min(0.99, ratio)  # Code draws a row together, not prose.


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
    """Returns rows for unlike lines: in common rows, unless a comment would be beside code.

    Common rows begin at the top or, if no comment is beside code then, end at the bottom.
    """
    top = list(itertools.zip_longest(left, right))
    bottom = list(itertools.zip_longest(reversed(left), reversed(right)))[::-1]
    for rows in (top, bottom):
        both = [(a[i].strip(), b[j].strip()) for i, j in rows if None not in (i, j)]
        if all(before.startswith("#") == after.startswith("#") for before, after in both):
            return rows
    return [(i, None) for i in left] + [(None, j) for j in right]


def align(a, b):
    """Returns rows (line of a or None, line of b or None) in which equal lines stand together.

    difflib finds the equal lines. Between them, similar lines share a row, and put_beside
    places what is left over.
    """
    rows = []
    matcher = difflib.SequenceMatcher(lambda line: not line.strip(), a, b, autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        pairs = [(i + n, j + n) for n in range(i_end - i)] if kind == "equal" else []
        if kind == "replace":
            pairs = [(i + m, j + n) for m, n in pair_lines(a[i:i_end], b[j:j_end])]
        for i_pair, j_pair in [*pairs, (i_end, j_end)]:
            rows += put_beside(range(i, i_pair), range(j, j_pair), a, b)
            if (i_pair, j_pair) in pairs:
                rows.append((i_pair, j_pair))
            i, j = i_pair + 1, j_pair + 1
    return rows


def changed_words(a, b):
    """Returns for two similar lines the ranges of letters that differ, [begin, end, begin, …]."""
    before, after = split_words(a), split_words(b)
    # What both begin and end with stays out, or a bracket would match another bracket.
    same = len(os.path.commonprefix([before, after]))
    tail = len(os.path.commonprefix([before[same:][::-1], after[same:][::-1]]))
    middle = [line[same : len(line) - tail] for line in (before, after)]
    start = len("".join(before[:same]))
    places = [[start + n for n in (0, *itertools.accumulate(map(len, line)))] for line in middle]
    changes = []
    for kind, *span in difflib.SequenceMatcher(str.isspace, *middle, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        begin, end, other_begin, other_end = (places[n // 2][at] for n, at in enumerate(span))
        # A blank or a sign between two changes would only make confetti.
        if changes and begin - changes[-1][1] <= 2:
            begin, _, other_begin, _ = changes.pop()
        changes.append((begin, end, other_begin, other_end))
    sides = [change[:2] for change in changes], [change[2:] for change in changes]
    return [[at for begin, end in side if begin < end for at in (begin, end)] for side in sides]


def describe_row(row, a, b):
    """Returns the kind of a row: "=", "-", "+", "x" for unlike lines, or the words that differ."""
    i, j = row
    if i is None or j is None:
        return "+" if i is None else "-"
    if a[i] == b[j]:
        return "="
    fit = similarity(a[i], b[j])
    # In a comment that is mostly another one, marked words would tear the sentence apart.
    is_new_prose = a[i].lstrip().startswith("#") and fit < 0.4
    return changed_words(a[i], b[j]) if fit and not is_new_prose else "x"


def find_replaced(places, marked, rows, plain):
    """Returns for each place of a mark the lines of a script without marks that it replaces.

    They are changed lines that are similar to one of the place, or assign a name that it assigns.
    """
    a, b = plain.splitlines(), marked.splitlines()
    kinds = [(row, describe_row(row, a, b)) for row in rows]
    changed = [i for (i, _), kind in kinds if i is not None and kind != "="]
    assigned = find_assigned(marked)
    assigned_before = [(i, name) for i, name in find_assigned(plain) if i in changed]
    replaced = []
    for _, first, last in places:
        names = {name for j, name in assigned if first <= j < last}
        lines = {i for i, name in assigned_before if name in names}
        lines |= {i for (i, j), kind in kinds if isinstance(kind, list) and first <= j < last}
        replaced.append(sorted(lines))
    return replaced


def describe_pair(before, after, marks):
    """Returns what the page must know of two scripts: their rows, counts, replaced lines."""
    a, b = before.splitlines(), after.splitlines()
    rows = align(a, b)
    runs = []  # "=41" is 41 equal rows; a row of similar lines stands for itself.
    for kind, group in itertools.groupby((describe_row(row, a, b) for row in rows), key=str):
        kinds = list(group)
        runs += kinds if isinstance(kinds[0], list) else [f"{kind}{len(kinds)}"]
    pair = {"rows": runs, "statements": changed_statements(before, after)}
    if marks[1] and not marks[0]:
        pair["replaced"] = find_replaced(marks[1], after, rows, before)
    return pair


def read_source(name):
    """Returns the text of a script."""
    return (REPO / f"{name}.py").read_text()


def read_docstring(name):
    """Returns the docstring of a script."""
    return ast.get_docstring(ast.parse(read_source(name)))


def describe_script(name):
    """Returns what the page must know of a script."""
    source = read_source(name)
    return {
        "lines": source.splitlines(),
        "colours": paint(source)[: len(source.splitlines())],
        "parts": find_parts(source),
        "marks": find_marks(source),
    }


def show_door(before, after, names):
    """Returns the link to a step as HTML."""
    numbers = f"{names.index(before) + 1} → {names.index(after) + 1}"
    return f'<a href="#{before}..{after}">{numbers} <small>{after}</small></a>'


def gather_data(steps, names):
    """Returns all that the page's JavaScript must know."""
    scripts = {name: describe_script(name) for name in names}
    used = {mark[0]: name for name in names for mark in scripts[name]["marks"]}
    recipe = read_recipe(read_docstring(next(iter(used.values()))))
    if used.keys() != recipe.keys():
        sys.exit(f"marks {sorted(used)} in the scripts, but {sorted(recipe)} in README's recipe")
    pairs = {}
    for before, after in itertools.combinations(names, 2):
        sources = [read_source(name) for name in (before, after)]
        marks = [scripts[name]["marks"] for name in (before, after)]
        pairs[f"{before}..{after}"] = describe_pair(*sources, marks)
    data = {"steps": steps, "context": CONTEXT, "recipe": recipe}
    return data | {"scripts": scripts, "pairs": pairs}


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
