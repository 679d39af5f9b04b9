"""SGLang's side: trees in its form; and, against the source of its wheel, everything that the plug-in counts on.

SGLang has no build for a CPU: its engine is not run here. What is read is its source, which needs no GPU.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from outrider.core.errors import InputError
from outrider.core.tree import fixed
from outrider.plugins.drafting import TokenDrafter
from outrider.plugins.sglang import Corpus

WHEEL = "sglang==0.5.23"
LOOP = list(range(12)) * 10


def test_trees_have_sglangs_form() -> None:
    corpus = Corpus(6)
    texts = {"a": LOOP[:40], "b": [7, 8, 9]}
    for _ in range(4):
        tokens, sees = corpus.batch_get(list(texts), list(texts.values()), [len(t) for t in texts.values()])
        texts["a"] = LOOP[: len(texts["a"]) + 1]
    tokens, sees = tokens.reshape(2, 6), sees.reshape(2, 6, 6)
    assert tokens[:, 0].tolist() == [LOOP[42], 9]
    assert tokens[0].tolist() == LOOP[42:48] and np.array_equal(sees[0], np.tri(6, dtype=int))  # a chain
    assert (sees[:, :, 0] == 1).all() and (np.diagonal(sees, axis1=1, axis2=2) == 1).all()
    assert (np.triu(sees, 1) == 0).all()  # nobody sees what stands behind


def test_a_node_sees_its_ancestors_and_no_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Corpus(7)
    tree = fixed(np.array([9, 1, 2, 3, 4, 5]), np.array([-1, 0, 0, 1, 2, 3]))
    monkeypatch.setattr(TokenDrafter, "draft", lambda self, texts, rooms: dict.fromkeys(texts, tree))
    tokens, sees = corpus.batch_get(["a"], [[8, 9]], [2])
    assert tokens.tolist() == [9, 1, 2, 3, 4, 5, 0]
    seen = [set(np.flatnonzero(row).tolist()) for row in sees.reshape(7, 7)]
    assert seen == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 1, 3, 5}, {0, 6}]


def test_corpora_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="NGRAM"):
        Corpus(4).load_external_corpus_named("books", [])
    assert Corpus(4).list_external_corpora() == {}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of SGLang's wheel, without what it depends on."""
    folder = tmp_path_factory.mktemp("sglang")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), WHEEL]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"needs the wheel {WHEEL}, which the package index does not give here")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return folder / "sglang" / "srt"


def definitions(path: Path) -> dict[str, ast.AST]:
    """Classes, functions and methods by their dotted names."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}": item for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def arguments(node: ast.AST) -> list[str]:
    assert isinstance(node, ast.FunctionDef)
    return [one.arg for one in (*node.args.args, *node.args.kwonlyargs) if one.arg not in ("self", "cls")]


@pytest.mark.slow
def test_sglang_registers_algorithms_and_finds_plugins_as_we_expect(source: Path) -> None:
    registry = definitions(source / "speculative" / "spec_registry.py")
    assert arguments(registry["register_algorithm"]) == [
        "name", "supports_overlap", "validate_server_args", "spec_class"
    ]  # fmt: skip
    for method in ("is_ngram", "has_draft_kv", "handle_server_args"):
        assert f"CustomSpecAlgo.{method}" in registry
    assert "get_spec" in registry
    assert arguments(definitions(source / "speculative" / "spec_info.py")["SpeculativeAlgorithm.register"])[0] == "name"
    assert '"sglang.srt.plugins"' in (source / "plugins" / "__init__.py").read_text()


@pytest.mark.slow
def test_sglangs_worker_asks_a_corpus_what_ours_answers(source: Path) -> None:
    worker = (source / "speculative" / "ngram_worker.py").read_text()
    asked = {
        node.func.attr
        for node in ast.walk(ast.parse(worker))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "ngram_corpus"
    }  # fmt: skip
    assert asked and all(callable(getattr(Corpus, name, None)) for name in asked), asked
    theirs = definitions(source / "speculative" / "cpp_ngram" / "ngram_corpus.py")
    for name in asked:
        ours = definitions(Path(sys.modules[Corpus.__module__].__file__ or ""))[f"Corpus.{name}"]
        assert arguments(ours) == arguments(theirs[f"NgramCorpus.{name}"]), name


@pytest.mark.slow
def test_sglangs_worker_takes_its_texts_whole_where_its_depth_is_large(source: Path) -> None:
    """We raise `max_trie_depth`; the worker must cut texts by it and size nothing by it."""
    worker = ast.parse((source / "speculative" / "ngram_worker.py").read_text())
    uses = [node for node in ast.walk(worker) if isinstance(node, ast.Attribute) and node.attr == "max_trie_depth"]
    assigned = [node for node in uses if isinstance(node.ctx, ast.Store)]
    assert len(assigned) == 1
    sizes = [
        node for node in ast.walk(worker)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("empty", "zeros")
        and any(isinstance(inner, ast.Attribute) and inner.attr == "max_trie_depth" for inner in ast.walk(node))
    ]  # fmt: skip
    assert not sizes
