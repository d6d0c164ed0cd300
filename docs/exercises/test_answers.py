"""The judge of the exercises. Each message is a hint that names the mistake.

    cp docs/exercises/template.py answers.py
    pytest docs/exercises                  # -k ring_all_reduce takes one of them
    pytest docs/exercises --seed 1         # other numbers and sizes
    ANSWERS=mine.py pytest docs/exercises  # another file than answers.py

Each test runs the reader's function in two or three processes and compares it with torch. The
network is slow: the result of an all_reduce in the background is not there before its wait().
"""

import copy
import gc
import importlib.util
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import CALLS, fail_if
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Imported once, before the tests. A mistake there ends pytest with its line.
answers_file = Path(os.environ.get("ANSWERS", "answers.py")).resolve()
if not answers_file.exists():
    copy_it = f"cp docs/exercises/template.py {answers_file.name}"
    message = f"there is no {answers_file}: type  {copy_it}"
    pytest.exit(message, returncode=pytest.ExitCode.USAGE_ERROR)
spec = importlib.util.spec_from_file_location("answers", answers_file)
answers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(answers)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def flatten(tensors):
    """Returns all numbers of some tensors in one list; of None there are none."""
    return [n for t in tensors if t is not None for n in t.detach().flatten().tolist()]


def gradients(model):
    return flatten(p.grad for p in model.parameters())


def close(a, b):
    return len(a) == len(b) and torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-6)


def near(a, b):
    """Like close(), for numbers that are rounded more often."""
    return len(a) == len(b) and torch.allclose(torch.tensor(a), torch.tensor(b), 1e-3, 1e-4)


def judge_gradients(own, found, right):
    """Fails with a hint if a rank has other gradients than DDP; lists of all numbers, by rank."""
    for rank in range(len(own)):
        if close(found[rank], right[rank]):
            continue
        fail_if(
            close(found[rank], [n * 2 for n in right[rank]]),
            "the gradients are the sum over the ranks: divide before all_reduce, or after wait()",
        )
        fail_if(
            any(close(found[rank], [n / d for n in own[rank]]) for d in (1, 2)),
            f"rank {rank} still has its own gradients: all_reduce works in place, on the tensor "
            "that it is given. Where that is a copy, copy the result back",
        )
        fail_if(True, f"the gradients on rank {rank} are not those of DDP")


def test_shard(run_ranks, numbers):
    count, epoch = 2 * numbers.randint(40, 60) + 1, numbers.randint(1, 9)
    share = count // 2 + 1

    def case(shard, rank):
        return [list(map(int, shard(count, e))) for e in (epoch, epoch + 1, epoch)]

    (first, other_epoch, again), (second, *_) = run_ranks("shard", case)
    missing = len(set(range(count)) - {*first, *second})
    fail_if(len(first) != len(second), "the rank with more images would wait in its last step")
    fail_if(sorted(first) == sorted(second), "both ranks have the same images: use the rank")
    fail_if(missing == 1, "an image is left out: round up, and let an image occur twice")
    fail_if(missing, f"{missing} images are on no rank: do all ranks shuffle with the same seed?")
    fail_if(len(first) > share, f"each rank has {len(first)} images where {share} are enough")
    fail_if(first != again, "two calls for the same epoch differ: seed a generator with the epoch")
    fail_if(first == other_epoch, "every epoch has the same order: put the epoch into the seed")


class RecordingModel(nn.Module):
    """Returns its input as logits, and records how it was called. Each rank has another buffer."""

    def __init__(self, rank):
        super().__init__()
        self.register_buffer("number", torch.tensor(float(rank)))
        self.seen, self.in_training, self.other_buffer = 0, False, False

    def forward(self, images):
        self.seen += len(images)
        self.in_training |= self.training
        self.other_buffer |= bool(self.number)
        return images


