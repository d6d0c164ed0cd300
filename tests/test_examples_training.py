"""What the pages other than docs/data.md say of their examples: cures are right, mistakes wrong.

That the programs print what the pages show is tested in test_pages.py. Here the printed numbers
are compared with one another, so that no page can be updated with numbers that refute it.
"""

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from launch import REPO
from test_examples_data import load, read_printed

EXAMPLES = sorted((REPO / "docs" / "examples").glob("*.py"))


def read_line(name, start):
    """Returns the rest of the only printed line that begins with start."""
    (line,) = (x for x in read_printed(name) if x.startswith(start))
    return line.removeprefix(start).strip()


def test_accumulation_equals_one_process_and_communicates_once():
    one_process = read_line("gradient_accumulation.py", "one process, all images at once:")
    right = f"rank 0 {one_process}, rank 1 {one_process}"
    assert read_line("gradient_accumulation.py", "accumulate:") == f"{right}, 1 all-reduces"
    slow = read_line("gradient_accumulation.py", "only_backward_inside:")
    assert slow == f"{right}, 3 all-reduces"


def test_flag_set_between_forward_and_backward_gives_each_rank_another_gradient():
    line = read_line("gradient_accumulation.py", "flag_before_backward:")
    rank_0, rank_1 = re.findall(r"rank \d ([\d.]+)", line)
    assert rank_0 != rank_1 and "1 all-reduces" in line


def test_clipping_after_the_average_and_after_unscale_equals_one_process():
    one_process = read_line("gradient_clipping.py", "1 one process:")
    lines = [read_line("gradient_clipping.py", str(number)) for number in (2, 3, 4, 5)]
    assert [one_process in line for line in lines] == [True, True, False, False]
    steps = [float(line.rpartition(" ")[2]) for line in lines]
    assert steps[0] == steps[1] > 10_000 * steps[3]


