"""docs/side_by_side.html, the page that shows two scripts beside each other, in a real browser."""

import ast
import difflib
import html
import itertools
import json
import re
from importlib.util import find_spec

import pytest
import side_by_side
from browser import find_chromium, open_browser, set_screen
from launch import DDP, REPO, SCRIPTS
from statements import changed_statements

can_browse = find_chromium() and find_spec("selenium")
needs_browser = pytest.mark.skipif(
    not can_browse, reason="needs chromium, chromium-driver (Debian's packages) and selenium"
)
NAMES = [script.removesuffix(".py") for script in SCRIPTS]
MARKED = [script.removesuffix(".py") for script in DDP]
STEPS = side_by_side.read_steps()
PAGE = side_by_side.PAGE
PAIR = "return [left.value, right.value]"
SHOWN = "return rows.filter((row) => row.element.checkVisibility()).length"
RECIPE = side_by_side.read_recipe(side_by_side.read_docstring(MARKED[0]))
# What the table says of each row: for both sides, the classes, the text, and the changed words.
READ_ROWS = """
return [...document.querySelectorAll("#page tbody tr:not(.fold, .note)")].map((row) =>
  [...row.cells].map((cell) => {
    const code = cell.querySelector("code");
    const parts = [...(code?.children || [])];
    return {
      kind: cell.className.split(" ")[1] || "equal",
      number: cell.dataset.n,
      text: code?.textContent ?? null,
      spoken: cell.querySelector(".unseen")?.textContent ?? "",
      words: parts.some((part) => part.tagName !== "SPAN"),
      rest: parts.map((part) => (part.tagName === "SPAN" ? part.textContent : "")).join(""),
    };
  }));
"""
PLACES = "return [...document.querySelectorAll('td.a.place')].map((cell) => +cell.dataset.n)"
# Of each row that is only indented: both line numbers, and the colours behind its cells.
INDENTED = """
return [...document.querySelectorAll("tr:has(.indented)")].map(({ cells: [a, b] }) =>
  [+a.dataset.n, +b.dataset.n, [a, b].map((cell) => getComputedStyle(cell).backgroundColor)]);
"""
# The contrast of each text with what is behind it, by the formula of WCAG 2.
READ_CONTRASTS = """
const channels = (color) => {
  const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
  return color.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
};
const luminance = (color) => channels(color).slice(0, 3).map((value) => value / 255)
  .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
  .reduce((sum, value, n) => sum + value * [0.2126, 0.7152, 0.0722][n], 0);
const background = (element) => {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if (channels(color)[3] === 1) return color;
  }
};
const found = {};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
  const pair = [getComputedStyle(element).color, background(element)];
  const [low, high] = pair.map(luminance).sort((a, b) => a - b);
  found[pair.join(" on ")] = (high + 0.05) / (low + 0.05);
}
return found;
"""


def read_lines(name):
    return (REPO / f"{name}.py").read_text().splitlines()


def read_plain(recipe_html):
    """The text of a sentence of the recipe, without its elements."""
    return html.unescape(re.sub(r"<[^>]+>", "", recipe_html))


@pytest.fixture(scope="module")
def chromium():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """The browser at 1,600 pixels; a test ends without an error in its console."""
    set_screen(chromium, 1600)
    chromium.get("about:blank")
    yield chromium
    assert chromium.get_log("browser") == []


def visit(browser, address=""):
    """Opens the page as new, or at another address."""
    browser.get("about:blank")
    browser.get(PAGE.as_uri() + address)


def run(browser, script):
    return browser.execute_script(script)


def read_text(browser, selector):
    return run(browser, f"return document.querySelector({json.dumps(selector)})?.innerText")


def settle(browser):
    """Waits until the page shows what its address says: a click returns before that."""
    from selenium.webdriver.support.wait import WebDriverWait

    shown = "return writeAddress() === location.hash || !location.hash"
    WebDriverWait(browser, 20, poll_frequency=0.02).until(lambda browser: run(browser, shown))


def click(browser, target):
    """Clicks an element, or the first that a selector finds."""
    if isinstance(target, str):
        target = browser.find_element("css selector", target)
    target.click()
    settle(browser)


def press(browser, *keys):
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(browser).send_keys(key).perform()
        settle(browser)


def read_hash(browser):
    return browser.current_url.partition("#")[2]


