"""The judge of the exercises: right solutions, and the usual wrong ones."""

import re
from itertools import zip_longest

import pytest
import update_pages
from forked import run_forked
from launch import REPO, page_commands, quick_for, without_gloo_lines

NAMES = ("shard", "evaluate", "average_gradients", "resume", "should_stop")

SHARD = """
def shard(count, epoch):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    order += order[: -count % dist.get_world_size()]
    return order[dist.get_rank() :: dist.get_world_size()]
"""
EVALUATE = """
def evaluate(model, images, labels):
    share = slice(dist.get_rank(), None, dist.get_world_size())
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    with torch.inference_mode():
        right = model(images[share]).argmax(1) == labels[share]
    counts = torch.tensor([int(right.sum()), len(right)])
    dist.all_reduce(counts)
    return tuple(counts.tolist())
"""
AVERAGE = """
def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""
RESUME = """
def resume(path, model, optimizer):
    state = [None]
    if dist.get_rank() == 0 and path.exists():
        state = [torch.load(path, weights_only=True)]
    dist.broadcast_object_list(state, src=0)
    if state[0] is None:
        return 0
    model.load_state_dict(state[0]["model"])
    optimizer.load_state_dict(state[0]["optimizer"])
    return state[0]["epoch"]
"""
RESUME_BY_TENSORS = """
def resume(path, model, optimizer):
    epoch = [0]
    if dist.get_rank() == 0 and path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = [state["epoch"]]
    dist.broadcast_object_list(epoch, src=0)
    if epoch[0]:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
        for row in optimizer.state.values():
            dist.broadcast(row["momentum_buffer"], src=0)
    return epoch[0]
"""
STOP = """
def should_stop(losses, patience):
    means = torch.tensor(losses)
    dist.all_reduce(means)
    return len(means) - 1 - int(means.argmin()) >= patience
