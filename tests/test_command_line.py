"""The commands in the docstrings, and a last line that says what is wrong."""

import ast
import re

import pytest
import torch
from launch import REPO, SCRIPTS, docstring_commands, free_port, run_forked
from messages import MESSAGES, says

import snmc_dp


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_docstring(tmp_path, script):
    """The docstring's commands use options that --help names: those of docs/reference.md."""
    code, out, err = run_forked(script, ["--help"], tmp_path / "run")
    assert code == 0, err
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", out.partition("options:")[2]))
    own_docstring = ast.get_docstring(ast.parse((REPO / script).read_text()))
    assert own_docstring.splitlines()[0] in " ".join(out.split())
    commands = docstring_commands(script)
    assert len(commands) >= 3
    for command in commands:
        if script not in command:  # a launcher of scripts/
            continue
        after = command[command.index(script) + 1 :]
        assert {argument for argument in after if argument.startswith("--")} <= options, command


ALONE = "--world-size 1 --rank 0"
# Script, options, and what the last line on stderr says: a text, or its name in messages.py.
MISTAKES = [
    ("snsc.py", "--batch-size 0", "batch_size should be a positive integer value"),
    ("snsc.py", "--checkpoint /proc/x/last.pt", "No such file or directory: '/proc/x'"),
    ("snsc.py", "--dataset mnist --data-root /proc/x", "cannot load mnist: if /proc/x holds a"),
    ("snmc_dp.py", "--dataset imagenet", "invalid choice: 'imagenet' (choose from"),
    ("mnmc_ddp_tcp.py", "--rank 2 --world-size 2", "--rank must be below --world-size"),
    ("mnmc_ddp_tcp.py", f"{ALONE} --rank -1", "--rank must be below --world-size"),
    ("mnmc_ddp_tcp.py", f"{ALONE} --checkpoint /proc/version", "no checkpoint"),  # read-only
    # As under torchrun, which gives no options: each process would train alone.
    ("mnmc_ddp_tcp.py", "", "arguments are required: -r/--rank, --world-size"),
    ("mnmc_ddp_env.py", "", "without torchrun"),
    ("mnmc_ddp_env.py", "--local-rank=0", "old launcher"),
    ("mnmc_ddp_slurm.py", "", "without srun"),
    ("mnmc_ddp_mp.py", "--nodes 2 --node-rank 2", "--node-rank must be below --nodes"),
    ("mnmc_ddp_tcp.py", f"{ALONE} --sync-bn", "SyncBatchNorm without a GPU"),
    ("mnmc_ddp_tcp.py", f"{ALONE} --backend nccl", "nccl without a GPU"),
]


@pytest.mark.parametrize(("script", "arguments", "message"), MISTAKES)
def test_last_line_says_what_is_wrong(tmp_path, script, arguments, message):
    """The status says so, too, nothing is trained and nothing is written."""
    if script == "mnmc_ddp_tcp.py":
        arguments += f" --init-method tcp://127.0.0.1:{free_port()}"
    options = ["--dataset", "synthetic", *arguments.split()]
    code, out, err = run_forked(script, options, tmp_path / "run")
    assert code not in (0, None), err
    last_line = err.rstrip().splitlines()[-1]
    assert says(message, last_line) if message in MESSAGES else message in last_line, err
    assert "epoch" not in out
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"out", "err"}


def test_amp_on_several_gpus_is_refused_by_data_parallel(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr("sys.argv", ["snmc_dp.py", "--amp", "--dataset", "synthetic"])
    with pytest.raises(SystemExit, match="^--amp needs a single GPU in this script: set CUDA_VIS"):
        snmc_dp.main()
