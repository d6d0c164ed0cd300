"""The benchmark trains every variant on the same images, and prints speeds and their ratios."""

import argparse

import benchmark
import pytest
import torch
from launch import page_commands
from test_measure import read_table


@pytest.mark.slow
@pytest.mark.parametrize("processes", (1, 2))
def test_page_command_prints_the_table(launch, processes):
    """In small; the ratio is that of the speeds."""
    env, *commands = page_commands("docs/performance.md", "Speed and scale")
    small = f"{env}; {commands[processes - 1]} --batch-size 4 --images 8 --repeats 1"
    run = launch([["bash", "-c", small]]).succeeded(280)
    (row,) = read_table(run.out)
    assert (row["batch"], row["processes"]) == ("4", str(processes))
    ratio = float(row["ddp"]) / float(row["ours"])
    assert float(row["ddp/ours"]) == pytest.approx(ratio, abs=0.01, rel=0.15), run.story()


def test_every_variant_trains_on_as_many_images(monkeypatch):
    """One epoch of each, counted where the model sees them."""
    seen = []

    class Counting(torch.nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x.flatten(1))

    monkeypatch.setattr(benchmark.snsc, "build_model", lambda dataset: Counting(784, 10))
    monkeypatch.setattr(benchmark.dist, "get_world_size", lambda: 1)
    images = torch.randint(256, (10, 1, 28, 28), dtype=torch.uint8)
    data = torch.utils.data.TensorDataset(images, torch.randint(10, (10,)))
    args = argparse.Namespace(dataset="mnist", batch_size=5, epochs=5, amp=False, workers=0)
    for variant in ("bare", "ours", "textbook"):
        seen.clear()
        setup = benchmark.prepare(variant, data, args, torch.device("cpu"))
        benchmark.VARIANTS[variant](setup)
        assert seen == [5, 5], variant
    pixels, label = benchmark.PilImages(data)[1]
    torch.testing.assert_close(pixels, images[1].float() / 127.5 - 1)
    assert label == data[1][1]
