"""Text that the target writes: its exact distribution in the answers, forced marks between turns, shard by shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.train.text import selfdata
from outrider.train.text.dialogue import OPENINGS, Dialogue, Piece, dialogue, template_marks
from outrider.train.text.material import Answer, about, answers_in
from outrider.train.text.selfdata import (
    ANSWER,
    FORCED,
    USER,
    DataPlan,
    SelfData,
    read_data,
    sample_shard,
    sampled,
    write_data,
)

PLAN = DataPlan(tokens=2 * 8 * 24, length=24, batch=8)


def shard(target: LoadedModel, script: Dialogue, plan: DataPlan) -> selfdata.SelfData:
    return sample_shard(target.model, script, plan, 0, lambda step: None)


def test_answers_at_temperature_zero_are_the_targets_greedy_text(tiny_llama: LoadedModel) -> None:
    plan = DataPlan(tokens=1, length=24, batch=3, answer_temperatures=(0.0,))
    made = shard(tiny_llama, dialogue(None, frozenset(), 5), plan)
    greedy = tiny_llama.model.generate(torch.tensor([[5]]), max_new_tokens=23, do_sample=False, eos_token_id=None)
    assert made.tokens.tolist() == greedy.tolist() * 3


def test_answers_at_temperature_one_follow_the_targets_distribution(tiny_llama: LoadedModel) -> None:
    plan = DataPlan(tokens=1, length=2, batch=4000, answer_temperatures=(1.0,))
    made = shard(tiny_llama, dialogue(None, frozenset(), 5), plan)
    probs = tiny_llama.model(torch.tensor([[5]])).logits[0, -1].softmax(-1)
    seen = torch.bincount(made.tokens[:, 1], minlength=64) / 4000
    errors = (seen - probs) / (probs * (1 - probs) / 4000).sqrt()
    assert errors.abs().max() < 5  # 64 binomial shares; one beyond five sigma has chance 4e-5


def test_turns_are_forced_sampled_and_ended_as_the_script_says(tiny_llama: LoadedModel) -> None:
    pieces = (Piece((7, 8), False, least=3, then=(1,)), Piece((9, 10), True, then=(0,)))
    plan = DataPlan(tokens=1, length=64, batch=16, most=6, answer_temperatures=(1.0,))
    made = shard(tiny_llama, Dialogue(pieces, (0,), frozenset({9, 3})), plan)
    for tokens, roles in zip(made.tokens.tolist(), made.roles.tolist(), strict=True):
        assert tokens[:2] == [7, 8] and roles[:2] == [FORCED, FORCED]
        turns = _turns(tokens, roles)
        assert [role for role, _ in turns] == [USER, ANSWER] * (len(turns) // 2) + [USER] * (len(turns) % 2)
        for role, turn in turns[:-1]:
            assert len(turn) <= 6
            if role == USER:
                assert len([t for t in turn if t not in (9, 3)]) >= 3


def _turns(tokens: list[int], roles: list[int]) -> list[tuple[int, list[int]]]:
    turns: list[tuple[int, list[int]]] = []
    for token, role, before in zip(tokens[2:], roles[2:], roles[1:-1], strict=True):
        if role != FORCED and before in (FORCED, 3 - role):
            turns.append((role, []))
        if role != FORCED:
            turns[-1][1].append(token)
    return turns


def test_a_chat_model_writes_both_sides(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    head, answer_mark, user_mark = template_marks(smollm2.tokenizer)
    assert head.endswith("<|im_start|>user\n")
    assert answer_mark == "<|im_end|>\n<|im_start|>assistant\n"
    assert user_mark == "<|im_end|>\n<|im_start|>user\n"
    script = dialogue(smollm2.tokenizer, smollm2.eos_ids, 0)
    assert len(script.first) == len(OPENINGS)
    for piece in (script.pieces[i] for i in script.first):
        assert not piece.answer and all(script.pieces[i].answer for i in piece.then)
    made = shard(smollm2, script, DataPlan(tokens=1, length=72, batch=4, most=12))
    text = [smollm2.tokenizer.decode(row) for row in made.tokens]
    assert all(head in row for row in text) and any(answer_mark in row for row in text)
    assert (made.roles == ANSWER).any() and (made.roles == USER).any()


def test_an_interrupted_run_goes_on_with_the_same_text(
    tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_data(tiny_llama, PLAN, tmp_path / "whole")
    seen: list[int] = []

    def stop(done: int, of: int) -> None:
        seen.append(done)
        if done >= of // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_data(tiny_llama, PLAN, tmp_path / "cut", stop)
    numbers: list[int] = []
    original = selfdata.sample_shard
    monkeypatch.setattr(selfdata, "sample_shard", lambda *a: (numbers.append(a[3]), original(*a))[1])
    resumed = write_data(tiny_llama, PLAN, tmp_path / "cut")
    assert numbers == [1]  # the first shard was not written again
    assert torch.equal(resumed.tokens, whole.tokens) and torch.equal(resumed.roles, whole.roles)
    assert not torch.equal(whole.tokens[:8], whole.tokens[8:])


def test_text_of_another_plan_or_target_is_refused(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    write_data(tiny_llama, PLAN, tmp_path)
    with pytest.raises(InputError, match=r"has length 24 \(asked: 12\), seed 0 \(asked: 1\); ask for the same"):
        write_data(tiny_llama, DataPlan(tokens=1, length=12, batch=8, seed=1), tmp_path)
    with pytest.raises(InputError, match=f"has target {tiny_llama.fingerprint}"):
        write_data(replace(tiny_llama, fingerprint="another"), PLAN, tmp_path)
    (tmp_path / "shard-0000.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match="remove it"):
        write_data(tiny_llama, PLAN, tmp_path)


def test_shards_of_another_size_are_gone_on_from(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    first = write_data(tiny_llama, PLAN, tmp_path)
    plan = DataPlan(tokens=3 * 8 * 24, length=24, batch=4)
    seen: list[tuple[int, int]] = []
    more = write_data(tiny_llama, plan, tmp_path, lambda done, of: seen.append((done, of)))
    assert torch.equal(more.tokens[: len(first.tokens)], first.tokens)
    assert len(list(tmp_path.iterdir())) == 4 and sampled(tmp_path, plan) == 24 >= len(more.tokens) > 8
    assert seen[-1] == (plan.tokens, plan.tokens) and all(done <= of for done, of in seen)


def test_text_of_other_settings_is_taken_as_it_is_where_it_is_enough(
    tiny_llama: LoadedModel, tmp_path: Path, caplog
) -> None:
    made = write_data(tiny_llama, PLAN, tmp_path)
    asked = DataPlan(tokens=PLAN.tokens, length=48, batch=3, seed=1)
    taken = write_data(tiny_llama, asked, tmp_path, as_it_is=True)
    assert torch.equal(taken.tokens, made.tokens) and "has length 24 (asked: 48), seed 0 (asked: 1)" in caplog.text
    with pytest.raises(InputError, match=r"384 tokens, too few for the 385 .* length 24 \(asked: 48\)"):
        write_data(tiny_llama, replace(asked, tokens=PLAN.tokens + 1), tmp_path, as_it_is=True)
    with pytest.raises(InputError, match="another target"):
        write_data(replace(tiny_llama, fingerprint="another"), PLAN, tmp_path, as_it_is=True)
    assert len(list(tmp_path.iterdir())) == 2


def test_no_beginning_comes_twice(tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two user turns that are equal, in one shard or in two, leave one sequence: the first."""
    roles = torch.tensor([[0, 0, 1, 2, 2]] * 4, dtype=torch.uint8)
    shards = [
        SelfData(torch.tensor([[7, 8, 1, 5, 5], [7, 8, 2, 5, 5], [7, 8, 1, 6, 6], [7, 8, 3, 5, 5]]).int(), roles),
        SelfData(torch.tensor([[7, 8, 2, 9, 9], [7, 8, 4, 5, 5], [7, 8, 5, 5, 5], [7, 8, 4, 5, 6]]).int(), roles),
    ]
    monkeypatch.setattr(selfdata, "sample_shard", lambda *a: shards[a[3]])
    plan = DataPlan(tokens=40, length=5, batch=4)
    for _ in range(2):  # the second time from the files
        made = write_data(tiny_llama, plan, tmp_path)
        assert [row[2:4] for row in made.tokens.tolist()] == [[1, 5], [2, 5], [3, 5], [4, 5], [5, 5]]


