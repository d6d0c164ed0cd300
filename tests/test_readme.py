"""Nothing in the README rots: its commands run, its examples print what stands under them."""

import contextlib
import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
import update_readme
from forked import run_forked, run_forked_ranks
from launch import REPO, SCRIPTS, Launch, free_port, shape
from PIL import Image
from torch.distributed.run import get_args_parser

TEXT = update_readme.README.read_text()
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
BLOCKS = update_readme.read_blocks(TEXT)
EXAMPLES = update_readme.examples(TEXT)
SHELL = [block for block in BLOCKS if block.language == "bash"]


def test_every_block_is_of_a_kind_that_is_checked():
    """No indented or unnamed block, no marker that means nothing."""
    kinds = {"python", "bash", "text", "diff", "mermaid"}
    assert {block.language for block in BLOCKS} == kinds
    assert TEXT.count("\n```") == 2 * len(BLOCKS)
    assert not re.search(r"^ {4}\S", PROSE, re.MULTILINE)
    for block in SHELL:
        assert re.match(r"run$|run at once$|run by \S+$|not run: .+", block.mark), block
    for above, block in zip(BLOCKS, BLOCKS[1:], strict=False):
        if block.language == "diff":
            assert block.mark.split()[0] in ("diff", "patch"), block
        if block.language == "text" and not block.mark.startswith("printed by "):
            assert TEXT[above.end : block.start] == "```\n```text\n", block


def test_diffs_are_those_of_the_scripts():
    assert update_readme.update(TEXT, run=False) == TEXT, "python scripts/update_readme.py"


def test_update_writes_diffs_and_output():
    """On a text with a stale diff and a stale output."""
    stale = "<!-- diff snsc.py snmc_dp.py -->\n```diff\nold\n```\n"
    stale += "\n# Heading\n\n```python\nprint(6 * 7)\n```\n```text\n41\n```\n"
    fresh = update_readme.update(stale, run=True)
    assert "+    parallel_model = nn.DataParallel(model)" in fresh and "old" not in fresh
    assert fresh.endswith("```text\n42\n```\n")


@pytest.mark.parametrize(
    ("block", "processes", "output"),
    [pytest.param(*row, id=f"{n}-{row[0].heading}") for n, row in enumerate(EXAMPLES)],
)
def test_example_prints_what_stands_under_it(tmp_path, block, processes, output):
    """In forked processes that have torch loaded already; the slow test takes torchrun."""
    path = tmp_path / "example.py"
    path.write_text(block.code)
    codes, out, err = run_forked_ranks(path, processes, free_port(), tmp_path / "run")
    assert codes == [0] * max(processes, 1), err
    printed = update_readme.sort_lines(out) if processes else out
    assert output and printed == output.code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "processes", "output"),
    [pytest.param(*row, id=f"{n}-{row[0].heading}") for n, row in enumerate(EXAMPLES) if row[1]],
)
def test_example_prints_the_same_under_torchrun(block, processes, output):
    assert update_readme.run_example(block.code, processes) == output.code


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository's files, for commands that write into it."""
    ignored = shutil.ignore_patterns(".git", ".venv", "data", "checkpoints", "*cache*")
    return Path(shutil.copytree(REPO, tmp_path_factory.mktemp("clone") / "repo", ignore=ignored))


def output_under(block):
    """The lines of the text block right under a block; none if there is none."""
    for below in BLOCKS:
        if below.language == "text" and TEXT[block.end : below.start] == "```\n```text\n":
            return below.code.splitlines()
    return []


RUN = [block for block in SHELL if block.mark in ("run", "run at once")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [pytest.param(block, id=f"{n}-{block.heading}") for n, block in enumerate(RUN)]
)
def test_commands_run_and_print_lines_like_those_shown(clone, tmp_path, block):
    lines = block.code.replace("\\\n", " ").splitlines()
    commands = lines if block.mark == "run at once" else ["\n".join(lines)]
    with Launch([["bash", "-euc", c] for c in commands], tmp_path / "output", cwd=clone) as run:
        run.succeeded(240)
        assert run.own_err() == "", run.story()
        printed = [shape(line) for line in run.out.splitlines()]
        for line in output_under(block):
            assert shape(line) in printed, (line, run.story())


