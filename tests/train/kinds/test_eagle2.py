"""The losses of EAGLE-2, HASS and FSPAD against their definitions, and where their gradients go and where not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from outrider.models import LoadedModel
from outrider.models.networks.eagle2 import Eagle2Layer
from outrider.train.kinds.eagle2 import Eagle2Learner, Eagle2Plan, eagle2_learner, new_layer
from outrider.train.kinds.eagle3 import look, unrolled
from outrider.train.kinds.fspad import FspadPlan, fspad_learner
from outrider.train.kinds.registry import train_drafter
from outrider.train.losses import LOSSES, topk_loss
from outrider.train.text.selfdata import ANSWER, DataPlan, SelfData, write_data
from tests.train.conftest import make_markov, make_target

PLAN = Eagle2Plan(batch=4, held_out=16, intermediate=32, noise=0.0)
WHOLE = FspadPlan(batch=4, held_out=16, intermediate=32, noise=0.0)


@pytest.fixture
def batch(text: SelfData) -> SelfData:
    part = SelfData(text.tokens[:3], text.roles[:3].clone())
    part.roles[:, :20] = 1
    return part


def test_the_loss_is_the_distance_of_features_and_of_distributions(
    four_layers: LoadedModel, text: SelfData, batch: SelfData
) -> None:
    """Column u against the target's feature and law at u + 1, over answer tokens, steps weighted."""
    plan = replace(PLAN, unroll=2, decay=0.5, topk_weight=0.7, topk=3, vocab=40)
    learner = eagle2_learner(four_layers, text, plan, None)
    net = learner.net
    loss = learner.backward(batch)
    tokens = batch.tokens.long()
    logits, embedded, state = look(four_layers, net, tokens)
    feature = four_layers.model(tokens, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(state, feature)  # what the target's head reads
    torch.testing.assert_close(four_layers.model.lm_head(feature)[..., net.ids], net.logits(feature))
    expected, count = 0.0, int((batch.roles == ANSWER).sum())
    with torch.no_grad():
        for step, after in enumerate(unrolled(net, embedded, state, 2)):
            for row in range(3):
                for column in range(step, batch.tokens.shape[1] - 2):
                    if batch.roles[row, column + 2] != ANSWER:
                        continue
                    guess, goal = after[row, column], feature[row, column + 1]
                    cost = float(smooth_l1_loss(guess, goal))
                    if int(logits[row, column + 1].argmax()) in net.ids.tolist():
                        p, q = logits[row, column + 1, net.ids].softmax(-1), net.logits(guess).softmax(-1)
                        best = p.argsort(descending=True)[:3]
                        cost += 0.1 * float((p * (p / q).log()).sum()) - 0.7 * float((p * q.log())[best].sum())
                    expected += 0.5**step * cost
    assert float(loss) == pytest.approx(expected / count / 1.5, rel=1e-4)
    assert all(w.grad is not None and w.grad.isfinite().all() for w in learner.weights.values())


def test_one_step_without_topk_is_the_loss_of_eagle(four_layers: LoadedModel, text: SelfData, batch: SelfData) -> None:
    net = new_layer(four_layers, text, PLAN, Eagle2Layer)
    plain = Eagle2Learner(four_layers, net, PLAN, LOSSES["kl"]).backward(batch)
    same = Eagle2Learner(four_layers, net, replace(PLAN, unroll=1, topk_weight=0.0, topk=5), LOSSES["kl"])
    assert float(plain) == float(same.backward(batch))
    more = Eagle2Learner(four_layers, net, replace(PLAN, topk_weight=1.0), LOSSES["kl"])
    assert float(more.backward(batch)) > float(plain) + 0.1


def test_steps_on_its_own_guesses_help_deeper_down(tmp_path: Path) -> None:
    """HASS against EAGLE at equal updates: the deeper tokens of a chain are accepted more often."""
    target = make_markov()
    text = write_data(target, DataPlan(tokens=6 * 32 * 48, length=48, batch=32), tmp_path / "text")
    reached = {}
    for unroll in (1, 3):
        plan = replace(PLAN, steps=60, batch=8, lr=3e-3, noise=0.1, unroll=unroll)
        _, curve = train_drafter("eagle2", target, text, plan, tmp_path / str(unroll))
        reached[unroll] = curve[-1].depths
    assert all(deep > shallow + 0.1 for deep, shallow in zip(reached[3][1:], reached[1][1:], strict=True))


def test_topk_loss_keeps_the_targets_probabilities_as_they_are() -> None:
    """p is not scaled up, q is the whole softmax; its gradient against finite differences."""
    torch.manual_seed(0)
    p_logits, q_logits = torch.randn(4, 9).double(), torch.randn(4, 9).double().requires_grad_(True)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    best = p.argsort(-1, descending=True)[:, :3]
    expected = -(p.gather(1, best) * q.gather(1, best).log()).sum(-1)
    torch.testing.assert_close(topk_loss(p_logits, q_logits, 3), expected)
    assert torch.autograd.gradcheck(lambda x: topk_loss(p_logits, x, 3), (q_logits,), eps=1e-6, atol=1e-7)
    whole = -(p * q.log()).sum(-1)
    torch.testing.assert_close(topk_loss(p_logits, q_logits, 99), whole)


def test_noise_is_on_true_features_only_and_repeats(four_layers: LoadedModel, text: SelfData, batch: SelfData) -> None:
    learner = eagle2_learner(four_layers, text, replace(PLAN, noise=0.2), None)
    state = torch.zeros(3, 48, 32)
    shown = learner.seen(state, batch)
    assert torch.equal(shown, learner.seen(state, batch)) and 0.19 < float(shown.abs().max()) <= 0.2
    other = SelfData(batch.tokens.flip(0) + 1, batch.roles)
    assert not torch.equal(shown, learner.seen(state, other))


def test_fspad_begins_as_eagle2_bit_for_bit(four_layers: LoadedModel, text: SelfData) -> None:
    nets = [eagle2_learner(four_layers, text, PLAN, None).net, fspad_learner(four_layers, text, WHOLE, None).net]
    tokens = text.tokens[:2].long()
    rows = []
    for net in nets:
        _, embedded, state = look(four_layers, net, tokens)
        rows.append([net.logits(after) for after in unrolled(net, embedded, state, 3)])
    for a, b in zip(*rows, strict=True):
        assert torch.equal(a, b)


def test_the_feature_loss_does_not_reach_the_adapter_and_the_distribution_does(
    four_layers: LoadedModel, text: SelfData, batch: SelfData
) -> None:
    for feature, token, touched in ((1.0, 0.0, False), (0.0, 1.0, True)):
        plan = replace(WHOLE, unroll=2, feature_weight=feature, token_weight=token)
        learner = fspad_learner(four_layers, text, plan, None)
        for weight in learner.net.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        learner.backward(batch)
        found = {name: w.grad for name, w in learner.weights.items()}
        for name in ("adapter.up.weight", "adapter.down.weight"):
            grad = found[name]
            assert bool(grad is not None and grad.any()) == touched
        grad = found["sampling.gate.weight"]
        assert grad is not None and grad.any()  # the drawn token's gate learns from both


def test_what_fspad_feeds_on_is_the_guess_and_not_what_the_head_reads(four_layers: LoadedModel, text: SelfData) -> None:
    """Changing the adapter changes distributions, and no state of any later step."""
    net = fspad_learner(four_layers, text, WHOLE, None).net
    _, embedded, state = look(four_layers, net, text.tokens[:2].long())
    before = [(after, net.logits(after)) for after in unrolled(net, embedded, state, 3)]
    torch.nn.init.normal_(net.adapter.up.weight)
    for (old, logits), after in zip(before, unrolled(net, embedded, state, 3), strict=True):
        assert torch.equal(old, after) and not torch.equal(logits, net.logits(after))


def test_partial_alignment_by_channels_leaves_the_others_free(
    four_layers: LoadedModel, text: SelfData, batch: SelfData
) -> None:
    learner = fspad_learner(four_layers, text, replace(WHOLE, align="channels", channels=0.25), None)
    assert learner.net.adapter is None
    after = torch.randn(5, 32, requires_grad=True)
    learner.feature_loss(after, torch.zeros(5, 32)).sum().backward()
    assert after.grad is not None and after.grad[:, :8].all() and not after.grad[:, 8:].any()


def test_sampled_features_tell_tokens_apart_that_share_a_feature() -> None:
    """The drawn token's embedding gates the feature: the same feature gives different mixtures."""
    target = make_target(0)
    text = SelfData(torch.randint(3, 64, (20, 16), dtype=torch.int32), torch.full((20, 16), ANSWER, dtype=torch.uint8))
    net = fspad_learner(target, text, WHOLE, None).net
    torch.nn.init.normal_(net.sampling.lower.weight)
    feature = torch.randn(32).expand(2, 32)
    embedded = target.model.get_input_embeddings()(torch.tensor([5, 9]))
    sampled = net.sampling(embedded, feature)
    assert not torch.allclose(sampled[0], sampled[1], atol=1e-3)
