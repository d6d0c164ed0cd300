"""Nothing on the pages rots: commands run, and examples print what stands under them."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path
from unittest import mock

import patches
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
    assert {b.language for b in blocks} <= {"python", "bash", "text", "diff", "yaml", "mermaid"}
    assert text.count("\n```") == 2 * len(blocks)
    assert not re.search(r"^ {4}\S", PROSE[page], re.MULTILINE)
    for block in blocks:
        kinds = {
            "bash": r"run$|run at once$|run by \S+$|not run: .+",
            "diff": r"diff \S+ \S+$|patch \S+$|all of \S+ \S+$",
            "python": r"(show|program|excerpt) .+",
            "yaml": r"excerpt \S+$",
            "mermaid": "$",
        }
        if block.language != "text":
            assert re.match(kinds[block.language], block.mark), block
        elif not re.match("printed by |not run: ", block.mark):
            assert text[: block.start].endswith("```\n```text\n"), block


def test_readme_is_a_front_door():
    assert len(TEXTS[update_pages.README].splitlines()) <= 450


@pytest.mark.parametrize("page", update_pages.PAGES[1:-1], ids=lambda page: page.name)
def test_page_says_what_it_answers_and_where_to_go_next(page):
    titles = re.findall(r"^#+ (.+)$", PROSE[page], re.MULTILINE)
    assert titles[-1] == "Where to go next" or page.name == "diffs.md"
    assert f"docs/{page.name}" in TEXTS[update_pages.README]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_blocks_are_those_of_the_files(page):
    """Functions, programs, patches, diffs, and the line numbers of who_hangs.py."""
    stale = "python scripts/docs/update_pages.py mends this page"
    assert update_pages.update(TEXTS[page]) == TEXTS[page], stale


@pytest.mark.parametrize(
    "block", [b for _, b in ALL_BLOCKS if b.mark.startswith("excerpt ")], ids=lambda b: b.heading
)
def test_excerpt_stands_in_the_file(block):
    """To the letter, but for the indentation."""
    text = (REPO / block.mark.split()[1]).read_text()
    indented = (textwrap.indent(block.code, " " * width) for width in (0, 4, 8))
    assert any(lines in text for lines in indented), block.code


def test_no_program_stands_in_a_page_alone():
    """Every line of Python on a page is a line of a file."""
    files = [*REPO.glob("*.py"), *REPO.glob("scripts/**/*.py"), *update_pages.EXAMPLES]
    lines = {line.strip() for file in files for line in file.read_text().splitlines()}
    for _, block in ALL_BLOCKS:
        if block.language == "python":
            assert {line.strip() for line in block.code.splitlines()} <= lines | {""}, block


def test_update_makes_stale_blocks_new():
    """A function, an excerpt that has other comments, a diff, a patch, and an example's output."""
    stale = "".join(
        f"<!-- {mark} -->\n```{language}\n{code}```\n\n"
        for mark, language, code in (
            ("show snsc.py ConvNet.forward main", "python", "old\n"),
            ("excerpt snsc.py", "python", "def main():  # old\nold\ntrain(args, device)  # old\n"),
            ("diff snsc.py snmc_dp.py", "diff", "old\n"),
            ("patch zero1", "diff", "old\n"),
            ("printed by docs/examples/shuffle_and_set_epoch.py", "text", "old\n"),
        )
    )
    blocks = update_pages.read_blocks(update_pages.update(stale))
    shown, lines, difference, patch, printed = (block.code for block in blocks)
    assert shown.startswith("def forward(self, x):\n    ") and "\n\n\ndef main():" in shown
    assert lines in shown and "old" not in lines
    assert "+    ddp_model = nn.DataParallel(model)" in difference or "DataParallel" in difference
    assert patch.startswith("--- a/mnmc_ddp_env.py\n") and "ZeroRedundancyOptimizer" in patch
    assert "mutually exclusive" in printed


@pytest.mark.slow
def test_recipe_both_sides_train_to_the_same_loss(tmp_path):
    """One process with the batch of both, and two processes under torchrun."""
    plain, ddp = (REPO / "docs" / "examples" / f"recipe_{name}.py" for name in ("plain", "ddp"))
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", 2, ddp]
    out = []
    for command in (["python", plain], torchrun):
        with Launch([command], tmp_path / "output", cwd=tmp_path) as run:
            run.succeeded()
            assert run.own_err() == "", run.story()
            out.append(run.out)
    assert re.fullmatch(r"loss 0\.\d{4}\n", out[0]) and out == [out[0]] * 2
    assert f"Both print `{out[0].strip()}`" in TEXTS[update_pages.README]
    marks = "".join(re.findall(r"# (\d)", ddp.read_text()))
    assert marks == "1234564778", "the marks follow the order of the file, 4 and 7 at two places"


