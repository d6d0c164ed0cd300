"""What docs/data.md says of its examples: which images each rank gets, and which numbers it draws.

That the programs print what the page shows is tested in test_pages.py. Here the functions that are
to be copied are called with more ranks than a program starts, and what is printed is compared.
"""

import ast
import itertools
import re
from unittest import mock

import pytest
import torch
import update_pages
from forked import run_forked_ranks
from launch import REPO, free_port

EXAMPLES = REPO / "docs" / "examples"


def load(name, *functions):
    """Returns functions and classes of an example without running the example."""
    module = ast.parse((EXAMPLES / name).read_text())
    kinds = (ast.Import, ast.ImportFrom)
    module.body = [
        node
        for node in module.body
        if isinstance(node, kinds) or getattr(node, "name", None) in functions
    ]
    namespace = {}
    exec(compile(module, name, "exec"), namespace)
    found = [namespace[function] for function in functions]
    return found[0] if len(found) == 1 else found


def read_printed(name):
    """Returns the lines that an example prints; test_pages.py compares them with a run."""
    return update_pages.printed_file(REPO / "docs" / "examples" / name).read_text().splitlines()


def read_numbers(name, start):
    """Returns the numbers with a decimal point in the printed lines that begin with start."""
    lines = [line for line in read_printed(name) if line.startswith(start)]
    return [re.findall(r"-?\d+\.\d+", line) for line in lines]


def test_join_with_the_optimizer_state_trains_as_by_hand():
    """A rank that had no more batches has the weights of the other after the next steps, too."""
    (by_hand,) = read_numbers("uneven_inputs.py", "by hand")
    rank_0, rank_1 = read_numbers("uneven_inputs.py", "train_one_epoch")
    assert rank_1 == by_hand
    assert rank_0 == by_hand[:2] + by_hand[3:5]


@pytest.mark.parametrize(("mistake", "ranks_agree"), [("momentum", False), ("ZeRO", True)])
def test_join_alone_and_join_with_zero_do_not(mistake, ranks_agree):
    """An old momentum makes the ranks differ; ZeroRedundancyOptimizer makes both ranks wrong."""
    (by_hand,) = read_numbers("uneven_inputs.py", "by hand")
    rank_0, rank_1 = read_numbers("uneven_inputs.py", f"mistake, {mistake}")
    assert rank_1 != by_hand
    assert (rank_0 == rank_1[:2] + rank_1[3:5]) == ranks_agree


# Two batches on rank 0, three on rank 1, and an all_reduce of the number of images in the loop.
COUNT_IN_JOIN = """
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

def main():
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    with Join([model], throw_on_early_termination={throw}):
        for _ in range(2 + dist.get_rank()):
            model(torch.ones(100, 1)).sum().backward()
            images = torch.tensor(100)
            dist.all_reduce(images)
            print(images.item(), flush=True)

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
main()
"""


def count_in_join(folder, throw):
    """Returns the exit statuses of both ranks, the counts of rank 0 and then of rank 1, stderr."""
    path = folder / "program.py"
    path.write_text(COUNT_IN_JOIN.format(throw=throw))
    codes, out, err = run_forked_ranks(path, 2, free_port(), folder / "run")
    return codes, out.split(), err


def test_join_takes_no_part_in_an_all_reduce_of_the_loop(tmp_path):
    """Else rank 1 would count its 100 images of the third batch alone, and both would end well."""
    codes, counts, err = count_in_join(tmp_path, throw=False)
    assert None not in codes and counts[:4] == ["200"] * 4 and "exhausted" not in err, err
    assert counts[4:] != ["100"] or codes != [0, 0]


def test_join_can_end_all_ranks_together(tmp_path):
    """In the page's program, and with an all_reduce in the loop, whose counts are right."""
    lines = [line.split() for line in read_printed("uneven_inputs.py") if "stop_early" in line]
    assert [line[1:] for line in lines] == [
        ["rank", "0", "RuntimeError"],
        ["rank", "1", "RuntimeError"],
    ]
    codes, counts, err = count_in_join(tmp_path, throw=True)
    assert codes == [1, 1] and counts == ["200"] * 4, err
    assert len(re.findall(r"^RuntimeError: ", err, re.MULTILINE)) == 2, err


def test_no_two_steps_and_ranks_have_the_same_seed(monkeypatch):
    """Over 3 epochs of 200 steps on 16 ranks; 1000 * epoch + 10 * step + rank had the same."""
    seed_step = load("resume_mid_epoch.py", "seed_step")
    seeds, old = [], set()
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    for epoch, step, rank in itertools.product(range(3), range(200), range(16)):
        seed_step(epoch, step, 200, rank, 16)
        old.add(1000 * epoch + 10 * step + rank)
    assert len(set(seeds)) == 3 * 200 * 16 > len(old)


def test_seed_of_a_step_is_the_gpus_seed_and_a_saved_state_is_not():
    seed_step = load("resume_mid_epoch.py", "seed_step")
    with mock.patch("torch.cuda.manual_seed_all") as seed_gpus:
        torch.set_rng_state(torch.get_rng_state())
        seed_gpus.assert_not_called()
        seed_step(0, 3, 200, 0, 1)
        seed_gpus.assert_called_once_with(3)
        torch.manual_seed(3)
        assert seed_gpus.call_count == 2


