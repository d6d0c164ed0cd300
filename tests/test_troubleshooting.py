"""The symptom tables of docs/troubleshooting.md: each row's mark says how we know it, truly."""

import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import update_pages
from launch import REPO
from messages import MESSAGES, hide_numbers

TEXT = (REPO / "docs" / "troubleshooting.md").read_text()
MARKS = {"✓": "tested", "●": "seen by hand", "○": "read in a linked source", "?": "believed"}
# Rows marked ✓ whose symptom is no message: the test that makes it.
MADE_BY = {
    "at the end of an epoch": "test_symptoms.py::test_hang_at_the_end",
    "in the evaluation": "test_symptoms.py::test_hang_in_evaluation",
    "when one rank stops early": "docs/examples/early_stopping.py",
    "when one rank skips a step": "docs/examples/irregular_steps.py",
    "when one rank has fewer batches": "docs/examples/uneven_inputs.py",
    "an error about connecting with `file://`": "test_failures.py::test_file_left_over",
    "every epoch has the same order": "test_symptoms.py::test_every_epoch_has_the_same_order",
    "as many steps with four": "docs/examples/iterable_dataset.py",
    "an accuracy that changes a little": "docs/examples/exact_metrics.py",
    "a resumed run differs": "test_failures.py::test_killed_run_resumes",
}


class Row(NamedTuple):
    """A row of a symptom table: its section, its mark, its messages, and the whole line."""

    section: str
    mark: str
    seen: str
    messages: list
    line: str


def read_rows():
    """Returns the rows of all tables whose first column is a mark."""
    rows, section, columns = [], "", []
    for line in TEXT.splitlines():
        if line.startswith("#"):
            section = line.strip("# ")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and cells[0] == "":
            columns = cells
        elif cells and cells[0] in MARKS and "what to do" in columns:
            seen = cells[1 : columns.index("what to do")]
            messages = [text for cell in seen for text in re.findall(r"`([^`]+)`", cell)]
            rows.append(Row(section, cells[0], " ".join(seen), messages, line))
        elif not cells:
            columns = []
    return rows


ROWS = read_rows()
EXAMPLES = "".join(
    block.code
    for page in update_pages.PAGES
    for block in update_pages.read_blocks(page.read_text())
    if block.mark.startswith("printed by docs/examples/")
)
SHOWN = [hide_numbers(text) for message in MESSAGES.values() for text in message.all_texts()]


def is_shown(message):
    """Whether a test looks for this message, or an example prints it."""
    return any(hide_numbers(message) in text for text in SHOWN) or message in EXAMPLES


def exists(test):
    """Whether there is a test whose name begins so, or an example."""
    file, _, function = test.partition("::")
    if not function:
        return (REPO / file).exists()
    return f"def {function}" in (REPO / "tests" / file).read_text()


def test_there_are_rows_with_a_mark_that_the_page_explains():
    assert len(ROWS) > 90
    table_rows = re.findall(r"^\| ([^\w\s-]) \|", TEXT, re.MULTILINE)
    assert set(table_rows) == set(MARKS)
    assert len(table_rows) == len(ROWS) + len(MARKS)


def test_the_cure_stands_before_the_cause():
    headers = re.findall(r"^\| \| .*what to do.*\|$", TEXT, re.MULTILINE)
    assert len(headers) >= 8
    assert all(header.endswith("| what to do | why |") for header in headers)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}: {row.seen}"[:60])
def test_row_says_truly_how_we_know(row):
    """A search finds one message in a row, and its mark is neither too strong nor too weak."""
    assert "`, `" not in row.seen and "` or `" not in row.seen, row
    if row.mark == "✓":
        made_by = [test for seen, test in MADE_BY.items() if row.seen.startswith(seen)]
        if made_by:
            assert exists(*made_by), made_by
        else:
            assert row.messages, "a symptom in words: name its test in MADE_BY"
            assert is_shown(row.messages[0]), (row.messages[0], "tests/messages.py")
    elif row.mark == "●" and row.messages:
        assert not is_shown(row.messages[0]), "a test shows it: mark it ✓"
    elif row.mark == "○" and row.section != "Messages of nccl":
        assert "](" in row.line, row


@pytest.mark.slow
def test_pdb_opens_in_one_rank():
    """What is typed reaches rank 1, which adds 2, while rank 0 waits for it."""
    program = REPO / "docs" / "examples" / "debug_one_rank.py"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.run(
        [*argv, program, "--stop"],
        input="up\np total\nc\n",
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    assert "tensor(2.)" in process.stdout
    assert "rank 0: 3" in process.stdout and "rank 1: 3" in process.stdout