@pytest.mark.parametrize(
    "block", [b for b in SHELL if b.mark.startswith("run by")], ids=lambda block: block.heading
)
def test_commands_run_by_another_file_are_there(block):
    """A test reads them from here by their section; .ci/run and the like have the words."""
    text = (REPO / block.mark.removeprefix("run by ")).read_text()
    if "readme_commands(" in text:
        assert re.search(rf'"{re.escape(block.heading)}"', text)
    else:
        commands = [command.split() for command in block.code.splitlines()]
        assert all(any(word in text for word in words if ".sh" in word) for words in commands)


def help_of(program, folder):
    """What a program says of its options: its --help; a shell script's text, and its program's."""
    if program == "torchrun":
        return get_args_parser().format_help()
    if program in ("srun", "sbatch"):  # they want a cluster's configuration, whatever they do
        folder.mkdir()
        (folder / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=none\n")
        env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        return subprocess.check_output([program, "--help"], text=True, env=env)
    if program.endswith(".py"):
        return run_forked(program, ["--help"], folder / program)[1]
    text = (REPO / program).read_text()
    for name in set(re.findall(r"\w+\.py", text)):
        path = name if (REPO / name).exists() else f"scripts/{name}"
        text += help_of(path, folder) if (REPO / path).exists() else ""
    return text


def options_by_program(line):
    """Yields (program, option): an option belongs to the last program or script before it."""
    program = None
    for word in line.split():
        if word in ("torchrun", "srun", "sbatch") or word.endswith((".py", ".sh", ".sbatch")):
            program = word
        elif word.startswith("--"):
            yield program, word.partition("=")[0]


def test_commands_that_are_not_run_parse_and_their_options_exist(tmp_path):
    """bash accepts them; every option is one that the program before it knows."""
    said = {}
    for block in SHELL:
        subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        if not block.mark.startswith("not run"):
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            for program, option in options_by_program(line):
                if program in ("srun", "sbatch") and not shutil.which(program):
                    continue  # where there is no Slurm; .ci/run has one
                if program not in said:
                    said[program] = help_of(program, tmp_path / str(len(said)))
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", said[program]), (line, option)


@pytest.mark.slow
def test_folder_of_images(launch, tmp_path):
    """The patch for image folders applies to mnmc_ddp_env.py, and the result trains."""
    (patch,) = (block for block in BLOCKS if block.mark == "patch mnmc_ddp_env.py")
    script = shutil.copy(REPO / "mnmc_ddp_env.py", tmp_path)
    apply = ["git", "apply", "-p0", "-"]
    subprocess.run(apply, input=patch.code, text=True, cwd=tmp_path, check=True)
    assert Path(script).read_text() != (REPO / "mnmc_ddp_env.py").read_text()
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 8), ("val", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(256, (240, 260, 3), generator=generator).to(torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{number}.jpg")
    words = ["torchrun", "--standalone", "--nproc-per-node", 2, script]
    run = launch([[*words, "--data-root", tmp_path / "images", "-e", "1", "-b", "4"]])
    assert [line["count"] for line in run.succeeded().epochs()] == [6], run.story()
    assert "UserWarning" not in run.err
    run = launch([[*words, "--data-root", tmp_path]]).wait()
    assert run.err.count(f"cannot load imagenet: [Errno 2] No such file or directory: '{tmp_path}/")


# What the lines that 'Make it yours' names become for tables of 20 numbers with a yes or no.
LOAD = """numbers = torch.randn(len(labels), 20, generator=generator)
        return numbers, (numbers[:, 0] * numbers[:, 1] > 0).long()
        return (templates[labels]"""
LOSS = "F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())"
TABLE = {
    "return ConvNet()": "return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))",
    "return (templates[labels]": LOAD,
    ".float() / 127.5 - 1": "",
    'if args.dataset == "cifar10":': "if False:",
    "F.cross_entropy(logits, labels)": LOSS,
    "logits.argmax(1) == labels": "(logits.squeeze(1) > 0).long() == labels",
    "train_set[:1][0].to(device).float()": "train_set[:1][0].to(device)",
}


@pytest.mark.slow
def test_make_it_yours_names_all_that_must_change(launch, tmp_path):
    """After a change of each line in the table, and of no other, another task is learned."""
    section = TEXT.partition("\n## Make it yours\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| .+ \|$", section, re.MULTILINE)
    assert [line for line, _ in rows] == list(TABLE)
    code = (REPO / "mnmc_ddp_env.py").read_text()
    for line, where in rows:
        assert code.count(line) == len(where.split(",")), line
        code = code.replace(line, TABLE[line])
    (tmp_path / "mine.py").write_text(code)
    words = ["torchrun", "--standalone", "--nproc-per-node", 2, tmp_path / "mine.py"]
    run = launch([[*words, "--dataset", "synthetic", "-e", "4"]]).succeeded()
    assert run.epochs()[-1]["test"] > 90, run.story()


def headings():
    """The anchors of the README's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", PROSE, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_headings_that_exist():
    links = re.findall(r"\]\(([^)]+)\)", PROSE)
    assert len(links) > 30
    for link in links:
        if link.startswith("#"):
            assert link[1:] in headings(), link
        elif not link.startswith("https://"):
            assert (REPO / link).exists(), link


def test_files_that_are_named_exist():
    for name in set(re.findall(r"`((?:scripts/|tests/)?[\w./]+\.(?:py|sh|sbatch|txt))`", TEXT)):
        found = [REPO / name, REPO / "tests" / name, REPO / "scripts" / name]
        assert name == "example.py" or any(path.exists() for path in found), name


def option_table():
    """The README's options: (names, default, scripts) of each row."""
    section = TEXT.partition("\n## Options\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`-.+?) \| (.+?) \| .+ \| (.+?) \|$", section, re.MULTILINE)
    return [(set(re.findall(r"-[-\w]+", names)), default, who) for names, default, who in rows]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_is_documented_with_its_default(script):
    """Names and defaults are those of the parser."""
    module = importlib.import_module(script.removesuffix(".py"))
    parsers = []
    with (
        mock.patch.object(module.argparse.ArgumentParser, "parse_args", autospec=True) as parse,
        contextlib.suppress(AttributeError),  # at the first look at what the parser did not return
    ):
        parse.side_effect = lambda parser, *_: parsers.append(parser)
        module.parse_args()
    short = script.removesuffix(".py").rpartition("_")[2]
    names_of = {"snsc": {"snsc", "all"}, "dp": {"all"}}.get(short, {short, "DDP", "all"})
    rows = [row for row in option_table() if names_of & set(re.findall(r"\w+", row[2]))]
    documented = {name for names, _, _ in rows for name in names if name != "--dist-url"}
    actions = [a for a in parsers[0]._actions if a.dest != "help"]
    assert documented == {n for a in actions for n in a.option_strings if n != "--dist-url"}
    for action in actions:
        ((_, default, _),) = (row for row in rows if row[0] & set(action.option_strings))
        if action.default is None or action.default is False:
            assert default in ("none", "off") or "the rank" in default, (action, default)
        elif action.dest != "backend" or not torch.cuda.is_available():
            assert f"`{action.default}`" in default, (action, default)


def symptoms():
    """The rows of 'When it goes wrong': (what you see, shown by)."""
    section = TEXT.partition("\n## When it goes wrong\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+?) \|$", section, re.MULTILINE)
    return [row for row in rows if row[0] not in ("what you see", "---")]


@pytest.mark.parametrize(("seen", "proof"), symptoms(), ids=lambda words: words[:40])
def test_symptom_is_shown_or_says_where_it_comes_from(seen, proof):
    """The message is in the test that the row names, or in an example's output."""
    if proof.startswith("not "):
        assert len(proof) > 20
        return
    shown = "".join(block.code for block in BLOCKS if block.language == "text")
    if name := re.search(r"test_\w+\.py", proof):
        shown = (REPO / "tests" / name[0]).read_text().replace("\\", "")
    messages = [m for m in re.findall(r"`([^`]+)`", seen) if not m.startswith("--")]
    for message in messages:
        assert message in shown or "`" not in proof, (message, proof)


def test_table_of_contents_names_every_section():
    contents = TEXT.partition("\n## Start\n")[0]
    for title in re.findall(r"^## (.+)$", TEXT, re.MULTILINE):
        assert f"[{title}](#" in contents, title
