"""The CPU build of torch, which README recommends: what lacks nccl there runs all the same.

Its wheels are not on every machine, so a few lines take away what it lacks. torch 2.13.0+cpu has
neither a CUDA version nor nccl, and no nccl in the flight recorder.
"""

import patches
import pytest
from launch import REPO, run_forked_ranks

IMITATION = """
import runpy
import sys

import torch
from torch.distributed import distributed_c10d

torch.version.cuda = None
distributed_c10d._NCCL_AVAILABLE = False
for name in ("_dump_nccl_trace", "_dump_nccl_trace_json", "ProcessGroupNCCL"):
    if hasattr(torch._C._distributed_c10d, name):
        delattr(torch._C._distributed_c10d, name)
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = ["--model", "convnet", "--repeats", "1", "--batch-size", "2"]
PROGRAMS = [
    ("scripts/measure/network.py", SMALL, "bf16 hook"),
    ("scripts/measure/benchmark.py", ["--images", "64", "--repeats", "1"], "textbook"),
    ("scripts/check_ddp.py", [REPO / "docs/examples/equal_weights.py"], "unequal after a step"),
]


def run_without_nccl(path, folder, arguments):
    """Two ranks of a program; returns (statuses, out, err)."""
    folder.mkdir(exist_ok=True)
    imitation = folder / "cpu_build.py"
    imitation.write_text(IMITATION)
    return run_forked_ranks(imitation, 2, folder / "ranks", [path, *arguments])


@pytest.mark.parametrize(
    ("program", "arguments", "line"), PROGRAMS, ids=[row[0] for row in PROGRAMS]
)
def test_program_of_a_page_runs(tmp_path, program, arguments, line):
    codes, out, err = run_without_nccl(REPO / program, tmp_path, arguments)
    assert codes == [0, 0] and line in out, out + err


def test_gradients_travel_in_bfloat16(tmp_path):
    """With the patch. Given to DDP by its own name, torch's hook is refused, as the page says."""
    script = patches.write_patched(["bf16_hook"], tmp_path)
    options = ["--dataset", "synthetic", "--epochs", "1", "--batch-size", "2500"]
    codes, out, err = run_without_nccl(script, tmp_path / "ours", options)
    assert codes == [0, 0] and "epoch 1/1 |" in out, out + err

    call = "lambda group, bucket: bf16_compress_hook(group, bucket)"
    text = script.read_text()
    assert call in text
    script.write_text(text.replace(call, "bf16_compress_hook"))
    codes, out, err = run_without_nccl(script, tmp_path / "torch's", options)
    assert codes == [1, 1] and "BF16 all reduce communication hook required CUDA" in err, out + err
