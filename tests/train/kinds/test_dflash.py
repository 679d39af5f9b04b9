"""Training of block drafters: packed blocks are as good as alone, and only what is an answer counts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from outrider.models import LoadedModel
from outrider.train.block_mask import block_mask, choose_anchors
from outrider.train.kinds.dflash import DFlashLearner, DFlashPlan, new_net
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import ANSWER, SelfData

PLAN = DFlashPlan(batch=4, held_out=16, anchors=6, block=4, deep=2, vocab=40, layers=(1, 3), intermediate=24, gamma=2)


@pytest.fixture(scope="module")
def learner(four_layers: LoadedModel, text: SelfData) -> DFlashLearner:
    net = new_net(four_layers, text, PLAN)
    torch.manual_seed(3)
    for name, weight in net.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
        weight.requires_grad_(True)
    return DFlashLearner(four_layers, net, PLAN, LOSSES["kl"])


def alone(learner: DFlashLearner, states: torch.Tensor, tokens: torch.Tensor, anchor: int) -> torch.Tensor:
    """What comes out for one block behind the text before the anchor, by itself: no mask is left to be wrong.

    `states`: all layers' of the whole text.
    """
    net, block = learner.net, learner.net.shape.block
    rows = torch.full((1, block), net.shape.mask)
    rows[0, 0] = tokens[anchor]
    context = None
    if anchor:
        fused = net.fuse(torch.cat([states[layer][None, :anchor] for layer in net.shape.layers], -1))
        context = net.context(fused, net.rotation(torch.arange(anchor)[None]))

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if context is not None:
            heads = slice(layer * k.shape[1], (layer + 1) * k.shape[1])
            k, v = (torch.cat([before[:, heads], rows], 2) for before, rows in zip(context, (k, v), strict=True))
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    embedded = learner.target.model.get_input_embeddings()(rows)
    return net(embedded, net.rotation(anchor + torch.arange(block)[None]), attention)[0]


def expected(learner: DFlashLearner, batch: SelfData) -> torch.Tensor:
    """Block by block and place by place, from the definition, differentiable."""
    target, net = learner.target.model, learner.net
    anchors = choose_anchors(batch, PLAN.anchors, PLAN.seed)
    total, whole = torch.zeros(()), 0.0
    for row in range(len(batch.tokens)):
        tokens = batch.tokens[row].long()
        with torch.no_grad():
            out = target(tokens[None], output_hidden_states=True)
        for anchor, real in zip(anchors.places[row].tolist(), anchors.real[row].tolist(), strict=True):
            if not real:
                continue
            states = alone(learner, [layer[0] for layer in out.hidden_states], tokens, anchor)
            for place in range(1, net.shape.block):
                said = anchor + place
                if said >= len(tokens) or batch.roles[row, said] != ANSWER:
                    continue
                weight = math.exp(-(place - 1) / PLAN.gamma)
                whole += weight
                goal = out.logits[0, said - 1]
                if int(goal.argmax()) not in net.ids.tolist():
                    continue
                q, p = net.logits(states[place]).log_softmax(-1), goal[net.ids].log_softmax(-1)
                total = total + weight * (p.exp() * (p - q)).sum()
    return total / whole


def test_packed_blocks_have_the_loss_and_gradients_of_blocks_alone(learner: DFlashLearner, text: SelfData) -> None:
    batch = SelfData(text.tokens[:3], text.roles[:3].clone())
    batch.roles[:, :30] = 1
    batch.roles[0, 35:40] = 1  # blocks that lead into what is no answer, and out of it
    batch.roles[1, :] = 1
    batch.roles[1, -3:] = ANSWER  # fewer places than anchors, blocks that reach over the end
    learner.net.zero_grad()
    loss = learner.backward(batch)
    found = {name: weight.grad.clone() for name, weight in learner.weights.items() if weight.grad is not None}
    learner.net.zero_grad()
    wanted = expected(learner, batch)
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-4)
    assert found.keys() == learner.weights.keys()
    for name, weight in learner.weights.items():
        torch.testing.assert_close(found[name], weight.grad, atol=1e-6, rtol=1e-3, msg=name)


def test_anchors_are_places_before_a_token_of_an_answer_and_a_function_of_the_text(text: SelfData) -> None:
    part = SelfData(text.tokens[:5].long(), text.roles[:5].clone())
    part.roles[2, :] = 1
    anchors = choose_anchors(part, 8, 3)
    again = choose_anchors(part, 8, 3)
    assert torch.equal(anchors.places, again.places) and torch.equal(anchors.real, again.real)
    assert not torch.equal(anchors.places, choose_anchors(part, 8, 4).places)
    for row, (places, real) in enumerate(zip(anchors.places.tolist(), anchors.real.tolist(), strict=True)):
        kept = [place for place, there in zip(places, real, strict=True) if there]
        assert kept == sorted(set(kept)) and all(place >= 1 for place in kept)
        assert all(part.roles[row, place + 1] == ANSWER for place in kept)
        assert len(kept) == (0 if row == 2 else min(8, int((part.roles[row, 2:] == ANSWER).sum())))


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("runs_text", [False, True])
def test_the_mask_is_what_each_block_would_see_alone(pending: bool, runs_text: bool) -> None:
    anchors, block, text = torch.tensor([[0, 3], [2, 4]]), 2, 5
    sees = block_mask(anchors, block, text, pending=pending, runs_text=runs_text)
    for row in range(2):
        rows = list(sees[row])
        if runs_text:
            for place in range(text):
                assert rows.pop(0).nonzero()[:, 0].tolist() == list(range(place + 1))
        for number, anchor in enumerate(anchors[row].tolist()):
            its = list(range(text + number * block, text + (number + 1) * block))
            for _ in range(block):
                assert rows.pop(0).nonzero()[:, 0].tolist() == [*range(anchor + (not pending)), *its]
        assert not rows


def test_the_first_place_weighs_one_and_each_next_the_same_share_of_it(learner: DFlashLearner) -> None:
    weights = [learner.weight(depth) for depth in range(5)]
    shares = [b / a for a, b in pairwise(weights)]
    assert weights[0] == 1 and max(shares) - min(shares) < 1e-12
    learner.plan, before = DFlashPlan(gamma=1e12), learner.plan
    assert learner.weight(7) == pytest.approx(1)
    learner.plan = before