def test_evaluate(run_ranks, numbers):
    total = 2 * numbers.randint(4, 9) + 1
    labels = torch.tensor([numbers.randrange(3) for _ in range(total)])
    images = torch.eye(3)[labels]
    images[[0, total // 2]] = torch.tensor([0.0, 0.5, 1.0])  # right for label 2 alone
    right = int((images.argmax(1) == labels).sum())

    def case(evaluate, rank):
        model = RecordingModel(rank)
        correct, count = evaluate(model, images, labels)
        return (float(correct), float(count)), model.seen, model.in_training, model.other_buffer

    counts, seen, in_training, other_buffer = zip(*run_ranks("evaluate", case), strict=True)
    fail_if(any(in_training), "the model is in training mode: BatchNorm, dropout work differently")
    fail_if(sum(seen) > total, "an image is tested twice, as DistributedSampler repeats images")
    fail_if(sum(seen) < total, "an image is not tested: the parts may have different lengths")
    fail_if(0 in seen, "one rank tests all images, and the other none: give each rank its part")
    fail_if(any(other_buffer), "a rank tests with other buffers than rank 0's: broadcast them")
    fail_if(
        counts[0] != counts[1] or counts[0][1] in seen,
        "the ranks return different or partial numbers: add them up on all ranks",
    )
    correct, count = counts[0]
    fail_if(
        counts[0] != (right, total),
        f"{correct:g} of {count:g}, and {right} of {total} is right: add up counts, not averages",
    )


def test_average_gradients(run_ranks, numbers):
    width = numbers.randint(2, 6)

    def case(average_gradients, rank):
        torch.manual_seed(width)
        model = nn.ModuleList([nn.Linear(width, 3), nn.Linear(3, 1)])  # The second is not used.
        ddp_model = DistributedDataParallel(copy.deepcopy(model[0]))
        for each in (model[0], ddp_model.module):
            each.weight.data += rank  # who averages weights in place of gradients changes them
        inputs = torch.rand(4, width) + rank
        ddp_model(inputs).square().mean().backward()
        model[0](inputs).square().mean().backward()
        own, before = gradients(model), flatten(model.parameters())
        average_gradients(model)
        unchanged = flatten(model.parameters()) == before
        unused = [p.grad for p in model[1].parameters()] == [None, None]
        return own, gradients(model[0]), gradients(ddp_model), unchanged, unused

    own, found, right, unchanged, unused = zip(*run_ranks("average_gradients", case), strict=True)
    fail_if(not all(unchanged), "the weights have changed: average the gradients alone")
    fail_if(not all(unused), "a gradient that was None is a tensor now: leave None alone")
    judge_gradients(own, found, right)


def train_steps(seed, steps):
    """Returns a small model and its optimizer after some steps; without a step no momentum."""
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


def read_state(model, optimizer):
    """Returns the weights and the momentum as lists of numbers."""
    rows = [optimizer.state.get(p, {}) for p in model.parameters()]
    return flatten(model.parameters()), flatten(row.get("momentum_buffer") for row in rows)


def test_resume(run_ranks, numbers, tmp_path):
    """Three times: a file on rank 0 alone, on rank 1 an older one, too, and on rank 1 alone."""
    epochs = numbers.randint(3, 9)
    seed = numbers.randrange(1000)

    def case(resume, rank):
        results = []
        for number, files in enumerate(({0: epochs}, {0: epochs, 1: 1}, {1: epochs})):
            path = tmp_path / str(number) / str(rank) / "last.pt"
            path.parent.mkdir(parents=True)
            if rank in files:
                model, optimizer = train_steps(seed + rank, steps=1)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"epoch": files[rank]}, path)
            # The first time the optimizer is new, and has no momentum.
            model, optimizer = train_steps(seed + 20 + rank, steps=min(number, 1))
            expected = read_state(*(train_steps(seed, 1) if 0 in files else (model, optimizer)))
            epoch = resume(path, model, optimizer)
            weights, momentum = read_state(model, optimizer)
            results.append((epoch, weights == expected[0], momentum == expected[1]))
        return results

    for rank, results in enumerate(run_ranks("resume", case)):
        found, weights, momentum = zip(*results, strict=True)
        right = (epochs, epochs, 0)
        fail_if(
            found != right,
            f"in three trials rank {rank} returns {found}, not {right}. There is a file on rank 0 "
            "alone, then an older one on rank 1, too, then one on rank 1 alone: rank 0 decides",
        )
        changed = not (weights[2] and momentum[2])
        file = "than rank 0's file: send and load all of it"
        fail_if(changed, f"rank {rank} has changed, and rank 0 has no file")
        fail_if(not all(weights), f"rank {rank} has other weights {file}")
        fail_if(not all(momentum), f"rank {rank} has another momentum {file}")


