"""`outrider index`: build, info, query and merge, as tables and as JSON; every bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.store.test_build import byte_tokenizer


@pytest.fixture(autouse=True)
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of bytes by the name `bytes`, another by the name `other`."""
    known = {"bytes": byte_tokenizer(), "other": byte_tokenizer(shift=1)}
    monkeypatch.setattr("outrider.models.load_tokenizer", lambda name, **_: known[name])


@pytest.fixture
def store(run: Any, tmp_path: Path) -> Path:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("the cat sat on the mat; the cat ran")
    (corpus / "b.txt").write_text("the dog sat")
    (corpus / "c.png").write_bytes(b"\x89PNG\0\0")
    result = run("index", "build", "--corpus", str(corpus), "--tokenizer", "bytes", "--out", str(tmp_path / "s"))
    assert result.exit_code == 0, result.stderr
    assert "46 in 2 documents" in result.stdout and "1 files are not UTF-8 text" in result.stderr
    return tmp_path / "s"


def test_info_says_what_is_there(run: Any, store: Path, tmp_path: Path) -> None:
    shown = run("index", "info", str(store))
    assert "46 in 2 documents" in shown.stdout and "bytes (" in shown.stdout
    found = json.loads(run("index", "info", str(store), "--verify", "--json").stdout)
    assert (found["tokens"], found["documents"], found["finished"], len(found["shards"])) == (46, 2, True, 1)
    assert found["corpora"][0]["skipped_files"] == 1
    assert 0 <= sum(p.stat().st_size for p in store.glob("*.shard")) - found["bytes"] < 256  # padding


def test_query_backs_off_to_the_longest_match(run: Any, store: Path) -> None:
    found = json.loads(run("index", "query", str(store), "a big cat", "--json").stdout)
    assert (found["tokens"], found["matched"], found["match"], found["count"]) == (9, 4, " cat", 2)
    assert [(n["text"], n["count"], n["probability"]) for n in found["next"]] == [(" ", 2, 1.0)]
    shown = run("index", "query", str(store), "the ", "--top", "2")
    assert "longest match: 4 of 4 tokens, 4 times: 'the '" in shown.stdout
    assert "'c'" in shown.stdout and "0.500" in shown.stdout and len(shown.stdout.splitlines()) == 4
    assert "nothing follows" in run("index", "query", str(store), "cat ran").stdout
    nothing = json.loads(run("index", "query", str(store), "Z", "--json").stdout)
    assert nothing["matched"] == 0 and nothing["count"] == 46


def test_more_is_added_and_shards_are_joined(run: Any, store: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"body": "a third"}) + "\n")
    build = ("index", "build", "--corpus", str(more), "-t", "bytes", "--out", str(store), "--field", "body")
    assert "--add" in run(*build).stderr
    found = json.loads(run(*build, "--add", "--json").stdout)
    assert (len(found["shards"]), found["tokens"], len(found["corpora"])) == (2, 53, 2)
    again = run(*build, "--add")
    assert again.exit_code == 0 and "holds this corpus already" in again.stderr
    joined = json.loads(run("index", "merge", str(store), "--json").stdout)
    assert (len(joined["shards"]), joined["tokens"]) == (1, 53)
    assert run(*build, "--add", "--merge").exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("index", "info", "nowhere"), "no store here"),
        (("index", "query", "nowhere", "x"), "outrider index build"),
        (("index", "merge", "nowhere"), "no store here"),
        (("index", "query", "STORE", "x", "--tokenizer", "other"), "built with the tokenizer of 'bytes'"),
        (("index", "build", "--corpus", "nowhere", "-t", "bytes", "--out", "new"), "does not exist"),
        (("index", "build", "--corpus", ".", "-t", "other", "--out", "STORE"), "choose another folder"),
        (("index", "build", "--corpus", ".", "-t", "bytes", "--out", "new", "--shard-bytes", "much"), "256M"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(run: Any, store: Path, args, message, monkeypatch, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    result = run(*(str(store) if arg == "STORE" else arg for arg in args))
    assert result.exit_code == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "empty" / "new").exists()
