"""DEER at run time: what it drafts is what training computes, from the text alone, wherever it begins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.draft.block.deer import TOGETHER, DeerSource
from outrider.draft.grown import Grown
from outrider.grow.block.best_first import BestFirst
from outrider.grow.chain import Chain
from outrider.models import load_model
from outrider.models.networks.block import BlockShape, DeerNet
from outrider.models.trained import target_head
from outrider.runtime.layers.blocks import TokenBlocks
from outrider.runtime.targets import eager_target
from outrider.train.block_mask import Anchors
from outrider.train.kinds.deer import DeerLearner, DeerPlan
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData
from outrider.verify.invariant import Invariant
from outrider.verify.rejection import Rejection
from tests.draft.toy_loop import history
from tests.watched import llama

PROMPTS = [[1, 2, 3, 4], [9, 8], [5], list(range(3, 3 + TOGETHER + 9))]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
BLOCK = 4


@pytest.fixture(scope="module")
def loaded():
    return load_model(llama(1).requires_grad_(False))


@pytest.fixture(scope="module")
def net(loaded) -> DeerNet:
    torch.manual_seed(2)
    ids = torch.arange(0, 52, 2)
    shape = BlockShape(32, 4, 2, 8, 48, (), 2, BLOCK + 1, 51, len(ids), end=49)
    made = DeerNet(shape, ids, target_head(loaded, ids)).requires_grad_(False)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made


class Watched(DeerSource):
    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.found = []

    def marginals(self, slots):
        made = super().marginals(slots)
        self.found += [
            (self._seats[slot].context.tokens.tolist(), rows) for slot, rows in zip(slots, made, strict=True)
        ]
        return made


def source_of(net, loaded) -> Watched:
    return Watched(TokenBlocks(net, loaded.model.get_input_embeddings()))


def run(loaded, source, grower, prompts=PROMPTS, rule=None, **sampling) -> list:
    engine = Engine(eager_target(loaded.model, max_slots=4), PLAIN, strict=True)
    rule = rule or Invariant()
    recipe = Recipe("deer", Grown(source, grower, sampled=rule.coupled), rule, Fixed(Budget(8, 4))) if source else PLAIN
    handles = [engine.submit(p, SamplingParams(**{"max_new_tokens": 20} | sampling), recipe) for p in prompts]
    return [handle.result() for handle in handles]


def trained_probs(loaded, net, text: list[int]) -> np.ndarray:
    """[depths, 53] of a block that training packs behind the text."""
    learner = DeerLearner(loaded, net, DeerPlan(), LOSSES["kl"])
    part = SelfData(torch.tensor([text]), torch.full((1, len(text)), 2))
    anchors = Anchors(torch.tensor([[len(text) - 1]]), torch.tensor([[True]]))
    _, states = learner.look(part, anchors, learner.masked(part, anchors), None)
    probs = torch.zeros(BLOCK, 53, dtype=torch.float64)
    probs[:, net.ids] = net.logits(states[0, 0, :BLOCK]).double().softmax(-1)
    return probs.numpy()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_distribution_of_a_run_is_that_of_training_for_the_same_text(loaded, net, temperature: float) -> None:
    source = source_of(net, loaded)
    rule = Rejection() if temperature else None
    results = run(loaded, source, Chain() if temperature else BestFirst(), rule=rule, temperature=temperature, seed=4)
    assert sum(g.stats.accepted for g in results) > 0 and len(source.found) > 40
    for text, rows in source.found:
        assert len(rows) == BLOCK
        for row, expected in zip(rows, trained_probs(loaded, net, text), strict=True):
            np.testing.assert_allclose(row.probs, expected[row.ids], atol=1e-5)


def test_greedy_text_is_the_targets_and_a_batch_drafts_what_each_would_alone(loaded, net) -> None:
    together, alone = source_of(net, loaded), source_of(net, loaded)
    drafted = run(loaded, together, BestFirst())
    assert [g.token_ids for g in drafted] == [g.token_ids for g in run(loaded, None, None)]
    for prompt in PROMPTS:
        run(loaded, alone, BestFirst(), [prompt])
    first, second = (
        sorted((text, [row.ids[:3].tolist() for row in rows]) for text, rows in source.found)
        for source in (together, alone)
    )
    assert first == second


def test_a_proposal_that_was_left_is_made_again(loaded, net) -> None:
    source = source_of(net, loaded)
    source.begin(0, history(PROMPTS[3], 53))
    (first,), (second,) = source.marginals([0]), source.marginals([0])
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one.probs, other.probs, atol=1e-6)
