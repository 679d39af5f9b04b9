"""The layers of the package, enforced: walks every import, lazy ones too, and fails on one that points upwards."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import outrider

PACKAGE = Path(outrider.__file__).parent

# all that a method may know
CONTRACT = {
    "errors",
    "tree",
    "proposals",
    "protocols",
    "sampling",
    "params",
    "noise",
    "files",
    "compiled",
    "native",
}
CORE = CONTRACT | {"generation", "text", "sequence"}  # what the engine may know besides
MIDDLE = {"target", "draft", "grow", "verify", "control", "constrain"}  # one file a method; concrete
TOP = {"check", "bench", "cli", "serve", "train"}  # may import everything below
HANDED_IN = {"target", "constrain"}  # the runtime and the caller's constraints: no method chooses them


def allowed(layer: str) -> set[str]:
    """The layers that a file of `layer` may import from besides its own."""
    if layer in CONTRACT:
        return CONTRACT
    if layer in CORE or layer == "engine":
        return CORE
    if layer in MIDDLE or layer == "store":
        return CONTRACT
    if layer == "models":
        return {"errors", "_version"}
    if layer == "methods":  # the registry knows recipes, not what they are made of
        return CORE | {"models", "recipes"}
    if layer == "recipes":  # the only place below the top that names concrete methods
        return CORE | MIDDLE | {"models", "methods", "store"}
    if layer in TOP or layer in {"", "__main__"}:
        return _layers()
    return _layers() - TOP - (MIDDLE - HANDED_IN)  # the Python surface knows methods by name only


def layer_of(module: str) -> str:
    """`outrider.draft.model` -> `draft`; the package itself -> ``."""
    return (module.split(".") + [""])[1]


def violations(module: str, imported: set[str]) -> list[str]:
    layer = layer_of(module)
    bad = {name for name in imported if layer_of(name) not in {layer, *allowed(layer)}}
    return [f"{module} imports {name}" for name in sorted(bad)]


def imports_of(source: str, module: str, is_package: bool) -> set[str]:
    """Every `outrider...` module that the source imports, anywhere in it; relative imports resolved."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parent = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parent, base] if base else parent)
            # `from outrider import methods` reaches the submodule, not the package
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "outrider" else {base}
    return {name for name in found if name.split(".")[0] == "outrider" and layer_of(name) in _layers()}


def _layers() -> set[str]:
    return {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}


def modules() -> dict[str, Path]:
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def test_imports_point_downwards() -> None:
    found = modules()
    assert {"outrider.engine", "outrider.tree", "outrider.methods", "outrider.models.load"} <= set(found)
    wrong = [
        line
        for module, path in found.items()
        for line in violations(module, imports_of(path.read_text(), module, path.name == "__init__.py"))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("outrider.engine", "from outrider.draft.model import ModelSource"),
        ("outrider.engine", "def f():\n    import outrider.verify.rejection"),
        ("outrider.engine", "from outrider import methods"),
        ("outrider.engine", "from .target import eager"),
        ("outrider.tree", "from outrider.engine import Engine"),
        ("outrider.sampling", "from outrider.text import TextStream"),
        ("outrider.draft.model", "from outrider.target.eager import TransformersTarget"),
        ("outrider.draft.model", "from outrider.engine import Engine"),
        ("outrider.draft.model", "from ..grow.chain import Chain"),
        ("outrider.verify.block", "from outrider.methods import METHODS"),
        ("outrider.target.eager", "if TYPE_CHECKING:\n    from outrider.engine import Engine"),
        ("outrider.methods", "from outrider.cli.output import table"),
        ("outrider.dropin", "from outrider.verify.invariant import Invariant"),
        ("outrider.api", "from outrider.bench import compare"),
        ("outrider.api", "from outrider.draft.prompt_lookup import PromptLookup"),
        ("outrider.models.load", "from outrider.target.eager import TransformersTarget"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    assert violations(module, imports_of(source, module, is_package=False))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("outrider.engine", "import torch\nfrom outrider.protocols import Target"),
        ("outrider.verify.recursive", "from outrider.verify.walk import follow\nfrom .residual import accept_ratio"),
        ("outrider.recipes.drafted", "from outrider.draft.model import ModelSource"),
        ("outrider.check.gate", "from outrider.engine import Engine\nfrom outrider.verify.rejection import Rejection"),
        ("outrider.cli.main", "from outrider import __version__, methods"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert violations(module, imports_of(source, module, is_package=False)) == []
