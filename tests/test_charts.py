"""Charts and tables are those of the measured files, and a timeline shows what was measured."""

import json
import re

import charts
import pytest
from launch import REPO

IMAGES = REPO / "docs" / "images"
MEASURED = REPO / "docs" / "measured"
PAGES = {path.name: path.read_text() for path in charts.PAGES}


@pytest.mark.parametrize("name", charts.CHARTS)
def test_charts_are_those_of_the_measurement(tmp_path, name):
    """To the letter; another version of matplotlib may draw other lines, but writes these words."""
    matplotlib = pytest.importorskip("matplotlib", reason="needs tests/requirements.txt")
    charts.CHARTS[name](tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    committed = (IMAGES / f"{name}.svg").read_text()
    labels = [re.findall(r"<text[^>]*>([^<]+)<", text) for text in (drawn, committed)]
    assert labels[0] == labels[1] and len(labels[0]) > 10
    if f"Matplotlib v{matplotlib.__version__}," in committed:
        assert drawn == committed, "python scripts/docs/charts.py"
    assert sum(f"(images/{name}.svg)" in page for page in PAGES.values()) == 1


def test_tables_are_those_of_the_measurement():
    for path, text in PAGES.items():
        assert charts.write_tables(text) == text, f"{path}: python scripts/docs/charts.py"
    processor = re.search("cores of (.+?),", charts.machine())[1].replace("(R)", "").split()
    assert f"with an {' '.join(processor[:2])}" in PAGES["performance.md"], charts.machine()
    shown = [match[2] for text in PAGES.values() for match in charts.TABLE.finditer(text)]
    assert sorted(shown) == sorted(charts.TABLES)


def test_estimate(monkeypatch):
    """A backward of 60 ms hides as much communication, unless it can start only afterwards."""
    rows = {("no limit", "no communication"): {"ms": 90}}
    for variant in charts.VARIANTS[1:]:
        rows["no limit", variant] = {"ms": 120}
        rows["100mbit", variant] = {"MB": 1.25}  # 100 ms
    monkeypatch.setattr(charts, "network_rows", lambda: rows)
    assert charts.estimate("DDP", "100mbit") == 160
    assert charts.estimate("DDP", "100mbit", 1000) == 120
    assert charts.estimate("no overlap", "100mbit") == 220
    assert charts.estimate("PowerSGD", "100mbit") == 220  # one bucket
    assert charts.estimate("no_sync over 4", "100mbit") == 205
    assert charts.estimate("batch times 4", "100mbit") == 140


def test_timeline_shows_all_parts_of_a_step(tmp_path):
    """Two all-reduces at the same time lie below each other; a part too short has no label."""
    pytest.importorskip("matplotlib", reason="needs tests/requirements.txt")
    buckets = [{"start": 20, "end": 90, "MB": 3.0}, {"start": 40, "end": 80, "MB": 1.0}]
    step = {"forward": [0, 2], "backward": [2, 90], "computed": 60, "optimizer": [90, 99]}
    step |= {"buckets": [*buckets, {"start": 81, "end": 90, "MB": 2.0}]}
    assert charts.find_lanes(step["buckets"]) == [0, 1, 1]
    charts.draw_timeline(tmp_path / "step.svg", {"title": "a step", "ranks": [step, step]})
    labels = re.findall(r"<text[^>]*>([^<]+)<", (tmp_path / "step.svg").read_text())
    for label, count in {
        "rank 0 computes": 1,
        "rank 1 computes": 1,
        "all-reduces": 2,
        "bucket 1: 3.0 MB": 2,
        "bucket 2: 1.0 MB": 2,
        "waits": 2,
        "forward": 0,
    }.items():
        assert labels.count(label) == count, (label, labels)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "least", "most"), [(1, 8, 40), (1000, 1, 1)])
def test_timeline_shows_each_bucket_in_its_step(launch, tmp_path, limit, least, most):
    """ResNet-18's gradients of 46.8 MB in many buckets, whose all-reduces overlap, and in one."""
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, "scripts/measure/timeline.py"]
    command += ["--batch-size", 4, "--steps", 3, "--bucket-cap-mb", limit]
    command += ["--json", tmp_path / "step.json", "--svg", tmp_path / "step.svg"]
    run = launch([[*command, "--trace", tmp_path / "trace"]]).succeeded(200)
    assert run.own_err() == "", run.story()
    ranks = json.loads((tmp_path / "step.json").read_text())["ranks"]
    assert len(ranks) == 2
    for number, step in enumerate(ranks):
        trace = json.loads((tmp_path / "trace" / f"rank{number}.json").read_text())
        seen = [event for event in trace["traceEvents"] if event.get("name") == "gloo:all_reduce"]
        buckets = step["buckets"]
        assert least <= len(buckets) <= most and len(seen) == 3 * len(buckets)
        assert sum(bucket["MB"] for bucket in buckets) == pytest.approx(46.8, abs=0.1)
        begin, end = step["backward"]
        assert step["forward"][0] < step["forward"][1] <= begin < step["computed"] <= end
        # The profiler can note the end of an all-reduce a little after backward has waited for it.
        assert all(begin < bucket["start"] < min(bucket["end"], end) for bucket in buckets)
        halfway = (begin + step["computed"]) / 2
        assert (buckets[0]["start"] < halfway) == (limit == 1)
        assert f"rank {number} computes" in (tmp_path / "step.svg").read_text()
    assert run.out.count(f"; buckets: {len(ranks[0]['buckets'])}\n") == 2
