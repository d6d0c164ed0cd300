"""Nothing on the pages rots: commands run, and examples print what stands under them."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch
import update_pages
from forked import run_forked, run_forked_ranks
from launch import REPO, SCRIPTS, Launch, free_port, shape, without_gloo_lines
from PIL import Image
from torch.distributed.run import get_args_parser

TEXTS = {page: page.read_text() for page in update_pages.PAGES}
PROSE = {
    page: re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for page, text in TEXTS.items()
}
BLOCKS = {page: update_pages.read_blocks(text) for page, text in TEXTS.items()}
ALL_BLOCKS = [(page, block) for page, blocks in BLOCKS.items() for block in blocks]
EXAMPLES = [row for text in TEXTS.values() for row in update_pages.examples(text)]
SHELL = [(page, block) for page, block in ALL_BLOCKS if block.language == "bash"]


def section(page, title):
    """The text of a section of the second level of a page."""
    part = (REPO / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert part, f"no section {title} in {page}"
    return part


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_block_is_of_a_kind_that_is_checked(page):
    """No indented or unnamed block, no marker that means nothing."""
    text, blocks = TEXTS[page], BLOCKS[page]
    assert {b.language for b in blocks} <= {"python", "bash", "text", "diff", "mermaid"}
    assert text.count("\n```") == 2 * len(blocks)
    assert not re.search(r"^ {4}\S", PROSE[page], re.MULTILINE)
    for above, block in zip([None, *blocks], blocks, strict=False):
        kinds = {
            "bash": r"run$|run at once$|run by \S+$|not run: .+",
            "diff": r"diff \S+ \S+$|patch \S+$|recipe$",
            "python": r"(torchrun \d+)?$|excerpt \S+$|not run: .+",
            "mermaid": "$",
        }
        if block.language != "text":
            assert re.match(kinds[block.language], block.mark), block
        elif not re.match("printed by |not run: ", block.mark):
            assert text[above.end : block.start] == "```\n```text\n", block


def test_readme_is_a_front_door():
    assert len(TEXTS[update_pages.README].splitlines()) <= 450


@pytest.mark.parametrize("page", update_pages.PAGES[1:-1], ids=lambda page: page.name)
def test_page_says_what_it_answers_and_where_to_go_next(page):
    titles = re.findall(r"^#+ (.+)$", PROSE[page], re.MULTILINE)
    assert titles[-1] == "Where to go next" or page.name == "diffs.md"
    assert f"docs/{page.name}" in TEXTS[update_pages.README]


def test_diffs_are_those_of_the_scripts():
    for text in TEXTS.values():
        assert update_pages.update(text, run=False) == text, "scripts/docs/update_pages.py"


@pytest.mark.parametrize(
    "block", [b for _, b in ALL_BLOCKS if b.mark.startswith("excerpt ")], ids=lambda b: b.heading
)
def test_excerpt_stands_in_the_file(block):
    """To the letter, but for the indentation."""
    text = (REPO / block.mark.split()[1]).read_text()
    indented = (textwrap.indent(block.code, " " * width) for width in (0, 4, 8))
    assert any(lines in text for lines in indented), block.code


def test_update_writes_diffs_and_output():
    """On a text with a stale diff and a stale output."""
    stale = "<!-- diff snsc.py snmc_dp.py -->\n```diff\noutdated\n```\n"
    stale += "\n# Heading\n\n```python\nprint(6 * 7)\n```\n```text\n41\n```\n"
    fresh = update_pages.update(stale, run=True)
    assert "+    parallel_model = nn.DataParallel(model)" in fresh and "outdated" not in fresh
    assert fresh.endswith("```text\n42\n```\n")


@pytest.mark.slow
def test_recipe_both_sides_train_to_the_same_loss(tmp_path):
    """One process with the batch of both, and two processes under torchrun."""
    (recipe,) = (block for _, block in ALL_BLOCKS if block.mark == "recipe")
    lines = recipe.code.splitlines()
    for name, dropped in (("plain.py", "+"), ("ddp.py", "-")):
        side = "\n".join(line[1:] for line in lines if not line.startswith(dropped))
        ast.parse(side)
        (tmp_path / name).write_text(side + "\n")
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", 2, "ddp.py"]
    out = []
    for command in (["python", "plain.py"], torchrun):
        with Launch([command], tmp_path / "output", cwd=tmp_path) as run:
            run.succeeded()
            assert run.own_err() == "", run.story()
            out.append(run.out)
    assert re.fullmatch(r"loss 0\.\d{4}\n", out[0]) and out == [out[0]] * 2
    assert f"Both print `{out[0].strip()}`" in TEXTS[update_pages.README]
    numbers = re.findall(r"# (\d)", recipe.code)
    assert sorted(set(numbers)) == list("12345678")


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
    printed = update_pages.sort_lines(out) if processes else out
    assert output and printed == output.code


FIRST = [
    next(row for row in update_pages.examples(text) if row[1])
    for text in TEXTS.values()
    if any(row[1] for row in update_pages.examples(text))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "processes", "output"), [pytest.param(*row, id=row[0].heading) for row in FIRST]
)
def test_example_prints_the_same_under_torchrun(block, processes, output):
    """The first of each page; the others ran in forked processes."""
    assert without_gloo_lines(update_pages.run_example(block.code, processes)) == output.code


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository's files, for commands that write into it."""
    ignored = shutil.ignore_patterns(".git", ".venv", "data", "checkpoints", "*cache*")
    return Path(shutil.copytree(REPO, tmp_path_factory.mktemp("clone") / "repo", ignore=ignored))


