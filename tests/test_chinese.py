"""The README in Chinese has the headings, blocks, code, tables and links of README.md.

Words cannot be compared. So a comment below each Chinese heading holds the checksum of the English
section that was translated. When it is another one, look at the Chinese section again.
"""

import re
import zlib
from collections import namedtuple

import pytest
from launch import REPO, SCRIPTS

Section = namedtuple("Section", "level title blocks prose")
BLOCK = re.compile(r"^(?:<!-- [^\n]+ -->\n)?```.*?^```\n", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]+`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGE = "docs/README.zh-CN.md"


def read_sections(name):
    """Returns the sections of a page in order; the first is what stands above the title."""
    text = (REPO / name).read_text()
    blocks = BLOCK.findall(text)
    first, *rest = re.split(r"^(#+) (.+)\n", BLOCK.sub("BLOCK\n", text), flags=re.MULTILINE)
    sections = [Section("", "first line", [], first)]
    for level, title, prose in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        own = [blocks.pop(0) for _ in range(prose.count("BLOCK\n"))]
        sections.append(Section(level, title, own, prose))
    return sections


ENGLISH = read_sections("README.md")
CHINESE = read_sections(PAGE)
OLD_TUTORIALS = CHINESE.pop()  # README.md has no such section


def make_anchor(title):
    """Returns the anchor that GitHub gives to a heading."""
    return "#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def translate_link(link):
    """Returns a link of README.md as it must stand on the Chinese page, which is in docs/."""
    if link.startswith("http"):
        return link
    if link.startswith("#"):
        (number,) = (n for n, section in enumerate(ENGLISH) if make_anchor(section.title) == link)
        return make_anchor(CHINESE[number].title)
    if link == PAGE:
        return "../README.md"
    return link.removeprefix("docs/") if link.startswith("docs/") else f"../{link}"


def read_tables(prose):
    """Returns the code of each cell of each row."""
    rows = [line.split("|") for line in prose.splitlines() if line.startswith("|")]
    return [[CODE.findall(cell) for cell in row] for row in rows]


def test_headings_correspond():
    levels = [[section.level for section in page] for page in (ENGLISH, CHINESE)]
    assert levels[0] == levels[1], [section.title for section in ENGLISH]


@pytest.mark.parametrize("number", range(len(ENGLISH)), ids=lambda n: ENGLISH[n].title)
def test_section_corresponds(number):
    english, chinese = ENGLISH[number], CHINESE[number]
    where = f"look again at '{chinese.title}' in {PAGE}: '{english.title}' in README.md has other"
    assert chinese.blocks == english.blocks, f"{where} blocks, which are equal to the letter"
    assert read_tables(chinese.prose) == read_tables(english.prose), f"{where} code in its tables"
    code = [sorted(CODE.findall(section.prose)) for section in (chinese, english)]
    assert code[0] == code[1], f"{where} code"
    links = sorted(map(translate_link, LINK.findall(english.prose)))
    assert sorted(LINK.findall(chinese.prose)) == links, f"{where} links"
    if number > 0:
        words = " ".join([english.title, *english.prose.split()])
        checksum = f"<!-- README.md {zlib.crc32(words.encode()):08x} -->"
        assert chinese.prose.startswith(checksum), f"{where} words. Then write {checksum}"


def test_lines_to_write_today_stand_in_the_scripts():
    """The last column of the table for those who come from older tutorials."""
    files = [*SCRIPTS, "docs/examples/recipe_ddp.py"]
    text = "".join((REPO / name).read_text() for name in files)
    rows = [row[-2] for row in read_tables(OLD_TUTORIALS.prose) if any(row)]
    assert len(rows) > 10
    for code in (code.strip("`") for row in rows for code in row):
        assert code in text, code
