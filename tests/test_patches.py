"""Patches follow a script that changes, and say so where they cannot."""

import re
import subprocess

import patches
import pytest
from launch import REPO

SCRIPT = "".join(f"line_{number} = {number}\n" for number in range(20))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of one script and one patch, which changes its line 10."""
    for name, path in (("REPO", ""), ("FOLDER", "patches"), ("PATCHED", "patched")):
        monkeypatch.setattr(patches, name, tmp_path / path)
    (tmp_path / "patches").mkdir()
    (tmp_path / ".ruff.toml").write_text((REPO / ".ruff.toml").read_text())
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "script.py").write_text(SCRIPT)
    patch = patches.Patch("ten", "Ten is eleven.\n\n    python patched/ten.py\n\n", "", "script.py")
    patches.write_patch(patch, SCRIPT, SCRIPT.replace("line_10 = 10", "line_10 = line_9 + 2"))
    return tmp_path


def patched_text(folder):
    return patches.write_patched(["ten"], folder).read_text()


def test_patch_follows_lines_that_move(repository):
    """The hunk's numbers are new, the sentence above it is the same."""
    (repository / "script.py").write_text("moved = 1\nmoved = 2\n" + SCRIPT)
    assert patches.rebase("ten") == ""
    patch = patches.read_patch("ten")
    assert patch.header.startswith("Ten is eleven.") and "@@ -12,3 +12,3 @@" in patch.diff
    assert "moved = 2\n" in patched_text(repository) and "line_9 + 2" in patched_text(repository)


def test_patch_follows_a_renamed_variable(repository):
    """Without --rename ruff or the merge finds the old name; with it nothing is left to do."""
    (repository / "script.py").write_text(SCRIPT.replace("line_9 ", "nine "))
    assert "line_9" in patches.rebase("ten") or (repository / "patched" / "ten.py").exists()
    assert patches.rebase("ten", [("line_9", "nine")]) == ""
    assert "line_10 = nine + 2" in patched_text(repository)


def test_patch_that_needs_a_hand_is_taken_from_it(repository):
    """Script and patch have changed the same line."""
    (repository / "script.py").write_text(SCRIPT.replace("= 10\n", "= 100\n"))
    assert patches.rebase("ten") == "1 conflicts"
    copy = repository / "patched" / "ten.py"
    mended, count = re.subn(r"<{7}.*?>{7}[^\n]*\n", "line_10 = 101\n", copy.read_text(), flags=re.S)
    assert count == 1
    copy.write_text(mended)
    patches.take("ten")
    assert "line_10 = 101\n" in patched_text(repository) and patches.rebase("ten") == ""


def test_patch_sh_writes_what_the_tests_take(tmp_path):
    """One patch, a second one on top of it, and a list; it names the command."""
    name = patches.NAMES[0]
    argv = ["bash", REPO / "scripts" / "patch.sh"]
    output = subprocess.check_output([*argv, name], text=True)
    copy = REPO / "patched" / f"{name}.py"
    assert copy.read_text() == patches.write_patched([name], tmp_path).read_text()
    copy.unlink()
    command = re.search(r"^    (.+)$", patches.read_patch(name).header, re.MULTILINE)[1]
    assert f"  {command}\n" in output
    assert [row.split()[0] for row in subprocess.check_output(argv, text=True).splitlines()] == (
        patches.NAMES
    )
    unknown = subprocess.run([*argv, "nothing"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "lists those that there are" in unknown.stderr