def decide(losses, patience):
    """Returns for each epoch whether the lowest loss so far is patience epochs old."""
    best = [losses.index(min(losses[: n + 1])) for n in range(len(losses))]
    return [n - first >= patience for n, first in enumerate(best)]


def test_should_stop(run_ranks):
    # The average, each rank alone, and an epoch more or less of patience: all stop elsewhere.
    losses = [[0.6, 0.7, 0.7, 0.8, 0.1, 0.4, 0.4, 0.9], [0.5, 0.2, 0.7, 0.4, 0.7, 0.3, 0.1, 0.6]]
    patience, mean = 2, [sum(pair) / 2 for pair in zip(*losses, strict=True)]
    right, *alone = (decide(row, patience) for row in (mean, *losses))

    def case(should_stop, rank):
        return [bool(should_stop(losses[rank][: n + 1], patience)) for n in range(8)]

    first, second = run_ranks("should_stop", case)
    fail_if(first != second, "the ranks disagree: one would go on, and wait for the other")
    fail_if(first in alone, "the ranks agree, but the loss of one rank decides: average the losses")
    fail_if(first != right, f"{first}, and {right} is right: count from the lowest average")


def test_ring_all_reduce(run_ranks, numbers):
    world_size = 3
    length = world_size * numbers.randint(4, 9) + 1

    def case(ring_all_reduce, rank):
        tensor = torch.rand(length)
        own = tensor.tolist()
        ring_all_reduce(tensor)
        return own, tensor.tolist(), list(CALLS)

    own, found, calls = zip(*run_ranks("ring_all_reduce", case, world_size), strict=True)
    total = torch.tensor(own).sum(0)
    for rank in range(world_size):
        names = {name for name, _ in calls[rank]}
        fail_if(names - {"isend", "send"}, f"it calls {names - {'isend'}}: isend and irecv alone")
        right = torch.isclose(torch.tensor(found[rank]), total).sum().item()
        sent = sum(count for _, count in calls[rank])
        limit = 2 * (world_size - 1) * (length // world_size + 1)
        fail_if(
            sent > limit,
            f"rank {rank} sends {sent} numbers, and {limit} are enough for a tensor of {length}: "
            "send pieces, not the tensor",
        )
        fail_if(found[rank] == own[rank], "the tensor is as it was: work in place, on its views")
        fail_if(
            right < length,
            f"on rank {rank} {right} of {length} numbers are the sum. In the first half of the "
            "rounds add what comes, until each rank has one finished piece. In the second half the "
            "finished pieces go round, and replace what is there",
        )


def test_accumulate(run_ranks, numbers):
    width, parts = numbers.randint(2, 6), numbers.randint(3, 5)

    def case(accumulate, rank):
        torch.manual_seed(width)
        model = nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, 2))
        plain = copy.deepcopy(model)
        ddp_model, last = (DistributedDataParallel(copy.deepcopy(model)) for _ in range(2))
        torch.manual_seed(100 + rank)
        batches = [(torch.rand(4, width) + rank, torch.rand(4, 2)) for _ in range(parts)]
        inputs, targets = map(torch.cat, zip(*batches, strict=True))
        for each in (plain, ddp_model):  # all micro-batches at once, which has the same average
            nn.functional.mse_loss(each(inputs), targets).backward()
        nn.functional.mse_loss(last(inputs[-4:]), targets[-4:]).backward()
        before = flatten(model.parameters())
        passes = []
        model[0].weight.register_post_accumulate_grad_hook(lambda _: passes.append("backward"))
        CALLS.clear()
        accumulate(model, batches, nn.functional.mse_loss)
        sent = sum(count for name, count in CALLS) / len(before)
        unchanged = before == flatten(model.parameters())
        all_gradients = [gradients(m) for m in (plain, model, ddp_model, last)]
        return *all_gradients, sent, unchanged, len(passes)

    results = run_ranks("accumulate", case)
    own, found, right, last, sent, unchanged, passes = zip(*results, strict=True)
    fail_if(
        passes[0] != parts,
        f"there are {parts} micro-batches, and backward runs {passes[0]} times: memory holds one "
        "micro-batch at a time, so call backward for each of them",
    )
    fail_if(not all(unchanged), "the weights have changed: leave the step to the caller")
    fail_if(max(sent) > 1, f"every gradient is sent {max(sent):g} times: send after the last part")
    too_large = [n * parts for n in right[0]]
    fail_if(close(found[0], too_large), f"the gradients are {parts} times too large: average parts")
    fail_if(
        any(close(found[0], [n / d for n in last[0]]) for d in (1, parts)),
        "only the last micro-batch counts: let backward add to .grad, and clear nothing between",
    )
    judge_gradients(own, found, right)


