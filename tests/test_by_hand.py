"""DDP written by hand trains to the weights of DDP, and the proof sees when it does not."""

import pytest
from launch import REPO, free_port, run_forked_ranks

EXAMPLE = REPO / "docs" / "examples" / "by_hand.py"
PROVEN = [
    f"Average{when} trains to the weights of DDP"
    for when in ("AfterBackward", "DuringBackward", "InBuckets")
]
DIVIDE, FINISH = "/= dist.get_world_size()", "wrapped.finish()"
# One change each, and how many versions rank 0 still proves. It has its own buffers in any case.
MISTAKES = {
    "no broadcast at the start": ("dist.broadcast(tensor, src=0)", "pass", 0),
    "buffers of each rank": ("dist.broadcast(buffer, src=0)", "pass", 1),
    "sum in place of average": (f"parameter.grad {DIVIDE}\n            dist", "dist", 0),
    "no averaging": (FINISH, "pass", 0),
    "sum, during backward": (f"parameter.grad {DIVIDE}\n        self", "self", 1),
    "sum, in buckets": (f"self.tensor {DIVIDE}", "pass", 2),
    "averages not copied back": ("parameter.grad.copy_(average.view_as(parameter))", "pass", 2),
}


def prove(processes, folder, old="", new=""):
    """Runs the example with one change; returns its exit status and the lines of rank 0."""
    text = EXAMPLE.read_text()
    assert not old or text.count(old) == 1, old
    (folder / "by_hand.py").write_text(text.replace(old, new) if old else text)
    path = folder / "by_hand.py"
    codes, out, _ = run_forked_ranks(path, processes, free_port(), folder / "run")
    return codes, out.splitlines()


@pytest.mark.parametrize("processes", (2, 3))
def test_each_version_trains_to_the_weights_of_ddp(tmp_path, processes):
    """Two ranks to the bit, three up to rounding."""
    assert prove(processes, tmp_path) == ([0] * processes, PROVEN)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_seen(tmp_path, mistake):
    old, new, proven = MISTAKES[mistake]
    codes, lines = prove(2, tmp_path, old, new)
    assert 0 not in codes
    assert lines == PROVEN[:proven]
