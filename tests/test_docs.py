"""Nothing on the pages rots: commands run, blocks are those of files, links lead somewhere."""

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import patches
import pytest
import update_pages
from launch import REPO, SCRIPTS, Launch, page_commands, run_forked, shape
from PIL import Image
from test_progression import STEPS
from torch.distributed.run import get_args_parser

TEXTS = {page: page.read_text() for page in update_pages.PAGES}
PROSE = {
    page: re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for page, text in TEXTS.items()
}
BLOCKS = [(page, b) for page, text in TEXTS.items() for b in update_pages.read_blocks(text)]
SHELL = [(page, block) for page, block in BLOCKS if block.language == "bash"]
ALL_PAGES = pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)


def read(name):
    return (REPO / name).read_text()


# Blocks


@ALL_PAGES
def test_every_block_is_of_a_kind_that_is_checked(page):
    """No indented or unnamed block, no marker that means nothing."""
    text, blocks = TEXTS[page], [block for other, block in BLOCKS if other == page]
    assert text.count("\n```") == 2 * len(blocks)
    assert not re.search(r"^ {4}\S", PROSE[page], re.MULTILINE)
    kinds = {
        "bash": r"run$|run at once$|run by \S+$|not run: .+",
        "diff": r"diff \S+ \S+$|patch \S+$|all of \S+ \S+$",
        "python": r"(show|program|excerpt) .+",
        "mermaid": "$",
    }
    for block in blocks:
        if block.language != "text":
            assert re.match(kinds[block.language], block.mark), block
        elif not re.match("printed by |not run: ", block.mark):
            assert text[: block.start].endswith("```\n```text\n"), block


@ALL_PAGES
def test_blocks_are_those_of_the_files(page):
    """Functions, programs, excerpts, patches, diffs, outputs, line numbers of who_hangs.py."""
    text, errors = update_pages.update(TEXTS[page])
    assert not errors, "\n".join(f"{page.relative_to(REPO)}:{error}" for error in errors)
    assert text == TEXTS[page], "python scripts/docs/update_pages.py mends this page"


def output_under(page, block):
    """The lines of the text block right under a block; none if there is none."""
    for other, below in BLOCKS:
        between = TEXTS[page][block.end : below.start] if other == page else ""
        if between == "```\n```text\n":
            return below.code.splitlines()
    return []


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository's files, for commands that write into it, without a reader's own."""
    own = ("answers.py", "mine.py", "checkpoints", "data", "run", "patched")
    ignored = shutil.ignore_patterns(".git", ".venv", "*cache*", *own)
    return Path(shutil.copytree(REPO, tmp_path_factory.mktemp("clone") / "repo", ignore=ignored))


RUN = [
    (page, block)
    for page, block in SHELL
    # README.zh-CN.md has README.md's commands: test_chinese.py.
    if block.mark in ("run", "run at once") and page.name != "README.zh-CN.md"
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "block"),
    [pytest.param(*row, id=f"{n}-{row[0].stem}-{row[1].heading}") for n, row in enumerate(RUN)],
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


def help_of(program, folder):
    """What a program says of its options: its --help; a shell script's text, and its program's."""
    if program == "torchrun":
        return get_args_parser().format_help()
    if program in ("srun", "sbatch"):  # they want a cluster's configuration, whatever they do
        folder.mkdir()
        (folder / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=none\n")
        env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        return subprocess.check_output([program, "--help"], text=True, env=env)
    if program == "mine.py":  # the reader's copy of this script
        program = "mnmc_ddp_env.py"
    if program.startswith("patched/"):  # what scripts/patch.sh has written
        program = patches.read_patch(Path(program).stem).script
    if program.endswith(".py"):
        return run_forked(program, ["--help"], folder / program)[1]
    text = read(program)
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
        elif word.startswith("--") and program:
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


@pytest.mark.slow
def test_recipe_both_sides_train_to_the_same_loss(launch):
    """One process with the batch of both, and two processes under torchrun."""
    commands = page_commands("README.md", "The recipe")
    run = launch([["bash", "-euc", "\n".join(commands)]]).succeeded()
    assert run.own_err() == "", run.story()
    loss, of_two = run.out.splitlines()
    assert re.fullmatch(r"loss 0\.\d{4}", loss) and of_two == loss
    assert loss in TEXTS[update_pages.README]
    ddp = read("docs/examples/recipe_ddp.py")
    assert "".join(re.findall(r"# (\d)", ddp)) == "1234564778"


# Patches


@pytest.mark.parametrize("name", patches.NAMES)
def test_patch_is_current_and_on_a_page(name):
    """It fits today's script, leaves no undefined name, and its command starts the copy."""
    patch = patches.read_patch(name)
    changed = patches.apply_patch(patch, read(patch.script))
    assert changed != read(patch.script) and patches.find_mistakes(changed) == ""
    assert f" patched/{name}.py" in patch.header
    assert any(name in text for text in TEXTS.values())


