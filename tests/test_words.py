"""The code speaks the words of the field: no identifier holds a private word, and no name stands for several things.

Looks at identifiers only, not at prose. The names of tests that are whole sentences may use any word. The glossary is
docs/develop/glossary.md.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = tuple(ROOT / folder for folder in ("outrider", "tests", "benchmarks"))

PRIVATE = {
    "own": "what the thing is, such as tree, budget, weights or row",
    "law": "distribution, in code probs (q for a draft's row)",
    "laws": "distributions, in code probs (rows for a draft's)",
    "heat": "temperature",
    "heats": "temperatures",
    "dear": "expensive",
    "dearer": "more expensive",
    "lone": "single",
}
# "Law" is a word of the field for one thing: how the draws of a node were made, which decides the rules that are exact
# for them. That is the class `Law` in core/tree.py and what names it.
CLASS_OF_DRAWS = {"Law", "law_of", "refuse_other_laws"}
ITS_VALUES = {"law", "laws"}  # values of the class: only in files that name it
SENTENCE = 4  # a test's name with more parts is a sentence


def private_words(source: str) -> list[tuple[int, str, str]]:
    """Line, identifier and remedy of each identifier with a private word in it."""
    if not any(word in source.lower() for word in PRIVATE):
        return []
    names = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.NAME]
    allowed = CLASS_OF_DRAWS | (ITS_VALUES if any(t.string == "Law" for t in names) else set())
    return [
        (token.start[0], token.string, PRIVATE[word])
        for token in names
        if token.string not in allowed and not _is_sentence(token.string)
        for word in _words(token.string)
        if word in PRIVATE
    ]


def _words(identifier: str) -> list[str]:
    """`_own_budget` and `OwnBudget` are two words each."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)]


def _is_sentence(identifier: str) -> bool:
    return identifier.startswith("test_") and len(identifier.split("_")) > SENTENCE


def _files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def _place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_identifiers_hold_no_private_words() -> None:
    found = [
        f"{_place(path)}:{line}: {name}: say {remedy}"
        for path in _files(*CODE)
        for line, name, remedy in private_words(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"{len(found)} identifiers with private words:\n" + "\n".join(found)


@pytest.mark.parametrize("name", ["Shape", "Rows"])
def test_no_two_classes_share_a_name_that_says_little(name: str) -> None:
    homes = [
        f"{_place(path)}:{node.lineno}"
        for path in _files(CODE[0])
        if f"class {name}" in (source := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    assert len(homes) < 2, f"classes called {name}; name all but one by what they describe:\n" + "\n".join(homes)


def test_no_constant_is_called_most() -> None:
    found: dict[str, int] = defaultdict(int)
    for path in _files(CODE[0]):
        source = path.read_text(encoding="utf-8")
        if "MOST" in source:
            for token in tokenize.generate_tokens(io.StringIO(source).readline):
                found[_place(path)] += token.type == tokenize.NAME and token.string == "MOST"
    wrong = [f"{place}: {count} times" for place, count in found.items() if count]
    assert not wrong, "MOST of what? Say MAX_ROWS, MAX_HEADS, ...:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "planted",
    ["own = 1", "for own_row in rows: pass", "def f(row_own): pass", "class LoneRow: pass", "f(heat=1)", "x.dear",
     "law = probs(node)", "from a import Laws", "def test_own_rows(): pass"],
)  # fmt: skip
def test_a_planted_word_is_seen(planted: str) -> None:
    ((line, _, remedy),) = private_words(f"import numpy\n\n{planted}\n")
    assert line == 3 and remedy in PRIVATE.values()


@pytest.mark.parametrize(
    "fine",
    ["known = owner = 1", "# our own, and dear\ntext = 'own law'", "from a import Law, law_of\nlaw = law_of(draws)",
     "def test_a_drafter_of_its_own_is_kept(): pass", "download = flaw = 1"],
)  # fmt: skip
def test_other_words_sentences_and_the_law_of_draws_are_fine(fine: str) -> None:
    assert private_words(fine) == []
