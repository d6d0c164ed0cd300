"""The three ways in which processes meet: tcp, file and env.

python docs/examples/init_methods.py
"""

import os
import socket
import tempfile

import torch.distributed as dist

with socket.socket() as sock:  # finds a free port
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]

# tcp: the address of rank 0, and a port that is free on its machine
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
print(f"tcp: rank {dist.get_rank()} of {dist.get_world_size()}")
dist.destroy_process_group()

# file: the folder exists, and the file does not
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    print(f"file: rank {dist.get_rank()} of {dist.get_world_size()}")
    dist.destroy_process_group()

# env: four variables, which torchrun sets
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", init_method="env://")
print(f"env: rank {dist.get_rank()} of {dist.get_world_size()}")
dist.destroy_process_group()
