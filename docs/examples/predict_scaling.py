"""How much faster N GPUs could be, from five numbers; checked against published tables.

    python docs/examples/predict_scaling.py
    python docs/examples/predict_scaling.py 4 8 10 87 102   # your own

Your numbers are the nodes, the GPUs of a node, the Gb/s that a node can send, the milliseconds that
one GPU needs for a batch, and the megabytes of the gradients, 4 bytes for each parameter.
"""

import math
import sys

# What was measured, with its efficiency: (nodes, GPUs, Gb/s, ms, MB, MB of a bucket, efficiency).
MEASURED = {
    "ResNet-50, 100 Gb/s InfiniBand": (4, 8, 100, 128 / 0.35066, 102.2, 25, 28.61 / 32),
    "BERT base, the same, one bucket": (4, 8, 100, 32 / 0.1196, 440, 440, 24.13 / 32),
    "ResNet-101, 25 Gb/s RoCE": (4, 4, 25, 64 / 0.1194, 178.2, 25, 14.6 / 16),
    "VGG-16, 25 Gb/s RoCE": (4, 4, 25, 64 / 0.1309, 553.4, 25, 13.7 / 16),
    "VGG-16, 40 Gb/s TCP": (16, 4, 40, 64 / 0.1496, 553.4, 25, 40.7 / 64),
}


def predict_all_reduce(nodes, gpus, gigabits, megabytes):
    """Returns the milliseconds of an all-reduce: bytes through a node's network, and latency."""
    ranks = nodes * gpus
    sent = 2 * (ranks - 1) / ranks * megabytes
    speed = gigabits if nodes > 1 else 1000  # Inside a node NVLink is the network.
    # Up and down nccl's tree: through the GPUs of a node, then from node to node.
    latency = 2 * (0.004 * (gpus - 1) + 0.014 * math.log2(nodes))
    return 8 * sent / speed + latency


def predict_step(nodes, gpus, gigabits, compute, megabytes, bucket=25):
    """Returns the milliseconds of a step: buckets are ready at even intervals during backward."""
    buckets = math.ceil(megabytes / bucket)
    all_reduce = predict_all_reduce(nodes, gpus, gigabits, megabytes / buckets)
    end = 0
    for number in range(1, buckets + 1):
        ready = compute * (1 / 3 + 2 / 3 * number / buckets)  # Forward is a third of a step.
        end = max(end, ready) + all_reduce  # The network carries one bucket at a time.
    return end


if len(sys.argv) == 6:
    numbers = [float(word) for word in sys.argv[1:]]
    step, compute = predict_step(*numbers), numbers[3]
    print(f"about {step:.0f} ms a step, efficiency {100 * compute / step:.0f} %")
else:
    print("GPUs  measured  estimated")
    for name, (*numbers, efficiency) in MEASURED.items():
        nodes, gpus, _, compute, *_ = numbers
        estimated = compute / predict_step(*numbers)
        print(f"{nodes * gpus:4}{100 * efficiency:8.0f} %{100 * estimated:9.0f} %  {name}")
