"""Plug-ins written for an earlier layout or protocol: refused with a sentence that names what changed, and the page."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import Needs
from outrider.draft.grown import Grown
from outrider.methods import moved, registry
from outrider.methods.common import controller, verifier

ROOT = Path(__file__).parents[2]


def load(statement: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    """What is logged when an installed package begins with this statement."""
    (folder / "planted_plugin.py").write_text(f"{statement}\nMETHOD = None\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(importlib.sys.modules, "planted_plugin", raising=False)
    entry = SimpleNamespace(name="planted", load=lambda: importlib.import_module("planted_plugin").METHOD)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [entry])
    with caplog.at_level(logging.WARNING):
        registry.table()
    return caplog.text


@pytest.mark.parametrize(
    ("statement", "old", "new"),
    [
        ("from outrider.protocols import Needs", "outrider.protocols", "outrider.core.protocols"),
        ("from outrider import tree", "outrider.tree", "outrider.core.tree"),
        ("import outrider.target.eager", "outrider.target.eager", "outrider.runtime.targets"),
        ("from outrider.target.passes import Block", "outrider.target.passes", "outrider.runtime.passes"),
        ("from outrider.recipes.common import (\n    verifier,\n)", "outrider.recipes.common",
         "outrider.methods.common"),
        ("from outrider.draft import prompt_lookup", "outrider.draft.prompt_lookup",
         "outrider.draft.lookup.prompt_lookup"),
        ("from outrider.draft.model import ModelSource", "outrider.draft.model", "outrider.draft.model.draft_model"),
    ],
)  # fmt: skip
def test_a_plugin_that_imports_a_moved_module_is_told_where_it_is(
    statement: str, old: str, new: str, tmp_path: Path, monkeypatch, caplog
) -> None:
    said = load(statement, tmp_path, monkeypatch, caplog)
    assert "the method plugin planted could not be loaded" in said
    assert f"it imports {old}, which is {new} now; see docs/develop/migration.md" in said


@pytest.mark.parametrize("statement", ["import torch_of_the_future", "from outrider.core.tree import Bush", "1 / 0"])
def test_any_other_fault_of_a_plugin_is_given_as_it_is(statement: str, tmp_path: Path, monkeypatch, caplog) -> None:
    said = load(statement, tmp_path, monkeypatch, caplog)
    assert "could not be loaded" in said and "Error" in said and "migration" not in said


def test_every_module_that_moved_is_where_the_table_says() -> None:
    assert (ROOT / moved.PAGE).is_file()
    gone = [new for new in moved.MOVED.values() if importlib.util.find_spec(new) is None]
    assert gone == []
    page = (ROOT / moved.PAGE).read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(outrider\.[\w.]+)` \| `(outrider\.[\w.]+)` \|$", page, re.MULTILINE)) == moved.MOVED


@dataclass
class Current:
    name: str = "current"
    needs: Needs = Needs()
    shared_noise: bool = False

    def begin(self, slot, context): ...
    def absorb(self, chunks): ...
    def propose(self, slots, budgets, noise): ...
    def observe(self, slots, records): ...
    def end(self, slot): ...


class WithChunks(Current):
    def begin(self, slot, context, chunks): ...


class WithoutAbsorb(Current):
    absorb = None


class OneByOne(Current):
    def observe(self, slot, record): ...


class OldGrower:
    def grow(self, source, slots, pending, budgets, noise): ...
    def observe(self, slot, record): ...


def build(drafter: object, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    recipe = Recipe("planted", drafter, verifier("invariant"), controller("fixed", 4))
    info = registry.MethodInfo("planted", "-", "-", "foreign", True, "nothing", registry.Options, lambda *_: recipe)
    registry.table()  # loads what is installed, which is to stay when the planted method goes
    monkeypatch.setattr(registry, "_METHODS", {**registry._METHODS, "planted": info})
    return registry.build("planted", SimpleNamespace())


@pytest.mark.parametrize(
    ("drafter", "changed"),
    [
        (WithChunks(), r"its drafter WithChunks has begin\(slot, context, chunks\)"),
        (WithoutAbsorb(), r"its drafter WithoutAbsorb has no absorb\(chunks\)"),
        (OneByOne(), r"its drafter OneByOne has observe\(slot, record\)"),
        (Grown(WithChunks(), OldGrower()), r"its source WithChunks has begin\(slot, context, chunks\)"),
        (Grown(Current(), OldGrower()), r"its grower OldGrower has observe\(slot, record\)"),
    ],
)
def test_a_drafter_of_the_earlier_protocol_is_refused_when_it_is_built(drafter, changed: str, monkeypatch) -> None:
    message = rf"method planted was written for an earlier protocol: {changed}.* now.*; see docs/develop/migration.md"
    with pytest.raises(InputError, match=message):
        build(drafter, monkeypatch)


def test_a_drafter_of_todays_protocol_is_built(monkeypatch) -> None:
    drafter = Current()
    assert build(drafter, monkeypatch).drafter is drafter
    assert build(Grown(Current(), None), monkeypatch).drafter.source.name == "current"


def test_a_drafter_may_take_anything(monkeypatch) -> None:
    class Forwarding(Current):
        def begin(self, *given, **named): ...
        def observe(self, *given): ...

    assert build(Forwarding(), monkeypatch).drafter is not None
