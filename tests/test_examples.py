"""Every program in docs/examples runs, asserts what it shows, and prints what a page shows."""

import ast
import re
import subprocess

import pytest
import update_pages
from launch import REPO, free_port, run_forked_ranks, without_gloo_lines

NAMES = subprocess.check_output(["git", "ls-files", "docs/examples/*.py"], cwd=REPO, text=True)
EXAMPLES = [REPO / name for name in NAMES.split()]
ALONE = [path for path in EXAMPLES if not path.stem.startswith("recipe_")]  # see test_docs.py
MARK = re.compile(r"^<!-- printed by docs/examples/(\w+)\.py -->$", re.MULTILINE)


def check_output(path, printed):
    """Compares an example's lines with the file that a page shows, where there is one."""
    shown = update_pages.printed_file(path)
    if shown.exists():
        stale = f"python scripts/docs/update_pages.py --run {path.name} renews the file"
        assert printed == shown.read_text(), stale


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_example_runs_and_prints_what_a_page_shows(tmp_path, path):
    """In forked processes that have torch loaded already. Its assertions say what it shows."""
    processes = update_pages.count_processes(path)
    codes, out, err = run_forked_ranks(path, processes, free_port(), tmp_path / "run")
    assert codes == [0] * max(processes, 1), err
    check_output(path, update_pages.sort_lines(out) if processes else out)


def test_ddp_by_hand_agrees_with_ddp_on_three_ranks(tmp_path):
    """Up to rounding, where two ranks agree to the bit."""
    path = REPO / "docs/examples/by_hand.py"
    codes, out, err = run_forked_ranks(path, 3, free_port(), tmp_path / "run")
    assert codes == [0] * 3, err
    check_output(path, update_pages.sort_lines(out))


@pytest.mark.slow
@pytest.mark.parametrize("path", ALONE[::6], ids=lambda path: path.stem)
def test_example_runs_by_its_own_command(path):
    """Some of them; the others ran in forked processes."""
    check_output(path, without_gloo_lines(update_pages.run_example(path)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_how_to_run_it_and_is_on_a_page(path):
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text))
    start = r"(torchrun --standalone --nproc-per-node \d+|python) "
    assert re.search(rf"^ *{start}docs/examples/{path.name}", docstring, re.MULTILINE), docstring
    assert any(f"examples/{path.name}" in page.read_text() for page in update_pages.PAGES)
    # With "cpu" in place of a tensor's device, a copy would train in float32 on a GPU.
    assert not re.search(r"(autocast|GradScaler)\(\s*\"cpu\"", text)


def test_each_file_of_output_stands_on_a_page():
    marks = {name for page in update_pages.PAGES for name in MARK.findall(page.read_text())}
    assert marks == {path.stem for path in (REPO / "docs/examples/printed").glob("*.txt")}
