"""On a slow cable time follows the bytes, and each remedy sends as few as the pages say."""

import contextlib
import json
import re

import patches
import pytest
from conftest import needs_hosts
from forked import run_forked
from launch import REPO, Launch, page_commands

RATE = 4  # Mb/s
# What each variant sends, in parts of what DDP sends. A matrix of rank 1 is not worth it for the
# biases and for BatchNorm, which travel as they are.
PARTS = {"no communication": 0, "DDP": 1, "bf16 hook": 0.5, "PowerSGD": 0.12}
PARTS |= {"no_sync over 4": 0.25, "batch times 4": 0.25, "no overlap": 1}
PARTS |= {"bucket_cap_mb 1": 1, "bucket_cap_mb 25": 1, "bucket_cap_mb 1000": 1}


@needs_hosts
@pytest.mark.slow
def test_bytes_and_time_of_the_variants(launch, name, tmp_path):
    """The page's command with the ConvNet's 116 KB, first without a limit, then at 4 Mb/s."""
    path = tmp_path / "network.json"
    command = page_commands("docs/slow_network.md", "Measured at three speeds")[0]
    small = f"{command} --models convnet --repeats 1 --batch-size 4 --json {path}"
    settings = {"RATES": f"none {RATE}mbit", "HOSTS": name}
    run = launch([["bash", "-c", small]], env=settings).succeeded(200)
    found = json.loads(path.read_text())
    assert "cores" in found["machine"]
    for network in ("no limit", f"{RATE}mbit"):
        rows = {row["variant"]: row for row in found["rows"] if row["network"] == network}
        assert rows.keys() == PARTS.keys()
        for variant, part in PARTS.items():
            row = rows[variant]
            expected = pytest.approx(part * 0.116, rel=0.15, abs=0.004)
            assert row["MB"] == expected, (network, variant)
            assert f" {row['MB']} " in run.out
            if network == "no limit":
                continue
            # 8000 bytes pass at once after a pause. A busy machine can be slower, and never faster.
            at_once = 0.008 if variant not in ("no_sync over 4", "batch times 4") else 0.002
            assert row["ms"] > 1000 * (row["MB"] - at_once) * 8 / RATE, (network, variant)


def test_network_says_how_to_start_it(tmp_path):
    code, _, err = run_forked("scripts/measure/network.py", ["--steps", "3"], tmp_path / "run")
    assert code == 2
    assert "start it with NPROC=1 bash scripts/cluster/two_hosts.sh" in err.splitlines()[-1]


PAGE = (REPO / "docs" / "slow_network.md").read_text()
# The way in the table of the page, its patch, options, and the bytes in parts of DDP's.
WAYS = [
    ("bf16_compress_hook", "bf16_hook", (), 0.5),
    ("PowerSGD", "powersgd", (), 0.3),
    ("`no_sync` over four", "accumulate_4", (), 0.25),
    ("a batch four times", None, ("--batch-size", "256"), 0.25),
]


def train_and_count(launch, script, *options):
    """Two ranks in a network of their own; returns (test accuracy, bytes that they sent)."""
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", 2, script]
    argv = " ".join(map(str, [*torchrun, "--dataset", "synthetic", *options]))
    command = f"ip link set lo up && {argv} && grep lo: /proc/net/dev"
    quiet = {"TORCH_CPP_LOG_LEVEL": "FATAL"}  # Else torch says that this network has no names.
    run = launch([["unshare", "--net", "bash", "-c", command]], env=quiet).succeeded()
    assert run.own_err() == "", run.story()
    return run.epochs()[-1]["test"], int(re.search(r"lo: *(\d+)", run.out)[1])


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    with contextlib.ExitStack() as launches:

        def launch(commands, env):
            folder = tmp_path_factory.mktemp("ddp")
            return launches.enter_context(Launch(commands, folder, env=env))

        return train_and_count(launch, REPO / "mnmc_ddp_env.py")


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(("way", "patch", "options", "part"), WAYS, ids=lambda word: str(word))
def test_patch_learns_and_sends_as_many_bytes_as_the_page_says(
    launch, tmp_path, ddp, way, patch, options, part
):
    script = REPO / "mnmc_ddp_env.py"
    if patch:
        script = patches.write_patched([patch], tmp_path)
    accuracy, sent = train_and_count(launch, script, *options)
    assert sent / ddp[1] == pytest.approx(part, abs=0.03)
    assert accuracy > ddp[0] - 2 and ddp[0] > 95
    rows = [line.split(" | ")[:2] for line in PAGE.splitlines() if line.startswith("| ")]
    assert [cells[1] for cells in rows if way in cells[0]][0] == str(part)