def make_model(widths):
    """Returns a model with buffers, and with a parameter that needs no gradient."""
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.Tanh()]
    layers[1].running_mean.normal_()
    layers[3].bias.requires_grad_(False)
    return nn.Sequential(*layers)


def try_wrapper(widths, *arguments):
    """Returns a case that compares a wrapper with DDP, in three steps."""

    def case(wrapper_class, rank):
        model = make_model(widths)  # Each rank has other weights.
        ddp_model = DistributedDataParallel(copy.deepcopy(model))
        wrapper = wrapper_class(model, *arguments)
        same = [
            flatten(model.parameters()) == flatten(ddp_model.module.parameters()),
            flatten(model.buffers()) == flatten(ddp_model.module.buffers()),
        ]
        steps = []
        for _ in range(3):
            inputs = torch.randn(6, widths[0])
            plain = copy.deepcopy(ddp_model.module)
            for each in (plain, model, ddp_model):
                each.zero_grad()
            plain(inputs).square().sum().backward()
            ddp_model(inputs).square().sum().backward()
            loss = wrapper(inputs).square().sum()
            CALLS.clear()
            loss.backward()
            during = list(CALLS)
            wrapper.finish()
            every = [gradients(m) for m in (plain, model, ddp_model)]
            steps.append((*every, during, CALLS[len(during) :]))
        return same, steps

    return case


def judge_wrapper(results, sizes, which):
    """Fails with a hint if a wrapper's calls do not send these counts of numbers, or wrongly."""
    same, steps = zip(*results, strict=True)
    fail_if(not all(s[0] for s in same), "the ranks begin with other parameters: send rank 0's")
    fail_if(not all(s[1] for s in same), "the ranks begin with other buffers: send rank 0's, too")
    for number, ranks in enumerate(zip(*steps, strict=True), 1):
        own, found, right, during, after = zip(*ranks, strict=True)
        started = [count for name, count in during[0] if name == "all_reduce in the background"]
        names, late = ([name for name, _ in calls[0]] for calls in (during, after))
        fail_if("all_reduce" in names, "backward waits for all_reduce: take async_op=True")
        fail_if("wait" in names, "backward waits, and nothing overlaps: wait in finish()")
        fail_if(
            number > 1 and not started,
            f"in step {number} nothing is sent: counters must begin at 0 in each step",
        )
        fail_if(not started, "no all_reduce starts during backward: start it in a hook")
        missing, waits = sum(sizes) - sum(started), late.count("wait")
        fail_if(
            missing > 0,
            f"{missing} numbers are not sent during backward: send what is ready. The last bucket "
            "may never be full, and is ready when all of its gradients are",
        )
        fail_if(waits > len(started), "it waits again for older requests: empty the list")
        fail_if(
            waits < len(started),
            f"finish() waits for {waits} of {len(started)} requests: wait for all",
        )
        fail_if(
            sorted(started) != sorted(sizes),
            f"the calls send {started} numbers, and {sizes} is right: {which}",
        )
        judge_gradients(own, found, right)


def test_average_during_backward(run_ranks, numbers):
    widths = [numbers.randint(4, 9) for _ in range(4)]
    sizes = [p.numel() for p in make_model(widths).parameters() if p.requires_grad]
    results = run_ranks("AverageDuringBackward", try_wrapper(widths))
    judge_wrapper(results, sizes, "one call for each gradient")


