"""Training DEER in its two stages: packed blocks are as good as alone, and weights are those of the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.train.block_mask import choose_anchors
from outrider.train.kinds.deer import DeerLearner, DeerPlan, new_net, refinement_weights
from outrider.train.kinds.registry import find_kind, plan_of, train_drafter
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import ANSWER, SelfData

PLAN = DeerPlan(batch=4, held_out=16, anchors=5, block=4, vocab=40, layers="2", alpha=1.5)


@pytest.fixture
def learner(four_layers: LoadedModel, text: SelfData) -> DeerLearner:
    net = new_net(four_layers, text, PLAN)
    for weight in net.parameters():
        weight.requires_grad_(True)
    return DeerLearner(four_layers, net, PLAN, LOSSES["kl"])


def alone(learner: DeerLearner, text: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What comes out for the rows of one block behind a text, in a pass of their own."""
    count, every = len(text), torch.cat([text, rows])
    sees = torch.ones(len(every), len(every), dtype=torch.bool)
    sees[:count] = sees[:count].tril()
    embedded = learner.target.model.get_input_embeddings()(every[None])

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)

    return learner.net(embedded, learner.net.rotation(torch.arange(len(every))[None]), attention)[0, count:]


def expected(learner: DeerLearner, batch: SelfData) -> torch.Tensor:
    """Block by block, from what stands in the blocks, differentiable."""
    anchors = choose_anchors(batch, PLAN.anchors, PLAN.seed)
    blocks, ids = learner.blocks(batch, anchors), learner.net.ids.tolist()
    total = torch.zeros(())
    for row in range(len(batch.tokens)):
        tokens = batch.tokens[row].long()
        with torch.no_grad():
            logits = learner.target.model(tokens[None]).logits[0]
        for number, anchor in enumerate(anchors.places[row].tolist()):
            if not anchors.real[row, number]:
                continue
            rows = blocks.tokens[row, number]
            if blocks.kept is not None:
                rows = rows[blocks.kept[row, number]]
            states = alone(learner, tokens[: anchor + 1], rows)
            for place in range(min(PLAN.block, len(rows))):
                said = anchor + 1 + place
                if said >= len(tokens) or batch.roles[row, said] != ANSWER:
                    continue
                q, goal = learner.net.logits(states[place]).log_softmax(-1), logits[said - 1]
                weight = blocks.weights[row, number, place]
                if learner.plan.stage == 1:
                    cost = -q[ids.index(int(tokens[said]))] if int(tokens[said]) in ids else torch.zeros(())
                else:
                    p = goal[learner.net.ids].log_softmax(-1)
                    cost = (p.exp() * (p - q)).sum() if int(goal.argmax()) in ids else torch.zeros(())
                total = total + weight * cost
    return total / blocks.whole


@pytest.mark.parametrize("stage", [1, 2])
def test_packed_blocks_have_the_loss_and_gradients_of_blocks_alone(
    learner: DeerLearner, text: SelfData, stage: int
) -> None:
    batch = SelfData(text.tokens[:3].long(), text.roles[:3].clone())
    batch.roles[:, :30] = 1
    batch.roles[1, :-3] = 1
    learner.plan = replace(PLAN, stage=stage)
    loss = learner.backward(batch)
    found = {name: weight.grad.clone() for name, weight in learner.weights.items() if weight.grad is not None}
    learner.net.zero_grad()
    wanted = expected(learner, batch)
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-4)
    for name, weight in learner.weights.items():
        torch.testing.assert_close(found[name], weight.grad, atol=1e-6, rtol=1e-3, msg=name)


def test_stage_one_hides_a_share_t_of_each_block_and_weighs_it_by_one_over_t(
    learner: DeerLearner, text: SelfData
) -> None:
    """So that the weights of a block's places come to its length in the mean: the bound of the likelihood."""
    part = SelfData(text.tokens.long(), text.roles)
    anchors = choose_anchors(part, 40, 0)
    blocks = learner.blocks(part, anchors)
    answers = anchors.answers(part, PLAN.block + 1)[..., 1:]
    hidden = blocks.weights > 0
    masks = blocks.tokens[..., : PLAN.block] == learner.net.shape.mask
    assert not (hidden & ~masks).any() and not (hidden & ~answers).any()
    assert float(blocks.weights.sum()) == pytest.approx(float(answers.sum()), rel=0.2)
    said = part.tokens.gather(1, anchors.rows(PLAN.block + 1)[..., 1:].clamp(max=47).flatten(1)).view(hidden.shape)
    shown = answers & ~masks
    assert torch.equal(blocks.tokens[..., : PLAN.block][shown], said[shown]) and shown.any()


def test_stage_two_weighs_places_from_the_text_on_down_to_the_end_and_every_block_alike() -> None:
    weights = refinement_weights(torch.tensor([[1], [3], [96]]), 96, 1.01)
    assert weights.sum(-1).tolist() == pytest.approx([1, 1, 1])
    assert weights[1, 0] > weights[1, 1] > weights[1, 2] > weights[1, 3] == 0
    assert (weights[2, :-1] / weights[2, 1:]).tolist() == pytest.approx([1.01] * 95, rel=1e-4)


def test_stage_two_goes_on_from_a_drafter_of_stage_one(four_layers: LoadedModel, text: SelfData, tmp_path) -> None:
    def settings(stage: int) -> dict:
        return {"steps": 2, "batch": 4, "held_out": 8, "block": 3, "layers": "2", "stage": stage}

    kind = find_kind("deer")
    with pytest.raises(InputError, match="name it with --from"):
        train_drafter("deer", four_layers, text, plan_of(kind, settings(2)), tmp_path / "none")
    train_drafter("deer", four_layers, text, plan_of(kind, settings(1)), tmp_path / "one")
    learner, curve = train_drafter(
        "deer", four_layers, text, plan_of(kind, settings(2)), tmp_path / "two", begin=tmp_path / "one"
    )
    assert learner.net.deepest == 3 and len(curve[-1].depths) == 3


def test_it_begins_as_the_targets_layers(four_layers: LoadedModel, text: SelfData) -> None:
    """Read causally, the text comes out as it does of the target cut to these layers."""
    net = new_net(four_layers, text, replace(PLAN, layers="0,1"))
    tokens = text.tokens[0, :9].long()
    with torch.no_grad():
        hidden = four_layers.model(tokens[None], output_hidden_states=True).hidden_states[2][0]
        sees = torch.ones(9, 9, dtype=torch.bool).tril()
        embedded = four_layers.model.get_input_embeddings()(tokens[None])
        out = net(
            embedded, net.rotation(torch.arange(9)[None]),
            lambda layer, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True),
        )[0]  # fmt: skip
    torch.testing.assert_close(out, hidden, atol=1e-4, rtol=1e-4)