def output_under(page, block):
    """The lines of the text block right under a block; none if there is none."""
    for below in BLOCKS[page]:
        if below.language == "text" and TEXTS[page][block.end : below.start] == "```\n```text\n":
            return below.code.splitlines()
    return []


RUN = [(page, block) for page, block in SHELL if block.mark in ("run", "run at once")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "block"), [pytest.param(*row, id=f"{n}-{row[1].heading}") for n, row in enumerate(RUN)]
)
def test_commands_run_and_print_lines_like_those_shown(clone, tmp_path, page, block):
    lines = block.code.replace("\\\n", " ").splitlines()
    commands = lines if block.mark == "run at once" else ["\n".join(lines)]
    with Launch([["bash", "-euc", c] for c in commands], tmp_path / "output", cwd=clone) as run:
        run.succeeded(240)
        assert run.own_err() == "", run.story()
        printed = [shape(line) for line in run.out.splitlines()]
        for line in output_under(page, block):
            assert shape(line) in printed, (line, run.story())


@pytest.mark.parametrize(
    "block", [b for _, b in SHELL if b.mark.startswith("run by")], ids=lambda block: block.heading
)
def test_commands_run_by_another_file_are_there(block):
    """A test reads them from here by their section; .ci/run and the like have the words."""
    text = (REPO / block.mark.removeprefix("run by ")).read_text()
    if "page_commands(" in text:
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
    if program == "mine.py":  # the reader's copy of this script, with a patch of the page
        program = "mnmc_ddp_env.py"
    if program.endswith(".py"):
        return run_forked(program, ["--help"], folder / program)[1]
    text = (REPO / program).read_text()
    for name in set(re.findall(r"\w+\.py", text)):
        path = name if (REPO / name).exists() else f"scripts/lab/{name}"
        text += help_of(path, folder) if (REPO / path).exists() else ""
    return text


def options_by_program(line):
    """Yields (program, option): an option belongs to the last program or script before it."""
    program = None
    for word in line.replace("!", " ").split():  # a notebook's cell begins its commands with !
        if word in ("torchrun", "srun", "sbatch") or word.endswith((".py", ".sh", ".sbatch")):
            program = word
        elif word.startswith("--") and program:  # not torchfrtrace: it needs traces of nccl
            yield program, word.partition("=")[0]


def test_commands_that_are_not_run_parse_and_their_options_exist(tmp_path):
    """bash accepts them; every option is one that the program before it knows."""
    said = {}
    for _, block in SHELL:
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


PATCHES = [block for _, block in ALL_BLOCKS if block.mark.startswith("patch ")]


@pytest.mark.parametrize("block", PATCHES, ids=lambda block: block.heading)
def test_patch_applies(tmp_path, block):
    script = update_pages.patched(block, tmp_path)
    assert script.read_text() != (REPO / script.name).read_text()
    ruff = [sys.executable, "-m", "ruff", "check", "--config", REPO / ".ruff.toml", script]
    subprocess.run(ruff, check=True)


@pytest.mark.slow
def test_folder_of_images(launch, tmp_path):
    """The patch for image folders makes a script that trains."""
    (patch,) = (block for block in PATCHES if block.heading == "Your own data: image folders")
    script = update_pages.patched(patch, tmp_path)
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


# What the lines that 'Make it yours' names become for tables of 20 numbers with a yes or no.
LOAD = """numbers = torch.randn(len(labels), 20, generator=generator)
        return TensorDataset(numbers, (numbers[:, 0] * numbers[:, 1] > 0).long())"""
LOSS = "F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())"
TABLE = {
    "return ConvNet()": "return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))",
    "return TensorDataset(images.to(torch.uint8), labels)": LOAD,
    ".float() / 127.5 - 1": "",
    'if args.dataset == "cifar10":': "if False:",
    "F.cross_entropy(logits, labels)": LOSS,
    "logits.argmax(1) == labels": "(logits.squeeze(1) > 0).long() == labels",
}


