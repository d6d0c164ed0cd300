"""Every list of the scripts in the repository names the same scripts in the same order."""

import re

import scripts_list
import update_pages
from launch import REPO
from test_progression import STEPS


def read(name):
    """Returns the text of a file of the repository."""
    return (REPO / name).read_text()


def test_list_has_every_script_of_the_repository():
    assert sorted(scripts_list.SCRIPTS) == sorted(path.name for path in REPO.glob("*.py"))


def test_readme_table_has_the_words_of_the_list():
    """The columns: what you have, the script, what starts it, what is new."""
    row = r"^\| [^|]+ \| \[`(\w+\.py)`\]\(\1\) \| ([^|]+) \| ([^|]+) \|$"
    rows = re.findall(row, update_pages.README.read_text(), re.MULTILINE)
    assert rows == [(s.name, s.started_with, s.new) for s in scripts_list.ALL]


def test_readme_has_a_step_for_each_script():
    steps = re.findall(r"^### Step (\d): (\w+\.py)$", read("README.md"), re.MULTILINE)
    assert steps == [(str(n), name) for n, name in enumerate(scripts_list.SCRIPTS, 1)]


def test_diffs_page_and_budgets_have_each_step():
    pairs = [(s.previous, s.name) for s in scripts_list.ALL if s.previous]
    headings = re.findall(r"^## (\w+\.py) to (\w+\.py)$", read("docs/diffs.md"), re.MULTILINE)
    assert headings == pairs
    assert [step[:2] for step in STEPS] == pairs


def test_run_all_runs_each_script():
    names = re.findall(r"^[^#\n]*\brun (\w+\.py) ", read("scripts/run_all.sh"), re.MULTILINE)
    assert list(dict.fromkeys(names)) == list(scripts_list.SCRIPTS)


def test_two_hosts_starts_each_script_that_can_have_many_hosts():
    """The patterns of its case statement."""
    patterns = re.findall(r"^ +([\w./ |\\\n]+\.py)\)$", read("scripts/cluster/two_hosts.sh"), re.M)
    names = re.findall(r"(?<![\w/])\w+\.py", " ".join(patterns))
    assert sorted(names) == sorted(s.name for s in scripts_list.ALL if s.many_hosts)