def test_average_in_buckets(run_ranks, numbers):
    widths = [numbers.randint(6, 9) for _ in range(4)]
    bucket_bytes = 4 * numbers.randint(50, 60)
    sizes = [0]
    for parameter in reversed(list(make_model(widths).parameters())):
        if parameter.requires_grad:
            if 4 * sizes[-1] >= bucket_bytes:
                sizes.append(0)
            sizes[-1] += parameter.numel()
    judge_wrapper(
        run_ranks("AverageInBuckets", try_wrapper(widths, bucket_bytes)),
        sizes,
        "begin with the last parameter, leave out what needs no gradient, and close a bucket when "
        "it has reached bucket_bytes",
    )


def test_sharded_optimizer(run_ranks, numbers):
    width = numbers.randint(5, 9)
    choices = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})]
    optimizer_class, options = numbers.choice(choices)

    def case(sharded_class, rank):
        torch.manual_seed(width)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        expected = copy.deepcopy(model)
        reference = optimizer_class(expected.parameters(), lr=0.1, **options)
        sharded = sharded_class(model.parameters(), optimizer_class, lr=0.1, **options)
        cleared = True
        for _ in range(3):
            inputs = torch.rand(4, width)  # equal on all ranks, and so are the gradients
            for each in (model, expected):
                each(inputs).square().mean().backward()
            reference.step()
            sharded.step()
            reference.zero_grad()
            sharded.zero_grad()
            cleared &= not any(gradients(model))
        kept = [p in sharded.optimizer.state for p in model.parameters()]
        sizes = [p.numel() for p in model.parameters()]
        return flatten(model.parameters()), flatten(expected.parameters()), kept, sizes, cleared

    results = run_ranks("ShardedOptimizer", case)
    found, expected, kept, sizes, cleared = zip(*results, strict=True)
    owners = list(zip(*kept, strict=True))
    fail_if(all(map(all, owners)), "each rank keeps the state of all parameters: nothing is saved")
    fail_if(any(sum(o) != 1 for o in owners), "the state of a parameter must be on one rank")
    fail_if(not all(cleared), "zero_grad() leaves gradients: the inner optimizer has its own alone")
    fail_if(found[0] != found[1], "the ranks have other weights: each owner sends them after step")
    fail_if(not close(found[0], expected[0]), "the weights are not those of torch's optimizer")
    numbers_kept = [sum(size for size, mine in zip(sizes[0], k, strict=True) if mine) for k in kept]
    fail_if(
        max(numbers_kept) - min(numbers_kept) > max(sizes[0]),
        f"the ranks keep the state of {numbers_kept} numbers: large weights and small biases "
        "alternate, so give each parameter to the rank that has the fewest numbers so far",
    )


def count_collectives():
    return len([name for name, _ in CALLS if name != "wait"])


def test_sync_batch_norm(run_ranks, numbers):
    features, lengths, eps = numbers.randint(2, 6), (numbers.randint(4, 9), 11), 0.01

    def case(function, rank):
        torch.manual_seed(features)
        ramp = torch.arange(sum(lengths)).view(-1, 1) / 9
        every = (torch.randn(sum(lengths), features) + ramp).requires_grad_()
        own = every.detach().split(lengths)[rank].requires_grad_()
        affine = [(torch.rand(features) + 0.5).requires_grad_() for _ in range(2)]

        def normalize(inputs):
            return nn.functional.batch_norm(inputs, None, None, *affine, training=True, eps=eps)

        def compute_loss(outputs, rank):
            return outputs.pow(3).sum() * (rank + 1)

        right = normalize(every).split(lengths)
        sum(map(compute_loss, right, range(2))).backward(inputs=[every], retain_graph=True)
        expected = torch.autograd.grad(compute_loss(right[rank], rank), affine)
        CALLS.clear()
        outputs = function.apply(own, *affine, eps)
        calls = [count_collectives()]
        CALLS.clear()
        compute_loss(outputs, rank).backward()
        calls.append(count_collectives())
        return {
            "outputs": [flatten([t]) for t in (outputs, right[rank], normalize(own))],
            "inputs": [flatten([t]) for t in (own.grad, every.grad.split(lengths)[rank])],
            "weight": [flatten([t]) for t in (affine[0].grad, expected[0])],
            "bias": [flatten([t]) for t in (affine[1].grad, expected[1])],
            "calls": calls,
        }

    for rank, result in enumerate(run_ranks("SyncBatchNorm", case)):
        found, right, alone = result["outputs"]
        fail_if(near(found, alone), f"rank {rank} normalises its own images alone: use all_reduce")
        fail_if(
            not near(found, right),
            f"rank {rank} does not normalise as BatchNorm does with all images at once: add up the "
            "sums, the squares and the counts of all ranks, and divide then. The ranks have "
            f"{lengths} images",
        )
        for name, count in zip(("forward", "backward"), result["calls"], strict=True):
            fail_if(
                count > 1, f"{name} makes {count} collective calls: put the numbers into one tensor"
            )
        for name in ("weight", "bias"):
            found, right = result[name]
            fail_if(
                not near(found, right),
                f"the gradient of {name} on rank {rank} is not that of this rank's loss alone: DDP "
                "averages it later",
            )
        found, right = result["inputs"]
        fail_if(
            result["calls"][1] == 0,
            "backward makes no collective call, but the other ranks' losses depend on this rank's "
            "images, too, through mean and variance",
        )
        fail_if(
            not near(found, right),
            f"the gradient of the inputs on rank {rank} is not that of BatchNorm over all images: "
            "the two sums in it go over all ranks, and so does the count that divides them",
        )


