"""The target's own text: exactly its law in the answers, forced marks where turns change, resumable shard by shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.errors import InputError
from outrider.models import LoadedModel
from outrider.train import selfdata
from outrider.train.dialogue import OPENINGS, Dialogue, Piece, dialogue, template_marks
from outrider.train.selfdata import ANSWER, FORCED, USER, DataPlan, sample_shard, write_data

PLAN = DataPlan(tokens=2 * 8 * 24, length=24, batch=8)


def shard(target: LoadedModel, script: Dialogue, plan: DataPlan) -> selfdata.SelfData:
    return sample_shard(target.model, script, plan, 0, lambda step: None)


def test_answers_at_temperature_zero_are_the_targets_greedy_text(tiny_llama: LoadedModel) -> None:
    plan = DataPlan(tokens=1, length=24, batch=3, answer_temperatures=(0.0,))
    made = shard(tiny_llama, dialogue(None, frozenset(), 5), plan)
    greedy = tiny_llama.model.generate(torch.tensor([[5]]), max_new_tokens=23, do_sample=False, eos_token_id=None)
    assert made.tokens.tolist() == greedy.tolist() * 3


def test_answers_at_temperature_one_follow_the_targets_law(tiny_llama: LoadedModel) -> None:
    plan = DataPlan(tokens=1, length=2, batch=4000, answer_temperatures=(1.0,))
    made = shard(tiny_llama, dialogue(None, frozenset(), 5), plan)
    law = tiny_llama.model(torch.tensor([[5]])).logits[0, -1].softmax(-1)
    seen = torch.bincount(made.tokens[:, 1], minlength=64) / 4000
    errors = (seen - law) / (law * (1 - law) / 4000).sqrt()
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
    with pytest.raises(InputError, match="another target or plan"):
        write_data(tiny_llama, DataPlan(tokens=1, length=24, batch=8, seed=1), tmp_path)
    (tmp_path / "shard-0000.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match="remove it"):
        write_data(tiny_llama, PLAN, tmp_path)
