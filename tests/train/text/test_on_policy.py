"""On-policy text: every answer is the drafter's own, marks and users are the text's, shards are written once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import load_draft
from outrider.models.trained import load_trained
from outrider.train.kinds.registry import find_kind, plan_of, train_drafter
from outrider.train.text.dialogue import ANSWER, FORCED, USER
from outrider.train.text.on_policy import OnPolicyPlan, answered, is_chosen, write_on_policy
from outrider.train.text.selfdata import SelfData, read_data
from tests.train.conftest import make_markov, make_text

LENGTH, ASKED = 24, 4
PLAN = OnPolicyPlan(share=0.5, temperatures=(0.0, 1.0), block=3, batch=4, sequences=14)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return make_markov()


@pytest.fixture(scope="module")
def text(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> SelfData:
    whole = make_text(target, tmp_path_factory.mktemp("text"))
    made = SelfData(whole.tokens[:, :LENGTH].clone(), whole.roles[:, :LENGTH].clone())
    made.roles[:, :ASKED] = FORCED  # a few tokens to begin from
    return made


def trained(kind: str, target: LoadedModel, text: SelfData, folder: Path, **settings: Any) -> Path:
    plan = plan_of(find_kind(kind), {"batch": 8, "lr": 3e-3, "held_out": 8, **settings})
    train_drafter(kind, target, text, plan, folder)
    return folder


def with_norm(drafter: Path, factor: float, folder: Path) -> Path:
    """The drafter with a scaled norm before its head: it is less sure, or not at all."""
    shutil.copytree(drafter, folder)
    weights = load_file(folder / "model.safetensors")
    names = {name for name in weights if name.startswith(("norm", "model.norm"))}
    assert names
    scaled = {name: weight * factor if name in names else weight for name, weight in weights.items()}
    save_file(scaled, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def draft(target: LoadedModel, text: SelfData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("draft-model", target, text, tmp_path_factory.mktemp("draft"), layers="0,3", steps=10)


def write(target: LoadedModel, drafter: Path, text: SelfData, plan: OnPolicyPlan, folder: Path) -> SelfData:
    write_on_policy(target, drafter, text, plan, folder)
    return read_data(folder, target.fingerprint)


def greedy(model: Any, text: SelfData) -> torch.Tensor:
    """The first sequences as this model goes on by itself."""
    tokens = text.tokens[:8, :ASKED].long()
    while tokens.shape[1] < LENGTH:
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens.int()


def test_greedy_text_is_word_for_word_what_the_draft_says_alone(target, text, draft, tmp_path) -> None:
    plan = OnPolicyPlan(share=1, temperatures=(0.0,), block=3, batch=5, sequences=8)
    made = write(target, draft, text, plan, tmp_path)
    assert torch.equal(made.tokens, greedy(load_draft(draft, target), text))
    assert not torch.equal(made.tokens, greedy(target.model, text))  # the two differ, so it matters who writes
    assert torch.equal(made.roles, text.roles[:8])


def test_drawn_text_follows_the_drafts_distribution(target, text, draft, tmp_path) -> None:
    flatter = with_norm(draft, 0.5, tmp_path / "flatter")  # so that it matters who writes
    begin, zeros = text.tokens[:1, :ASKED].long(), torch.zeros(600, dtype=torch.int64)
    draws, targets = (m(begin).logits[0, -1].softmax(-1) for m in (load_draft(flatter, target), target.model))
    same = SelfData(text.tokens[zeros, : ASKED + 1], text.roles[zeros, : ASKED + 1])
    made = write(target, flatter, same, OnPolicyPlan(share=1, batch=300), tmp_path / "text")
    seen = torch.bincount(made.tokens[:, ASKED], minlength=64) / 600

    def worst(p: torch.Tensor) -> float:
        return float(((seen - p) / (p * (1 - p) / 600).sqrt().clamp(min=1 / 600)).abs().max())

    assert worst(draws) < 5 < worst(targets)  # 64 binomial shares; one beyond five sigma has chance 4e-5


@pytest.mark.parametrize("kind", ["eagle3", "eagle2", "fspad", "medusa", "hydra"])
def test_a_drafter_that_knows_two_words_says_nothing_else(kind, target, text, tmp_path) -> None:
    drafter = trained(kind, target, text, tmp_path / "drafter", vocab=2, steps=0)
    words = set(load_trained(kind, drafter, target).ids.tolist())
    made = write(target, drafter, text, replace(PLAN, share=1, temperatures=(1.0,)), tmp_path / "text")
    assert len(words) == 2 and set(made.tokens[:, ASKED:].flatten().tolist()) == words
    assert torch.equal(made.tokens[:, :ASKED], text.tokens[: PLAN.sequences, :ASKED])


def test_an_adapter_that_always_says_one_word_is_found_in_the_text(target, text, tmp_path) -> None:
    drafter = trained("kangaroo", target, text, tmp_path / "drafter", steps=0)
    drafter = with_norm(drafter, 0.0, tmp_path / "silent")
    made = write(target, drafter, text, replace(PLAN, share=1, temperatures=(0.0,)), tmp_path / "text")
    assert not made.tokens[:, ASKED:].any()  # of equals the first token of the vocabulary


def test_the_share_is_the_drafters_and_the_rest_stays_as_it_was(target, text, draft, tmp_path) -> None:
    said = write_on_policy(target, draft, text, PLAN, tmp_path)
    made = read_data(tmp_path, target.fingerprint)
    same = [torch.equal(a, b) for a, b in zip(made.tokens, text.tokens[:14], strict=True)]
    assert same == [not is_chosen(row, 0.5) for row in range(14)] and sum(same) == 7
    assert said == {"sequences": 14, "rewritten": 7, "tokens": 14 * LENGTH, "answers": 14 * (LENGTH - ASKED),
                    "own": 7 * (LENGTH - ASKED)}  # fmt: skip
    alone = greedy(load_draft(draft, target), text)
    assert [torch.equal(made.tokens[row], alone[row]) for row in (1, 3, 5, 7)] == [True, False, True, False]  # in turn
    assert [sum(is_chosen(row, share) for row in range(100)) for share in (0.01, 0.1, 0.3, 1.0)] == [1, 10, 30, 100]


# 1 opens a turn, 9 ends it, 8 ends all; the users say 50s, the target 60s, the drafter 70s
TOKENS = [1, 50, 9, 1, 60, 61, 9, 1, 51, 9, 1, 62, 63, 64]
ROLES = [FORCED, USER, FORCED, FORCED, ANSWER, ANSWER, ANSWER, FORCED, USER, FORCED, FORCED, ANSWER, ANSWER, ANSWER]
ENDS = frozenset({9, 8})


def told(
    answers: list[list[int]], tokens: list[int] = TOKENS, roles: list[int] = ROLES, most: int = 400, requests: Any = ()
) -> Any:
    """The text with these answers; what stood before each, and its length at most."""
    writing, asked = answered(tokens, roles, ENDS, most, requests), []
    asked.append(next(writing))
    try:
        for answer in answers:
            asked.append(writing.send(answer))
    except StopIteration as end:
        made, kinds = end.value
        assert len(made) == len(kinds) == len(tokens)
        return made, kinds, asked
    raise AssertionError("it asks for more")


def test_a_shorter_answer_lets_the_next_user_speak_and_the_end_is_filled_with_what_does_not_count() -> None:
    made, kinds, asked = told([[70, 9], [71, 72, 9]])
    assert made == [1, 50, 9, 1, 70, 9, 1, 51, 9, 1, 71, 72, 9, 9]
    assert kinds == [0, 1, 0, 0, 2, 2, 0, 1, 0, 0, 2, 2, 2, 0]
    assert asked == [([1, 50, 9, 1], 10), ([1, 50, 9, 1, 70, 9, 1, 51, 9, 1], 4)]


def test_an_answer_without_its_end_gets_it_by_force() -> None:
    made, kinds, asked = told([[70, 71], [72, 73, 74, 75]], most=2)
    assert made == [1, 50, 9, 1, 70, 71, 9, 1, 51, 9, 1, 72, 73, 74]
    assert kinds == [0, 1, 0, 0, 2, 2, 0, 0, 1, 0, 0, 2, 2, 2]
    assert [most for _, most in asked] == [2, 3]  # the last has no one behind it
    other = told([[70, 8], [72, 73, 74]])  # an end, but not the mark's
    assert other[0] == [1, 50, 9, 1, 70, 9, 1, 51, 9, 1, 72, 73, 74, 74] and other[1][4:6] == [2, 0]


def test_a_conversation_that_is_over_goes_on_with_requests() -> None:
    tokens, roles = [*TOKENS[:11], 62, 9, 1, 52, 53, 54, 55], [*ROLES[:11], 2, 2, 0, 1, 1, 1, 1]  # a user is cut off
    made, kinds, asked = told([[70, 9], [71, 9], [72], [73, 9]], tokens, roles, 1, [(9, 5, 1), (9, 6)])
    assert made == [1, 50, 9, 1, 70, 9, 1, 51, 9, 1, 71, 9, 5, 1, 72, 9, 6, 73]
    assert kinds == [0, 1, 0, 0, 2, 2, 0, 1, 0, 0, 2, 2, 0, 0, 2, 0, 0, 2]
    assert [len(before) for before, _ in asked] == [4, 10, 14, 17]
    with pytest.raises(StopIteration) as end:
        next(answered(tokens[:3], [0, 1, 0], ENDS, 9, [(9, 5, 1)]))
    assert end.value.value == (tokens[:3], [0, 1, 0])  # nobody is asked anything


def test_where_the_target_was_cut_short_the_drafter_may_end_by_itself() -> None:
    tokens, roles = [*TOKENS[:6], *TOKENS[6:]], [*ROLES]
    roles[6] = FORCED  # the mark's first token was forced
    made, kinds, _ = told([[70, 9], [71, 9]], tokens, roles)
    assert made[:10] == [1, 50, 9, 1, 70, 9, 1, 51, 9, 1] and kinds[4:7] == [2, 2, 0]
    made, kinds, _ = told([[70, 71, 72, 73, 74, 75, 76, 77, 78, 79]], tokens, roles)
    assert made[4:] == list(range(70, 80)) and kinds[4:] == [2] * 10  # no room for the others


def test_an_interrupted_run_goes_on_and_writes_nothing_twice(target, text, draft, tmp_path) -> None:
    whole = write(target, draft, text, PLAN, tmp_path / "whole")

    def kill(done: int, of: int) -> None:
        if done > 2.5 * PLAN.batch * LENGTH:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_on_policy(target, draft, text, PLAN, tmp_path / "cut", kill)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cut").iterdir()}
    assert sorted(before) == ["shard-0000.safetensors", "shard-0001.safetensors"]
    made = write(target, draft, text, PLAN, tmp_path / "cut")
    assert torch.equal(made.tokens, whole.tokens) and torch.equal(made.roles, whole.roles) and len(made.tokens) == 14
    assert len(list((tmp_path / "cut").iterdir())) == 4
    assert all((tmp_path / "cut" / name).stat().st_mtime_ns == at for name, at in before.items())


def test_a_foreign_drafter_plan_or_folder_is_refused(target, text, draft, four_layers, tmp_path) -> None:
    with pytest.raises(InputError, match="trained for"):
        write_on_policy(four_layers, draft, text, PLAN, tmp_path / "x")
    with pytest.raises(InputError, match="no drafter here"):
        write_on_policy(target, tmp_path, text, PLAN, tmp_path / "x")
    for bad in (replace(PLAN, share=0.0), replace(PLAN, share=1.5), replace(PLAN, temperatures=(-1.0,))):
        with pytest.raises(InputError):
            write_on_policy(target, draft, text, bad, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    small = replace(PLAN, sequences=2)
    write_on_policy(target, draft, text, small, tmp_path / "y")
    again = trained("draft-model", target, text, tmp_path / "again", layers="0,3", steps=1)
    for drafter, plan in ((draft, replace(small, seed=1)), (again, small)):
        with pytest.raises(InputError, match=r"(seed|drafter) \S+ \(asked: \S+\); ask for the same"):
            write_on_policy(target, drafter, text, plan, tmp_path / "y")


def test_training_on_its_own_text_makes_it_better_there(target, text, draft, tmp_path) -> None:
    data = write(target, draft, text, OnPolicyPlan(share=1, batch=64, sequences=96), tmp_path / "own")
    plan = plan_of(find_kind("draft-model"), {"steps": 15, "batch": 16, "lr": 2e-3, "held_out": 16})
    _, curve = train_drafter("draft-model", target, data, plan, tmp_path / "again", begin=draft)
    assert curve[-1].greedy > curve[0].greedy and curve[-1].sampled > curve[0].sampled
