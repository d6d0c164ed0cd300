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


def measure_own_memory():
    """Returns the MiB of this process that are neither a file's nor another process's."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Anonymous:")) / 1024


def measure(load):
    """Returns (MiB that the process has more after loading and reading every page, a sum)."""
    before = measure_own_memory()
    dataset = load()
    total = int(dataset.tensors[0].view(-1)[::4096].sum(dtype=torch.int64))  # touches all pages
    return round((measure_own_memory() - before) / 32) * 32, total


def main():
    rank = dist.get_rank()
    folders = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(folders, src=0)
    path = Path(folders[0], "train.pt")
    if rank == 0:  # on several nodes without a shared folder: local rank 0
        # In a file, too, so that this rank has no freed memory that the measurement would miss.
        with tempfile.NamedTemporaryFile() as file:
            images = torch.from_file(file.name, shared=True, size=2**26, dtype=torch.uint8)
            images.view(-1, 256)[:] = torch.arange(256, dtype=torch.uint8)
            images = images.view(-1, 1, 32, 32)
            torch.save({"images": images, "labels": torch.zeros(len(images))}, path)
            del images
    dist.barrier()
    mapped, mapped_sum = measure(lambda: map_split(path))
    read, read_sum = measure(lambda: TensorDataset(torch.load(path, weights_only=True)["images"]))
    print(f"rank {rank}: a file of 64 MiB: torch.load {read} MiB, with mmap {mapped} MiB")
    assert mapped_sum == read_sum and read == 64 and mapped == 0
    dist.barrier()
    if rank == 0:
        path.unlink()
        path.parent.rmdir()


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
