"""What the README and the course say to try ends as they say."""

import os
import re
import signal

import pytest
from launch import REPO

HANG = """
import time
import torch.distributed as dist

dist.init_process_group()
print("joined", flush=True)
if dist.get_rank() == 0:
    dist.barrier()
time.sleep(1000)
"""


def read_words(page):
    """Returns a page's text without its line breaks."""
    return " ".join((REPO / page).read_text().split())


@pytest.mark.slow
def test_quit_signal_ends_a_hung_run_at_once(launch, tmp_path):
    """What Ctrl-\\ sends. Ctrl-C would take 30 seconds, because rank 0 is inside a collective."""
    (tmp_path / "hang.py").write_text(HANG)
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2", tmp_path / "hang.py"]
    run = launch([torchrun])
    run.wait_for(lambda: run.out.count("joined") == 2, 120, "both ranks")
    os.kill(run.processes[0].pid, signal.SIGQUIT)
    run.wait(20)
    assert "got signal: 3" in run.err.splitlines()[-1], run.story()
    assert "ends at once with `Ctrl-\\`" in read_words("README.md")
    assert run.pids() == []


@pytest.mark.slow
def test_spawning_script_is_imported_once_more_by_each_process(launch, tmp_path):
    """The course, mnmc_ddp_mp.py: three times with two processes."""
    text = (REPO / "mnmc_ddp_mp.py").read_text()
    script = tmp_path / "imported.py"
    script.write_text(
        re.sub(r"^(from tqdm .*)$", r'\1\nprint("imported")', text, flags=re.MULTILINE)
    )
    options = ["--dataset", "synthetic", "--epochs", 0, "--nproc-per-node", 2]
    run = launch([["python", script, *options]]).succeeded()
    assert run.out.count("imported") == 3, run.story()
    assert "three times" in read_words("docs/course.md")
