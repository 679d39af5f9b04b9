"""Pages for users are short, in short lines, and what they show as Python is Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, place

MAX_COLUMNS, MAX_WORDS = 120, 1500
LOG = DOCS / "lab"  # what was tried, as long as it has to be
FOR_USERS = [page for page in PAGES if not page.is_relative_to(LOG)]


def faults(text: str) -> list[str]:
    long = [
        f"line {at}: {len(line)} characters" for at, line in enumerate(text.splitlines(), 1) if len(line) > MAX_COLUMNS
    ]
    words = len(text.split())
    return long + ([f"{words} words"] if words > MAX_WORDS else [])


@pytest.mark.parametrize("page", FOR_USERS, ids=place)
def test_no_page_for_users_is_long_or_has_long_lines(page: Path) -> None:
    found = faults(page.read_text(encoding="utf-8"))
    found = [fault for fault in found if page.name != "CHANGELOG.md" or not fault.endswith("words")]
    assert not found, f"at most {MAX_COLUMNS} characters a line and {MAX_WORDS} words a page: {', '.join(found)}"


def test_a_long_page_and_a_long_line_are_seen() -> None:
    assert faults("word " * 24) == []
    assert faults("x" * 121) == ["line 1: 121 characters"]
    assert faults("word\n" * 1501) == ["1501 words"]


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_python_in_a_page_is_python(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        compile(block, str(page), "exec")