@pytest.mark.parametrize("tokens", [8, 1])
def test_token_loss_of_all_ranks_is_the_mean_over_their_tokens(monkeypatch, tokens):
    """Four ranks with different numbers of tokens, one of them with none."""
    compute_token_loss = load("token_loss.py", "compute_token_loss")
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 8, 3), torch.randint(3, (4, 8))
    labels[0, tokens:] = -100
    labels[3] = -100
    count = (labels != -100).sum()
    dist = compute_token_loss.__globals__["dist"]
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.copy_(count))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    losses = torch.stack([compute_token_loss(logits[r], labels[r]) for r in range(4)])
    assert losses.mean().isclose(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    alone = torch.stack([F.cross_entropy(logits[r], labels[r]) for r in range(4)])
    assert alone.isnan().any()  # as the page says of a rank without labels


def test_unequal_batch_sizes_make_equally_many_steps_and_equal_one_process():
    lines = "\n".join(read_printed("unequal_batch_sizes.py"))
    usual = re.findall(r"(\d+) steps with DistributedSampler", lines)
    equal = re.findall(r"(\d+) steps with draw_batches", lines)
    assert len(set(usual)) == len(usual) == 2 == len(equal) and len(set(equal)) == 1
    found = re.findall(r"one process (.+), no weight (.+), compute_loss (.+)", lines)
    assert len(found) == 2 and len(set(found)) == 1
    one_process, mistake, cure = found[0]
    assert cure == one_process != mistake


def test_gathered_embeddings_have_the_gradients_of_one_process():
    """Of the network and of the temperature, which no other way has."""
    one_process = read_line("contrastive_loss.py", "1 one process:")
    assert read_line("contrastive_loss.py", "2 gather_embeddings:") == one_process
    for number in (3, 4, 5):
        assert one_process not in read_line("contrastive_loss.py", str(number))


def test_all_ranks_skip_the_same_step_of_float16():
    lines = {line.partition(", ")[2] for line in read_printed("grad_scaler.py")}
    assert len(lines) == 4  # the same four lines on both ranks
    assert sum("skipped: True" in line for line in lines) == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_takes_autocast_s_device_from_a_tensor(path):
    """With "cpu" in its place, a copy of the lines would train in float32 on a GPU."""
    assert not re.search(r"(autocast|GradScaler)\(\s*\"cpu\"", path.read_text())


def test_autocast_for_the_cpu_does_nothing_on_a_gpu():
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


def test_wrapper_for_two_forwards_equals_training_without_ddp():
    """BatchNorm is right with the default since 2.12; a buffer that backward needs is not."""
    for name, verdict in (("BatchNorm", "right"), ("DivideByLargest", "wrong")):
        norms = re.findall(r"\d+\.\d+", read_line("two_forwards.py", f"{name}: without DDP"))
        assert len(norms) == 2 and norms[0] == norms[1]
        assert (
            read_line("two_forwards.py", f"{name}: the default") == f"is {verdict} since torch 2.12"
        )


def test_wrapper_for_two_forwards_chooses_the_option_of_its_torch(monkeypatch):
    """The new name where there is one, because the old one is deprecated; buffers are copied."""
    wrap = load("two_forwards.py", "wrap")
    scope, copied = wrap.__globals__, []
    monkeypatch.setattr(scope["dist"], "broadcast", lambda buffer, src: copied.append(buffer))

    def old(module, broadcast_buffers=True):
        return {"broadcast_buffers": broadcast_buffers}

    def new(module, broadcast_buffers=None, forward_sync_buffers=None):
        return {"forward_sync_buffers": forward_sync_buffers}

    for constructor, option in ((old, "broadcast_buffers"), (new, "forward_sync_buffers")):
        monkeypatch.setitem(scope, "DistributedDataParallel", constructor)
        assert wrap(torch.nn.BatchNorm1d(2)) == {option: False}
    assert len(copied) == 6


def test_layers_are_frozen_before_the_wrapper():
    frozen = read_printed("frozen_layers.py")
    assert [line.partition(": ")[2][:20] for line in frozen] == [
        "trained",
        "equal weights True",
        "trained",
        "Expected to have fin",
        "equal weights False",
        "trained",
    ]


def test_empty_batch_and_nan_are_the_same_for_all_ranks():
    """Together: equal steps and weights. Alone: rank 0 fails, and rank 1 has other weights."""
    together = [read_line("irregular_steps.py", f"rank {rank}, together:") for rank in (0, 1)]
    assert together[0] == together[1] and together[0].startswith("[True, True, False]")
    assert read_line("irregular_steps.py", "rank 0, alone:") == "RuntimeError"
    assert read_line("irregular_steps.py", "rank 1, alone:") != together[1]


def test_overflow_is_named_on_the_rank_where_it_begins():
    lines = read_printed("first_overflow.py")
    assert not any("gives" in line for line in lines if line.startswith("rank 0"))
    assert "rank 1: 0 gives torch.float16 that is not finite" in lines
    assert all("gradient finite False" in line for line in lines if "loss" in line)


@pytest.mark.parametrize("rank", (0, 1))
def test_gradient_penalty_needs_one_backward_for_the_whole_loss(rank):
    assert read_line("gradient_penalty.py", f"rank {rank}, one backward:").endswith("True")
    assert read_line("gradient_penalty.py", f"rank {rank}, mistake, two:").endswith("False")


def test_average_of_the_weights_needs_every_rank():
    for rank in (0, 1):
        line = read_line("ema.py", f"rank {rank}:")
        one_process, every_rank, rank_0_alone = re.findall(r"-?\d\.\d{4}", line)
        assert one_process == every_rank
        assert (rank_0_alone == every_rank) == (rank == 0)


def test_each_process_has_two_gpus_of_its_node(monkeypatch):
    """nccl of 2.15 takes GPU LOCAL_RANK % 4 for itself: for rank 1 that is rank 0's second GPU."""
    choose_devices, chosen = load("model_on_two_devices.py", "choose_devices"), []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    devices = [[str(device) for device in choose_devices(rank, 2)] for rank in (0, 1)]
    assert devices == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]] and chosen == [0, 2]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert {str(device) for device in choose_devices(1, 2)} == {"cpu"}


