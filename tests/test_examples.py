"""Every program in docs/examples runs, asserts what it shows, and prints what a page shows."""

import ast
import re
import subprocess

import pytest
import update_pages
from launch import REPO, run_forked_ranks, without_gloo_lines

NAMES = subprocess.check_output(["git", "ls-files", "docs/examples/*.py"], cwd=REPO, text=True)
EXAMPLES = [REPO / name for name in NAMES.split()]
# Those are in test_docs.py and test_convert.py.
ALONE = [path for path in EXAMPLES if not path.stem.startswith(("recipe_", "char_lm"))]


def check_output(path, printed):
    """Compares an example's lines with the file that a page shows, where there is one."""
    shown = update_pages.printed_file(path)
    if shown.exists():
        stale = f"python scripts/docs/update_pages.py --run {path.name} renews the file"
        assert printed == shown.read_text(), stale


CASES = [(path.stem, update_pages.count_processes(path)) for path in ALONE]
CASES.append(("by_hand", 3))  # agrees with DDP up to rounding, where two ranks agree to the bit


@pytest.mark.parametrize(("name", "processes"), CASES)
def test_example_runs_and_prints_what_a_page_shows(tmp_path, name, processes):
    """In forked processes that have torch loaded already. Its assertions say what it shows."""
    path = REPO / f"docs/examples/{name}.py"
    codes, out, err = run_forked_ranks(path, processes, tmp_path / "run")
    assert codes == [0] * max(processes, 1), err
    check_output(path, update_pages.sort_lines(out) if processes else out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("gradient_accumulation", "predict_scaling"))
def test_example_runs_by_its_own_command(name):
    """One with torchrun and one with python; the others ran in forked processes."""
    path = REPO / f"docs/examples/{name}.py"
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
