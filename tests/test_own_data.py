"""A user's own Dataset in place of load_split() trains, with loader workers too."""

import re

import pytest
from launch import MEETING_POINT, REPO, SCRIPTS, quick_for, read_epochs, run_forked_ranks

OWN = '''
class OwnData(torch.utils.data.Dataset):
    """Reads one image at a time, as from a file."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = int(index) % 10  # a single number, and no list of them
        return torch.full((1, 28, 28), 25 * label, dtype=torch.uint8), label


def load_split(dataset, data_root, train):
    return OwnData(96 if train else 21)


'''


# The other scripts load their data as one of these does.
TRIED = ("snsc.py", "mnmc_ddp_env.py", "mnmc_ddp_mp.py")


@pytest.mark.parametrize("script", quick_for(TRIED, "mnmc_ddp_env.py"))
def test_own_dataset_trains_with_workers(launch, tmp_path, script):
    """load_split is another function, and nothing else is changed."""
    text, replaced = re.subn(
        r"^def load_split\(.*?(?=^def )", OWN, (REPO / script).read_text(), flags=re.M | re.S
    )
    assert replaced == 1
    (tmp_path / script).write_text(text)
    # Spawned workers import torch: 1 is enough.
    options = ("-e", 1, "-b", 8, "--workers", 1 if script == "mnmc_ddp_mp.py" else 2)
    if script == "mnmc_ddp_mp.py":
        options += ("--nproc-per-node", 1, "--init-method", MEETING_POINT)
        command = ["python", tmp_path / script, *options]
        out = launch([command]).succeeded(280).out
    else:
        processes = 0 if script == "snsc.py" else 2
        path, folder = tmp_path / script, tmp_path / "run"
        codes, out, err = run_forked_ranks(path, processes, folder, options)
        assert not any(codes), err
    (epoch,) = read_epochs(out)
    assert epoch["count"] == 21


def test_make_it_yours_names_lines_of_the_scripts():
    """Each line of the page's table stands where the table says, in each script."""
    section = (REPO / "docs" / "data.md").read_text().partition("\n## Make it yours\n")[2]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert rows
    for script in SCRIPTS:
        text = (REPO / script).read_text()
        for line, places in rows:
            assert text.count(line) == len(places.split(",")), (script, line)
