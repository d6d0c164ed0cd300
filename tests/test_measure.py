"""What the programs of scripts/measure share: versions from patches, a turn, a table."""

from types import SimpleNamespace

import by_hand
import common
import memory
import patches
import pytest
import torch


def test_versions_name_patches_and_ddp_comes_last():
    names = [*by_hand.VERSIONS.values(), *memory.VERSIONS.values(), *["bf16_hook"]]
    assert set(names) <= set(patches.NAMES)
    versions = common.load_versions({"bf16": "bf16_hook"})
    assert list(versions) == ["bf16", "DDP"]
    assert hasattr(versions["bf16"], "bf16_compress_hook")
    assert not hasattr(versions["DDP"], "bf16_compress_hook")


def test_options_are_the_scripts_own():
    script = common.load_module(common.REPO / "mnmc_ddp_env.py")
    options = common.read_options(script, "--dataset", "cifar10", "--batch-size", 3)
    assert (options.dataset, options.batch_size, options.seed) == ("cifar10", 3, 0)


def test_turn_is_the_second_epoch_and_leaves_the_module_as_it_was(monkeypatch, capsys):
    """Without a script: a module that trains for two epochs of two steps."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    seen, clock = [], iter((0.0, 100.0, 200.0, 200.5))
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(common, "count_sent_bytes", iter((0, 900, 900, 940)).__next__)

    def train(options, local_rank, device):
        for epoch in range(2):
            images, labels = module.load_split("cifar10", None, train=True).tensors
            seen.append((tuple(images.shape), images.is_contiguous(), len(labels)))
            module.train_one_epoch("model", "loader", f"optimizer {epoch}", epoch)
            print("epoch", module.evaluate("model", "loader", device))

    module = SimpleNamespace(
        train=train, load_split="load", evaluate="test", train_one_epoch=lambda *_: None
    )
    before = dict(vars(module))
    options = SimpleNamespace(batch_size=3)
    turn = common.take_turn(module, options, 0, "cpu", 2, lambda model, optimizer: optimizer)
    assert turn == (250.0, 20.0, "optimizer 1")
    assert seen == [((12, 3, 32, 32), False, 12)] * 2  # channels_last, as CIFAR-10's files
    assert vars(module) == before and capsys.readouterr().out == ""


def test_table_has_names_at_the_end_and_no_lists(capsys):
    common.print_table(
        [{"ms": 1.5, "turns": [1, 2], "name": "bf16 hook"}, {"ms": 12.25, "turns": [], "name": "x"}]
    )
    assert capsys.readouterr().out == "     ms name\n    1.5 bf16 hook\n  12.25 x\n"
    assert common.summarize([3, 1.26, 9]) == {"median": 3, "lowest": 1.3, "highest": 9}


@pytest.mark.parametrize(
    ("version", "megabytes"), [("DDP", 12), ("ZeRO-1", 10), ("FSDP2", 6), ("another", 12)]
)
def test_predicted_bytes(version, megabytes):
    assert memory.predict_bytes(version, weights=4, world_size=2) == megabytes


def test_kept_bytes_are_those_of_the_tensors():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert memory.count_kept_bytes(model, optimizer) == (16, 16, 16)
