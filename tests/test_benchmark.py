"""The benchmark trains every variant on the same images, and prints speeds and their ratios."""

import argparse

import benchmark
import pytest
import torch
from launch import REPO, page_commands
from test_measure import read_table


@pytest.mark.slow
def test_scaling_prints_both_tables(launch):
    """The page's command in small; ratios are those of the speeds."""
    (command,) = page_commands("docs/performance.md", "Speed and scale")
    small = f"{command} --images 8 --repeats 1"
    sizes = {"SIZES": "4", "WORLDS": "1 2", "MANY": "3"}
    run = launch([["bash", "-c", small]], env=sizes).succeeded(280)
    first, second = run.out.split("\n\n")[1::2]
    rows = read_table(first)
    assert [(row["batch"], row["processes"]) for row in rows] == [("4", "1"), ("4", "2")]
    for row in rows:
        for pair in ("ours/bare", "ddp/ours", "ddp/textbook"):
            above, below = (float(row[name]) for name in pair.split("/"))
            assert float(row[pair]) == pytest.approx(above / below, abs=0.01, rel=0.15), run.story()
    (row,) = read_table(second)
    assert float(row["ms/step"]) == pytest.approx(1000 * 4 * 3 / float(row["ddp"]), rel=0.3)
    assert int(row["MiB"]) > 100


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
    args = argparse.Namespace(dataset="mnist", batch_size=5, lr=0.1, epochs=5, amp=False)
    for variant in ("bare", "ours", "textbook"):
        seen.clear()
        setup = benchmark.prepare(variant, data, args, torch.device("cpu"))
        benchmark.VARIANTS[variant](setup)
        assert seen == [5, 5], variant
    pixels, label = benchmark.PilImages(data)[1]
    torch.testing.assert_close(pixels, images[1].float() / 127.5 - 1)
    assert label == data[1][1]


def test_wrong_sizes_are_answered_in_one_line(launch):
    run = launch([["python", REPO / "scripts/measure/benchmark.py", "--images", "0"]]).wait()
    assert run.codes == [2]
    assert run.last_line().endswith("error: sizes, images and repeats must be above 0")