def test_patch_sh_applies_one_or_two_and_lists_all(clone, tmp_path):
    """It writes what the tests take, and names the command."""
    argv = ["bash", clone / "scripts" / "patch.sh"]
    for names in (["zero1"], ["zero1", "accumulate_4"]):
        output = subprocess.check_output([*argv, *names], text=True)
        copy = clone / "patched" / f"{names[-1]}.py"
        assert copy.read_text() == patches.write_patched(names, tmp_path).read_text()
        copy.unlink()
        command = re.search(r"^    (.+)$", patches.read_patch(names[-1]).header, re.MULTILINE)[1]
        assert f"  {command}\n" in output
    listed = subprocess.check_output(argv, text=True).splitlines()
    assert [row.split()[0] for row in listed] == patches.NAMES
    unknown = subprocess.run([*argv, "nothing"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "lists those that there are" in unknown.stderr


@pytest.mark.slow
def test_folder_of_images(launch, tmp_path):
    """The patch for image folders makes a script that trains."""
    script = patches.write_patched(["image_folders"], tmp_path)
    for split, count in (("train", 8), ("val", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.effect_noise((260, 240), 99).convert("RGB").save(folder / f"{number}.jpg")
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, script]
    run = launch([[*command, "--data-root", tmp_path / "images", "-e", "1", "-b", "4"]])
    assert [line["count"] for line in run.succeeded().epochs()] == [6], run.story()
    assert "UserWarning" not in run.err


# Pages, links, lists


@pytest.mark.parametrize("page", update_pages.PAGES[1:], ids=lambda page: page.name)
def test_every_page_can_be_found(page):
    """From the README, the course, the index or another page, if it does more than lead on."""
    assert len(TEXTS[page].splitlines()) < 6 or any(
        re.search(rf"\]\((docs/)?{re.escape(page.name)}", PROSE[p]) for p in PROSE if p != page
    )


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", PROSE[page], re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@ALL_PAGES
def test_links_lead_to_files_and_headings_that_exist(page):
    """Across the pages; addresses outside are well-formed."""
    for link in re.findall(r"\]\(([^)]+)\)", PROSE[page]):
        if link.startswith("http"):
            assert re.fullmatch(r"https?://[\w.-]+\.[a-z]+(/[^\s]*)?", link), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":  # side_by_side.html has a test of its own.
            assert anchor in anchors(target), link


CONTRIBUTING = REPO / ".github" / "CONTRIBUTING.md"


@pytest.mark.parametrize("page", [*TEXTS, CONTRIBUTING], ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    name_of_file = r"(?:scripts|docs|tests|\.ci)/[\w./-]*\w|(?:mnmc|sn|test_)\w+\.(?:py|sh|sbatch)"
    folders = (REPO, REPO / "tests", REPO / "scripts", REPO / "docs")
    for name in re.findall(rf"(?<![\w./$}}-])({name_of_file})(?![\w*{{])", page.read_text()):
        assert any((folder / name).exists() for folder in folders), name


def test_index_has_one_line_an_entry_in_the_order_of_the_alphabet():
    """So that grep shows the entry with its link."""
    lines = read("docs/index.md").splitlines()
    entries = [line for line in lines if line.startswith("- ")]
    assert entries
    assert not [line for line in entries if not re.search(r": .*\]\([^)]+\)", line)]
    keys = [re.sub(r"[^a-z0-9]", "", line.partition(": ")[0].lower()) for line in entries]
    assert keys == sorted(set(keys))


def test_every_list_of_the_scripts_names_the_same_six():
    """git's files, the README's table, the diffs, the budgets; run_all.sh: test_launchers.py."""
    argv = ["git", "-C", REPO, "ls-files", "*.py", ":!:*/*"]
    assert set(subprocess.check_output(argv, text=True).split()) == set(SCRIPTS)
    rows = re.findall(r"^\|.*\[`(\w+\.py)`\]\(\1\)", read("README.md"), re.MULTILINE)
    assert tuple(dict.fromkeys(rows)) == SCRIPTS
    headings = re.findall(r"^## (\w+\.py) to (\w+\.py)$", read("docs/diffs.md"), re.MULTILINE)
    assert headings == [step[:2] for step in STEPS]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_is_documented_with_its_default(script):
    """The table of the reference has the names and defaults of the parser."""
    module = importlib.import_module(script.removesuffix(".py"))
    parsers = []
    with mock.patch.object(module.argparse.ArgumentParser, "parse_args", autospec=True) as parse:
        parse.side_effect = lambda parser, *_: parsers.append(parser)
        module.parse_args()
    short = script.removesuffix(".py").rpartition("_")[2]
    names_of = {"snsc": {"snsc", "all"}, "dp": {"all"}}.get(short, {short, "DDP", "all"})
    section = read("docs/reference.md").partition("\n## Options\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| (`-.+?) \| (.+?) \| .+ \| (.+?) \|$", section, re.MULTILINE)
    rows = [
        (set(re.findall(r"-[-\w]+", names)), default)
        for names, default, who in table
        if names_of & set(re.findall(r"\w+", who))
    ]
    actions = [a for a in parsers[0]._actions if a.dest != "help"]
    documented = {name for names, _ in rows for name in names}
    assert documented == {name for action in actions for name in action.option_strings}
    for action in actions:
        ((_, default),) = (row for row in rows if row[0] & set(action.option_strings))
        if action.required:
            assert default == "required", action
        elif action.default is None or action.default is False:
            assert default in ("none", "off") or "the rank" in default, (action, default)
        else:
            assert f"`{action.default}`" in default, (action, default)