ALONE = [path for path in update_pages.EXAMPLES if not path.stem.startswith("recipe_")]
VARYING = {"debug_one_rank", "find_slow_part", "profile_step", "record_traceback", "watch"}


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_example_prints_what_its_file_says(tmp_path, path):
    """In forked processes that have torch loaded already; the slow test takes torchrun."""
    processes = update_pages.count_processes(path)
    codes, out, err = run_forked_ranks(path, processes, free_port(), tmp_path / "run")
    assert codes == [0] * max(processes, 1), err
    printed = update_pages.sort_lines(out) if processes else out
    expected = update_pages.printed_file(path)
    if path.stem not in VARYING:  # These print times, or nothing.
        stale = f"python scripts/docs/update_pages.py --run {path.name} renews the file"
        assert printed == expected.read_text(), stale


@pytest.mark.parametrize("path", update_pages.EXAMPLES, ids=lambda path: path.stem)
def test_example_says_how_to_run_it_and_is_on_a_page(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    start = r"(torchrun --standalone --nproc-per-node \d+|python) "
    assert re.search(rf"^ *{start}docs/examples/{path.name}", docstring, re.MULTILINE), docstring
    assert any(f"examples/{path.name}" in text for text in TEXTS.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in update_pages.EXAMPLES if update_pages.printed_file(path).exists()][::8],
    ids=lambda p: p.stem,
)
def test_example_prints_the_same_under_torchrun(path):
    """Some of them, by the command of the docstring; the others ran in forked processes."""
    expected = update_pages.printed_file(path).read_text()
    assert without_gloo_lines(update_pages.run_example(path)) == expected


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
        commands = [line.split() for line in block.code.splitlines()]
        assert all(any(word in text for word in argv if ".sh" in word) for argv in commands)


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
    if program.startswith("patched/"):  # what scripts/patch.sh has written
        program = patches.read_patch(Path(program).stem).script
    if program.endswith(".py"):
        return run_forked(program, ["--help"], folder / program)[1]
    text = (REPO / program).read_text()
    for name in set(re.findall(r"\w+\.py", text)):
        path = name if (REPO / name).exists() else f"scripts/measure/{name}"
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
    helps = {}
    for _, block in SHELL:
        subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        if not block.mark.startswith("not run"):
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            for program, option in options_by_program(line):
                if program in ("srun", "sbatch") and not shutil.which(program):
                    continue  # where there is no Slurm; .ci/run has one
                if program not in helps:
                    helps[program] = help_of(program, tmp_path / str(len(helps)))
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", helps[program]), (line, option)


@pytest.mark.parametrize("name", patches.NAMES)
def test_patch_is_current_and_on_a_page(name):
    """It fits today's script, leaves no undefined name, and its command starts the copy."""
    patch = patches.read_patch(name)
    script = (REPO / patch.script).read_text()
    stale = "python scripts/docs/patches.py rebases the patches"
    identity = subprocess.check_output(["git", "hash-object", REPO / patch.script], text=True)
    assert f"index {identity.strip()}.." in patch.diff, stale
    changed = patches.apply_patch(patch, script)
    assert changed != script and patches.find_mistakes(changed) == ""
    assert f" patched/{name}.py" in patch.header
    assert any(
        f"<!-- patch {name} -->" in text or f"{name}.diff" in text for text in TEXTS.values()
    )


@pytest.mark.slow
def test_folder_of_images(launch, tmp_path):
    """The patch for image folders makes a script that trains."""
    script = patches.write_patched(["image_folders"], tmp_path)
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 8), ("val", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(256, (240, 260, 3), generator=generator).to(torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{number}.jpg")
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, script]
    run = launch([[*command, "--data-root", tmp_path / "images", "-e", "1", "-b", "4"]])
    assert [line["count"] for line in run.succeeded().epochs()] == [6], run.story()
    assert "UserWarning" not in run.err


# What the lines that 'Make it yours' names become for tables of 20 numbers with a yes or no.
LOAD = """numbers = torch.randn(len(labels), 20, generator=generator)
        return TensorDataset(numbers, (numbers[:, 0] * numbers[:, 1] > 0).long())"""
LOSS = "F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())"
TABLE = {
    "return ConvNet()": "return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))",
    "return TensorDataset(images.to(torch.uint8, memory_format=torch.channels_last), labels)": LOAD,
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
        section("docs/data.md", "Make it yours"),
        re.MULTILINE,
    )
    rows = [row for row in rows if row[0] != "mnmc_ddp_env.py"]
    assert [line for line, _ in rows] == list(TABLE)
    code = (REPO / "mnmc_ddp_env.py").read_text()
    for line, where in rows:
        assert code.count(line) == len(where.split(",")), line
        code = code.replace(line, TABLE[line])
    (tmp_path / "mine.py").write_text(code)
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, tmp_path / "mine.py"]
    run = launch([[*command, "--dataset", "synthetic", "-e", "4"]]).succeeded()
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
        if anchor and target.suffix == ".md":  # side_by_side.html has a test of its own.
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
