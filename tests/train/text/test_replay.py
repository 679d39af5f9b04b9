"""Replay: anchors are where proposals fell, blocks are what was drafted there, and training on them helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.tree import chain, from_paths
from outrider.models.trained import load_eagle3
from outrider.runtime import packed
from outrider.train.kinds.eagle3 import Eagle3Learner, Eagle3Plan, look, unrolled
from outrider.train.kinds.registry import train_drafter
from outrider.train.losses import LOSSES
from outrider.train.text.dialogue import ANSWER, FORCED
from outrider.train.text.replay import Mistake, ReplayPlan, first_path, rollout, windows, write_replay
from outrider.train.text.selfdata import SelfData, read_data
from tests.train.conftest import make_markov, make_text

PLAN = ReplayPlan(prompts=24, new_tokens=40, length=16, block=4)


@pytest.fixture(scope="module")
def target():
    return make_markov()


@pytest.fixture(scope="module")
def text(target, tmp_path_factory) -> SelfData:
    made = make_text(target, tmp_path_factory.mktemp("text"))
    made.roles[:, :4] = FORCED  # a few tokens to begin from
    return made


@pytest.fixture(scope="module")
def drafter(target, text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3")
    plan = Eagle3Plan(steps=20, batch=8, lr=3e-3, held_out=16, vocab=64, unroll=3, intermediate=32)
    train_drafter("eagle3", target, text, plan, folder)
    return folder


def test_replaying_from_an_anchor_drafts_the_same_block(target, text, drafter, monkeypatch) -> None:
    monkeypatch.setattr(packed, "_eight_bits_supported", lambda: False)  # training knows no rounding
    mistakes = rollout(target, drafter, text, PLAN)
    net = load_eagle3(drafter, target)
    assert len(mistakes) > 20
    for mistake in mistakes[:20]:
        before = list(mistake.text[: mistake.anchor])
        drafted: list[int] = []
        for depth in range(len(mistake.block)):
            _, embedded, state = look(target, net, torch.tensor([[*before, *drafted, 0]]))
            after = list(unrolled(net, embedded, state, depth + 1))[-1][0, len(before) + depth - 2]
            drafted.append(int(net.ids[net.logits(after).argmax()]))
        assert tuple(drafted) == mistake.block
        said = mistake.text[mistake.anchor :]
        agreed = next((i for i, (a, b) in enumerate(zip(mistake.block, said, strict=False)) if a != b), len(said))
        assert agreed == mistake.accepted < len(mistake.block)


def test_windows_hold_what_was_said_and_what_was_drafted_and_only_blocks_count() -> None:
    text = tuple(range(20))
    made = windows([Mistake(text, 10, (10, 99, 98), 1), Mistake(text, 2, (7,), 0), Mistake(text, 19, (50, 51), 0)], 6)
    assert made.tokens.tolist() == [[7, 8, 9, 10, 11, 12], [7, 8, 9, 10, 99, 98]]  # too little before, nothing behind
    assert made.roles.tolist() == [[FORCED] * 3 + [ANSWER] * 3] * 2
    assert windows([], 6).tokens.shape == (0, 6)


def test_the_first_path_of_a_tree_is_what_was_proposed_first() -> None:
    assert first_path(chain(5, [1, 2, 3])) == (1, 2, 3)
    assert first_path(from_paths(5, [[1, 2], [4, 6, 7]])) == (1, 2)


def test_training_on_its_mistakes_makes_fewer_of_them(target, text, drafter, tmp_path) -> None:
    made = write_replay(target, drafter, text, PLAN, tmp_path / "replay")
    data = read_data(tmp_path / "replay", target.fingerprint)
    assert made["windows"] == len(data.tokens) and made["windows"] <= 2 * made["anchors"]
    plan = Eagle3Plan(steps=25, batch=16, lr=2e-3, held_out=16, unroll=3)
    learner, _ = train_drafter("eagle3", target, data, plan, tmp_path / "again", begin=drafter)
    fresh = SelfData(text.tokens[100:140], text.roles[100:140])
    before = Eagle3Learner(target, load_eagle3(drafter, target), plan, LOSSES["kl"]).measure(fresh)
    after = Eagle3Learner(target, learner.net, plan, LOSSES["kl"]).measure(fresh)
    assert after.greedy > before.greedy and after.sampled > before.sampled
    with pytest.raises(InputError, match="already holds"):
        write_replay(target, drafter, text, PLAN, tmp_path / "replay")


def test_a_slot_is_as_long_as_needed_so_that_the_batch_fits(target, text, drafter, monkeypatch) -> None:
    made: list[Outrider] = []

    class Tight(Outrider):
        def __init__(self, *given, limits, **more) -> None:
            super().__init__(*given, limits={**limits, "cache_bytes": 1 << 20}, **more)
            made.append(self)

    monkeypatch.setattr("outrider.train.text.replay.Outrider", Tight)
    assert rollout(target, drafter, text, replace(PLAN, prompts=4, batch=6))
    assert made[0].target.max_context == 4 + PLAN.new_tokens and made[0].target.free_slots == 6
    assert Tight(target, "plain", limits={"max_slots": 6}).target.free_slots < 6  # the whole context of each


def test_what_cannot_work_is_refused(target, text, drafter, tmp_path) -> None:
    with pytest.raises(InputError, match="cannot hold"):
        write_replay(target, drafter, text, ReplayPlan(length=4, block=4), tmp_path / "x")
    with pytest.raises(InputError, match="shorter windows"):
        write_replay(target, drafter, text, ReplayPlan(prompts=2, new_tokens=8, length=200), tmp_path / "x")
    assert not (tmp_path / "x").exists()