def test_page_is_current():
    """It is made from the scripts, the README's recipe and docs/diffs.md."""
    current = PAGE.read_text() == side_by_side.build_page()
    assert current, "run: python scripts/docs/side_by_side.py --picture"


def test_page_is_one_small_file(record_property):
    text = PAGE.read_text()
    script = (REPO / "scripts/docs/side_by_side.js").read_text()
    lines = [line for line in script.splitlines() if line.strip() and line.strip()[:2] != "//"]
    size = len(text.encode())
    record_property("says", f"side_by_side.html: {size} bytes, {len(lines)} lines of JavaScript")
    assert size <= 400_000
    assert not re.search(r"<(img|link|iframe|object|embed)|<[^>]+ src=|url\(|@import|https?:", text)
    assert "default-src 'none'" in text
    # As few lines as do it; more need a reason.
    assert len(lines) <= 320


def test_picture_of_the_page_is_small():
    assert 10_000 < side_by_side.PICTURE.stat().st_size < 150_000


def test_similar_lines_share_a_row_and_words_that_differ_are_found():
    before = ["a = 1", "b = load(path)", "", "return a"]
    after = ["a = 1", "if ready:", "    b = load(path, 2)", "print(a)", "", "return a"]
    rows = side_by_side.align(before, after)
    assert rows == [(0, 0), (None, 1), (1, 2), (None, 3), (2, 4), (3, 5)]
    # So do calls of relatives.
    assert side_by_side.similarity("s = LeftReader(path)", "t = RightReader(path, rank=r, n=2)")
    assert not side_by_side.similarity("s = LeftReader(path)", "t = RightWriter(path, rank=r, n=2)")
    # Unlike lines, too, but a comment does not stand beside code that it does not explain.
    assert side_by_side.align(["x", "abc(1)", "y"], ["x", "def f():", "y"])[1] == (1, 1)
    assert side_by_side.align(["x", "# why", "y"], ["x", "f()", "y"])[1:3] == [(1, None), (None, 1)]
    assert side_by_side.changed_words(before[1], after[2]) == [[], [0, 4, 17, 20]]
    assert side_by_side.changed_words("f(g(1))", "f(g(1) if h(2))") == [[], [6, 14]]


def test_words_of_a_comment_are_marked_only_where_its_sentence_stays():
    """Otherwise the two lines are marked whole."""
    before = ["# The seed of an epoch makes a run repeatable."]
    for after, stays in (
        ("# The seed of each epoch makes a run repeatable.", True),
        ("# Each rank has the seed of an epoch, and a shard.", False),
    ):
        kind = side_by_side.describe_row((0, 0), before, [after])
        assert isinstance(kind, list) if stays else kind == "x", after


def test_marks_and_recipe_are_read_from_scripts_and_readme():
    for name in MARKED:
        marks = side_by_side.find_marks((REPO / f"{name}.py").read_text())
        lines = read_lines(name)
        commented = [n for n, line in enumerate(lines) if re.search(r"# \d ", line)]
        assert [first for _, first, _ in marks] == commented
        assert all(re.search(rf"# {number} ", lines[first]) for number, first, _ in marks)
        assert all(first < last for _, first, last in marks)


def test_every_mark_has_a_sentence_in_the_recipe():
    """Under the number that it has in the scripts."""
    assert list(RECIPE) == list("12345678")
    for number, (title, sentences) in RECIPE.items():
        assert title[0].isupper() and sentences.endswith(".") and "](" not in sentences, (
            f"mark {number}: README's recipe and the docstrings of the scripts do not agree"
        )


def test_recipe_is_a_list_a_table_or_the_docstring(monkeypatch, tmp_path):
    monkeypatch.setattr(side_by_side, "README", tmp_path / "README.md")
    text = "# A\n\n## The recipe\n\n1. **Begin.** With `this`\n   line.\n2. **Go onward.** Now.\n"
    text += "\n| 3 | **Ending** | With [a link](b.md). |\n\n## B\n\n1. **No.** Not here.\n"
    side_by_side.README.write_text(text)
    docstring = (
        "What it is:\n\n    1 beginning\n    2 stop, and leave\n    3 at the end\n    4 rest"
    )
    assert side_by_side.read_recipe(docstring) == {
        "1": ["Begin", "With <code>this</code> line."],
        "2": ["Stop, and leave", ""],  # The README speaks of something else here.
        "3": ["At the end", ""],
        "4": ["Rest", ""],
    }
    assert side_by_side.read_recipe("") == {
        "1": ["Begin", "With <code>this</code> line."],
        "2": ["Go onward", "Now."],
        "3": ["Ending", "With a link."],
    }