def test_model_on_two_devices_counts_the_processes_of_its_own_node(monkeypatch):
    """On the second of two nodes with two processes each."""
    main = load("model_on_two_devices.py", "main")
    scope, choose_devices = main.__globals__, mock.Mock(return_value=())
    monkeypatch.setitem(scope, "choose_devices", choose_devices)
    monkeypatch.setitem(scope, "SplitModel", mock.Mock(side_effect=NotImplementedError))
    monkeypatch.setattr(scope["dist"], "get_rank", lambda: 3)
    monkeypatch.setattr(scope["dist"], "get_world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(NotImplementedError):
        main()
    choose_devices.assert_called_once_with(1, 2)


def test_class_without_a_pixel_is_left_out_of_the_mean():
    mean_iou = load("exact_metrics.py", "mean_iou")
    matrix = torch.tensor([[2, 1, 0], [0, 3, 0], [0, 0, 0]])
    hit = matrix.diag()
    assert (hit / (matrix.sum(0) + matrix.sum(1) - hit)).mean().isnan()
    assert mean_iou(matrix).item() == pytest.approx(0.7083, abs=1e-4)  # of 2 / 3 and 3 / 4


def test_pixel_without_a_label_is_not_counted():
    """Counted, it makes the matrix too long for its view."""
    count_pixels = load("exact_metrics.py", "count_pixels")
    labels, predicted = torch.tensor([0, 1, 255]), torch.tensor([0, 1, 1])
    with pytest.raises(RuntimeError, match="invalid for input of size 512"):
        torch.bincount(2 * labels + predicted, minlength=4).view(2, 2)
    assert count_pixels(labels, predicted, 2).tolist() == [[1, 0], [0, 1]]


def test_all_reduce_on_rank_0_alone_gives_wrong_sums():
    """The mean over all ranks is that of one process; each sum of the mistake is wrong."""
    all_ranks = read_line("logging_on_one_rank.py", "rank 0: all ranks:")
    assert all_ranks == read_line("logging_on_one_rank.py", "rank 0: one process:")
    assert all_ranks != read_line("logging_on_one_rank.py", "rank 0: this rank alone:")
    mistakes = [x for x in read_printed("logging_on_one_rank.py") if x.startswith("mistake")]
    sums = re.findall(r"both (?:is|are) (\d+), in place of (\d+)", "\n".join(mistakes))
    assert sorted(right for _, right in sums) == ["200", "200", "3"]
    assert all(wrong != right for wrong, right in sums)


def test_weight_is_initialised_as_a_whole_and_not_its_slice():
    """xavier_normal_ of 300 x 100 has a deviation of the root of 2 / 400, on each rank."""
    for rank in (0, 1):
        lines = [read_line("meta_device.py", f"rank {rank}: {number}.") for number in (1, 2, 3, 4)]
        empty, variance, whole, of_slices = (float(line.rpartition(" ")[2]) for line in lines)
        assert empty != empty and variance == 1  # nan differs from itself.
        assert whole == pytest.approx((2 / 400) ** 0.5, rel=0.03)
        assert of_slices != pytest.approx((2 / 400) ** 0.5, rel=0.03)
    with pytest.raises(ValueError, match="fewer than 2 dimensions"):
        torch.nn.init.kaiming_normal_(torch.empty(3))


def test_compression_waits_for_the_new_buckets_after_a_resume():
    for rank in (0, 1):
        assert read_line("powersgd_state.py", f"rank {rank}: until then the rest") == (
            "is as it was: True"
        )
        assert read_line("powersgd_state.py", f"rank {rank}: mistake, compresses at once,") == (
            "the rest is as it was: False"
        )
