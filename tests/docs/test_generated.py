"""What is written into the pages by programs is what they would write today."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

from outrider.methods import registry
from tests.docs.pages import DOCS, ROOT


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(f"outrider_docs_{name}", DOCS / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def same(folder: str, made: dict[str, str]) -> None:
    stale = [name for name, text in made.items() if (DOCS / folder / name).read_text(encoding="utf-8") != text]
    assert not stale, f"run `make pages`: {', '.join(stale)}"


def test_the_pages_of_methods_are_what_the_registry_says() -> None:
    made = script("methods").pages()
    same("methods", made)
    assert {page.name for page in (DOCS / "methods").iterdir()} == set(made)


def test_every_method_has_its_paper_its_options_and_a_file_that_exists() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "methods").glob("*.md"))
    listed = dict(re.findall(r"^## ([\w-]+)$.*?^- File: `([\w/.]+)`", text, re.M | re.S))
    for info in registry.table():
        if info.family != "planted":
            assert listed[info.name] == f"outrider/{info.file}"
            assert (ROOT / "outrider" / info.file).is_file()


def test_a_method_whose_family_has_no_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = script("methods")
    monkeypatch.setattr(methods, "PAGES", methods.PAGES[:-1])
    with pytest.raises(SystemExit, match="give its family, 'block', a page"):
        methods.pages()


def test_the_page_of_commands_is_what_the_command_line_says() -> None:
    same("reference", {"commands.md": script("commands").page()})


def test_the_pages_of_results_are_what_the_files_say() -> None:
    same("", script("results").pages())
