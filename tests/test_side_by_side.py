"""docs/side_by_side.html, the page that shows two scripts beside each other, in a real browser."""

import itertools
import json
import re
from importlib.util import find_spec

import pytest
import side_by_side
from browser import find_chromium, open_browser, set_screen
from launch import REPO, SCRIPTS

can_browse = find_chromium() and find_spec("selenium")
needs_browser = pytest.mark.skipif(
    not can_browse, reason="needs chromium, chromium-driver (Debian's packages) and selenium"
)
NAMES = [script.removesuffix(".py") for script in SCRIPTS]
BIG_STEP = "#snmc_dp..mnmc_ddp_tcp"
# What the table says of each row that can be seen, or of all: both sides as [number, text, kind].
READ_ROWS = """
return [...document.querySelectorAll("#page tbody tr:not(.fold, .note)")]
  .filter((row) => arguments[0] || row.checkVisibility())
  .map((row) => [...row.cells].map((cell) => [+cell.dataset.n || null,
    cell.querySelector("code")?.textContent ?? null, cell.className.split(" ")[1] || "equal"]));
"""
FOLDS = "return [...document.querySelectorAll('tr.fold')].map((row) => row.innerText)"


def read_lines(name):
    return (REPO / f"{name}.py").read_text().splitlines()


@pytest.fixture(scope="module")
def chromium():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """The browser at 1,600 pixels; a test ends without an error in its console."""
    set_screen(chromium, 1600)
    yield chromium
    assert chromium.get_log("browser") == []


def visit(browser, address=""):
    """Opens the page as new, or at another address."""
    browser.get("about:blank")
    browser.get(side_by_side.PAGE.as_uri() + address)


def run(browser, script, *arguments):
    return browser.execute_script(script, *arguments)


def read_text(browser, selector):
    return run(browser, f"return document.querySelector({json.dumps(selector)})?.innerText")


def settle(browser):
    """Waits until the page shows what its address says: a click returns before that."""
    from selenium.webdriver.support.wait import WebDriverWait

    shown = "return writeAddress() === location.hash || !location.hash"
    WebDriverWait(browser, 20, poll_frequency=0.02).until(lambda browser: run(browser, shown))


def click(browser, selector):
    browser.find_element("css selector", selector).click()
    settle(browser)


def press(browser, *keys):
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(browser).send_keys(key).perform()
        settle(browser)


def read_address(browser):
    return run(browser, "return location.hash")


def test_page_is_current():
    """It is made from the scripts, the README's recipe and docs/diffs.md."""
    stale = "python scripts/docs/side_by_side.py writes the page anew"
    assert side_by_side.PAGE.read_text() == side_by_side.build_page(), stale


def test_page_is_one_file_that_asks_for_nothing():
    text = side_by_side.PAGE.read_text()
    assert "default-src 'none'" in text and not re.search(r"(src|href)=\"(?!#|diffs)", text)
    assert len(text) < 400_000 and side_by_side.PICTURE.stat().st_size < 150_000


def test_every_mark_has_its_title_and_a_sentence_of_the_recipe():
    recipe = side_by_side.read_recipe()
    assert "".join(recipe) == "12345678"
    assert all(title and len(sentences) > 20 for title, sentences in recipe.values())


@needs_browser
def test_every_pair_gives_back_its_two_files_line_by_line(browser):
    """Both columns are the files to the letter; equal lines share a row, and nothing else does."""
    for left, right in itertools.permutations(NAMES, 2):
        visit(browser, f"#{left}..{right}+all")
        rows = run(browser, READ_ROWS, True)
        for side, name in enumerate((left, right)):
            assert [row[side][1] for row in rows if row[side][0]] == read_lines(name)
        for (_, a, kind), (_, b, other) in rows:
            assert (a == b) == (kind == "equal") == (other == "equal"), (a, b)


@needs_browser
def test_page_opens_at_the_first_difference_in_code(browser):
    """Docstring and imports are folded; the address and the menus name the pair."""
    visit(browser)
    (left, right), *_ = rows = run(browser, READ_ROWS, False)
    head = side_by_side.find_parts((REPO / "snsc.py").read_text())[1][2]
    assert left[0] > head and next(row for row in rows if row[1][2] != "equal")[1][2] != "equal"
    assert "docstring, imports" in run(browser, FOLDS)[0]
    click(browser, "tr.fold button")
    assert run(browser, READ_ROWS, False)[0][0][0] == 1
    assert run(browser, "return [left.value, right.value]") == ["snsc", "snmc_dp"]


@needs_browser
@pytest.mark.parametrize("mark", "12345678")
def test_a_chip_shows_the_lines_of_its_mark_alone(browser, mark):
    """With the sentence of the recipe; another click shows all differences again."""
    visit(browser, BIG_STEP)
    before = len(run(browser, READ_ROWS, False))
    click(browser, f"#marks a:nth-child({mark})")
    assert read_address(browser) == f"{BIG_STEP}@{mark}"
    source = (REPO / "mnmc_ddp_tcp.py").read_text()
    places = [(a, b) for number, a, b in side_by_side.find_marks(source) if number == mark]
    shown = {row[1][0] for row in run(browser, READ_ROWS, False)}
    for first, end in places:
        assert set(range(first + 1, end + 1)) <= shown
    between = [fold for fold in run(browser, FOLDS) if "lines: " in fold]
    # Few other lines: stretches of up to three are not worth a fold.
    assert len(shown) <= sum(end - first for first, end in places) + 3 * (len(places) + 1) + 12
    assert len(shown) < before and between
    assert read_text(browser, "tr.note").startswith(f"{mark} ")
    click(browser, f"#marks a:nth-child({mark})")
    assert len(run(browser, READ_ROWS, False)) == before


@needs_browser
def test_keys_and_buttons_walk_through_the_differences(browser):
    visit(browser, BIG_STEP)
    count = int(read_text(browser, "#where").split()[0])
    press(browser, "n", "n", "p")
    assert read_text(browser, "#where") == f"difference 1 of {count}"
    click(browser, "#next")
    assert read_text(browser, "#where") == f"difference 2 of {count}"
    press(browser, "7")
    assert read_address(browser).endswith("@7")
    press(browser, "a")
    assert read_address(browser).endswith("@7+all")
    press(browser, "a", "\ue00c")  # Escape
    assert read_address(browser) == BIG_STEP


@needs_browser
def test_menus_doors_and_addresses_choose_any_pair(browser):
    visit(browser, "#mnmc_ddp_env..mnmc_ddp_slurm@2")
    assert read_text(browser, "tr.note").startswith("2 ")
    click(browser, "#swap")
    assert read_address(browser) == "#mnmc_ddp_slurm..mnmc_ddp_env@2"
    click(browser, "nav a:nth-child(4)")
    assert run(browser, "return [left.value, right.value]") == ["mnmc_ddp_env", "mnmc_ddp_mp"]
    visit(browser, "#nothing..here")
    assert run(browser, "return [left.value, right.value]") == ["snsc", "snmc_dp"]


@needs_browser
@pytest.mark.parametrize("width", (390, 800, 1600))
@pytest.mark.parametrize("address", (BIG_STEP, f"{BIG_STEP}@4"))
def test_page_fits_the_width(browser, width, address):
    """A phone has one column: no line is cut, nothing scrolls sideways."""
    set_screen(browser, width)
    visit(browser, address)
    assert run(browser, "return document.documentElement.scrollWidth") <= width
    texts = [text for row in run(browser, READ_ROWS, False) for _, text, _ in row if text]
    assert any("DistributedSampler" in text for text in texts)
