"""The six scripts differ in their step's lesson and in nothing else."""

import ast
import difflib

import pytest
from launch import REPO

# From, to, changed lines allowed, the pieces that change, that come, that go.
STEPS = [
    ("snsc.py", "snmc_dp.py", 12, "parse_args main", "", ""),
    (
        "snmc_dp.py",
        "mnmc_ddp_tcp.py",
        75,
        "train_one_epoch evaluate report load_checkpoint parse_args main",
        "setup_distributed exit_together",
        "",
    ),
    (
        "mnmc_ddp_tcp.py",
        "mnmc_ddp_env.py",
        25,
        "setup_distributed parse_args",
        "leave_quietly",
        "",
    ),
    (
        "mnmc_ddp_env.py",
        "mnmc_ddp_mp.py",
        40,
        "setup_distributed parse_args main",
        "worker",
        "leave_quietly",
    ),
    ("mnmc_ddp_env.py", "mnmc_ddp_slurm.py", 40, "setup_distributed parse_args", "", ""),
]


def pieces(script):
    """Top-level functions and classes by name, in order, with their text to the letter."""
    text = (REPO / script).read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def code_lines(script):
    """The script's lines without docstrings, imports, comments and blank lines."""
    text = (REPO / script).read_text()
    dropped = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            dropped.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    kept = [line for number, line in lines if number not in dropped]
    return [line for line in kept if line.strip() and not line.strip().startswith("#")]


@pytest.mark.parametrize(("a", "b", "budget", "changed", "added", "removed"), STEPS)
def test_step(a, b, budget, changed, added, removed, record_property):
    before, after = pieces(a), pieces(b)
    common = before.keys() & after.keys()
    assert {name for name in common if before[name] != after[name]} == set(changed.split())
    assert after.keys() - before.keys() == set(added.split())
    assert before.keys() - after.keys() == set(removed.split())
    order = [name for name in before if name in common]
    assert order == [name for name in after if name in common]
    rows = difflib.unified_diff(code_lines(a), code_lines(b), lineterm="", n=0)
    count = sum(row[0] in "+-" for row in rows if not row.startswith(("+++", "---")))
    record_property("says", f"{a} -> {b}: {count} lines change, {budget} allowed")
    assert count <= budget


def test_mp_worker_is_main_of_env():
    """The story moved into worker() and is the same to the letter after its first lines."""
    story = "# One process downloads"
    main, worker = pieces("mnmc_ddp_env.py")["main"], pieces("mnmc_ddp_mp.py")["worker"]
    assert worker[worker.index(story) :] == main[main.index(story) :]


def test_no_script_imports_another():
    for a, b, *_ in STEPS:
        for script in (a, b):
            tree = ast.parse((REPO / script).read_text())
            names = {
                (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
                for node in ast.walk(tree)
                if isinstance(node, (ast.Import, ast.ImportFrom))
                for alias in node.names
            }
            assert not {f"{name}.py" for name in names} & {path.name for path in REPO.iterdir()}
