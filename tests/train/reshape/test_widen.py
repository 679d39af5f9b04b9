"""A larger drafter says what the smaller one said, and something sensible of the tokens it did not know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.train.kinds.eagle3 import Eagle3Plan, eagle3_learner, look, new_layer, unrolled
from outrider.train.kinds.registry import train_drafter
from outrider.train.reshape.trim import token_counts
from outrider.train.reshape.widen import widened
from outrider.train.text.selfdata import SelfData

PLAN = Eagle3Plan(vocab=24, intermediate=16, layers=(1, 2, 3), unroll=3, held_out=4, steps=2, batch=4)


def test_known_tokens_keep_their_distributions_in_every_step(four_layers: LoadedModel, text: SelfData) -> None:
    net = new_layer(four_layers, text, PLAN)
    more = widened(net, four_layers, text, 40, 48)
    assert (more.shape.vocab, more.shape.intermediate) == (40, 48) and torch.isin(net.ids, more.ids).all()
    known = torch.isin(more.ids, net.ids)
    tokens = text.tokens[:2].long()
    for small, large in zip(
        unrolled(net, *look(four_layers, net, tokens)[1:], 3), unrolled(more, *look(four_layers, more, tokens)[1:], 3),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(more.logits(large)[..., known], net.logits(small))


def test_new_tokens_are_those_said_most_and_begin_as_the_targets(four_layers: LoadedModel, text: SelfData) -> None:
    # Its head is the target's, so the best map between them changes nothing; 40 rows of 32 values say so.
    net = new_layer(four_layers, text, replace(PLAN, vocab=40))
    more = widened(net, four_layers, text, 56, 0)
    fresh = more.ids[~torch.isin(more.ids, net.ids)]
    left = torch.tensor([token for token in range(64) if token not in more.ids])
    counts = token_counts(text, 64)
    assert len(fresh) == 16 and counts[fresh].min() >= counts[left].max()
    torch.testing.assert_close(more.lm_head.weight, four_layers.model.get_output_embeddings().weight[more.ids])


def test_training_goes_on_at_larger_sizes_and_refuses_smaller_ones(
    four_layers: LoadedModel, text: SelfData, tmp_path: Path
) -> None:
    train_drafter("eagle3", four_layers, text, PLAN, tmp_path / "small")
    same = eagle3_learner(four_layers, text, Eagle3Plan(unroll=2), tmp_path / "small")
    assert (same.net.shape.vocab, same.net.shape.intermediate) == (24, 16)
    large = Eagle3Plan(vocab=40, intermediate=32, unroll=2, held_out=4, steps=2, batch=4)
    learner, _ = train_drafter("eagle3", four_layers, text, large, tmp_path / "large", begin=tmp_path / "small")
    assert (learner.net.shape.vocab, learner.net.shape.intermediate) == (40, 32)
    with pytest.raises(InputError, match="24 tokens .* can only grow.*train trim"):
        eagle3_learner(four_layers, text, Eagle3Plan(vocab=10), tmp_path / "small")