@pytest.mark.parametrize("page", [REPO / "README.md", REPO / "docs/diffs.md"], ids=lambda p: p.name)
def test_links_to_the_page_name_two_scripts_and_a_mark(page):
    links = re.findall(r"side_by_side\.html#([^)\s]+)", page.read_text())
    for link in links:
        left, right, mark = re.fullmatch(r"(\w+)\.\.(\w+?)(?:@([1-8]))?", link).groups()
        assert left in NAMES and right in NAMES, link
        assert not mark or {left, right} & set(MARKED), link
    if page.name == "diffs.md":
        assert {f"{before}..{after}" for before, after, _ in STEPS} <= set(links)


@needs_browser
def test_every_pair_gives_back_its_two_files_line_by_line(browser):
    """Both columns are the files to the letter; equal lines share a row, and nothing else does."""
    visit(browser)
    for left, right in itertools.permutations(NAMES, 2):
        run(browser, f"location.hash = '#{left}..{right}'; render()")
        rows = run(browser, READ_ROWS)
        for side, name in enumerate((left, right)):
            cells = [row[side] for row in rows if row[side]["number"]]
            assert [cell["text"] for cell in cells] == read_lines(name)
            assert [int(cell["number"]) for cell in cells] == list(range(1, len(cells) + 1))
        for a, b in rows:
            assert (a["text"] == b["text"]) == (a["kind"] == b["kind"] == "equal")
            if a["kind"] != "equal":
                assert a["kind"] in ("del", "gap") and b["kind"] in ("ins", "gap")
                assert (a["spoken"], b["spoken"]) == (
                    "removed: " if a["number"] else "",
                    "added: " if b["number"] else "",
                )
            if a["words"] or b["words"]:  # Without the words that differ, the lines are equal.
                assert a["rest"] == b["rest"]
        equal = [a["text"] for a, b in rows if a["kind"] == "equal" and a["text"].strip()]
        files = ([line for line in read_lines(name) if line.strip()] for name in (left, right))
        matcher = difflib.SequenceMatcher(None, *files, autojunk=False)
        assert len(equal) >= sum(block.size for block in matcher.get_matching_blocks())


@needs_browser
def test_doors_lead_to_the_five_steps(browser):
    visit(browser)
    assert run(browser, PAIR) == [*STEPS[0][:2]]
    assert read_text(browser, "#about").startswith(read_plain(STEPS[0][2]))
    doors = browser.find_elements("css selector", "nav a")
    assert len(doors) == len(STEPS)
    for door, (before, after, sentence) in zip(doors, STEPS, strict=True):
        numbers = f"{NAMES.index(before) + 1} → {NAMES.index(after) + 1}"
        assert door.text == f"{numbers} {after}"
        click(browser, door)
        assert run(browser, PAIR) == [before, after]
        assert door.get_attribute("aria-current") == "page"
        sources = [(REPO / f"{name}.py").read_text() for name in (before, after)]
        counted = f"{changed_statements(*sources)} statements change."
        assert f"{read_plain(sentence)} {counted}" in read_text(browser, "#about")
    browser.back()
    settle(browser)
    assert run(browser, PAIR) == [*STEPS[-2][:2]]
    for wrong in ("#no..such", "#toString..valueOf", f"#{NAMES[0]}..{NAMES[0]}", "#", "#%"):
        visit(browser, wrong)
        assert run(browser, PAIR) == [*STEPS[0][:2]]


@needs_browser
def test_menus_choose_any_pair_and_the_sides_can_be_exchanged(browser):
    from selenium.webdriver.support.select import Select

    visit(browser, f"#{NAMES[0]}..{NAMES[1]}")
    click(browser, "#swap")
    assert run(browser, PAIR) == [NAMES[1], NAMES[0]]
    click(browser, "#swap")
    Select(browser.find_element("id", "right")).select_by_value(NAMES[5])
    settle(browser)
    assert read_hash(browser) == f"{NAMES[0]}..{NAMES[5]}"
    # The script of the other side: the two change places.
    Select(browser.find_element("id", "left")).select_by_value(NAMES[5])
    settle(browser)
    assert read_hash(browser) == f"{NAMES[5]}..{NAMES[0]}"


