"""The benchmark measures what it says."""

import json
import re

import pytest
import torch
from launch import REPO, page_commands

COLUMNS = "dataset batch W bare ours ours_ddp textbook input ours/bare ddp/ours ours/textbook"


@pytest.mark.slow
def test_scaling_prints_and_writes_both_tables(launch, tmp_path):
    """The page's command in small, on made-up images; ratios are those of the speeds."""
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)  # what a failed download leaves
    command, _ = page_commands("docs/performance.md", "Speed and scale")
    sizes = {"DATASETS": "mnist cifar10", "SIZES": "4", "WORLDS": "2", "MANY": "1 3"}
    small = f"--images 8 --repeats 1 --data-root {tmp_path}"
    run = launch([["bash", "-c", f"{command} {small}"]], env=sizes | {"JSON": str(tmp_path)})
    run.succeeded()
    tables = [[line.split() for line in table.splitlines()] for table in run.out.split("\n\n")]
    assert tables[0][0][: len(COLUMNS.split())] == COLUMNS.split()
    assert [row[:3] for row in tables[0][1:]] == [["mnist", "4", "2"], ["cifar10", "4", "2"]]
    for table, name in zip(tables, ("speed", "many"), strict=True):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        for row in rows:
            turns = row.pop("turns")
            assert all(turns[variant] == [row[variant]] for variant in turns)  # of one repeat
        assert [[str(value) for value in row.values()] for row in rows] == table[1:]
        assert list(rows[0]) == table[0]
    for row in json.loads((tmp_path / "speed.json").read_text())["rows"]:
        assert row["ours/bare"] == pytest.approx(row["ours"] / row["bare"], abs=0.001)
        assert row["ddp/ours"] == pytest.approx(row["ours_ddp"] / row["ours"], abs=0.001)
        assert row["ours/textbook"] == pytest.approx(row["ours_ddp"] / row["textbook"], abs=0.001)
    many = json.loads((tmp_path / "many.json").read_text())["rows"]
    assert [row["W"] for row in many] == [1, 3]
    for row in many:
        assert row["ms/step"] == pytest.approx(1000 * 4 * row["W"] / row["ours_ddp"], rel=0.05)
        assert row["MiB"] > 100


def test_every_variant_trains_on_as_many_images(monkeypatch):
    """One epoch of each, counted where the model sees them; input alone trains on none."""
    import benchmark

    seen = []

    class Counting(torch.nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x.flatten(1))

    monkeypatch.setattr(benchmark.snsc, "build_model", lambda dataset: Counting(784, 10))
    monkeypatch.setattr(benchmark.dist, "get_world_size", lambda: 1)
    images = torch.randint(256, (10, 1, 28, 28), dtype=torch.uint8)
    data = benchmark.TensorDataset(images, torch.randint(10, (10,)))
    args = benchmark.argparse.Namespace(dataset="mnist", batch_size=5, lr=0.1, epochs=5, amp=False)
    for variant in ("bare", "ours", "textbook", "input"):
        seen.clear()
        setup = benchmark.prepare(variant, data, args, torch.device("cpu"))
        benchmark.VARIANTS[variant](setup)
        assert seen == ([] if variant == "input" else [5, 5]), variant


def test_textbook_images_are_the_usual_ones():
    """ToTensor and Normalize: the scripts' own normalisation, one image at a time."""
    import benchmark

    images = torch.randint(256, (3, 1, 28, 28), dtype=torch.uint8)
    pixels, label = benchmark.PilImages(images, torch.tensor([7, 8, 9]))[1]
    torch.testing.assert_close(pixels, images[1].float() / 127.5 - 1)
    assert label == 8


def test_on_a_gpu_nccl_gets_the_device_and_the_memory_is_the_gpus(monkeypatch):
    """Calls of CUDA are replaced, because a GPU is seldom there."""
    import benchmark

    gpu, calls = torch.device("cuda", 1), []
    monkeypatch.setattr(
        benchmark.dist, "init_process_group", lambda **options: calls.append(options)
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {gpu: 3 * 2**20}.get)
    for device in (gpu, torch.device("cpu")):
        benchmark.join(0, 2, "file:///new", device)
    assert [(c["backend"], c["device_id"]) for c in calls] == [("nccl", gpu), ("gloo", None)]
    assert benchmark.measure_peak(gpu) == 3
    assert benchmark.measure_peak(torch.device("cpu")) > 100


def test_wrong_sizes_are_answered_in_one_line(launch):
    run = launch([["python", REPO / "scripts/measure/benchmark.py", "--images", "0"]]).wait()
    assert run.codes == [2]
    assert re.search("error: sizes, images and repeats must be above 0$", run.err.strip())