@pytest.mark.slow
def test_make_it_yours_names_all_that_must_change(launch, tmp_path):
    """After a change of each line in the table, and of no other, another task is learned."""
    rows = re.findall(
        r"^\| `(.+?)` \| (.+?) \| .+ \|$",
        section("docs/cookbook.md", "Make it yours"),
        re.MULTILINE,
    )
    rows = [row for row in rows if row[0] != "mnmc_ddp_env.py"]
    assert [line for line, _ in rows] == list(TABLE)
    code = (REPO / "mnmc_ddp_env.py").read_text()
    for line, where in rows:
        assert code.count(line) == len(where.split(",")), line
        code = code.replace(line, TABLE[line])
    (tmp_path / "mine.py").write_text(code)
    words = ["torchrun", "--standalone", "--nproc-per-node", 2, tmp_path / "mine.py"]
    run = launch([[*words, "--dataset", "synthetic", "-e", "4"]]).succeeded()
    assert run.epochs()[-1]["test"] > 90, run.story()


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", PROSE[page], re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    """Across the pages; addresses outside are well-formed."""
    links = re.findall(r"\]\(([^)]+)\)", PROSE[page])
    assert links
    for link in links:
        if link.startswith("http"):
            assert re.fullmatch(r"https?://[\w.-]+\.[a-z]+(/[^\s]*)?", link), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_there_are_links_to_what_others_have_written():
    links = [link for prose in PROSE.values() for link in re.findall(r"\]\((http[^)]+)\)", prose)]
    assert len(set(links)) > 40


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    names = re.findall(
        r"`((?:scripts/|tests/|docs/)?[\w./]+\.(?:py|sh|sbatch|txt|md))`", TEXTS[page]
    )
    for name in set(names):
        folders = (REPO, REPO / "tests", REPO / "scripts", REPO / "docs")
        if "/" in name or name.startswith(("mnmc", "sn", "test_")):
            assert any((folder / name).exists() for folder in folders), name


def option_table():
    """The options of the reference: (names, default, scripts) of each row."""
    rows = re.findall(
        r"^\| (`-.+?) \| (.+?) \| .+ \| (.+?) \|$",
        section("docs/reference.md", "Options"),
        re.MULTILINE,
    )
    return [(set(re.findall(r"-[-\w]+", names)), default, who) for names, default, who in rows]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_is_documented_with_its_default(script):
    """Names and defaults are those of the parser."""
    module = importlib.import_module(script.removesuffix(".py"))
    parsers = []
    with mock.patch.object(module.argparse.ArgumentParser, "parse_args", autospec=True) as parse:
        parse.side_effect = lambda parser, *_: parsers.append(parser)
        module.parse_args()
    short = script.removesuffix(".py").rpartition("_")[2]
    names_of = {"snsc": {"snsc", "all"}, "dp": {"all"}}.get(short, {short, "DDP", "all"})
    rows = [row for row in option_table() if names_of & set(re.findall(r"\w+", row[2]))]
    documented = {name for names, _, _ in rows for name in names}
    actions = [a for a in parsers[0]._actions if a.dest != "help"]
    assert documented == {name for action in actions for name in action.option_strings}
    for action in actions:
        ((_, default, _),) = (row for row in rows if row[0] & set(action.option_strings))
        if action.default is None or action.default is False:
            assert default in ("none", "off") or "the rank" in default, (action, default)
        else:
            assert f"`{action.default}`" in default, (action, default)


def symptoms():
    """The rows of the tables of symptoms: (what you see, shown by)."""
    text = (REPO / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(
        r"^\| what you see \|.*\n\|[ -|]+\n((?:\|.*\n)+)", text, re.MULTILINE | re.IGNORECASE
    )
    rows = [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in "".join(tables).splitlines()]
    return [(row[0], row[-1].rstrip(" |")) for row in rows]


def test_there_are_symptoms():
    assert len(symptoms()) > 40


@pytest.mark.parametrize(("seen", "proof"), symptoms(), ids=lambda words: words[:40])
def test_symptom_is_shown_or_says_where_it_comes_from(seen, proof):
    """The message is in the test that the row names, or in an example's output."""
    if proof.startswith("not "):
        assert len(proof) > 20
        return
    shown = "".join(block.code for _, block in ALL_BLOCKS if block.language == "text")
    if name := re.search(r"test_\w+\.py", proof):
        both = [(REPO / "tests" / file).read_text() for file in (name[0], "launch.py")]
        shown += "".join(both).replace("\\", "")
    messages = [m for m in re.findall(r"`([^`]+)`", seen) if not m.startswith("--")]
    for message in messages:
        assert message in shown, (message, proof)
