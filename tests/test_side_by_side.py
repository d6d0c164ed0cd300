"""docs/side_by_side.html, the page that shows two scripts beside each other, in a real browser."""

import itertools
import re
import shutil
from importlib.util import find_spec

import pytest
import side_by_side
from launch import REPO, SCRIPTS

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and find_spec("selenium")),
    reason="needs chromium, chromium-driver (Debian's packages) and selenium",
)
NAMES = [script.removesuffix(".py") for script in SCRIPTS]
BIG_STEP = "#snmc_dp..mnmc_ddp_tcp"
# What the table says of each row that can be seen: both sides as [number, text, kind].
READ_ROWS = """
return [...document.querySelectorAll("tbody:not(.fold) tr:not(.note)")]
  .filter((row) => row.checkVisibility())
  .map((row) => [...row.cells].map((cell) => [+cell.dataset.n || null,
    cell.querySelector("code")?.textContent ?? null, cell.className.split(" ")[1] || "equal"]));
"""
# What is done at each of the eight marks.
CODE = ["set_device_index", "timeout=", "barrier()", "DistributedSampler(", "Parallel(model)"]
CODE += ["peak_lr *=", "save_checkpoint", "destroy_process_group"]
READ_MENUS = "return [left.value, right.value]"
# The beginnings of lines that are each other's counterpart: the script before, and the one after.
COUNTERPARTS = {
    ("snsc", "snmc_dp"): [
        ("train_loader = DataLoader(", "train_loader = DataLoader("),
        ("def train_one_epoch(", "def train_one_epoch("),
        ("device = torch.device(accelerator.type, args.gpu)", "device = torch.device(accelerator"),
    ],
    ("snmc_dp", "mnmc_ddp_tcp"): [
        ("dp_model = nn.DataParallel(model)", "ddp_model = DistributedDataParallel(model)"),
        ("train_loader = DataLoader(", "train_loader = DataLoader("),
        ("test_loader = DataLoader(", "test_loader = DataLoader("),
        ("torch.manual_seed(args.seed + epoch", "torch.manual_seed(args.seed + epoch"),
        ("def train(args, device)", "def train(args, local_rank, device)"),
        ("save_checkpoint(", "save_checkpoint("),
    ],
    ("mnmc_ddp_tcp", "mnmc_ddp_env"): [("init_method=", "init_method=")],
    ("mnmc_ddp_env", "mnmc_ddp_mp"): [
        ("init_method=", "init_method="),
        ("return local_rank, device", "return device"),
        ("local_rank, device = setup_distributed(", "device = setup_distributed("),
    ],
    ("mnmc_ddp_env", "mnmc_ddp_slurm"): [
        ("local_rank = int(", "local_rank = int("),
        ("init_method=", "init_method="),
    ],
}
# What one column shows: of each cell its number, its left edge and its width.
READ_COLUMN = """
return [...document.querySelectorAll("td[data-n]")].filter((cell) => cell.checkVisibility())
  .map((cell) => [cell.className.split(" ")[0], cell.querySelector("code").textContent,
    cell.getBoundingClientRect().left, cell.getBoundingClientRect().width]);
"""
# The lines that take more than one row on the screen.
READ_WRAPPED = """
return [...document.querySelectorAll("td[data-n] code")].filter((code) =>
  code.offsetHeight > 1.5 * parseFloat(getComputedStyle(code).lineHeight)
).map((code) => code.textContent);
"""


@pytest.fixture(scope="module")
def chromium():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for option in ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]:
        options.add_argument(option)
    # Given its path, Selenium does not look for a driver on the network.
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """The browser at 1,600 pixels; a test ends without an error in its console."""
    set_width(chromium, 1600)
    yield chromium
    assert chromium.get_log("browser") == []


def set_width(browser, width):
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def visit(browser, address=""):
    """Opens the page as new, at an address."""
    browser.get("about:blank")
    browser.get(side_by_side.PAGE.as_uri() + address)


def click(browser, selector):
    """Clicks, and waits until the page shows what its address says."""
    from selenium.webdriver.support.wait import WebDriverWait

    browser.find_element("css selector", selector).click()
    shown = "return writeAddress(state) === location.hash || !location.hash"
    WebDriverWait(browser, 20, 0.02).until(lambda browser: browser.execute_script(shown))


def read_rows(browser):
    return browser.execute_script(READ_ROWS)


def read_address(browser):
    return browser.execute_script("return location.hash")


def test_page_is_current():
    """It is made from the scripts, the README's recipe and docs/diffs.md."""
    stale = "python scripts/docs/side_by_side.py writes the page again"
    data = side_by_side.collect_data()
    assert side_by_side.PAGE.read_text() == side_by_side.build_page(data), stale


def test_picture_of_the_readme_shows_the_page():
    """Its hash is that of what it shows: lines, numbers, counted statements, the template."""
    stale = "python scripts/docs/side_by_side.py makes the picture again"
    assert side_by_side.read_signature() == side_by_side.sign_picture(
        side_by_side.collect_data()
    ), stale


