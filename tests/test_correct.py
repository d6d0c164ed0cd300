"""DDP computes what one process would, on every image once.

The four DDP scripts share the code that is tested here, to the letter (test_progression.py), and
print the same numbers (test_train.py); so one of them is watched, with what every rank saw.
"""

from collections import namedtuple

import pytest
import reference
import torch
from launch import REPO, read_epochs, run_forked_ranks
from tiny_data import write_mnist
from torchvision.datasets import MNIST

import snsc

TRAIN, EPOCHS, BATCH = 101, 2, 8  # images that neither 2 nor 3 divides


# One run: its printed epochs, and for each epoch what every rank saw.
Watched = namedtuple("Watched", "lines epochs")


def watch(world_size, seed, test_images, folder):
    write_mnist(folder / "data", train=TRAIN, test=test_images)
    script = "snsc.py" if world_size == 1 else "mnmc_ddp_env.py"
    arguments = [folder, script, "--data-root", folder / "data"]
    arguments += ["-e", EPOCHS, "-b", BATCH, "--seed", seed]
    path, processes = REPO / "tests" / "probe.py", 0 if world_size == 1 else world_size
    codes, out, err = run_forked_ranks(path, processes, folder / "output", arguments)
    assert not any(codes), err
    epochs = [
        [torch.load(folder / f"{rank}-{epoch}.pt", weights_only=True) for rank in range(world_size)]
        for epoch in range(1, EPOCHS + 1)
    ]
    return Watched(read_epochs(out), epochs)


# World size, seed, test images: a test set that the ranks divide unequally, one with too few.
RUNS = ((1, 0, 31), (2, 0, 31), (3, 1, 2))


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return {run: watch(*run, tmp_path_factory.mktemp("watched")) for run in RUNS}


def mnist(folder, train, test_images=1):
    """The images uint8 (N, 1, 28, 28) and labels int64 (N,) of the training or the test split."""
    write_mnist(folder, train=TRAIN, test=test_images)
    split = MNIST(folder, train=train)
    return split.data.unsqueeze(1), split.targets


@pytest.mark.parametrize("run", RUNS[1:])
def test_weights_equal_one_process_that_averages_the_gradients(watched, tmp_path, run):
    world_size, seed, _ = run
    images, labels = mnist(tmp_path, train=True)
    torch.manual_seed(seed)
    start = {"module": snsc.ConvNet(), "optimizer": None, "epoch": 0}
    state, loss, accuracy = reference.train(start, images, labels, world_size, EPOCHS, BATCH, seed)
    torch.testing.assert_close(watched[run].epochs[0][0]["state"], state, rtol=1e-4, atol=1e-5)
    # The line that rank 0 prints is that of the images of all ranks.
    assert watched[run].lines[0]["loss"] == pytest.approx(loss, abs=2e-4)
    assert watched[run].lines[0]["train"] == pytest.approx(accuracy, abs=0.01)


@pytest.mark.parametrize("run", RUNS)
def test_each_rank_and_epoch_draws_its_augmentation_from_a_seed_of_its_own(watched, run):
    seeds = [rank["seed"] for ranks in watched[run].epochs for rank in ranks]
    assert len(set(seeds)) == len(seeds) == run[0] * EPOCHS


@pytest.mark.parametrize("run", RUNS[1:])
def test_all_ranks_hold_the_same_bits(watched, run):
    """Parameters and BatchNorm's statistics, after every epoch."""
    for first, *others in watched[run].epochs:
        for other in others:
            torch.testing.assert_close(other["state"], first["state"], rtol=0, atol=0)


def global_order(ranks):
    """The order that was dealt out to the ranks, put together again."""
    dealt = zip(*(rank["train"] for rank in ranks), strict=True)
    return [number for numbers in dealt for number in numbers]


@pytest.mark.parametrize("run", RUNS)
def test_every_image_is_trained_on_once(watched, run):
    """All of them, and at most world size - 1 twice, for shards of equal length."""
    for ranks in watched[run].epochs:
        numbers = global_order(ranks)
        assert set(numbers) == set(range(TRAIN))
        assert len(numbers) - TRAIN == -TRAIN % run[0]


def test_order_depends_on_seed_and_epoch_alone(watched):
    two, three = (
        [global_order(ranks)[:TRAIN] for ranks in watched[run].epochs] for run in RUNS[1:]
    )
    # DistributedSampler adds the epoch to its seed: seed 1 begins with seed 0's second order, also
    # for another number of ranks.
    assert three[0] == two[1]
    assert len({tuple(order) for order in (*two, three[1], list(range(TRAIN)))}) == 4
    first, second = (global_order(ranks) for ranks in watched[RUNS[0]].epochs)
    assert first != second


@pytest.mark.parametrize("run", RUNS)
def test_evaluation_counts_every_test_image_once(watched, tmp_path, run):
    """And finds as many correct as a plain loop over all of them with the same weights."""
    count = run[2]
    images, labels = mnist(tmp_path, train=False, test_images=count)
    model = snsc.ConvNet().eval()
    for ranks, line in zip(watched[run].epochs, watched[run].lines, strict=True):
        assert sorted(sum((rank["test"] for rank in ranks), [])) == list(range(count))
        model.load_state_dict(ranks[0]["state"])
        with torch.inference_mode():
            correct = (model(images.float() / 127.5 - 1).argmax(1) == labels).sum().item()
        assert (line["correct"], line["count"]) == (correct, count)
