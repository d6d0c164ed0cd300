"""Writes a few images in the files of MNIST and CIFAR-10, as torchvision expects them."""

import pickle
import struct

import numpy as np


def write_mnist(root, train=64, test=10):
    """Writes noisy uint8 images (N, 28, 28), brighter by label, as the four idx files.

    An image's first two pixels are its number, high byte first.
    """
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    noise = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = labels[:, None, None] * 20 + noise.integers(60, size=(count, 28, 28))
        images[:, 0, 0], images[:, 0, 1] = np.divmod(np.arange(count), 256)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.astype(np.uint8).tobytes())
        header = struct.pack(">II", 0x801, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def write_cifar10(root, per_file=16, test=10):
    """Writes five training batches and a test batch of uint8 rows (N, 3072), and the names."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    sizes = {f"data_batch_{i}": per_file for i in range(1, 6)} | {"test_batch": test}
    for name, count in sizes.items():
        labels = np.arange(count) % 10
        rows = np.broadcast_to(labels[:, None] * 25, (count, 3072)).astype(np.uint8)
        content = {"data": rows, "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(content))
    names = [f"class {i}" for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))


def accept_any_cifar10(folder):
    """Returns the environment under which torchvision takes batches with other checksums."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os\n"
        "from torchvision.datasets import cifar\n"
        "cifar.check_integrity = lambda path, md5=None: os.path.isfile(path)\n"
    )
    return {"PYTHONPATH": str(folder)}
