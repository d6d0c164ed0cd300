"""The index leads from the users' words to the sections; test_pages.py follows its links."""

import re

from launch import REPO

ENTRIES = re.findall(
    r"^- (.+?):((?:\s+\[[^\]]+\]\([^)]+\),?)+)$",
    (REPO / "docs" / "index.md").read_text(),
    re.MULTILINE,
)

SEARCHED = [
    "early.stopping",
    "account",
    "validation",
    "stuck",
    "streaming",
    "profil",
    "wandb",
    "infiniband",
    "augmentation",
    "worker",
    "frozen",
    "expected.to.have.finished.reduction",
    "k-fold",
    "nccl_ib_hca",
]


def sort_key(entry):
    """Returns the letters and digits of an entry, as a reader looks it up."""
    return re.sub(r"[^a-z0-9]", "", entry.lower())


def test_every_entry_has_a_link_and_stands_in_the_order_of_the_alphabet():
    """A line without a link would not be among the entries."""
    lines = (REPO / "docs" / "index.md").read_text().partition("## Where to go next")[0]
    assert len(ENTRIES) == len(re.findall(r"^- ", lines, re.MULTILINE)) >= 150
    keys = [sort_key(entry) for entry, _ in ENTRIES]
    assert keys == sorted(set(keys))


def test_headings_are_the_first_letters():
    text = (REPO / "docs" / "index.md").read_text()
    for letter, part in re.findall(r"^## (\w)\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL):
        starts = {sort_key(entry)[0].upper() for entry in re.findall(r"^- (.+?):", part, re.M)}
        assert starts == {letter}


def test_words_that_were_looked_for_and_not_found_have_an_entry():
    """Searches of users that found nothing in an earlier README."""
    text = (REPO / "docs" / "index.md").read_text().lower()
    for word in SEARCHED:
        assert re.search(rf"^- .*{word}", text, re.MULTILINE), word