@needs_browser
def test_equal_stretches_are_folded_under_the_names_of_their_functions(browser):
    left, right, _ = STEPS[1]
    lines = read_lines(right)
    names = [node.name for node in ast.parse("\n".join(lines)).body if hasattr(node, "name")]
    visit(browser, f"#{left}..{right}")
    labels = run(browser, "return folds.map((lines) => lines.previousSibling.innerText)")
    hidden = run(browser, "return folds.map((lines) => lines.rows.length)")
    assert sum(hidden) == run(browser, "return rows.length") - run(browser, SHOWN)
    found = [re.fullmatch(r"▸ (\d+) equal lines: (.+)", label.strip()).groups() for label in labels]
    assert [int(count) for count, _ in found] == hidden and min(hidden) > 3
    for (_, parts), fold in zip(found, range(len(found)), strict=True):
        numbers = (
            f"return rows.filter((row) => folds[{fold}].contains(row.element)).map((r) => r.b)"
        )
        inside = "\n".join(lines[number] for number in run(browser, numbers))
        assert set(parts.split(", ")) <= {"docstring", "imports", *names}
        assert set(re.findall(r"^(?:def|class) (\w+)", inside, re.M)) <= set(parts.split(", "))
    # Around each difference, some equal lines stay.
    near = run(browser, "return folds.map(({ nextSibling }) => nextSibling.rows.length)")
    assert set(near[:-1]) == {side_by_side.CONTEXT}


@needs_browser
def test_folds_open_alone_and_all_together(browser):
    left, right, _ = STEPS[1]
    visit(browser, f"#{left}..{right}")
    before = run(browser, SHOWN)
    first = run(browser, "return folds[0].rows.length")
    click(browser, "tr.fold button")
    assert run(browser, SHOWN) == before + first
    assert read_hash(browser) == f"{left}..{right}+1"
    visit(browser, f"#{read_hash(browser)}")
    assert run(browser, SHOWN) == before + first
    button = browser.find_element("css selector", "tr.fold button")
    assert button.get_attribute("aria-expanded") == "true"
    click(browser, "tr.fold button")
    assert (run(browser, SHOWN), read_hash(browser)) == (before, f"{left}..{right}")
    click(browser, "#all")
    assert run(browser, SHOWN) == run(browser, "return rows.length")
    assert read_hash(browser) == f"{left}..{right}+all"
    visit(browser, f"#{left}..{right}+all")
    assert run(browser, SHOWN) == run(browser, "return rows.length")
    assert browser.find_element("id", "all").is_selected()
    press(browser, "a")
    assert (run(browser, SHOWN), read_hash(browser)) == (before, f"{left}..{right}")


@needs_browser
def test_keys_and_buttons_go_from_difference_to_difference(browser):
    left, right, _ = STEPS[1]
    a, b = read_lines(left), read_lines(right)
    kinds = [side_by_side.describe_row(row, a, b) == "=" for row in side_by_side.align(a, b)]
    count = sum(not equal for equal, _ in itertools.groupby(kinds))
    visit(browser, f"#{left}..{right}")
    assert read_text(browser, "#where") == f"{count} differences"
    in_sight = """
    const { top } = document.querySelector(".now").getBoundingClientRect();
    return bar.getBoundingClientRect().bottom <= top && top < innerHeight;
    """
    for number in range(1, count + 1):
        press(browser, "n")
        assert read_text(browser, "#where") == f"difference {number} of {count}"
        assert run(browser, in_sight)
    press(browser, "n")
    assert read_text(browser, "#where") == f"difference {count} of {count}"
    press(browser, "p", "p")
    assert read_text(browser, "#where") == f"difference {count - 2} of {count}"
    click(browser, "#previous")
    assert read_text(browser, "#where") == f"difference {count - 3} of {count}"
    # From where the reader has scrolled to.
    run(browser, "scrollTo(0, 0)")
    click(browser, "#next")
    assert read_text(browser, "#where") == f"difference 1 of {count}"
    assert run(browser, "return document.activeElement.classList.contains('now')")


def read_note(browser, number, line):
    """Returns the text of a mark's note, which stands in sight right above its line."""
    note = " ".join(read_text(browser, "tr.note").split())
    title, sentences = RECIPE[number]
    assert f"{number} {title}. {' '.join(read_plain(sentences).split())}" in note
    below = "return document.querySelector('tr.note').nextSibling.cells[1].dataset.n"
    assert int(run(browser, below)) == line + 1
    in_sight = """
    const { top, bottom } = document.querySelector("tr.note").getBoundingClientRect();
    return bar.getBoundingClientRect().bottom <= top && bottom < innerHeight;
    """
    assert run(browser, in_sight)
    return note


