"""The processes of a node share one copy of the data: a file that is mapped, not read.

torchrun --standalone --nproc-per-node 2 docs/examples/data_in_memory_once.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset


def map_split(path):
    """Returns the data set in a file that torch.save wrote, without reading it into memory."""
    split = torch.load(path, mmap=True, weights_only=True)
    return TensorDataset(split["images"], split["labels"])


def is_mapped(path):
    """Whether Linux shows this process the file's own pages, of which all processes share one."""
    return str(path.resolve()) in Path("/proc/self/maps").read_text()


dist.init_process_group("gloo")
folder = tempfile.TemporaryDirectory()
names = [folder.name]
dist.broadcast_object_list(names, src=0)
path = Path(names[0], "train.pt")
if dist.get_rank() == 0:  # on several nodes without a shared folder: local rank 0
    torch.save({"images": torch.ones(1000, 1, 28, 28), "labels": torch.zeros(1000)}, path)
dist.barrier()
split = torch.load(path, weights_only=True)
assert not is_mapped(path)  # Each process has read a copy of its own.
dataset = map_split(path)
assert is_mapped(path) and dataset.tensors[0].equal(split["images"])
print(f"rank {dist.get_rank()} has mapped {path}")
dist.barrier()  # Rank 0 deletes its folder when it ends.
dist.destroy_process_group()
