"""Suites: what each is made of, and what is said when it cannot be made."""

from __future__ import annotations

import io
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from outrider.bench import suites
from outrider.bench.suites import CONTEXTS, find, long_context, synthetic, traffic
from outrider.core.errors import InputError, UnknownName

ROW = '{"question_id": 81, "category": "writing", "turns": ["Hello", "And then?"]}\n'


def test_the_synthetic_suite_needs_no_data_and_is_always_the_same() -> None:
    prompts = synthetic()
    assert prompts == synthetic() == find("synthetic").prompts
    assert {p.group for p in prompts} == {"edit", "extract", "count", "write"} and len(prompts) == 32
    assert len({p.id for p in prompts}) == 32 and synthetic(seed=1) != prompts


def test_spec_bench_by_path_has_its_groups(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(ROW + ROW.replace("writing", "rag").replace("81", "82"))
    suite = find(f"spec_bench:{path}")
    assert suite.name == "spec_bench" and [p.group for p in suite.prompts] == ["chat", "rag"]
    assert suite.prompts[0].rounds == 2 and not suite.ordered
    assert find(str(path)).name == "question"


def test_spec_bench_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(address: str, timeout: float) -> Any:
        asked.append(address)
        return io.BytesIO(ROW.encode())

    monkeypatch.setattr(suites, "user_cache_path", lambda name: tmp_path)
    monkeypatch.setattr(suites.urllib.request, "urlopen", answer)
    assert find("spec_bench").prompts == find("spec_bench").prompts
    assert len(asked) == 1


def test_without_a_network_the_path_is_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, timeout: float) -> Any:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(suites, "user_cache_path", lambda name: tmp_path)
    monkeypatch.setattr(suites.urllib.request, "urlopen", refuse)
    with pytest.raises(InputError, match="--suite spec_bench:FILE"):
        find("spec_bench")


def test_long_contexts_grow_and_stop_where_the_text_ends() -> None:
    prompts = long_context("word " * 1000)
    lengths = {p.group: len(p.turns[0]) for p in prompts}
    assert list(lengths) == [f"context-{n}" for n in CONTEXTS if 4 * n < 5000]
    assert sorted(lengths.values()) == list(lengths.values())
    assert len({p.turns[0] for p in prompts}) > len(lengths)  # several places of the text
    with pytest.raises(InputError, match="needs more than"):
        long_context("short")


def test_traffic_comes_back_to_every_passage_in_order(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) * 400 for i in range(12))
    path = tmp_path / "text.txt"
    path.write_text(text)
    suite = find(f"traffic:{path}")
    assert suite.ordered and suite.prompts == traffic(text)
    visits = [p.group for p in suite.prompts]
    assert visits == sorted(visits) and set(visits) == {"visit-1", "visit-2", "visit-3"}
    first = [p.turns[0] for p in suite.prompts if p.group == "visit-1"]
    assert first == [p.turns[0] for p in suite.prompts if p.group == "visit-3"]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [("nonsense", UnknownName, "known suites: synthetic"), ("long", InputError, "long:FILE.txt"),
     ("no-such.jsonl", InputError, "no such file"), ("traffic:no-such.txt", InputError, "no such file")],
)  # fmt: skip
def test_a_bad_suite_is_refused_with_the_remedy(spec: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find(spec)
