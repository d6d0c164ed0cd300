"""Save on a signal: all ranks stop after the same step, and rank 0 saves.

torchrun --standalone --nproc-per-node 2 docs/examples/save_on_signal.py
"""

import signal

import torch
import torch.distributed as dist

SIGNALS = []  # those that have come to this rank


def remember_signals():
    """Call it before the training. Now USR1 and SIGTERM are only noted, and end nothing."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: SIGNALS.append(number))


def train(steps, train_one_step, save, device):
    """Trains; after a signal to any rank all ranks leave in the same step, and rank 0 saves."""
    for step in range(steps):
        train_one_step(step)
        stop = torch.tensor(len(SIGNALS), device=device)
        dist.all_reduce(stop)  # in each step, on every rank
        if stop > 0:
            if dist.get_rank() == 0:
                save(step + 1)
            return


def main():
    remember_signals()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    steps_done = []

    def train_one_step(step):
        if rank == 1 and step == 2:
            signal.raise_signal(signal.SIGUSR1)  # as Slurm's may come to one rank first
        steps_done.append(step)

    train(5, train_one_step, lambda steps: print(f"rank {rank}: saved after {steps} steps"), "cpu")
    print(f"rank {rank}: left after {len(steps_done)} steps, signals {len(SIGNALS)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
