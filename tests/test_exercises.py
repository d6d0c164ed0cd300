"""The judge of the exercises: our answers pass, and the hint to a wrong one names its mistake."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from itertools import zip_longest

import pytest
from launch import REPO, page_commands, quick_for

RIGHT = (REPO / "tests" / "answers_right.py").read_text()
HEAD, *PARTS = re.split(r"\n\n\n(?=def |class )", RIGHT)
ANSWERS = {re.match(r"(?:def|class) (\w+)", part)[1]: part.rstrip() + "\n" for part in PARTS}
ONE_RANK_ALONE = "a rank waited for a call that the other rank did not make"
SAMPLER = "list(torch.utils.data.DistributedSampler(labels, shuffle=False))"
BLOCKING = """        dist.irecv(received, (rank - 1) % world_size).wait()
        dist.isend(outgoing, (rank + 1) % world_size).wait()
"""
LAST_LINES = re.search(r" +for parameter .*", ANSWERS["accumulate"], re.DOTALL)[0]
MICRO_BATCHES = re.search(r" +for inputs.*?backward\(\)\n", ANSWERS["accumulate"], re.DOTALL)[0]
ALL_AT_ONCE = """    inputs, targets = map(torch.cat, zip(*batches, strict=True))
    loss_function(model(inputs), targets).backward()