def test_resumed_run_ends_with_the_weights_of_the_whole_run():
    for line in read_printed("resume_mid_epoch.py"):
        whole, resumed, repeated = re.findall(r"-?\d\.\d{6}", line)
        assert whole == resumed != repeated


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weighted_draw_is_one_draw_divided(world_size):
    """The ranks' shares are those of one process, equally long, and new in each epoch."""
    draw_images = load("weighted_sampling.py", "draw_images")
    weights = torch.tensor([1.0] * 90 + [9.0] * 12)
    shares = [draw_images(weights, 0, rank, world_size) for rank in range(world_size)]
    whole = draw_images(weights, 0, 0, 1)
    assert [image for images in zip(*shares, strict=True) for image in images] == whole
    assert whole != draw_images(weights, 1, 0, 1)
    rare = sum(image >= 90 for image in whole) / len(whole)
    assert 0.4 < rare < 0.7  # 12 of 102 images have 108 of the weights' sum of 198.


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_of_similar_length(world_size):
    """Each sequence is in a batch, no batch is too large, and those of a step are alike."""
    make_batches = load("similar_lengths.py", "make_batches")
    lengths = torch.randint(4, 100, (500,), generator=torch.Generator().manual_seed(0))
    lengths[0] = 1000  # longer than max_tokens
    ranks = [make_batches(lengths, 800, 0, rank, world_size) for rank in range(world_size)]
    steps = list(zip(*ranks, strict=True))  # equally many on all ranks
    batches = [batch for step in steps for batch in step]
    assert {i for batch in batches for i in batch} == set(range(500))
    repeated = len(batches) - len({tuple(batch) for batch in batches})
    assert repeated < world_size
    assert all(len(batch) * lengths[batch].max() <= 800 or batch == [0] for batch in batches)
    longest = torch.tensor([[lengths[batch].max() for batch in step] for step in steps])
    differences = (longest.amax(1) - longest.amin(1)).sort().values
    assert (differences[:-1] < 20).all()  # The last may be that of the repeated batch.
    assert ranks[0] != make_batches(lengths, 800, 1, 0, world_size)


def test_each_rank_that_orders_sequences_by_itself_makes_others_wait():
    shares = re.findall(
        r"(32 of|make_b).* (\S+) % waiting", "\n".join(read_printed("similar_lengths.py"))
    )
    alone, together = (
        [float(share) for name, share in shares if name == kind] for kind in ("32 of", "make_b")
    )
    assert min(alone) > 20 and max(together) < 5


def test_stream_gives_each_sample_to_one_worker_of_one_rank(monkeypatch):
    """Two ranks with three workers each, and ranks without workers."""
    stream_class = load("iterable_dataset.py", "Stream")
    for workers, ranks in ((3, 2), (0, 5)):
        samples = []
        for rank in range(ranks):
            stream = stream_class(range(23), rank, ranks)
            for worker in range(max(workers, 1)):
                info = type("Info", (), {"num_workers": workers, "id": worker})
                scope = stream_class.__iter__.__globals__
                monkeypatch.setitem(scope, "get_worker_info", lambda i=info, n=workers: n and i)
                samples += list(stream)
        assert sorted(samples) == list(range(23))


def test_workers_with_a_generator_of_their_own_draw_different_numbers():
    """Without it, all workers, ranks and epochs drew the same four numbers."""
    lines = [line for line in read_printed("worker_augmentation.py") if line.startswith("rank")]
    shifts = [[ast.literal_eval(part) for part in re.findall(r"\[.*?\]", line)] for line in lines]
    copied = {tuple(shift[0][half : half + 4]) for shift in shifts for half in (0, 4)}
    seeded = {tuple(shift[1][half : half + 4]) for shift in shifts for half in (0, 4)}
    assert len(copied) == 1 and len(seeded) == 8


def test_split_and_dropout_need_two_seeds():
    """One seed: equal masks until start_epoch. A seed for each rank: the splits overlap."""

    def read(start):
        (line,) = (x for x in read_printed("random_seeds.py") if x.startswith(start))
        return [ast.literal_eval(part) for part in re.findall(r"\[.*?\]", line)]

    tests, trains = read("a seed for each rank: 1"), read("a seed for each rank: 2")
    assert set(tests[0]) & set(trains[1])
    tests, trains = read("one seed: 1"), read("one seed: 2")
    assert tests[0] == tests[1] and not set(tests[0]) & {*trains[0], *trains[1]}
    assert not set(trains[0]) & set(trains[1])
    equal = [masks[0] == masks[1] for masks in (read("one seed: 3"), read("one seed: 4"))]
    assert equal == [True, False]


@pytest.mark.parametrize("folds", [2, 5])
def test_every_image_is_tested_in_one_fold(folds):
    split_fold = load("k_fold.py", "split_fold")
    tested = []
    for fold in range(folds):
        train, test = split_fold(23, fold, folds)
        assert sorted([*train.tolist(), *test.tolist()]) == list(range(23))
        tested += test.tolist()
    assert sorted(tested) == list(range(23))


def test_image_folders_command_has_options_of_the_changed_script():
    """The data set's only name is imagenet, so a command with another name would fail."""
    text = (REPO / "docs" / "patches" / "image_folders.diff").read_text()
    command = text.partition("diff --git")[0]
    assert "--data-root" in command and "--dataset" not in command
