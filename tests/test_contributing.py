"""What .github/CONTRIBUTING.md names is there: files, tests, and options of the tools."""

import re
import subprocess

from launch import REPO

TEXT = (REPO / ".github" / "CONTRIBUTING.md").read_text()


def test_contributing_is_one_page():
    assert len(TEXT.splitlines()) <= 60


def test_named_files_exist():
    pattern = r"(?<![\w/])((?:scripts|docs|tests|\.ci)/[\w./]+|test_\w+\.py)"
    names = {name.rstrip(".") for name in re.findall(pattern, TEXT)}
    assert len(names) > 10
    for name in names:
        assert (REPO / name).exists() or (REPO / "tests" / name).exists(), name


def test_named_checks_exist():
    """The functions of its table; they say the command that mends what they check."""
    tests = "".join(path.read_text() for path in (REPO / "tests").glob("*.py"))
    for name in re.findall(r"`(test_\w+)`", TEXT):
        assert f"def {name}(" in tests, name


def test_named_commands_parse():
    for command in re.findall(r"`((?:bash|python|pytest|source|ruff|shellcheck) [^`]+)`", TEXT):
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
    for tool, option in re.findall(r"`?python (\S+\.py) (--\w+)", TEXT):
        assert f'"{option}"' in (REPO / tool).read_text(), (tool, option)


def test_workflow_runs_what_contributing_names():
    """The same checks as .ci/run, which is what has been run."""
    workflow = (REPO / ".github" / "workflows" / "tests.yml").read_text()
    for command in ("ruff check .", "ruff format --check .", "bash scripts/test.sh"):
        assert command in workflow and command in (REPO / ".ci" / "run").read_text()
    assert "never been run" in workflow
