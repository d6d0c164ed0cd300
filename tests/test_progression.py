"""The six scripts differ in their step's lesson and in nothing else."""

import ast
import re

import pytest
from launch import DDP, REPO, SCRIPTS
from statements import changed_statements

# From, to, statements that may change, and the pieces that change, that come, that go.
STEPS = [
    ("snsc.py", "snmc_dp.py", 8, "parse_args train main", "", ""),
    (
        "snmc_dp.py",
        "mnmc_ddp_tcp.py",
        84,  # seven of them for an indentation, that of `if rank == 0:`
        "parse_args train main train_one_epoch evaluate",
        "setup_distributed",
        "",
    ),
    ("mnmc_ddp_tcp.py", "mnmc_ddp_env.py", 16, "parse_args setup_distributed", "", ""),
    ("mnmc_ddp_env.py", "mnmc_ddp_mp.py", 28, "parse_args setup_distributed main", "worker", ""),
    ("mnmc_ddp_env.py", "mnmc_ddp_slurm.py", 18, "setup_distributed", "read_slurm", ""),
]
ORDER = """
parse_args read_slurm setup_distributed train train_one_epoch evaluate save_checkpoint
load_checkpoint ConvNet build_model load_split augment normalize worker main
"""
SAME_IN_ALL = re.compile(
    r"^# From here to main\(\) the six scripts are the same\.\n.*?(?=^def (?:worker|main)\()",
    re.MULTILINE | re.DOTALL,
)


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


@pytest.mark.parametrize(("a", "b", "budget", "changed", "added", "removed"), STEPS)
def test_step(a, b, budget, changed, added, removed):
    before, after = pieces(a), pieces(b)
    common = before.keys() & after.keys()
    assert {name for name in common if before[name] != after[name]} == set(changed.split())
    assert after.keys() - before.keys() == set(added.split())
    assert before.keys() - after.keys() == set(removed.split())
    assert changed_statements(*((REPO / script).read_text() for script in (a, b))) <= budget


@pytest.mark.parametrize("script", SCRIPTS)
def test_lesson_first_then_what_all_share_and_main_last(script):
    names = list(pieces(script))
    assert names == [name for name in ORDER.split() if name in names]
    shared, of_snsc = (SAME_IN_ALL.findall((REPO / s).read_text()) for s in (script, "snsc.py"))
    assert len(shared) == 1 and shared == of_snsc


@pytest.mark.parametrize("script", DDP)
def test_marks_stand_in_every_ddp_script(script):
    """The recipe's eight numbers, and letters for what is easily forgotten, as in its docstring."""
    mark, line = r"# ([1-8a-d]) [A-Z]", r"^    ([1-8a-d]) [a-z]"
    text, env = ((REPO / name).read_text() for name in (script, "mnmc_ddp_env.py"))
    marks = re.findall(mark, text)
    assert "".join(sorted(set(marks))) == "12345678abcd"
    assert marks == re.findall(mark, env)
    assert "".join(re.findall(line, text, re.MULTILINE)) == "12345678abcd"


def test_no_script_imports_another():
    """Each works where it is copied to."""
    names = "|".join(script.removesuffix(".py") for script in SCRIPTS)
    for script in SCRIPTS:
        line = rf"^ *(?:from|import) (?:{names})\b(?!\.py)"
        assert not re.search(line, (REPO / script).read_text(), re.MULTILINE), script