"""
RIGHT = dict(zip(NAMES, (SHARD, EVALUATE, AVERAGE, RESUME, STOP), strict=True))

ENDLESS = "def average_gradients(model):\n    while True:\n        pass\n"
# What is changed in the right solution, and what the hint must say.
WRONG = {
    "shard": [
        ("    order += order[: -count % dist.get_world_size()]\n", "", "51 and 50 images"),
        ("order += order[: -count % dist.get_world_size()]", "order = order[:100]", "left out"),
        ("order[dist.get_rank() :: dist.get_world_size()]", "order[:51]", "both ranks have the sa"),
        ("manual_seed(epoch)", "manual_seed(dist.get_rank())", "with the same seed"),
        (", generator=torch.Generator().manual_seed(epoch)", "", "with the same seed"),
        ("manual_seed(epoch)", "manual_seed(7)", "every epoch has the same order"),
        ("order += order[: -count % dist.get_world_size()]", "order += order[:3]", "51 are enough"),
        ("return ", "", "NoneType"),
    ],
    "evaluate": [
        ("    model.eval()\n", "", "training mode"),
        ("dist.get_rank(), None, dist.get_world_size()", "None", "each rank tests all images"),
        ("    dist.all_reduce(counts)\n", "", "add them up on all ranks"),
        (
            "share = slice(dist.get_rank(), None, dist.get_world_size())",
            "share = list(torch.utils.data.DistributedSampler(labels, shuffle=False))",
            "an image is tested twice",
        ),
        ("dist.get_rank(), None, ", "dist.get_rank(), 6, ", "an image is not tested"),
        (
            "    dist.all_reduce(counts)\n",
            "    counts = counts / len(right) / 2\n    dist.all_reduce(counts)\n",
            "add up counts, not averages",
        ),
        ("dist.all_reduce(counts)", "dist.reduce(counts, dst=0)", "add them up on all ranks"),
        (
            "    dist.all_reduce(counts)\n",
            "    if dist.get_rank() == 0:\n        dist.all_reduce(counts)\n",
            "look for one under an if",
        ),
        (
            "        dist.broadcast(buffer, src=0)\n",
            "        pass\n",
            "other buffers than rank 0's",
        ),
        ("broadcast(buffer, src=0)", "all_reduce(buffer)", "other buffers than rank 0's"),
        (
            "dist.get_rank(), None, dist.get_world_size()",
            "0 if dist.get_rank() == 0 else 7, None",
            "the other rank none",
        ),
    ],
    "average_gradients": [
        ("            parameter.grad /= dist.get_world_size()\n", "", "are the sum over the ranks"),
        ("            dist.all_reduce(parameter.grad)\n", "", "its own gradients"),
        ("(parameter.grad)", "(parameter.grad.clone())", "its own gradients"),
        ("parameter.grad", "parameter.data", "the weights have changed"),
        ("        if parameter.grad is not None:\n", "        if True:\n", "took no part"),
        ("/= dist.get_world_size()", "/= dist.get_world_size() ** 2", "divided twice"),
        (
            "        if parameter.grad is not None:\n",
            "        if parameter.grad is None:\n"
            "            parameter.grad = torch.zeros_like(parameter)\n"
            "        if True:\n",
            "leave None alone",
        ),
        ("def average_gradients(model):\n", ENDLESS, "is there a loop that does not end"),
    ],
    "resume": [
        # This does no harm: the broadcast replaces what rank 1 has read.
        ("dist.get_rank() == 0 and path", "path", "right"),
        ("    dist.broadcast_object_list(state, src=0)\n", "", "after 0: rank 0 decides"),
        ('    model.load_state_dict(state[0]["model"])\n', "", "has other weights"),
        ('    optimizer.load_state_dict(state[0]["optimizer"])\n', "", "has another momentum"),
        (
            "if dist.get_rank() == 0 and path.exists()",
            "found = [path.exists()]\n"
            "    dist.broadcast_object_list(found, src=0)\n"
            "    if found[0]",
            "a rank without the file reads it",
        ),
        ('["epoch"]', '["epoch"] + 1', r"\[4, 4, 0, 4\]"),
        (
            "    if dist.get_rank() == 0 and path",
            '    state = [{"model": model.state_dict(), "optimizer": optimizer.state_dict(), '
            '"epoch": 0}]\n    if dist.get_rank() == 0 and path',
            "and rank 0 has no file",
        ),
        # A new optimizer has no tensors on rank 1 that could receive.
        (RESUME, RESUME_BY_TENSORS, "another momentum|a rank waited"),
    ],
    "should_stop": [
        ("    dist.all_reduce(means)\n", "", "the ranks disagree"),
        ("dist.all_reduce(means)", "dist.broadcast(means, src=0)", "the loss of one rank decides"),
        (">= patience", "> patience", "never stop|stop after epoch 6"),
        ("dist.all_reduce(means)", "dist.broadcast(means, src=1)", "never stop"),
        (">= patience", ">= 1", "stop after epoch"),
        ("    return ", "    import os\n    os._exit(0)\n    return ", "it has ended its process"),
        ("def should_stop", "def stop", "no function of this name"),
    ],
}


def judge(tmp_path, solutions):
    """Writes a file with these functions; returns (exit status, verdicts by name)."""
    path = tmp_path / "answers.py"
    path.write_text("import torch\nimport torch.distributed as dist\n" + "".join(solutions))
    argv = ["judge", path, "--seconds", "20"]
    code, out, err = run_forked("scripts/exercises.py", argv, tmp_path / "run", 200)
    verdicts = dict(re.findall(r"^(\w+) +(.+)$", without_gloo_lines(out), re.MULTILINE))
    assert tuple(verdicts) == NAMES, err
    return code, verdicts


def test_right_solutions_are_right(tmp_path):
    assert judge(tmp_path, RIGHT.values()) == (0, dict.fromkeys(NAMES, "right"))


# In each round the next wrong solution of every exercise; right ones where there are no more.
ROUNDS = list(zip_longest(*(WRONG[name] for name in NAMES), fillvalue=("", "", "right")))


# The round with the endless loop, and with a rank that waits for the other, takes long.
WAITING = len(WRONG["average_gradients"]) - 1


@pytest.mark.parametrize(
    "number", quick_for(range(len(ROUNDS)), *{*range(len(ROUNDS))} - {WAITING})
)
def test_wrong_solutions_get_a_hint_that_names_the_mistake(tmp_path, number):
    solutions = []
    for name, (old, new, _) in zip(NAMES, ROUNDS[number], strict=True):
        assert old in RIGHT[name], old
        solutions.append(RIGHT[name].replace(old, new) if old else RIGHT[name])
    code, verdicts = judge(tmp_path, solutions)
    for name, (_, _, hint) in zip(NAMES, ROUNDS[number], strict=True):
        assert re.search(hint, verdicts[name]), (name, verdicts)
        assert hint == "right" or verdicts[name].startswith("wrong: "), (name, verdicts)
    assert code == 1


def test_commands_of_the_page(tmp_path):
    """On a file just started nothing is done yet; a second start does not overwrite it."""
    page = update_pages.read_blocks((REPO / "docs" / "exercises.md").read_text())
    (shown,) = (block.code for block in page if block.language == "text")
    printed = ""
    commands = page_commands("docs/exercises.md", "Write your copy and ask the judge")
    for number, command in enumerate([*commands, commands[0]]):
        _, script, *arguments = command.replace("answers.py", str(tmp_path / "answers.py")).split()
        code, out, err = run_forked(script, arguments, tmp_path / str(number), 200)
        printed += without_gloo_lines(out).replace(f"{tmp_path}/", "")
    assert printed == shown
    assert code == 1 and err.endswith("answers.py exists: choose another name\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def shard(count, epoch)\n    return []\n",
            "line 1: expected ':': def shard(count, epoch)",
        ),
        ("import torch\ntorch.shuffle\n", "line 2: AttributeError: module 'torch' has no attri"),
        (None, "there is no "),
    ],
    ids=["syntax", "import", "absent"],
)
def test_file_that_cannot_be_imported_is_named_with_its_line(tmp_path, text, message):
    """In one line, without a traceback of the judge."""
    path = tmp_path / "answers.py"
    if text:
        path.write_text(text)
    code, out, err = run_forked("scripts/exercises.py", ["judge", path], tmp_path / "run")
    assert (code, out) == (1, "")
    assert message in err and len(err.splitlines()) == 1, err
