"""Training an acceptance head: which tokens it learns from, what their goals are, and that states tell it something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.trained import ACCEPTANCE, load_trained
from outrider.train.kinds.acceptance_head import (
    AcceptancePlan,
    ChainJudge,
    ModelJudge,
    acceptance_learner,
    calibration,
    drawn_from,
    weighted,
)
from outrider.train.kinds.eagle3 import look, shifted, unrolled
from outrider.train.kinds.registry import find_kind, plan_of, train_drafter
from outrider.train.loop import split
from outrider.train.text.dialogue import ANSWER, USER
from outrider.train.text.selfdata import SelfData
from tests.drafters import drafter
from tests.train.conftest import make_markov, make_text

KIND = find_kind(ACCEPTANCE)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return make_markov()


@pytest.fixture(scope="module")
def text(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> SelfData:
    return make_text(target, tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def folders(target: LoadedModel, text: SelfData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafters that have hardly learnt anything: sometimes right, sometimes wrong."""
    place = tmp_path_factory.mktemp("drafters")
    few = {"batch": 8, "lr": 3e-3, "held_out": 16}
    return {
        "draft-model": drafter("draft-model", target, text, place / "model", **few, steps=0, layers="0,1"),
        "eagle3": drafter("eagle3", target, text, place / "eagle3", **few, steps=12, layers="1,2,3", vocab=64),
    }


def noise() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drawn_tokens_goal_is_its_chance_under_rejection(temperature: float) -> None:
    q, p = torch.randn(2, 5, 7, generator=noise()), torch.randn(2, 5, 9, generator=noise())
    ids = torch.tensor([0, 1, 3, 4, 5, 7, 8])
    drawn, accepted = drawn_from(q, p, temperature, noise(), ids)
    assert set(drawn.flatten().tolist()) <= set(ids.tolist())
    for b in range(2):
        for t in range(5):
            at = ids.tolist().index(int(drawn[b, t]))
            if temperature == 0:
                assert at == int(q[b, t].argmax())
                assert accepted[b, t] == float(p[b, t].argmax() == drawn[b, t])
            else:
                ratio = (p[b, t] / temperature).softmax(-1)[drawn[b, t]] / (q[b, t] / temperature).softmax(-1)[at]
                assert float(accepted[b, t]) == pytest.approx(min(1.0, float(ratio)), rel=1e-5)


def test_the_loss_is_the_papers() -> None:
    odds, accepted = torch.tensor([0.3, -2.0, 1.0]), torch.tensor([1.0, 0.25, 0.0])
    s = odds.sigmoid()
    expected = -6 * (1 - accepted) * (1 - s).log() - accepted * s.log()
    torch.testing.assert_close(weighted(odds, accepted, 6.0), expected)


@pytest.mark.parametrize("kind", ["draft-model", "eagle3"])
def test_only_drawn_tokens_of_answers_are_learnt_from(target, text, folders, kind: str) -> None:
    """All true tokens: nothing to learn. All drawn ones: every token of an answer, once a step that can have it."""
    part = SelfData(text.tokens[:3].long(), text.roles[:3].clone())
    part.roles[:, :20], part.roles[:, 20:30] = USER, ANSWER
    part.roles[:, 30:] = USER
    for mixed, count in ((1.0, 0), (0.0, 3 * 10)):
        plan = AcceptancePlan(drafter=str(folders[kind]), mixed=mixed, unroll=3)
        learner = acceptance_learner(target, text, plan, None)
        seen = list(learner.judge(part, noise()))
        assert [len(each.states) for each in seen] == [count] * (1 if kind == "draft-model" else 2)
        assert all(len(each.accepted) == len(each.states) for each in seen)


def test_a_draft_model_is_read_at_the_tokens_it_drew(target, text, folders) -> None:
    plan = AcceptancePlan(drafter=str(folders["draft-model"]), mixed=0.4)
    learner = acceptance_learner(target, text, plan, None)
    judge = learner.judge.__self__
    assert isinstance(judge, ModelJudge)
    part = SelfData(text.tokens[:2].long(), text.roles[:2])
    (seen,) = learner.judge(part, noise())
    same = noise()
    q = judge.draft(part.tokens).logits
    drawn, accepted = drawn_from(q, target.model(part.tokens).logits, 1.0, same)
    read = (part.roles == ANSWER) & (torch.rand(part.roles.shape, generator=same) >= 0.4)
    texts, goals, states = part.tokens.clone(), [], []
    for b in range(2):
        for t in range(1, 48):
            if read[b, t]:
                texts[b, t] = drawn[b, t - 1]
    for b in range(2):
        out = judge.draft(texts[b : b + 1], output_hidden_states=True).hidden_states[-1][0]
        for t in range(1, 48):
            if read[b, t]:
                goals.append(accepted[b, t - 1])
                states.append(out[t])
    torch.testing.assert_close(seen.accepted, torch.stack(goals))
    torch.testing.assert_close(seen.states, torch.stack(states), atol=1e-4, rtol=1e-4)
    assert 0 < int(read.sum()) < int((part.roles == ANSWER).sum())