@needs_browser
@pytest.mark.parametrize("left", [NAMES[0], NAMES[1], MARKED[0]])
def test_a_chip_opens_its_mark_in_both_columns(browser, left):
    """With the recipe's sentence; beside a script without marks, with the lines it replaces."""
    right = MARKED[1]
    a, b = read_lines(left), read_lines(right)
    quotes = 0
    visit(browser, f"#{left}..{right}")
    chips = browser.find_elements("css selector", "#marks a")
    for chip, (number, (title, _)) in zip(chips, RECIPE.items(), strict=True):
        count = len(re.findall(rf"# {number} ", "\n".join(b)))
        places = f"{count} places" if count > 1 else ""
        assert chip.text.split() == f"{number} {read_plain(title)} {places}".split()
    for number, chip in zip(RECIPE, chips, strict=True):
        places = [n for n, line in enumerate(b) if re.search(rf"# {number} ", line)]
        for index, line in enumerate(places):
            click(browser, chip)
            suffix = f".{index + 1}" if index else ""
            assert read_hash(browser) == f"{left}..{right}@{number}{suffix}"
            assert chip.get_attribute("aria-current") == "true"
            note = read_note(browser, number, line)
            marked = run(browser, PLACES)
            if left in MARKED:
                assert re.search(rf"# {number} ", a[marked[0] - 1])
            elif marked:
                quotes += 1
                quoted = [f"{n} {' '.join(a[n - 1].split())}" for n in marked]
                assert note.count(f"In its place {left}.py has {' '.join(quoted)}") == 1
            else:
                assert f"{left}.py has no such line." in note
        click(browser, chip)  # After the last place the mark closes.
        assert read_hash(browser) == f"{left}..{right}"
        assert browser.find_elements("css selector", "tr.note") == []
    assert left in MARKED or quotes >= 3


@needs_browser
@pytest.mark.parametrize("number", RECIPE)
def test_no_fold_hides_lines_of_the_open_mark(browser, number):
    """Between two scripts that differ inside some marks, and are equal in others."""
    visit(browser, f"#mnmc_ddp_env..mnmc_ddp_slurm@{number}")
    cells = browser.find_elements("css selector", "td.place")
    assert cells and all(cell.is_displayed() for cell in cells)


@needs_browser
def test_lines_that_are_only_indented_have_no_colour_but_the_blanks(browser):
    """So that one new `if` does not look like nine new lines."""
    left, right = NAMES[1], MARKED[0]
    visit(browser, f"#{left}..{right}")
    a, b = ([line.strip() for line in read_lines(name)] for name in (left, right))
    rows = run(browser, INDENTED)
    assert len(rows) >= 8
    for i, j, colours in rows:
        assert a[i - 1] == b[j - 1] and set(colours) == {"rgba(0, 0, 0, 0)"}


@needs_browser
def test_address_holds_pair_mark_and_fold(browser):
    left, right = NAMES[1], MARKED[0]
    visit(browser, f"#{left}..{right}@5+2")
    assert run(browser, "return [left.value, right.value, !folds[1].hidden]") == [left, right, True]
    assert read_text(browser, "tr.note").strip().find("5 ") >= 0
    press(browser, "7")
    assert read_hash(browser) == f"{left}..{right}@7+2"
    press(browser, "7")
    assert read_hash(browser) == f"{left}..{right}@7.2+2"
    browser.back()
    settle(browser)
    assert read_hash(browser) == f"{left}..{right}@7+2"
    from selenium.webdriver.common.keys import Keys

    press(browser, Keys.ESCAPE)
    assert read_hash(browser) == f"{left}..{right}+2"
    # Two scripts without marks have no chips, and a mark in their address does no harm.
    visit(browser, f"#{NAMES[0]}..{NAMES[1]}@5")
    assert not browser.find_element("id", "marks").is_displayed()
    assert read_hash(browser) == f"{NAMES[0]}..{NAMES[1]}"
    press(browser, "5")
    assert browser.find_elements("css selector", "tr.note") == []


