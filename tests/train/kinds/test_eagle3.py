"""Masks, shifts and gradients of the unroll equal a drafter run by hand; training beats the unigram prior."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import packed, read_card, unpacked
from outrider.models.networks.eagle2 import Eagle2Layer
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.models.networks.fspad import FspadLayer, FspadShape
from outrider.models.trained import load_eagle3
from outrider.train.attention import attend
from outrider.train.kinds.eagle3 import (
    Eagle3Learner,
    Eagle3Plan,
    answers,
    default_layers,
    draft_vocabulary,
    look,
    new_layer,
    unrolled,
)
from outrider.train.kinds.registry import train_drafter
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import ANSWER, SelfData

PLAN = Eagle3Plan(steps=30, batch=8, lr=3e-3, held_out=16, vocab=40, unroll=3, intermediate=32)


def layer(kind: str = "eagle3") -> Any:
    torch.manual_seed(5)
    sizes, ids, head = (8, 4, 2, 4, 12), torch.arange(7), torch.nn.Linear(8, 7).double()
    net = {
        "eagle3": lambda: Eagle3Layer(Eagle3Shape(*sizes, (0, 1), 7), ids),
        "eagle2": lambda: Eagle2Layer(Eagle3Shape(*sizes, (1,), 7), ids, head),
        "fspad": lambda: FspadLayer(FspadShape(*sizes, (1,), 7, lift=10, adapter=3), ids, head),
    }[kind]().double()
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return net


def by_hand(
    net: Any, embedded: torch.Tensor, state: torch.Tensor, step: int, column: int, detached: bool = False
) -> torch.Tensor:
    """What a drafter does that drafts `step` tokens ahead to arrive at `column`, row by row, without any mask.

    The chain starts from true states up to column - step, then feeds each output back one column later.
    """
    last = column - step
    keys, values = [], []

    def row(state: torch.Tensor, at: int) -> torch.Tensor:
        token = embedded[:, at : at + 1]
        state = net.enter(token, state)
        q, k, v = net.project(token, state, torch.tensor([[at]]))
        keys.append(k)
        values.append(v)
        heads = q.shape[1] // k.shape[1]
        k, v = (torch.cat(part, 2).repeat_interleave(heads, 1) for part in (keys, values))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return net.finish(state, weights @ v)

    out = torch.zeros(0)
    for at in range(last + 1):
        out = row(state[:, at : at + 1], at)
    for at in range(last + 1, column + 1):
        out = row(out.detach() if detached else out, at)
    return out[:, 0]


LAYERS = pytest.mark.parametrize("kind", ["eagle3", "eagle2", "fspad"])


@LAYERS
def test_every_column_of_every_step_equals_a_drafter_unrolled_by_hand(kind: str) -> None:
    net = layer(kind)
    embedded, state = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(2, 6, 8, dtype=torch.float64)
    for step, after in enumerate(unrolled(net, embedded, state, 4)):
        for column in range(step, 6):
            torch.testing.assert_close(after[:, column], by_hand(net, embedded, state, step, column))


@LAYERS
@pytest.mark.parametrize("detached", [False, True])
def test_its_gradients_equal_those_of_the_hand_unroll(kind: str, detached: bool) -> None:
    """Through the head too, so that an adapter before it counts."""
    net = layer(kind)
    embedded = torch.randn(1, 5, 8, dtype=torch.float64)
    state = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for way in ("unrolled", "by hand"):
        net.zero_grad()
        state.grad = None
        if way == "unrolled":
            steps = enumerate(unrolled(net, embedded, state, 3, detached))
            outputs = [after[:, step:].flatten(0, 1) for step, after in steps]
        else:
            outputs = [by_hand(net, embedded, state, s, c, detached) for s in range(3) for c in range(s, 5)]
        sum(net.logits(after).sin().sum() for after in outputs).backward()
        found.append(
            {"state": state.grad, **{n: w.grad.clone() for n, w in net.named_parameters() if w.grad is not None}}
        )
    assert found[0].keys() == found[1].keys() and len(found[0]) > 8
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], msg=name)


@LAYERS
def test_a_column_sees_nothing_that_comes_later_nor_true_states_it_would_not_have(kind: str) -> None:
    net = layer(kind)
    embedded, state = torch.randn(1, 6, 8, dtype=torch.float64), torch.randn(1, 6, 8, dtype=torch.float64)
    before = [after.clone() for after in unrolled(net, embedded, state, 3)]
    changed = state.clone()
    changed[:, 3] += 1.0
    for step, after in enumerate(unrolled(net, embedded, changed, 3)):
        touched = (after != before[step]).any(-1)[0].tolist()
        assert touched == [column >= 3 + step for column in range(6)]
    changed = embedded.clone()
    changed[:, 3] += 1.0
    for step, after in enumerate(unrolled(net, changed, state, 3)):
        assert not (after != before[step])[:, :3].any() and (after != before[step])[:, 3].any()


def test_large_scores_stay_finite() -> None:
    torch.manual_seed(0)
    q, k, v = (200 * torch.randn(1, 2, 5, 4) for _ in range(3))
    out = attend(q, (k, v), [(-k, v)])
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])  # the first column sees itself alone


def test_the_loss_counts_answers_inside_the_vocabulary_and_weighs_steps(
    four_layers: LoadedModel, text: SelfData
) -> None:
    """Against the closed form: the mean over answer tokens of a weighted sum of KL from the restricted target."""
    net = new_layer(four_layers, text, PLAN)
    batch = SelfData(text.tokens[:3], text.roles[:3].clone())
    batch.roles[:, :20] = 1
    learner = Eagle3Learner(four_layers, net, PLAN, LOSSES["kl"])
    loss = learner.backward(batch)
    logits, embedded, state = look(four_layers, net, batch.tokens.long())
    expected, count = 0.0, int((batch.roles == ANSWER).sum())
    for step, after in enumerate(unrolled(net, embedded, state, 3)):
        q = net.logits(after).log_softmax(-1)
        for row in range(3):
            for column in range(step, batch.tokens.shape[1] - 2):
                goal = logits[row, column + 1]
                if batch.roles[row, column + 2] == ANSWER and int(goal.argmax()) in net.ids.tolist():
                    p = goal[net.ids].log_softmax(-1)
                    expected += 0.8**step * float((p.exp() * (p - q[row, column].detach())).sum())
    assert float(loss) == pytest.approx(expected / count / (1 + 0.8 + 0.64), rel=1e-4)
    assert all(w.grad is not None and w.grad.isfinite().all() for w in learner.weights.values())
    assert all(w.grad is None for w in four_layers.model.parameters())


def test_the_topk_term_is_added_with_its_weight(four_layers: LoadedModel, text: SelfData) -> None:
    """The gradient is linear in the two: what the term adds is what it is by itself."""
    net = new_layer(four_layers, text, PLAN)
    batch, found = SelfData(text.tokens[:3], text.roles[:3]), []
    plans = (PLAN, replace(PLAN, topk_weight=0.5, topk=4), replace(PLAN, topk_weight=1.0, topk=4))
    for plan in plans:
        net.zero_grad()
        loss = Eagle3Learner(four_layers, net, plan, LOSSES["kl"]).backward(batch)
        found.append((float(loss), net.fc.weight.grad.clone()))
    (plain, g0), (half, g1), (whole, g2) = found
    assert half == pytest.approx((plain + whole) / 2, rel=1e-5) and whole > plain + 0.1
    torch.testing.assert_close(g1, (g0 + g2) / 2, atol=1e-6, rtol=1e-4)


def test_a_text_without_answers_teaches_nothing(four_layers: LoadedModel, text: SelfData) -> None:
    net = new_layer(four_layers, text, PLAN)
    silent = SelfData(text.tokens[:4], torch.zeros_like(text.roles[:4]))
    learner = Eagle3Learner(four_layers, net, PLAN, LOSSES["kl"])
    assert float(learner.backward(silent)) == 0
    assert not any(w.grad.any() for w in learner.weights.values() if w.grad is not None)


def test_columns_are_two_tokens_behind_what_they_say() -> None:
    part = SelfData(torch.arange(6)[None], torch.tensor([[0, 1, 2, 2, 1, 2]]))
    assert answers(part).tolist() == [[True, True, False, True, False, False]]


def test_the_draft_vocabulary_is_what_answers_say_most_and_what_ends_them() -> None:
    data = SelfData(torch.tensor([[9, 5, 5, 7, 3, 3, 3]]), torch.tensor([[1, 2, 2, 2, 2, 2, 1]]))
    assert draft_vocabulary(data, 3, 12, frozenset({11})).tolist() == [3, 5, 11]
    assert draft_vocabulary(data, 4, 12, frozenset({11})).tolist() == [3, 5, 7, 11]
    assert draft_vocabulary(data, 99, 12, frozenset()).tolist() == list(range(12))


def test_default_layers_are_low_middle_high() -> None:
    assert default_layers(30) == (2, 15, 27)
    assert default_layers(2) == (0, 1) and default_layers(1) == (0,)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_stored_drafter_comes_back_and_says_the_same(
    four_layers: LoadedModel, text: SelfData, tmp_path: Path, eight_bits: bool
) -> None:
    plan = replace(PLAN, steps=3, eight_bits=eight_bits)
    learner, _ = train_drafter("eagle3", four_layers, text, plan, tmp_path, licence="Apache-2.0")
    card = read_card(tmp_path)
    assert (card.kind, card.layers, card.licence) == ("eagle3", (1, 2), "Apache-2.0")
    again = load_eagle3(tmp_path, four_layers)
    assert torch.equal(again.ids, learner.net.ids)
    state = torch.randn(1, 4, 32)
    torch.testing.assert_close(
        again.logits(state), learner.net.logits(state), atol=0.1 if eight_bits else 0.01, rtol=0.02
    )


def test_eight_bits_keep_each_value_within_half_a_step_of_its_row() -> None:
    weights = {"a": torch.randn(5, 9) * torch.tensor([[1.0], [10.0], [0.1], [3.0], [0.0]]), "b": torch.randn(4)}
    stored = packed(weights, eight_bits=True)
    assert stored["a"].dtype == torch.int8 and stored["b"].dtype == torch.float16
    step = weights["a"].abs().amax(1, keepdim=True) / 127
    assert ((unpacked(stored)["a"] - weights["a"]).abs() <= 0.5 * step + 1e-9).all()


def test_a_drafter_of_another_target_or_kind_is_refused(
    four_layers: LoadedModel, another: LoadedModel, text: SelfData, tmp_path: Path
) -> None:
    train_drafter("eagle3", four_layers, text, replace(PLAN, steps=1), tmp_path)
    with pytest.raises(InputError, match="trained for .* outrider train run --kind eagle3"):
        load_eagle3(tmp_path, another)
    card = json.loads((tmp_path / "drafter.json").read_text())
    (tmp_path / "drafter.json").write_text(json.dumps(card | {"kind": "draft-model"}))
    with pytest.raises(InputError, match="of kind draft-model, not eagle3"):
        load_eagle3(tmp_path, four_layers)