def test_a_layer_is_read_in_the_steps_in_which_it_drafts(target, text, folders) -> None:
    """With nothing mixed in, a step's column stands for the token that the step before drew one column earlier; its
    goal is the target's chance of that token behind the text."""
    plan = AcceptancePlan(drafter=str(folders["eagle3"]), mixed=0.0, temperature=0.0, unroll=3)
    learner = acceptance_learner(target, text, plan, None)
    judge = learner.judge.__self__
    assert isinstance(judge, ChainJudge)
    part = SelfData(text.tokens[:1].long(), torch.full_like(text.roles[:1], ANSWER))
    seen = list(learner.judge(part, noise()))
    net, embed = judge.net, target.model.get_input_embeddings()
    logits, embedded, state = look(target, net, part.tokens)
    first = next(unrolled(net, embedded, state, 1))
    drawn = net.ids[net.logits(first).argmax(-1)]  # column u: about token u + 2
    for column in range(1, 47):
        token = int(drawn[0, column - 1])
        assert float(seen[0].accepted[column - 1]) == float(int(logits[0, column].argmax()) == token)
    told = embed(drawn.roll(1, 1))  # column u reads what was drawn for token u + 1
    _, second = unrolled(net, embedded, state, 2, read=lambda moved: told)
    torch.testing.assert_close(seen[0].states, second[0, 1:47], atol=1e-4, rtol=1e-4)
    assert shifted(first, 1).shape == second.shape


@pytest.mark.parametrize("kind", ["draft-model", "eagle3"])
def test_a_head_tells_good_drafts_from_bad_on_unseen_text(target, text, folders, kind: str, tmp_path: Path) -> None:
    settings = {"steps": 100, "batch": 8, "lr": 2e-2, "held_out": 16, "blocks": 1, "drafter": str(folders[kind]),
                "weight": 1.0, "unroll": 3}  # fmt: skip
    learner, curve = train_drafter(ACCEPTANCE, target, text, plan_of(KIND, settings), tmp_path / "head")
    held_out, _ = split(text, 16)
    accepted, said = learner.told(held_out)
    constant = binary(accepted, torch.full((len(accepted),), accepted.mean()).double().numpy())
    assert binary(accepted, said) < constant
    high, low = accepted[said > said.mean()].mean(), accepted[said <= said.mean()].mean()
    assert high > low
    assert sum(count for _, _, count in calibration(accepted, said)) == len(said)
    loaded = load_trained(ACCEPTANCE, tmp_path / "head", target)
    assert loaded.shape.drafter == kind and loaded.shape.digest
    states = torch.randn(4, 32)
    torch.testing.assert_close(loaded(states), learner.net(states), atol=1e-2, rtol=1e-2)
    assert curve[-1].greedy == pytest.approx(float(accepted.mean()), abs=1e-3)


def binary(accepted, said) -> float:
    """Mean cross-entropy."""
    said = said.clip(1e-6, 1 - 1e-6)
    return float(-(accepted * np.log(said) + (1 - accepted) * np.log(1 - said)).mean())


def test_a_rejection_weighs_more_and_makes_the_head_more_careful(target, text, folders, tmp_path: Path) -> None:
    said = {}
    for weight in (1.0, 6.0):
        settings = {"steps": 60, "batch": 8, "lr": 3e-2, "held_out": 16, "blocks": 0, "weight": weight,
                    "drafter": str(folders["draft-model"])}  # fmt: skip
        _, curve = train_drafter(ACCEPTANCE, target, text, plan_of(KIND, settings), tmp_path / str(weight))
        said[weight] = curve[-1].sampled
    assert said[6.0] < said[1.0] - 0.05


def test_other_drafters_are_refused(target, text, tmp_path: Path) -> None:
    heads = drafter("medusa", target, text, tmp_path / "medusa", vocab=40)
    with pytest.raises(InputError, match="judges drafters of kind draft-model or eagle3, not medusa"):
        acceptance_learner(target, text, AcceptancePlan(drafter=str(heads)), None)
    with pytest.raises(InputError, match="no draft model is kept or shipped"):
        acceptance_learner(target, text, AcceptancePlan(), None)