@needs_browser
def test_keyboard_alone_reaches_everything(browser):
    from selenium.webdriver.common.keys import Keys

    left, right, _ = STEPS[1]
    visit(browser, f"#{left}..{right}")
    reached = []
    for _ in range(len(STEPS) + len(RECIPE) + 6 + 1):
        press(browser, Keys.TAB)
        reached.append(
            run(
                browser,
                "const e = document.activeElement; return e.id || e.closest('[id], nav, tr').id"
                " || e.closest('nav, tr').className || 'nav'",
            )
        )
    tools = ["left", "swap", "right", "previous", "next", "all"]
    assert reached == ["nav"] * len(STEPS) + ["marks"] * len(RECIPE) + tools + ["fold"]
    press(browser, Keys.ENTER)
    assert read_hash(browser) == f"{left}..{right}+1"
    assert run(browser, "return document.activeElement.ariaExpanded") == "true"


@needs_browser
def test_screen_reader_hears_added_and_removed(browser):
    """The browser's accessibility tree is what a screen reader reads."""
    left, right, _ = STEPS[0]
    visit(browser, f"#{left}..{right}")
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    texts = [n["name"]["value"] for n in nodes if n["role"]["value"] == "StaticText"]
    shown = run(browser, "return rows.filter((row) => !row.equal).map(({ a, b }) => [a, b])")
    assert texts.count("removed:") == sum(a is not None for a, b in shown)
    assert texts.count("added:") == sum(b is not None for a, b in shown)
    # An equal line is heard once.
    line = next(text for text in read_lines(right) if text.startswith("import "))
    assert "".join(texts).count(line) == 1
    roles = [
        (n["role"]["value"], n.get("name", {}).get("value")) for n in nodes if not n["ignored"]
    ]
    assert ("columnheader", f"{left}.py") in roles and ("columnheader", f"{right}.py") in roles
    assert ("button", "next difference") in roles and ("combobox", "script on the left") in roles


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_can_be_read(browser, dark):
    set_screen(browser, 1600, dark=dark)
    visit(browser, f"#{NAMES[1]}..{MARKED[0]}@4+all")
    contrasts = run(browser, READ_CONTRASTS)
    assert len(contrasts) > 15
    assert {pair: ratio for pair, ratio in contrasts.items() if ratio < 4.5} == {}
    red, green, blue = map(
        int,
        re.findall(r"\d+", run(browser, "return getComputedStyle(document.body).backgroundColor")),
    )
    assert (red + green + blue < 100) == dark


@needs_browser
def test_phone_has_one_column_with_signs(browser):
    set_screen(browser, 380, 800)
    visit(browser, f"#{NAMES[1]}..{MARKED[0]}@4")
    assert run(browser, "return document.documentElement.scrollWidth") == 380
    seen = run(
        browser,
        """
        return [...document.querySelectorAll("#page tbody:not([hidden]) td[data-n]")]
          .filter((cell) => cell.checkVisibility())
          .map((cell) => [cell.className.split(" ")[1] || "", cell.getBoundingClientRect().left,
                          getComputedStyle(cell, "::after").content]);
        """,
    )
    assert {left for _, left, _ in seen} == {0}
    assert {(kind, sign) for kind, _, sign in seen} == {
        ("", "none"),
        ("del", '"−"'),
        ("ins", '"+"'),
    }
    # An equal line is there once.
    left = "[...document.querySelectorAll('td.a:not(.del)')]"
    assert not run(browser, f"return {left}.some((cell) => cell.checkVisibility())")
    # Unlike lines do not alternate: those that go stand before those that come.
    shared = "return rows.some((row) => row.unlike && row.a !== null && row.b !== null)"
    assert not run(browser, shared)
    set_screen(browser, 1600)
    assert run(browser, shared)


@needs_browser
@pytest.mark.parametrize("width", [380, 800, 1280, 1600, 2560])
def test_page_fits_the_width(browser, width):
    set_screen(browser, width)
    visit(browser, f"#{NAMES[1]}..{MARKED[3]}@7")
    assert run(browser, "return document.documentElement.scrollWidth") <= width
    cut = """
    return [...document.querySelectorAll("#page code, #bar *, nav *")].filter((element) =>
      element.checkVisibility() && element.getBoundingClientRect().right > innerWidth).length;
    """
    assert run(browser, cut) == 0
    if width > 700:
        assert (
            abs(run(browser, "return document.querySelector('td.b').offsetLeft") - width / 2) <= 1
        )


