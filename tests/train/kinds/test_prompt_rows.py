"""Training prompt rows: they learn, each from the target's rows further on, and their rates are what was counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.models import LoadedModel
from outrider.models.networks.prompt_rows import PromptRows, PromptShape
from outrider.models.trained import load_trained
from outrider.train.kinds import prompt_rows as made
from outrider.train.kinds.prompt_rows import PromptRowsLearner, PromptRowsPlan
from outrider.train.kinds.registry import find_kind, plan_of, train_drafter
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import ANSWER, SelfData
from tests.train.conftest import make_markov, make_text


@pytest.fixture(scope="module")
def markov() -> LoadedModel:
    return make_markov()


@pytest.fixture(scope="module")
def its_text(markov: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> SelfData:
    return make_text(markov, tmp_path_factory.mktemp("text"))


@pytest.mark.slow
def test_trained_prompts_are_better_than_random_ones(markov, its_text: SelfData, tmp_path: Path) -> None:
    settings = {"steps": 40, "batch": 8, "lr": 1e-1, "held_out": 16, "anchors": 16}
    learner, curve = train_drafter(
        "ppd", markov, its_text, plan_of(find_kind("ppd"), settings), tmp_path, measure_every=20
    )  # fmt: skip
    assert curve[-1].greedy > curve[0].greedy + 0.05 and curve[-1].sampled > curve[0].sampled + 0.03
    assert curve[-1].loss < 0.8 * curve[1].loss
    stored = load_trained("ppd", tmp_path, markov)
    torch.testing.assert_close(stored.vectors, learner.net.vectors.detach(), rtol=1e-3, atol=1e-3)
    assert stored.rates.sum() > 0 and (stored.rates.sum(1) <= 1.001).all()


def learner_of(target: LoadedModel) -> PromptRowsLearner:
    torch.manual_seed(3)
    net = PromptRows(PromptShape(32, 2, 1, 64))
    net.vectors.data.normal_()
    return PromptRowsLearner(target, net, PromptRowsPlan(), LOSSES["kl"])


def counted(target: LoadedModel, net: PromptRows, text: torch.Tensor) -> torch.Tensor:
    """How often each rank is right, one forward for each place of a text that is all answer."""
    right, offered = torch.zeros(2, 64), torch.zeros(2)
    model, words = target.model, target.model.get_input_embeddings()
    for row in text.tolist():
        for end in range(len(row) - 3):
            before = torch.cat([words(torch.tensor(row[: end + 1])), net.vectors[0]])
            guesses = model(inputs_embeds=before[None]).logits[0, -2:].argsort(-1, descending=True)
            for depth in range(2):
                choice = int(model(torch.tensor([row[: end + 2 + depth]])).logits[0, -1].argmax())
                offered[depth] += 1
                right[depth, guesses[depth].tolist().index(choice)] += 1
                if choice != row[end + 2 + depth]:
                    break
    return right / offered.clamp(min=1)[:, None]


@torch.no_grad()
def test_rates_are_what_counting_one_by_one_finds(markov: LoadedModel) -> None:
    """And rows that look one column too far would be caught."""
    model = markov.model
    text = torch.tensor([[3, 9, 4], [8, 2, 60]])
    for _ in range(9):  # greedy, so that the second guess counts often
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    data, learner = SelfData(text, torch.full_like(text, ANSWER)), learner_of(markov)
    learner.measure(data)
    assert torch.allclose(learner.net.rates, counted(markov, learner.net, text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "later", lambda columns, count: columns[..., None] + torch.arange(count))
        learner.measure(data)
    assert not torch.allclose(learner.net.rates, counted(markov, learner.net, text))
