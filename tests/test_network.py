"""On a slow cable time follows the bytes, and each remedy sends as few as the pages say."""

import json
import os
import shutil

import pytest
from forked import run_forked
from launch import REPO

needs_root = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2"
)
RATE = 4  # Mb/s
# What each variant sends, in parts of what DDP sends. A matrix of rank 1 is not worth it for the
# biases and for BatchNorm, which travel as they are.
PARTS = {"no communication": 0, "DDP": 1, "bf16 hook": 0.5, "PowerSGD": 0.12}
PARTS |= {"no_sync over 4": 0.25, "batch times 4": 0.25, "no overlap": 1}
PARTS |= {"bucket_cap_mb 1": 1, "bucket_cap_mb 25": 1, "bucket_cap_mb 1000": 1}


@needs_root
@pytest.mark.slow
def test_bytes_and_time_of_the_variants(launch, tmp_path):
    """The ConvNet's 116 KB of gradients, first without a limit and then at 4 Mb/s."""
    path = tmp_path / "network.json"
    command = ["bash", REPO / "scripts/lab/network.sh", "--models", "convnet", "--repeats", "1"]
    settings = {"RATES": f"none {RATE}mbit"}
    run = launch([[*command, "--batch-size", "4", "--json", path]], env=settings).succeeded(200)
    assert run.own_err() == "", run.story()
    found = json.loads(path.read_text())
    assert "cores" in found["machine"]
    for network in ("no limit", f"{RATE}mbit"):
        rows = {row["variant"]: row for row in found["rows"] if row["network"] == network}
        assert rows.keys() == PARTS.keys()
        for name, part in PARTS.items():
            assert rows[name]["MB"] == pytest.approx(part * 0.116, abs=0.012), (network, name)
            assert f"{rows[name]['MB']:14.3f}" in run.out
            if network == "no limit":
                continue
            # A burst of 64 KB passes at once, and a step also computes.
            cable = 1000 * rows[name]["MB"] * 8 / RATE
            assert cable - 50 < rows[name]["ms"] < cable * 1.1 + 50, (network, name)


def test_network_says_how_to_start_it(tmp_path):
    code, _, err = run_forked("scripts/lab/network.py", ["--steps", "3"], tmp_path / "run")
    assert code == 2
    assert "start it with NPROC=1 bash scripts/lab/two_hosts.sh" in err.splitlines()[-1]