"""
# What is changed in an answer, and what the hint must say. The last of each list can take long.
WRONG = {
    "shard": [
        (
            "    order += order[: -count % dist.get_world_size()]\n",
            "",
            "more images would wait",
        ),
        ("+= order[: -count % dist.get_world_size()]", "= order[:-1]", "an image is left out"),
        ("manual_seed(epoch)", "manual_seed(dist.get_rank())", "shuffle with the same seed"),
        ("manual_seed(epoch)", "manual_seed(7)", "every epoch has the same order"),
    ],
    "evaluate": [
        ("    model.eval()\n", "", "in training mode"),
        ("slice(dist.get_rank(), None, dist.get_world_size())", SAMPLER, "is tested twice"),
        ("dist.broadcast(buffer, src=0)", "pass", "other buffers than rank 0's"),
        ("dist.all_reduce(counts)", "dist.reduce(counts, dst=0)", "different or partial numbers"),
        ("dist.all_reduce(counts)", "dist.get_rank() or dist.all_reduce(counts)", ONE_RANK_ALONE),
    ],
    "average_gradients": [
        ("            parameter.grad /= dist.get_world_size()\n", "", "are the sum over the ranks"),
        ("(parameter.grad)", "(parameter.grad.clone())", "still has its own gradients"),
        ("parameter.grad", "parameter.data", "the weights have changed"),
        ("if parameter.grad is not None", "if True", "A gradient can be None"),
        ("    for parameter", "    while True:\n        pass\n    for parameter", "does not end"),
    ],
    "resume": [
        ("    dist.broadcast_object_list(state, src=0)\n", "", "rank 0 decides"),
        ('    optimizer.load_state_dict(state[0]["optimizer"])\n', "", "another momentum"),
        ('    model.load_state_dict(state[0]["model"])\n', "", "other weights"),
        (
            "if dist.get_rank() == 0 and path.exists()",
            "found = [path.exists()]\n    dist.broadcast_object_list(found)\n    if found[0]",
            "FileNotFoundError in line .* on rank 1",
        ),
    ],
    "should_stop": [
        ("    dist.all_reduce(means)\n", "", "the ranks disagree"),
        ("dist.all_reduce(means)", "dist.broadcast(means, src=0)", "the loss of one rank decides"),
        (">= patience", "> patience", "count from the lowest"),
        ("def should_stop", "def stop", "the file has no should_stop"),
        (
            "    return ",
            "    import os\n    os._exit(0)\n    return ",
            "the process of rank . ended",
        ),
    ],
    "ring_all_reduce": [
        ("tensor.tensor_split(world_size)", "[tensor] * world_size", "send pieces, not the tensor"),
        ("range(2 * (world_size - 1))", "range(world_size - 1)", "the finished pieces go round"),
        ("incoming.copy_(received)", "incoming += received", "and replace what is there"),
        ("    pieces", "    dist.all_reduce(tensor)\n    pieces", "isend and irecv alone"),
        (re.search(r" +send = .*?send\.wait\(\)\n", RIGHT, re.DOTALL)[0], BLOCKING, ONE_RANK_ALONE),
    ],
    "accumulate": [
        ("(loss / len(batches))", "loss", "times too large"),
        (LAST_LINES, textwrap.indent(LAST_LINES, "    "), "every gradient is sent"),
        ("        (loss /", "        model.zero_grad()\n        (loss /", "only the last"),
        ("        dist.all_reduce(parameter.grad)\n", "", "still has its own gradients"),
        (MICRO_BATCHES, ALL_AT_ONCE, "backward runs 1 times"),
    ],
    "AverageDuringBackward": [
        ("            request.wait()\n", "            pass\n", "waits for 0 of"),
        (", async_op=True)", ")", "without async_op=True"),
        ("        self.requests.clear()\n", "", "empty the list"),
        ("model.state_dict().values()", "model.parameters()", "begin with other buffers"),
        (
            "            if parameter.requires_grad:\n",
            "            if True:\n",
            "RuntimeError in line",
        ),
    ],
    "AverageInBuckets": [
        ("        self.ready.clear()\n", "", "in step 2 nothing is sent"),
        ("parameter.grad.copy_(", "torch.clone(", "copy the result back"),
        ("reversed(list(model.parameters()))", "model.parameters()", "begin with the last"),
        (">= bucket_bytes", ">= 10**9", "close a bucket when"),
        ("== len(bucket):", "== len(bucket) and number < 2:", "last bucket may never be full"),
    ],
    "ShardedOptimizer": [
        ("if owner == dist.get_rank()", "if owner >= 0", "keeps the state of all parameters"),
        ("dist.broadcast(parameter.data, src=owner)", "pass", "each owner sends them after step"),
        ("numbers.index(min(numbers))", "len(self.owners) % 2", "large weights and small biases"),
        ("parameter.grad = None", "self.optimizer.zero_grad()", "has its own alone"),
        ("p, owner in self.owners.items() if owner ==", "p in parameters if 0 ==", "generator"),
    ],
    "SyncBatchNorm": [
        ("        dist.all_reduce(sums)\n", "", "normalises its own images alone"),
        (
            "inputs.sum(0), inputs.square().sum(0), count",
            "inputs.mean(0), inputs.square().mean(0), count / len(inputs)",
            "add up the sums",
        ),
        ("        dist.all_reduce(every)\n", "", "backward makes no collective call"),
        ("own[0], own[1]", "every[0], every[1]", "the gradient of weight on rank 0"),
        ("every / count", "every / len(gradient)", "so does the count that divides them"),
        (
            "dist.all_reduce(sums)",
            "for row in sums:\n            dist.all_reduce(row)",
            "forward makes 3 collective calls",
        ),
    ],
    "ShardedLinear": [
        (
            "context.save_for",
            "context.weight = ShardedLinear.gather(shard)\n        context.save_for",
            "save inputs and shard, and gather again",
        ),
        ("@ inputs / dist.get_world_size()", "@ inputs", "is the sum over the ranks"),
        ("        dist.all_reduce(by_weight)\n", "", "of its own loss alone"),
        ("[dist.get_rank()]", "[0]", "another rank's rows"),
        ("return gradient @", "return 2 * gradient @", "the gradient of the inputs"),
        ("        dist.all_gather(parts, shard)\n", "", "gather the shards of all ranks"),
    ],
}


def judge(folder, answers, *options):
    """Judges answers in a folder; returns (exit status, hints by test, what was printed)."""
    (folder / "answers.py").write_text(answers)
    argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    env = os.environ | {"COLUMNS": "1000"}  # so that pytest cuts no line
    argv = [sys.executable, *argv, REPO / "docs" / "exercises" / "test_answers.py"]
    run = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    hints = re.findall(r"^FAILED \S+::test_(\w+) - Failed: (.+)$", run.stdout, re.MULTILINE)
    return run.returncode, dict(hints), run.stdout + run.stderr


def name_test(answer):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", answer).lower()


@pytest.mark.parametrize("seed", quick_for(range(5), 0))
def test_our_answers_pass(tmp_path, seed):
    code, hints, output = judge(tmp_path, RIGHT, "--seed", str(seed))
    assert code == 0 and f"{len(ANSWERS)} passed" in output, output


# In each round the next wrong answer of every exercise; the right one where there are no more.
ROUNDS = list(zip_longest(*WRONG.values()))


@pytest.mark.parametrize("number", quick_for(range(len(ROUNDS)), 0))
def test_wrong_answers_get_a_hint_that_names_the_mistake(tmp_path, number):
    changed, expected = dict(ANSWERS), {}
    for name, change in zip(WRONG, ROUNDS[number], strict=True):
        if change:
            old, new, expected[name_test(name)] = change
            assert old in ANSWERS[name], (name, old)
            changed[name] = ANSWERS[name].replace(old, new)
    code, hints, output = judge(tmp_path, "\n\n".join([HEAD, *changed.values()]))
    assert code == 1 and hints.keys() == expected.keys(), output
    for name, hint in expected.items():
        assert re.search(hint, hints[name]), (name, hint, hints[name])


def test_commands_of_the_course_say_what_to_do(tmp_path):
    """On the template nothing is done yet."""
    shutil.copytree(REPO / "docs" / "exercises", tmp_path / "docs" / "exercises")
    commands = page_commands("docs/course.md", "Before unit 1")
    assert commands.pop(0) == "pip install pytest pytest-timeout"
    commands = "\n".join(commands).replace("\npytest", f"\n{sys.executable} -m pytest")
    run = subprocess.run(["bash", "-c", commands], cwd=tmp_path, capture_output=True, text=True)
    assert len(re.findall("^to do: ", run.stdout, re.MULTILINE)) == len(ANSWERS), run.stdout


def test_file_that_cannot_be_imported_is_named_with_its_line(tmp_path):
    code, _, output = judge(tmp_path, "import nothing\n")
    assert code == 2 and "answers.py:1" in output, output