@pytest.mark.parametrize("names", COUNTERPARTS, ids="..".join)
def test_counterparts_stand_side_by_side(names):
    sides = [(REPO / f"{name}.py").read_text().splitlines() for name in names]
    rows = side_by_side.align(*sides)
    for beginnings in COUNTERPARTS[names]:
        found = []
        for side, beginning in enumerate(beginnings):
            (line,) = [n for n, t in enumerate(sides[side]) if t.strip().startswith(beginning)]
            found.append(next(number for number, row in enumerate(rows) if row[side] == line))
        assert found[0] == found[1], beginnings


def test_page_is_one_file_that_asks_for_nothing():
    text = side_by_side.PAGE.read_text()
    assert "default-src 'none'" in text and not re.search(r"(src|href)=\"(?!#|diffs)", text)


@needs_browser
def test_every_pair_gives_back_its_two_files_line_by_line(browser):
    """Both columns are the files to the letter; equal lines share a row, and nothing else does."""
    for names in itertools.combinations(NAMES, 2):
        visit(browser, f"#{'..'.join(names)}")
        click(browser, "#all")
        rows = read_rows(browser)
        for side, name in enumerate(names):
            lines = (REPO / f"{name}.py").read_text().splitlines()
            assert [row[side][1] for row in rows if row[side][0]] == lines
        for (_, a, kind), (_, b, other) in rows:
            assert (a == b) == (kind == "equal") == (other == "equal"), (a, b)


@needs_browser
def test_page_opens_at_the_first_difference_in_code(browser):
    """Docstring and imports are folded, and can be opened; the menus name the pair.

    The words that changed are marked on both sides.
    """
    visit(browser)
    rows = read_rows(browser)
    head = side_by_side.describe_script("snsc", (REPO / "snsc.py").read_text())["head"]
    assert rows[0][0][0] > head and "changed" in [row[0][2] for row in rows[:5]]
    for side, word in (("left", "model"), ("right", "dp_model")):
        assert word in browser.execute_script(f"return [...words.{side}].map(String)")
    click(browser, ".fold button")
    assert read_rows(browser)[0][0][0] == 1
    assert browser.execute_script(READ_MENUS) == ["snsc", "snmc_dp"]


@needs_browser
@pytest.mark.parametrize(("mark", "code"), list(zip("12345678", CODE, strict=True)))
def test_a_chip_shows_the_lines_of_its_mark_alone(browser, mark, code):
    """With the sentence of the recipe; another click shows all differences again."""
    visit(browser, BIG_STEP)
    before = len(read_rows(browser))
    click(browser, f"#marks a:nth-child({mark})")
    assert read_address(browser) == f"{BIG_STEP}@{mark}"
    texts = [row[1][1] or "" for row in read_rows(browser)]
    assert any(f"# {mark} " in text for text in texts) and len(texts) < before
    assert any(code in text for text in texts)
    note = browser.find_element("css selector", ".note").text
    assert note.startswith(f"{mark} {side_by_side.read_recipe()[mark][0]}")
    click(browser, f"#marks a:nth-child({mark})")
    assert len(read_rows(browser)) == before


@needs_browser
def test_keys_and_buttons_walk_through_the_differences(browser):
    from selenium.webdriver import ActionChains

    def press(key):
        ActionChains(browser).send_keys(key).perform()
        return browser.execute_script("return scrollY")

    visit(browser, BIG_STEP)
    first, second = press("n"), press("n")
    assert 0 < first < second and press("p") == first
    click(browser, "#next")
    assert browser.execute_script("return scrollY") == second
    # No bar covers the difference.
    place = "return [differences[1].getBoundingClientRect().top, bar.offsetHeight]"
    top, height = browser.execute_script(place)
    assert height < top < 250


@needs_browser
def test_menus_doors_and_addresses_choose_any_pair(browser):
    visit(browser, "#mnmc_ddp_slurm..mnmc_ddp_env@2")  # The earlier script is on the left.
    assert browser.find_element("css selector", ".note").text.startswith("2 ")
    assert browser.execute_script(READ_MENUS) == ["mnmc_ddp_env", "mnmc_ddp_slurm"]
    click(browser, "#left option[value=snsc]")
    assert read_address(browser) == "#snsc..mnmc_ddp_slurm@2"
    click(browser, "nav a:nth-child(4)")
    assert browser.execute_script(READ_MENUS) == ["mnmc_ddp_env", "mnmc_ddp_mp"]
    visit(browser, "#nothing..here")
    assert browser.execute_script(READ_MENUS) == ["snsc", "snmc_dp"]


@needs_browser
@pytest.mark.parametrize("width", (420, 800, 1400))
def test_page_fits_the_width(browser, width):
    """On a small screen in one column, on a large one without a line that wraps."""
    set_width(browser, width)
    visit(browser, f"{BIG_STEP}@5")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    click(browser, "#all")
    if width == 1400:
        assert browser.execute_script(READ_WRAPPED) == []
        return
    cells = browser.execute_script(READ_COLUMN)
    assert {(left, size) for *_, left, size in cells} == {(0, width)}
    texts = [text for side, text, *_ in cells if side == "right"]
    assert texts == (REPO / "mnmc_ddp_tcp.py").read_text().splitlines()
    order = [text.strip() for _, text, *_ in cells]
    wrapper = order.index("dp_model = nn.DataParallel(model)")
    assert order[wrapper + 1] == "ddp_model = DistributedDataParallel(model)"
