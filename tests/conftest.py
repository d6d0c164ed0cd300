"""The launch fixture, and the rule that with CI=true a test may be skipped for a GPU alone."""

import contextlib
import os
import shutil
import signal
import subprocess
import uuid

import pytest
from launch import Launch, commands_for
from slurm import cluster, running_cluster  # noqa: F401 (fixtures of the Slurm tests)

# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C;
# torch ends the workers of mp.spawn by it. A handler is back to the default in new programs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests share the cores. A thread of OpenMP that waits for work now sleeps, and does not spin: three
# runs of snsc.py at once took 12 seconds on two cores, and 33 without this line.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests read what is printed, without the progress bar.
os.environ["TQDM_DELAY"] = "1000"


def pytest_configure(config):
    """Hides the GPUs from tests that count on gloo and the CPU: all but those of `-m gpu`."""
    if not config.getoption("markexpr").startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def launch(tmp_path):
    """Starts commands, or a script with so many processes; all of it ends with the test."""
    running = contextlib.ExitStack()

    def start(script_or_commands, processes=1, *options, env=None):
        commands = script_or_commands
        if isinstance(commands, str):
            commands = commands_for(commands, processes, *options)
        return running.enter_context(Launch(commands, tmp_path / "output", env=env))

    with running:
        yield start


def can_make_hosts():
    """Whether two_hosts.sh can work: root in a container may be without network namespaces."""
    if os.getuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


needs_hosts = pytest.mark.skipif(
    not can_make_hosts(), reason="needs root, network namespaces and iproute2"
)


def hosts_called(name):
    """The network namespaces with names that begin so."""
    listed = subprocess.check_output(["ip", "netns", "list"], text=True)
    return [line.split()[0] for line in listed.splitlines() if line.startswith(name)]


@pytest.fixture
def name():
    """For the hosts of one test; nothing of them is left at its end."""
    name = f"t{uuid.uuid4().hex[:8]}"
    yield name
    left = hosts_called(name)
    for host in left:
        subprocess.run(["ip", "netns", "delete", host], check=True)
    assert left == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and "GPU" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"with CI=true this test must not be skipped: {report.longrepr}"
    return report