@needs_browser
def test_it_prints(browser):
    """Without what is for the mouse; with the scripts' names above the columns, and in colours."""
    visit(browser, f"#{NAMES[1]}..{MARKED[0]}@4")
    set_screen(browser, 1050, media="print")
    for selector in ("nav", "#bar", "#keys"):
        assert not browser.find_element("css selector", selector).is_displayed()
    heads = browser.find_elements("css selector", "#page th")
    assert [head.text for head in heads] == [f"{NAMES[1]}.py", f"{MARKED[0]}.py"]
    assert all(head.size["height"] > 5 for head in heads)
    style = "return getComputedStyle(document.querySelector('td.ins')).printColorAdjust"
    assert run(browser, style) == "exact"
    assert len(browser.print_page()) > 10_000


@needs_browser
def test_without_javascript_the_five_steps_are_tables(browser):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        visit(browser)
        assert not browser.find_element("id", "bar").is_displayed()
        sections = browser.find_elements("css selector", "section")
        assert [s.get_attribute("id") for s in sections] == [f"{a}..{b}" for a, b, _ in STEPS]
        for section, (before, after, sentence) in zip(sections, STEPS, strict=True):
            text = section.get_attribute("innerHTML")
            folds = text.count('class="fold"')
            assert sentence in text and len(re.findall(r"\d+ equal lines: \w", text)) == folds > 0
            shown = {}
            for side, tag, name in (("a", "del", before), ("b", "ins", after)):
                cells = rf'<td class="{side}( {tag})?" data-n="(\d+)">.*?<code[^>]*>(.*?)</code>'
                for changed, number, code in re.findall(cells, text):
                    line = read_plain(code)
                    assert line == read_lines(name)[int(number) - 1]
                    shown[side, int(number) - 1] = bool(changed)
            a, b = read_lines(before), read_lines(after)
            for i, j in side_by_side.align(a, b):
                for side, number in (("a", i), ("b", j)):
                    if number is not None and (i is None or j is None or a[i] != b[j]):
                        assert shown[side, number]
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@needs_browser
def test_first_view_comes_quickly_and_without_network(browser, record_property):
    browser.set_window_size(1600, 1000)
    visit(browser)
    read = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    from selenium.webdriver.support.wait import WebDriverWait

    time = WebDriverWait(browser, 20).until(lambda browser: run(browser, read))
    record_property("says", f"side_by_side.html: first view after {time:.0f} ms")
    assert time < 5000  # A busy machine is slow.
    assert run(browser, "return performance.getEntriesByType('resource').length") == 0


@needs_browser
def test_one_column_is_copied_alone(browser):
    from selenium.webdriver import ActionChains

    visit(browser, f"#{NAMES[0]}..{NAMES[1]}+all")
    cells = browser.find_elements("css selector", "td.b[data-n]")
    first, last = cells[20], cells[24]
    # From before the first letter to below the last line.
    ActionChains(browser).move_to_element_with_offset(
        first, -first.size["width"] // 2 + 40, 0
    ).click_and_hold().move_to_element_with_offset(
        last, last.size["width"] // 2 - 5, 0
    ).release().perform()
    copied = run(browser, "return getSelection().toString()").split("\n")
    lines = [line for line in copied if line.strip()]
    wanted = [line for line in read_lines(NAMES[1])[20:25] if line.strip()]
    assert [line.strip() for line in lines] == [line.strip() for line in wanted]


@pytest.mark.slow
@needs_browser
def test_pictures_of_every_kind_of_view(browser, tmp_path, record_property):
    """For people to look at; none is empty."""
    views = {
        f"step {NAMES.index(a) + 1} to {NAMES.index(b) + 1}": (f"#{a}..{b}", {})
        for a, b, _ in STEPS
    }
    pair = f"#{NAMES[1]}..{MARKED[0]}"
    views |= {
        "a mark open": (f"{pair}@5", {}),
        "dark": (pair, {"dark": True}),
        "phone": (f"{pair}@4", {"width": 380, "height": 800}),
        "print": (pair, {"media": "print", "width": 1050}),
    }
    for name, (address, screen) in views.items():
        set_screen(browser, **{"width": 1600} | screen)
        visit(browser, address)
        picture = tmp_path / f"{name}.png"
        browser.save_screenshot(str(picture))
        assert picture.stat().st_size > 20_000, name
    record_property("says", f"side_by_side.html: pictures of {len(views)} views in {tmp_path}")
