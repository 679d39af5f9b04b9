"""Training heads: which column learns what, and that Hydra learns what Medusa cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.models import LoadedModel
from outrider.models.networks.heads import HydraHeads, MedusaHeads
from outrider.train.kinds.medusa import HeadsLearner, HeadsPlan, answers, new_heads
from outrider.train.kinds.registry import find_kind, plan_of, train_drafter
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import ANSWER, DataPlan, SelfData, write_data
from tests.train.conftest import make_markov

PLAN = HeadsPlan(batch=4, held_out=16, heads=3, vocab=40, decay=0.5)
HEADS = pytest.mark.parametrize("make", [MedusaHeads, HydraHeads])


def learner_of(make: type[MedusaHeads], target: LoadedModel, text: SelfData) -> HeadsLearner:
    net = new_heads(target, text, PLAN, make)
    torch.manual_seed(3)
    for block in net.blocks:
        torch.nn.init.normal_(block.weight, std=0.2)
    return HeadsLearner(target, net, PLAN, LOSSES["kl"])


def expected(learner: HeadsLearner, batch: SelfData) -> torch.Tensor:
    """Head by head and column by column, from the definition, differentiable."""
    target, net = learner.target.model, learner.net
    out = target(batch.tokens.long(), output_hidden_states=True)
    embed = target.get_input_embeddings().weight
    total = torch.zeros(())
    for row in range(len(batch.tokens)):
        tokens = batch.tokens[row].long()
        for column in range(len(tokens)):
            for number in range(3):
                said = column + 2 + number
                if said >= len(tokens) or batch.roles[row, said] != ANSWER:
                    continue
                goal = out.logits[row, said - 1]
                if int(goal.argmax()) not in net.ids.tolist():
                    continue
                path = embed[tokens[column + 1 : said]]
                q = net.logits(net.state(number, out.hidden_states[-1][row, column], path)).log_softmax(-1)
                p = goal[net.ids].log_softmax(-1)
                total = total + 0.5**number * (p.exp() * (p - q)).sum()
    return total / int((batch.roles == ANSWER).sum()) / (1 + 0.5 + 0.25)


@HEADS
def test_loss_and_gradients_equal_the_definition(
    make: type[MedusaHeads], four_layers: LoadedModel, text: SelfData
) -> None:
    batch = SelfData(text.tokens[:2], text.roles[:2].clone())
    batch.roles[:, :30] = 1
    learner = learner_of(make, four_layers, text)
    loss = learner.backward(batch)
    found = {name: weight.grad.clone() for name, weight in learner.weights.items() if weight.grad is not None}
    learner.net.zero_grad()
    wanted = expected(learner, batch)
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-4)
    assert len(found) == 3
    for name, weight in learner.weights.items():
        torch.testing.assert_close(found[name], weight.grad, atol=1e-6, rtol=1e-4, msg=name)


@HEADS
def test_a_head_sees_nothing_that_comes_later_than_its_own_path(
    make: type[MedusaHeads], four_layers: LoadedModel, text: SelfData
) -> None:
    """Changing the token at place 10 touches head k in columns that have it before them, and in those whose path has
    it; nothing earlier, and Medusa's columns only through the target."""
    learner = learner_of(make, four_layers, text)
    tokens = text.tokens[:1].long().clone()
    before = [learner.state(number, *learner.look(tokens)[1:]) for number in range(3)]
    tokens[0, 10] = (tokens[0, 10] + 1) % 64
    reads = make is HydraHeads
    for number in range(3):
        state = learner.state(number, *learner.look(tokens)[1:])
        first = 10 - 1 - number if reads else 10  # the path of column u is u + 1 .. u + 1 + number
        touched = (state != before[number]).any(-1)[0]
        assert not touched[:first].any() and touched[first : 10 + 1].all()


def test_columns_count_where_their_head_says_an_answer() -> None:
    part = SelfData(torch.arange(6)[None], torch.tensor([[0, 1, 2, 2, 1, 2]]))
    assert answers(part, 0).tolist() == [[True, True, False, True, False, False]]
    assert answers(part, 2).tolist() == [[False, True, False, False, False, False]]


def test_hydra_learns_what_follows_a_token_that_medusa_does_not_see(tmp_path: Path) -> None:
    """Text that is drawn, so that the feature before the pending token does not say which token that is."""
    target = make_markov()
    plan = DataPlan(tokens=4 * 32 * 48, length=48, batch=32, answer_temperatures=(1.0,))
    text = write_data(target, plan, tmp_path / "text")
    reached = {}
    for kind in ("medusa", "hydra"):
        settings = {"steps": 60, "batch": 8, "lr": 1e-2, "held_out": 16, "heads": 2}
        _, curve = train_drafter(kind, target, text, plan_of(find_kind(kind), settings), tmp_path / kind)
        reached[kind] = curve[-1]
    assert reached["hydra"].sampled > reached["medusa"].sampled + 0.1
    assert reached["hydra"].depths[1] > reached["medusa"].depths[1]
