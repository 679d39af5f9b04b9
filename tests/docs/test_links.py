"""Links in the pages lead somewhere, and every page is reached from the menu of the site."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, FENCE, PAGES, ROOT, place

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The names that headings are linked by."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in plain}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(re.sub(r"`[^`]*`", "", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        known = to.exists() and (not anchor or anchor in anchors(to))
        # the site has nothing but docs/
        inside = not page.is_relative_to(DOCS) or to.is_relative_to(DOCS)
        if not (known and inside):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    broken = broken_links(page, page.read_text(encoding="utf-8"))
    assert not broken, f"links that lead nowhere, or out of docs/: {', '.join(broken)}"


def test_links_that_lead_nowhere_are_seen() -> None:
    text = "[a](index.md) [b](no-such.md) [c](index.md#no-such) ![d](images/no-such.svg) [e](../README.md)"
    assert broken_links(DOCS / "index.md", text) == [
        "no-such.md", "index.md#no-such", "images/no-such.svg", "../README.md",
    ]  # fmt: skip


def test_every_page_stands_once_in_the_menu_and_the_menu_has_no_others() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = Counter(re.findall(r"(\S+\.md)$", menu, re.M))
    there = {page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)}
    assert not there - set(listed), f"put these into the nav of mkdocs.yml: {', '.join(sorted(there - set(listed)))}"
    assert not set(listed) - there, f"mkdocs.yml names pages that are not there: {', '.join(set(listed) - there)}"
    assert max(listed.values()) == 1


def test_every_picture_and_result_is_used() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    unused = [place(file) for file in sorted((DOCS / "images").iterdir()) if file.name not in text]
    assert not unused, f"no page shows {', '.join(unused)}"