def find_storages():
    """Returns the bytes of the tensors that gc knows, by the address of their memory."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_sharded_linear(run_ranks, numbers):
    features, outputs, count = 8 * numbers.randint(4, 6), 2 * numbers.randint(20, 30), 3
    whole = 4 * features * outputs  # the bytes of the weight

    def case(function, rank):
        torch.manual_seed(features)
        plain = nn.Linear(features, outputs, bias=False)
        every = torch.randn(2, count, features)
        factors = torch.randn(2, count, outputs)
        rows = outputs // 2
        (plain(every) * factors / 2).sum().backward()  # the mean of the ranks' losses
        mean = plain.weight.grad
        shard = plain.weight.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        own = every[rank].clone().requires_grad_()
        by_inputs = flatten([factors[rank] @ plain.weight])
        by_own_loss = flatten([factors[rank].T @ every[rank]])
        right = flatten([plain(every[rank])])
        gc.freeze()  # From here on gc shows what is new.
        saved = {}

        def note(tensor):  # Autograd calls it for all that it keeps until backward.
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            found = function.apply(own, shard)
        known = [tensor.untyped_storage().data_ptr() for tensor in (own, shard, found)]

        def count_more_bytes():
            kept = saved | find_storages()
            return sum(size for address, size in kept.items() if address not in known)

        # gloo's threads let go of their tensors a moment after the call.
        deadline = time.monotonic() + 5
        while (more := count_more_bytes()) > whole / 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        (found * factors[rank]).sum().backward()
        mine = slice(rank * rows * features, (rank + 1) * rows * features)
        other = slice((1 - rank) * rows * features, (2 - rank) * rows * features)
        mean, gradient = flatten([mean]), flatten([shard.grad])
        return {
            "outputs": near(flatten([found]), right),
            "bytes": more,
            "inputs": near(flatten([own.grad]), by_inputs),
            "weight": near(gradient, mean[mine]),
            "sum": near(gradient, [2 * n for n in mean[mine]]),
            "own": any(near(gradient, [n / d for n in by_own_loss[mine]]) for d in (1, 2)),
            "other": near(gradient, mean[other]),
        }

    for rank, found in enumerate(run_ranks("ShardedLinear", case)):
        fail_if(
            not found["outputs"],
            f"rank {rank} has other outputs than a linear layer with the whole weight: gather the "
            "shards of all ranks, in their order",
        )
        fail_if(
            found["bytes"] > whole / 4,
            f"between forward and backward rank {rank} holds {found['bytes']} bytes more than its "
            f"shard, and the whole weight has {whole}: save inputs and shard, and gather again",
        )
        fail_if(
            not found["inputs"],
            f"the gradient of the inputs on rank {rank} is not right: it "
            "is gradient @ weight, of the whole weight and this rank's loss alone",
        )
        fail_if(found["sum"], "the gradient of the shard is the sum over the ranks: divide by W")
        fail_if(found["own"], f"the gradient of the shard on rank {rank} is of its own loss alone")
        fail_if(found["other"], f"rank {rank} returns the gradient of another rank's rows")
        fail_if(not found["weight"], f"the gradient of the shard on rank {rank} is not right")
