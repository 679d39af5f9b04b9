"""The layers of the package, enforced: walks every import, lazy ones too, and fails on one that points upwards."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import outrider

PACKAGE = Path(outrider.__file__).parent

MIDDLE = {"draft", "grow", "verify", "control", "constrain", "store"}  # one file a method; each knows only the core
SURFACE = {"api", "dropin"}  # what users import
TOP = {"check", "bench", "cli", "serve", "train"}  # may import everything below
KNOWN = {
    "core": set[str](),
    "models": {"core", "_version"},
    "runtime": {"core", "models"},
    **{layer: {"core"} for layer in MIDDLE},
    "methods": {"core", "models", "runtime", *MIDDLE},  # the only place below the top that names concrete classes
    "export": {"core", "models"},
    "plugins": {"core", "draft", "control"},  # other engines load it: no model, no runtime of ours
    "explain": {"core"},
    "search": {"core"},  # populations of sequences: on the engine's loop, apart from concrete constraints
    **{layer: {"core", "models", "runtime", "methods", "constrain", "store", "explain", "api"} for layer in SURFACE},
}
BACKENDS = {"eager", "cuda", "openvino", "native"}  # folders of the runtime: reached through it only


def allowed(layer: str) -> set[str]:
    """The layers that a file of `layer` may import from besides its own."""
    return _layers() if layer in TOP | {"", "__main__"} else KNOWN[layer]


def layer_of(module: str) -> str:
    """`outrider.draft.model.draft_model` -> `draft`; the package itself -> ``."""
    return (module.split(".") + [""])[1]


def violations(module: str, imported: set[str]) -> list[str]:
    layer = layer_of(module)
    bad = {name for name in imported if layer_of(name) not in {layer, *allowed(layer)}}
    bad |= {name for name in imported if layer != "runtime" and _backend(name)}
    apart = {*BACKENDS} - {_backend(module)} - ({"eager"} if _backend(module) == "cuda" else set())  # what it falls to
    bad |= {name for name in imported if _backend(module) and _backend(name) in apart}
    return [f"{module} imports {name}" for name in sorted(bad)]


def _backend(module: str) -> str:
    """The runtime's folder that a module lies in; empty where it lies in none."""
    place = (module.split(".") + ["", ""])[1:3]
    return place[1] if place[0] == "runtime" and place[1] in BACKENDS else ""


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
    assert {"outrider.core.engine", "outrider.core.tree", "outrider.methods", "outrider.models.load"} <= set(found)
    wrong = [
        line
        for module, path in found.items()
        for line in violations(module, imports_of(path.read_text(), module, path.name == "__init__.py"))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("outrider.core.engine", "from outrider.draft.model.draft_model import ModelSource"),
        ("outrider.core.engine", "def f():\n    import outrider.verify.rejection"),
        ("outrider.core.engine", "from outrider import methods"),
        ("outrider.core.engine", "from ..runtime import slots"),
        ("outrider.draft.model.draft_model", "from outrider.runtime.slots import SlotTarget"),
        ("outrider.draft.model.draft_model", "from outrider.models.truncate import truncate"),
        ("outrider.draft.model.draft_model", "from ...grow.chain import Chain"),
        ("outrider.draft.feature.eagle3", "from outrider.runtime.native.kernels.linear import pack"),
        ("outrider.verify.block", "from outrider.methods import MethodInfo"),
        ("outrider.control.goodput", "from outrider.draft.mix import Mix"),
        ("outrider.runtime.slots", "if TYPE_CHECKING:\n    from outrider.api import Outrider"),
        ("outrider.runtime.native.backend", "from outrider.runtime.openvino.convert import trace"),
        ("outrider.methods.trained", "from outrider.runtime.native.kernels.team import Team"),
        ("outrider.train.kinds.heads", "from outrider.runtime.eager.cache import SlotCache"),
        ("outrider.methods.registry", "from outrider.cli.output import table"),
        ("outrider.dropin", "from outrider.verify.invariant import Invariant"),
        ("outrider.api", "from outrider.bench import compare"),
        ("outrider.explain.picture", "from outrider.api import Outrider"),
        ("outrider.api", "from outrider.draft.lookup.prompt_lookup import PromptLookup"),
        ("outrider.models.load", "from outrider.runtime.slots import SlotTarget"),
        ("outrider.plugins.vllm", "from outrider.models.load import load_model"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    assert violations(module, imports_of(source, module, is_package=False))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("outrider.core.engine", "import torch\nfrom outrider.core.protocols import Target"),
        ("outrider.verify.recursive", "from outrider.verify.walk import follow\nfrom .residual import accept_ratio"),
        ("outrider.methods.drafted", "from outrider.draft.model.draft_model import ModelSource"),
        ("outrider.check.gate", "from outrider.core.engine import Engine\nfrom outrider.verify.block import Block"),
        ("outrider.cli.main", "from outrider import __version__, methods"),
        ("outrider.runtime.choice", "from outrider.runtime.native.backend import NativeBackend"),
        ("outrider.runtime.native.backend", "from outrider.runtime.native.kernels.team import Team"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert violations(module, imports_of(source, module, is_package=False)) == []
