"""--help, the commands in the docstrings, and one line for each mistake."""

import ast
import re

import pytest
import torch
from forked import run_forked
from launch import REPO, SCRIPTS, docstring_commands

COMMON = (
    "--dataset --data-root --epochs --batch-size --lr --seed --amp --use-mix-precision --checkpoint"
)
COMMON_DDP = f"{COMMON} --backend --timeout --sync-bn"
OPTIONS = {
    "snsc.py": f"{COMMON} --gpu --gpuid",
    "snmc_dp.py": COMMON,
    "mnmc_ddp_tcp.py": f"{COMMON_DDP} --init-method --rank --world-size --gpu --gpuid",
    "mnmc_ddp_env.py": COMMON_DDP,
    "mnmc_ddp_mp.py": f"{COMMON_DDP} --nodes --node-rank --nproc-per-node --ngpus-per-node "
    "--init-method --dist-url",
    "mnmc_ddp_slurm.py": COMMON_DDP,
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_docstring(launch, script):
    """--help names the script's options and no others; the docstring's commands use those."""
    run = launch([["python", REPO / script, "--help"]]).succeeded()
    listed = run.out[run.out.index("options:") :]
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", listed)) - {"--help"}
    assert options == set(OPTIONS[script].split())
    own_docstring = ast.get_docstring(ast.parse((REPO / script).read_text()))
    assert own_docstring in run.out
    commands = docstring_commands(script)
    assert len(commands) >= 3
    for words in commands:
        if script not in words:  # a launcher of scripts/
            continue
        after = words[words.index(script) + 1 :]
        assert {word for word in after if word.startswith("--")} <= options, words


MISTAKES = [
    ("snsc.py", ["--lr", "nan"], "--lr must be above 0"),
    ("snmc_dp.py", ["--seed", "-1"], "--seed must be between"),
    ("snmc_dp.py", ["--dataset", "imagenet"], "invalid choice: 'imagenet' (choose from"),
    ("snsc.py", ["--checkpoint", "/proc/last.pt"], "cannot use the checkpoint /proc/last.pt"),
    ("snsc.py", ["--dataset", "cifar10", "--data-root", "/proc/x"], "cannot load cifar10 from"),
    ("mnmc_ddp_tcp.py", ["--rank", "2", "--world-size", "2"], "--rank: below --world-size"),
    ("mnmc_ddp_tcp.py", ["--sync-bn"], "--sync-bn needs GPUs"),
    ("mnmc_ddp_tcp.py", ["--backend", "nccl"], "no GPU 0 for rank 0, 0 on this node"),
    ("mnmc_ddp_env.py", [], "no RANK in the environment: torchrun --nproc-per-node 2"),
    ("mnmc_ddp_env.py", ["--local-rank=0"], "unrecognized arguments: --local-rank=0"),
    ("mnmc_ddp_slurm.py", [], "neither srun nor torchrun started this: srun --ntasks 2 python"),
    ("mnmc_ddp_mp.py", ["--nodes", "2", "--node-rank", "2"], "--node-rank below --nodes"),
    ("mnmc_ddp_mp.py", ["--nproc-per-node", "1000000"], "--nproc-per-node must be 1 to 1024"),
]


def check_one_line(code, out, err):
    """One line on stderr, an exit status that says so, and no metrics."""
    assert code not in (0, None)
    assert "Traceback" not in err and err.count("\n") == 1, err
    assert "epoch" not in out


@pytest.mark.parametrize(("script", "words", "said"), MISTAKES)
def test_mistake_is_answered_in_one_line(tmp_path, script, words, said):
    if "nccl" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, out, err = run_forked(script, ["--dataset", "synthetic", *words], tmp_path / "run")
    check_one_line(code, out, err)
    assert said in err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"out", "err"}  # nothing written


WEIRD = (
    "-1",
    "0",
    "1e30",
    "9" * 20,
    "nan",
    "inf",
    "",
    "many",
    "/",
    "tcp://127.0.0.1",
    "http://x:1",
)
WEIRD_FOR = {
    "snsc.py": "--data-root --epochs --batch-size --lr --seed --checkpoint --dataset --gpu",
    "mnmc_ddp_tcp.py": "--timeout --backend --init-method --rank --world-size --gpu",
    "mnmc_ddp_mp.py": "--nodes --node-rank --nproc-per-node --init-method",
}
# These may train: a folder or a file of that name, a GPU that no CPU run looks at, and plain zeros.
FINE = {("--seed", "0"), ("--rank", "0"), ("--node-rank", "0"), ("--gpu", "-1"), ("--gpu", "0")}
FINE |= {("--gpu", "9" * 20)} | {
    ("--checkpoint", value) for value in WEIRD if value not in ("", "/")
}


@pytest.mark.parametrize("script", WEIRD_FOR)
def test_weird_values_are_answered_in_one_line(tmp_path, script):
    """No option's value brings a traceback, a hang or a run that nobody asked for."""
    for option in WEIRD_FOR[script].split():
        for value in WEIRD:
            if (option, value) in FINE:
                continue
            words = ["--dataset", "synthetic", option, value]
            if option == "--data-root":
                words = [option, value]
            folder = tmp_path / f"{option}{WEIRD.index(value)}"
            code, out, err = run_forked(script, words, folder)
            assert code not in (0, None), (words, out, err)
            assert "Traceback" not in err and err.count("\n") == 1, (words, err)
            assert "epoch" not in out, (words, out)


def test_torchrun_complains_once(launch):
    """All ranks read the same wrong option; rank 0 alone says so."""
    run = launch("mnmc_ddp_env.py", 2, "--batch-size", "0").wait()
    assert run.codes != [0]
    assert run.err.count("--batch-size must be above 0") == 1, run.story()


def test_absent_data_ends_all_ranks(launch, tmp_path):
    """A data folder that cannot be made: one line from rank 0, and no rank waits for it."""
    (tmp_path / "file").write_text("not a folder")
    for script in ("mnmc_ddp_tcp.py", "mnmc_ddp_env.py"):
        run = launch(script, 2, "--data-root", tmp_path / "file").wait(60)
        assert 0 not in run.codes, run.story()
        assert run.err.count("cannot load mnist from") == 1, run.story()
        assert "mnmc_ddp" not in "".join(re.findall(r'File "(\S+)", line', run.err)), run.story()


def test_damaged_checkpoint_ends_all_ranks(launch, tmp_path):
    (tmp_path / "last.pt").write_bytes(b"no checkpoint")
    options = ("--dataset", "synthetic", "--checkpoint", tmp_path / "last.pt")
    for script, processes in (("mnmc_ddp_env.py", 2), ("mnmc_ddp_mp.py", 2)):
        run = launch(script, processes, *options).wait(60)
        assert 0 not in run.codes, run.story()
        assert run.err.count("cannot use the checkpoint") == 1, run.story()
        assert "mnmc_ddp" not in "".join(re.findall(r'File "(\S+)", line', run.err)), run.story()
