"""Every script trains from one command, and prints what the README says."""

import pytest
from launch import DDP, PLAIN, docstring_commands, free_port, read_epochs, run_forked

ONE_EPOCH = ("--dataset", "synthetic", "--epochs", "1")
TEST_IMAGES = 2000


def check_epoch(run):
    """One epoch line, which counts every test image once, and nothing on stderr."""
    (epoch,) = run.epochs()
    assert epoch["count"] == TEST_IMAGES, run.story()
    assert epoch["test"] > 95, run.story()
    assert abs(epoch["test"] - 100 * epoch["correct"] / epoch["count"]) < 0.006, run.story()
    # img/s counts the images of all ranks; the printed seconds are rounded.
    assert epoch["speed"] * epoch["seconds"] == pytest.approx(10_000, rel=0.1), run.story()
    assert run.own_err() == "", run.story()


@pytest.mark.parametrize("script", PLAIN)
def test_one_process(launch, script):
    run = launch(script, 1, *ONE_EPOCH).succeeded()
    check_epoch(run)
    assert run.out.splitlines()[0] == "[init] cpu"
    assert len(run.out.splitlines()) == 2, run.story()


def check_ddp(run):
    """One [init] line per rank, and one epoch line, which rank 0 prints."""
    assert run.inits() == [(0, 2, 0, "cpu", "gloo"), (1, 2, 1, "cpu", "gloo")], run.story()
    check_epoch(run)
    assert len(run.out.splitlines()) == 2 + 1, run.story()
    for rank in range(1, len(run.outputs)):  # tcp: one output per rank
        assert run.out_of(rank).count("\n") == 1, f"rank {rank} printed\n{run.out_of(rank)}"


def two_processes(script):
    """The docstring's commands for two, as they stand but for the port and the epochs."""
    commands = [
        command
        for command in docstring_commands(script)
        if "synthetic" in command and command[0] != "srun"  # that one is in test_slurm.py
    ]
    meet = ["--init-method", f"tcp://127.0.0.1:{free_port()}"]
    if commands[0][0] == "torchrun":
        ((torchrun, *arguments),) = commands
        commands, meet = [[torchrun, "--master-port", free_port(), *arguments]], []
    return [[*command, *meet, "-e", "1"] for command in commands]


def test_docstring_commands_for_two_processes_print_the_same_numbers(launch):
    """The four scripts differ in their start, not in the numbers that they print."""
    runs = [launch(two_processes(script)).succeeded() for script in DDP]
    for run in runs:
        check_ddp(run)
        assert run.metrics() == runs[0].metrics(), runs[0].story() + run.story()


@pytest.mark.slow
def test_amp_on_cpu_learns_as_well_as_fp32(tmp_path):
    """In bf16 the numbers are others, and the accuracy is within a point."""
    _, out, _ = run_forked("snsc.py", ONE_EPOCH, tmp_path / "fp32")
    code, out_amp, err = run_forked("snsc.py", [*ONE_EPOCH, "--amp"], tmp_path / "amp", seconds=60)
    assert code == 0, err
    ((fp32,), (amp,)) = map(read_epochs, (out, out_amp))
    assert any(amp[name] != fp32[name] for name in ("loss", "train", "correct"))
    assert abs(amp["test"] - fp32["test"]) < 1


def test_finished_run_has_nothing_left_to_do(tmp_path):
    """Also when another script goes on from its checkpoint."""
    options = [*ONE_EPOCH, "--batch-size", "500", "--checkpoint", tmp_path / "last.pt"]
    code, out, err = run_forked("snsc.py", options, tmp_path / "first")
    assert code == 0 and "epoch 1/1" in out, err
    options += ["--init-method", f"file://{tmp_path}/meet", "--world-size", 1, "--rank", 0]
    code, out, err = run_forked("mnmc_ddp_tcp.py", options, tmp_path / "second")
    assert code == 0, err
    assert out.splitlines()[1:] == [f"resumed {tmp_path}/last.pt after epoch 1/1"]