def test_damaged_text_is_refused(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    write_data(tiny_llama, PLAN, tmp_path)
    path = tmp_path / "shard-0000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    for read in (lambda: write_data(tiny_llama, PLAN, tmp_path), lambda: read_data(tmp_path, tiny_llama.fingerprint)):
        with pytest.raises(InputError, match="checksum differs"):
            read()
    del data
    save_file(load_file(path), path)
    with pytest.raises(InputError, match="cannot be read"):
        read_data(tmp_path, tiny_llama.fingerprint)


def test_text_is_read_back_by_its_own_target_only(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    made = write_data(tiny_llama, PLAN, tmp_path)
    assert torch.equal(read_data(tmp_path, tiny_llama.fingerprint).tokens, made.tokens)
    with pytest.raises(InputError, match="another target"):
        read_data(tmp_path, "0" * 16)
    with pytest.raises(InputError, match="outrider train data"):
        read_data(tmp_path / "nowhere", tiny_llama.fingerprint)


def test_answers_are_found_with_the_question_that_began_the_conversation() -> None:
    said = list(range(100, 170))
    tokens = np.array([1, 2, 50, 51, 3, *said, 9, 4, 60, 3, *said[:5], 9, 4, 3, *said, 9, 4])
    roles = np.array([0, 0, 1, 1, 0, *[2] * 71, 0, 1, 0, *[2] * 6, 0, 0, *[2] * 71, 0])
    found = answers_in(tokens, roles, head=2, mark=1, ends=frozenset({9}))
    assert found == [Answer(tuple(said), (50, 51)), Answer(tuple(said))]  # five tokens are no material
    assert answers_in(tokens[:-1], roles[:-1], 2, 1, frozenset({9}))[1:] == []  # cut off by the end


def test_conversations_about_earlier_answers_carry_them_whole(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    script = dialogue(tokenizer, smollm2.eos_ids, 0)
    prose = "Bees live in hives. They make honey. " * 10
    code = "```python\ndef add(a, b):\n    return a + b\n```\n" * 5

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    made = about(script, tokenizer, [Answer(ids(prose), ids("What do bees do?")), Answer(ids(code))], 40, 300, 0)
    texts = [tokenizer.decode(made.pieces[i].tokens) for i in made.first]
    head, mark, _ = script.marks
    assert len(texts) == 40 and made.pieces[: len(script.pieces)] == script.pieces
    assert all(text.startswith(head) and text.endswith(mark) for text in texts)
    assert all(prose.strip() in text or code.strip() in text for text in texts)
    assert any("Question: What do bees do?" in text for text in texts)
    assert any("Summarize" in text for text in texts) and any("type hints" in text for text in texts)
    assert all(made.pieces[i].answer and made.pieces[i].then == script.follow for i in made.first)
