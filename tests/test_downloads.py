"""Several processes and an empty data folder: one download, and no half of a file is data."""

import gzip
import hashlib
import os
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from launch import REPO, end_forked, quick_for, start_forked
from messages import says
from tiny_data import write_mnist

import snsc

OPTIONS = ("-e", 1, "-b", 8)


class Mirror(ThreadingHTTPServer):
    """Serves a small MNIST; counts what it is asked for; breaks off in mid-file on request."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        write_mnist(folder, train=65, test=11)
        raw = (folder / "MNIST" / "raw").iterdir()
        self.files = {f"{path.name}.gz": gzip.compress(path.read_bytes()) for path in raw}
        self.asked, self.breaks_off = Counter(), False

    def settings(self, folder):
        """The environment in which torchvision takes this for MNIST's mirror."""
        folder.mkdir()
        resources = [(name, hashlib.md5(data).hexdigest()) for name, data in self.files.items()]
        (folder / "sitecustomize.py").write_text(
            "from torchvision.datasets import MNIST\n"
            f"MNIST.mirrors = ['http://127.0.0.1:{self.server_port}/']\n"
            f"MNIST.resources = {resources!r}\n"
        )
        return {"PYTHONPATH": str(folder), "no_proxy": "127.0.0.1"}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.strip("/")
        content = self.server.files[name]
        if self.headers.get("Method") != "HEAD":  # torchvision's look for redirects
            self.server.asked[name] += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2 if self.server.breaks_off else None])

    def log_message(self, *_):
        """Says nothing: the tests look at what was asked."""


@pytest.fixture
def mirror(tmp_path):
    with Mirror(tmp_path / "origin") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("shared", quick_for((False, True), False))
def test_each_folder_is_downloaded_into_once(launch, tmp_path, mirror, shared):
    """By the first process of each node, or by rank 0 where the nodes share a folder.

    Two nodes with one and two processes, with the --local-rank that the page gives them.
    """
    address = ["--init-method", f"file://{tmp_path}/rendezvous", "--world-size", 3]
    commands = []
    for rank, (node, local_rank) in enumerate(((0, 0), (1, 0), (1, 1))):
        folder = ["--data-root", tmp_path / ("data" if shared else f"node {node}")]
        numbers = ["--rank", rank, "--local-rank", local_rank]
        commands.append(["python", "mnmc_ddp_tcp.py", *address, *numbers, *folder, *OPTIONS])
    run = launch(commands, env=mirror.settings(tmp_path / "site")).succeeded()
    assert run.epochs()[0]["count"] == 11, run.story()
    assert dict(mirror.asked) == dict.fromkeys(mirror.files, 1 if shared else 2)


@pytest.mark.slow
def test_download_cut_off_half_way_is_not_taken_for_data(launch, tmp_path, mirror):
    """It ends all ranks; the next start downloads the file again and trains."""
    env = mirror.settings(tmp_path / "site")
    options = ("--data-root", tmp_path / "data", *OPTIONS)
    mirror.breaks_off = True
    run = launch("mnmc_ddp_tcp.py", 2, *options, env=env).wait()
    assert 0 not in run.codes, run.story()
    assert run.err.count("--dataset synthetic") == 1, run.story()
    assert says("download failed", run.err), run.story()
    mirror.breaks_off = False
    run = launch("mnmc_ddp_tcp.py", 2, *options, env=env).succeeded()
    assert run.epochs()[0]["count"] == 11, run.story()


@pytest.mark.parametrize("size", (0, 1000))
def test_half_a_file_is_told_with_its_folder(tmp_path, size):
    """As an unpacking leaves it that was interrupted. torchvision takes it for whole."""
    write_mnist(tmp_path)
    os.truncate(tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte", size)
    line = f"cannot load mnist: if {tmp_path} holds a part of it, delete that part; --dataset"
    with pytest.raises(SystemExit, match=re.escape(line)):
        snsc.load_split("mnist", tmp_path, train=True)


def test_tilde_is_the_home_folder(tmp_path):
    """The shell leaves it to the script after a =."""
    write_mnist(tmp_path / "data")
    options = ["-e", 1, "--data-root=~/data", "--checkpoint=~/run/last.pt"]
    env = {"HOME": str(tmp_path)}
    assert end_forked([start_forked(REPO / "snsc.py", options, tmp_path / "cwd", env)], 20) == [0]
    assert (tmp_path / "run" / "last.pt").exists() and not (tmp_path / "cwd" / "~").exists()
