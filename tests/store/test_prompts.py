"""Every form of prompt file is read, and every broken one is refused in one line that says where and what to do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from outrider.core.errors import InputError
from outrider.store.prompts import GROUPS, Prompt, built_in_prompts, read_prompts

SPEC_BENCH = Path(__file__).parents[3] / "shared/data/spec_bench/question.jsonl"


def written(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


def test_the_three_forms_of_a_row(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = written(
        tmp_path / "p.jsonl",
        {"prompt": "Hello"},
        "",
        {"turns": ["a", "b"], "question_id": 81, "category": "roleplay"},
        {"messages": messages, "id": "m", "category": "translation"},
    )
    first, second, third = read_prompts(path)
    assert first == Prompt(id="1", turns=("Hello",)) and first.group == "all"
    assert second == Prompt(id="81", turns=("a", "b"), category="roleplay") and second.group == "chat"
    assert third.group == "translation" and third.conversation() == messages and third.rounds == 1
    assert read_prompts(path, limit=2) == [first, second]


def test_a_later_turn_follows_the_earlier_answers() -> None:
    prompt = Prompt(id="1", turns=("one", "two", "three"))
    assert prompt.rounds == 3
    assert [m["content"] for m in prompt.conversation(["first"])] == ["one", "first", "two"]
    assert [m["role"] for m in prompt.conversation(["first", "second"])] == ["user", "assistant"] * 2 + ["user"]
    assert prompt.raw(["first"]) == "one\n\nfirst\n\ntwo"


def test_line_separators_inside_a_string_do_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', encoding="utf-8")
    assert [p.turns[0] for p in read_prompts(path)] == ["a\u2028b", "c"]


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert read_prompts(path)[0].turns == ("a",)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"prompt": "a"}', '{"prompt": "b"'], "line 2 is not JSON"),
        (["[1]"], "line 1 is not a JSON object"),
        (["{}"], "line 1 needs exactly one of prompt, turns and messages; it has none"),
        (['{"prompt": "a", "turns": ["b"]}'], "it has prompt and turns"),
        (['{"prompt": 3}'], "line 1: prompt must be text"),
        (['{"prompt": "  "}'], "line 1: prompt must be text that is not empty"),
        (['{"turns": []}'], "line 1: turns must be a list of texts"),
        (['{"turns": "abc"}'], "line 1: turns must be"),
        (['{"messages": [{"role": "user"}]}'], "line 1: messages must be"),
        (["", "  "], "holds no prompts"),
        (["[" * 100_000], "line 1 is not JSON"),
    ],
)
def test_a_broken_row_is_named_by_its_line(tmp_path: Path, rows: list[str], message: str) -> None:
    path = written(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "a"}\n{"prompt": "caf\u00e9"}\n'.encode("latin-1"))
    with pytest.raises(InputError, match="line 2 is not UTF-8; save it"):
        read_prompts(path)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is a folder"):
        read_prompts(tmp_path)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_leaves_nothing_is_refused(limit: int) -> None:
    with pytest.raises(InputError, match="give 1 or more"):
        built_in_prompts(limit)


def test_built_in_prompts_cover_the_six_groups_with_distinct_ids() -> None:
    prompts = built_in_prompts()
    assert {p.group for p in prompts} == set(GROUPS)
    assert len({p.id for p in prompts}) == len(prompts) >= 18
    assert any(p.rounds > 1 for p in prompts)
    for group in ("summarization", "rag"):
        assert all(150 <= len(p.turns[0].split()) <= 300 for p in prompts if p.group == group)


@pytest.mark.skipif(not SPEC_BENCH.exists(), reason="the spec_bench file is not beside this checkout")
def test_spec_bench_has_six_groups_of_eighty() -> None:
    assert Counter(p.group for p in read_prompts(SPEC_BENCH)) == dict.fromkeys(GROUPS, 80)
