"""docs/develop/architecture.md is checked against the code: its files exist, its arrows are the real imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_imports import imports_of, layer_of, modules

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "develop" / "architecture.md"
Arrows = set[tuple[str, str]]


def drawn(page: str) -> Arrows:
    return set(re.findall(r"^ *(\w+) --> (\w+)$", page, re.MULTILINE))


def imported() -> Arrows:
    """Between the parts of the package; what lies at its root besides the two surfaces is no part."""
    found = {
        (layer_of(module), layer_of(name))
        for module, path in modules().items()
        for name in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    }
    return {(one, other) for one, other in found if one != other and not {one, other} & {"", "__main__", "_version"}}


def reachable(arrows: Arrows) -> Arrows:
    """All pairs of which the second is reached from the first along arrows."""
    known = set(arrows)
    while more := {(one, last) for one, middle in known for first, last in arrows if middle == first} - known:
        known |= more
    return known


def complaints(arrows: Arrows, real: Arrows) -> list[str]:
    invented = [f"the arrow {one} --> {other} is no import" for one, other in sorted(arrows - real)]
    missing = [f"{one} imports {other}, which no arrows say" for one, other in sorted(real - reachable(arrows))]
    spare = [f"{one} --> {other} follows from the others" for one, other in sorted(arrows)
             if (one, other) in reachable(arrows - {(one, other)})]  # fmt: skip
    return [*invented, *missing, *spare]


def test_the_picture_shows_the_imports_and_nothing_else() -> None:
    assert complaints(drawn(PAGE.read_text(encoding="utf-8")), imported()) == []


def test_a_wrong_picture_is_seen() -> None:
    real = {("api", "methods"), ("methods", "core"), ("api", "core")}
    assert complaints({("api", "methods"), ("methods", "core")}, real) == []
    assert complaints(real, real) == ["api --> core follows from the others"]
    assert "methods imports core, which no arrows say" in complaints({("api", "methods")}, real)
    assert "the arrow core --> api is no import" in complaints({*real, ("core", "api")}, real)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "develop").glob("*.md")), ids=lambda path: path.stem)
def test_files_that_a_page_for_developers_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:outrider|tests|docs|benchmarks)/[\w./-]*)`", text))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    links = set(re.findall(r"\]\(([\w./-]+\.md)\)", text))
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []


def test_names_that_the_walk_gives_stand_in_the_code() -> None:
    named = re.findall(r"`(\w+)\.(\w+)` of\s+`(outrider/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8"))
    assert named
    for owner, member, file in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"class {owner}" in text and f"def {member}(" in text, f"{owner}.{member} is not in {file}"
