"""`outrider sample` and `outrider find` on a tiny model of bytes: what is asked holds, and bad input is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import outrider
from tests.store.test_build import byte_tokenizer

END = 255
FILLER = "zyxwv" * 1600  # what is said of a corpus needs one of some size
RULES = "def viable(text):\n    return text.isdigit() or not text\ndef complete(text):\n    return len(text) >= 2\n"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, model: LlamaForCausalLM, tmp_path: Path) -> Any:
    from outrider.cli import app

    real = outrider.load

    def load(*_: Any, **options: Any) -> Any:
        kept = {key: options[key] for key in ("max_slots",) if key in options}
        return real(model, method="plain", tokenizer=byte_tokenizer(), runtime="eager", **kept)

    monkeypatch.setattr("outrider.load", load)
    monkeypatch.setattr("outrider.models.load_tokenizer", lambda name, **_: byte_tokenizer())
    monkeypatch.chdir(tmp_path)
    Path("rules.py").write_text(RULES)
    corpus = "".join(
        json.dumps({"text": text}) + "\n" for text in ("the cat sat on the mat", "a dog ran", "cats", FILLER)
    )
    Path("corpus.jsonl").write_text(corpus)
    return lambda *args: CliRunner().invoke(app, list(args))


@pytest.fixture
def store(run: Any) -> str:
    pytest.importorskip("pydivsufsort", reason="building an index needs the extra retrieval")
    result = run("index", "build", "--corpus", "corpus.jsonl", "-t", "bytes", "--out", "s", "--fm")
    assert result.exit_code == 0, result.stderr
    assert "8,035 in 4 documents" in result.stdout
    return "s"


def said(run: Any, *args: str) -> dict[str, Any]:
    result = run("sample", "x", "--raw", "--seed", "1", "--json", *args)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_every_text_obeys_the_file_and_its_calls_are_counted(run: Any) -> None:
    found = said(run, "--predicate", "rules.py", "-n", "6", "--samples", "3")
    assert len(found["texts"]) == 3 and all(re.fullmatch(r"\d{2,6}", text["text"]) for text in found["texts"])
    assert found["predicate_calls_per_token"] > 1
    assert run("sample", "x", "--raw", "--predicate", "rules.py", "-n", "3").stdout.strip().isdigit()


def test_particles_have_weights_and_more_of_them_than_slots_by_default(run: Any) -> None:
    found = said(run, "--predicate", "rules.py", "-n", "5", "--particles", "12")
    assert sum(text["weight"] for text in found["texts"]) == pytest.approx(1)
    assert all(text["text"].isdigit() for text in found["texts"])
    assert 0 < found["legal_probability"] < 1e-3 and found["effective_particles"] <= 12


def test_texts_are_taken_from_the_store_alone(run: Any, store: str) -> None:
    found = said(run, "--within", store, "-n", "8", "--samples", "4")
    corpus = Path("corpus.jsonl").read_text()
    assert all(text["text"] and text["text"] in corpus for text in found["texts"])


def test_rounds_tighten_the_bound_and_the_last_one_is_shown(run: Any, store: str) -> None:
    found = said(run, "--within", store, "-n", "4", "--samples", "2", "--rounds", "6")
    assert found["rounds"] == 6 and len(found["texts"]) == 2
    assert found["bounds"] == sorted(found["bounds"], reverse=True) and found["bounds"][-1] < found["bounds"][0] < 1


def test_documents_are_ranked_with_the_reasons(run: Any, store: str) -> None:
    result = run("find", "the cat", "--store", store, "--top", "2", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["documents"]
    assert len(found) == 2 and found[0]["score"] >= found[1]["score"] > 0
    assert found[0]["text"] in Path("corpus.jsonl").read_text() and found[0]["keys"]
    shown = run("find", "the cat", "--store", store, "--top", "2", "--full")
    assert "score" in shown.stdout and found[0]["text"] in shown.stdout


def test_a_compact_store_is_described_checked_and_kept_from_what_it_cannot_do(run: Any, store: str) -> None:
    found = json.loads(run("index", "info", store, "--verify", "--json").stdout)
    assert (found["tokens"], found["documents"], found["finished"]) == (8035, 4, True)
    refused = run("index", "query", store, "the")
    assert refused.exit_code == 2 and "outrider find" in refused.stderr
    again = run("index", "build", "--corpus", "corpus.jsonl", "-t", "bytes", "--out", store, "--fm")
    assert again.exit_code == 0 and "holds this corpus already" in again.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("sample", "x"), "there is no condition"),
        (("sample", "x", "--regex", "a", "--rounds", "2", "--particles", "2"), "choose one way"),
        (("sample", "x", "--predicate", "rules.py", "--rounds", "2"), "learns from masks"),
        (("sample", "x", "--predicate", "rules.py", "--particles", "2", "-t", "0"), "temperature above 0"),
        (("sample", "x", "--raw", "--predicate", "none.py"), "no such file"),
        (("sample", "x", "--raw", "--predicate", "rules.py", "--top-k", "3"), "leave out top_k"),
        (("sample", "x", "--raw", "--within", "nowhere"), "no store here"),
        (("find", " ", "--store", "s"), "the question is empty"),
        (("find", "a", "--store", "nowhere"), "no store here"),
    ],
)
def test_what_cannot_be_is_one_line_with_a_remedy(run: Any, args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error")]) == 1
