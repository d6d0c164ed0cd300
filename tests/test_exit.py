"""A process leaves without a thread of gloo's, and so without the abort that they can cause."""

import re

import pytest
from launch import DDP, REPO, commands_for, quick_for, run_forked_ranks

# Runs a script's main() and counts, before it leaves and after, the threads that are not Python's
# own. OMP_NUM_THREADS is 1, so that they are gloo's.
COUNT = """
import os, sys, threading
sys.path.insert(0, {folder!r})
import {script} as script

def count():
    number = len(os.listdir("/proc/self/task")) - threading.active_count()
    os.write(1, b"%d of gloo\\n" % number)  # one write, as lines of two ranks would mix

before = script.dist.destroy_process_group
def destroy_and_count():
    count()
    before()
    count()
script.dist.destroy_process_group = destroy_and_count
if __name__ == "__main__":
    script.main()
"""


# Two of the scripts: main() and train() are the same in all but mnmc_ddp_mp.py, whose processes
# are spawned.
@pytest.mark.parametrize("script", quick_for(DDP[1:3], "mnmc_ddp_env.py"))
def test_no_thread_of_gloo_is_left(launch, tmp_path, script):
    (tmp_path / "count.py").write_text(COUNT.format(folder=str(REPO), script=script[:-3]))
    options = ("--dataset", "synthetic", "-e", "1", "-b", "500")
    if script == "mnmc_ddp_env.py":
        path, folder = tmp_path / "count.py", tmp_path / "run"
        codes, out, err = run_forked_ranks(path, 2, folder, options)
        assert codes == [0, 0], err
    else:
        (command,) = commands_for(script, 2, *options)
        command[command.index(REPO / script)] = tmp_path / "count.py"
        out = launch([command]).succeeded().out
    # Of each of the two ranks: before it leaves, and after.
    counts = sorted(map(int, re.findall(r"^(\d+) of gloo", out, re.MULTILINE)))
    missing = "Does torchvision still import torch.distributed.nn? If not, the scripts must."
    assert len(counts) == 4 and counts[:2] == [0, 0] and counts[2] > 0, missing
