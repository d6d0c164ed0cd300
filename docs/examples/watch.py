"""A thread that notes every five seconds where its rank is, for who_hangs.py.

torchrun --standalone --nproc-per-node 2 docs/examples/watch.py
torchrun --standalone --nproc-per-node 2 docs/examples/watch.py SCRIPT OPTIONS...

With a script it watches that. In a script of your own copy the functions, and the call of
start_watching(). nccl's entries are asked for as torch's sources say, because no GPU was there to
run this on.
"""

import faulthandler
import json
import os
import runpy
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist


def read_recorders():
    """Returns the collectives that torch remembers of this rank: JSON text for each library."""
    c10d = torch._C._distributed_c10d
    texts = [c10d._dump_fr_trace_json()]  # gloo's
    if hasattr(c10d, "_dump_nccl_trace_json"):  # nccl's, up to torch 2.14
        texts.append(c10d._dump_nccl_trace_json())
    if hasattr(c10d, "_dump_fr_trace_file"):  # torch 2.15, whose nccl is called nccl2
        texts.append(c10d._dump_fr_trace_json(backend="nccl2"))
    return [text.decode() for text in texts]


def watch(rank, world_size, folder):
    """Writes every five seconds where this rank is, until its script has ended."""
    os.makedirs(folder, exist_ok=True)
    main, running = threading.main_thread(), True
    while running:
        running = main.is_alive()
        stack = traceback.extract_stack(sys._current_frames()[main.ident])
        note = {"rank": rank, "world_size": world_size, "host": os.uname().nodename}
        note |= {"pid": os.getpid(), "time": time.time(), "running": running}
        note |= {"stack": [list(frame) for frame in stack], "recorder": read_recorders()}
        with open(f"{folder}/{rank}.new", "w") as file:
            json.dump(note, file)
        os.replace(f"{folder}/{rank}.new", f"{folder}/{rank}.json")
        main.join(timeout=5)


def start_watching():
    """Call it before init_process_group. Under srun: SLURM_PROCID and SLURM_STEP_NUM_TASKS."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")  # collectives that torch remembers
    faulthandler.enable()  # An abort prints the line of each thread.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = os.path.abspath("who_hangs")  # The script may go to another folder.
    threading.Thread(target=watch, args=(rank, world_size, folder)).start()


def main():
    start_watching()
    if sys.argv[1:]:
        del sys.argv[0]
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))  # as Python does it
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} counts {total.item():.0f} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
