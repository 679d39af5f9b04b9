"""The drafter of `examples/custom_drafter`: found by its entry point, right where a text repeats, lossless anywhere."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import methods
from outrider.methods import registry
from tests.runtime.test_toy_backend import parts, texts

FOLDER = Path(__file__).parents[2] / "examples" / "custom_drafter"
NAME = "pair-memory"
__all__ = ["parts"]  # the fixture


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As pip leaves it: the module, and what `pyproject.toml` says of entry points beside it."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    place = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (place / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(registry, "_METHODS", {})
    monkeypatch.setattr(registry, "_loaded", False)
    yield
    sys.modules.pop("pair_memory", None)


@pytest.mark.usefixtures("installed")
def test_the_method_is_found_by_its_entry_point() -> None:
    info = methods.find(NAME)
    assert info.lossless and info.needs == "nothing" and NAME in {one.name for one in methods.table()}


@pytest.mark.usefixtures("installed")
def test_it_says_what_plain_decoding_says_and_drafts_some_of_it(parts: methods.Parts) -> None:
    recipe, plain = methods.build(NAME, parts), methods.build("plain", parts)
    got, accepted = texts(parts, recipe)
    assert got == texts(parts, plain)[0] and accepted > 0
    assert texts(parts, recipe, temperature=0.8, seed=5)[0] == texts(parts, plain, temperature=0.8, seed=5)[0]
    assert not recipe.drafter.contexts and not recipe.drafter.next  # what ended is forgotten


@pytest.mark.usefixtures("installed")
def test_it_proposes_what_followed_the_last_two_tokens_until_it_knows_no_further(parts: methods.Parts) -> None:
    from types import SimpleNamespace

    import numpy as np

    drafter = methods.build(NAME, parts).drafter
    drafter.begin(0, SimpleNamespace(tokens=np.array([1, 2, 3, 4, 1, 2])))
    drafter.begin(1, SimpleNamespace(tokens=np.array([7])))
    assert drafter.draft(0, 8).tokens.tolist() == [2, 3, 4, 1, 2, 3, 4, 1, 2]  # a loop goes on as a loop
    assert drafter.draft(0, 2).tokens.tolist() == [2, 3, 4]
    assert drafter.draft(1, 8).tokens.tolist() == [7]
