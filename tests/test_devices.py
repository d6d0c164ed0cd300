"""Which device, current device, backend and device_id result: on any machine, without a GPU."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launch import DDP

# (accelerator, how many are visible, local rank, --backend): (device, backend)
CHOICES = {
    **{(None, 0, local, None): ("cpu", "gloo") for local in range(6)},
    **{("cuda", 1, local, None): ("cuda:0", "nccl") for local in range(6)},
    **{("cuda", 4, local, None): (f"cuda:{local % 4}", "nccl") for local in range(6)},
    ("cuda", 4, 3, "gloo"): ("cuda:3", "gloo"),
    ("cuda", 1, 1, "gloo"): ("cuda:0", "gloo"),
    (None, 0, 1, "gloo"): ("cpu", "gloo"),
    # Slurm with --gpus-per-task 1 lets each process see its own GPU alone, as number 0.
    ("cuda", 1, 3, "nccl"): ("cuda:0", "nccl"),
    # CUDA_VISIBLE_DEVICES=0,1 for four processes: two to a GPU, which nccl refuses.
    ("cuda", 2, 3, "gloo"): ("cuda:1", "gloo"),
    # Intel's GPUs train as NVIDIA's do. A Mac's GPU has no backend.
    ("xpu", 4, 5, None): ("xpu:1", "xccl"),
    ("mps", 1, 1, None): ("cpu", "gloo"),
}


def make_args(script, local_rank, backend):
    """The options that setup_distributed reads, and what comes before them in its call."""
    args = SimpleNamespace(backend=backend, timeout=1, init_method="file:///nowhere")
    args.rank, args.world_size, args.local_rank = 7, 8, local_rank
    args.node_rank, args.nproc_per_node, args.nodes = 1, 4, 2
    return (args, local_rank) if script == "mnmc_ddp_mp.py" else (args,)


@pytest.mark.parametrize("script", DDP)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_choice_of_device_and_backend(monkeypatch, script, choice):
    """The local rank's GPU, or a shared one; the CPU without; all but gloo are told which."""
    accelerator, visible, local_rank, option = choice
    expected, backend = CHOICES[choice]
    found = None if accelerator is None else torch.device(accelerator)
    chosen, asked, threads = [], {}, []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: asked.update(options))
    monkeypatch.setattr(dist, "get_rank", lambda: 7)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    for name, value in {"RANK": "7", "LOCAL_RANK": str(local_rank)}.items():
        monkeypatch.setenv(name, value)
    module = importlib.import_module(script.removesuffix(".py"))
    result = module.setup_distributed(*make_args(script, local_rank, option))
    device = result if script == "mnmc_ddp_mp.py" else result[1]
    assert str(device) == expected and (device is result or result[0] == local_rank)
    # torchrun sets OMP_NUM_THREADS.
    assert threads == ([] if script == "mnmc_ddp_env.py" else [1])
    assert chosen == ([device.index] if device.type != "cpu" else [])
    assert asked["backend"] == backend
    assert asked["device_id"] == (None if backend == "gloo" else device)


@pytest.mark.parametrize(
    ("accelerator", "expected"), [(None, "cpu"), ("cuda", "cuda:2"), ("mps", "mps:2")]
)
def test_snsc_takes_the_gpu_it_is_given(monkeypatch, accelerator, expected):
    """Also a Mac's, which the DDP scripts leave alone."""
    import snsc

    found = None if accelerator is None else torch.device(accelerator)
    seen = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr("sys.argv", ["snsc.py", "--gpu", "2"])
    monkeypatch.setattr(snsc, "train", lambda args, device: seen.append(str(device)))
    snsc.main()
    assert seen == [expected]


def test_number_of_spawned_workers_is_that_of_the_gpus(monkeypatch):
    """mnmc_ddp_mp.py; two where there is none."""
    import mnmc_ddp_mp

    monkeypatch.setattr("sys.argv", ["mnmc_ddp_mp.py"])
    for visible, workers in ((4, 4), (0, 2)):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=visible: count)
        assert mnmc_ddp_mp.parse_args().nproc_per_node == workers
