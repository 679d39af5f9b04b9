"""The losses of chunk sparsity: their gradients, their bounds, what lowers them, and that they do what they are for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.core.errors import InputError
from outrider.train.blockffn import BlockFFNPlan, encoded, new_tokenizer, read_text, train_blockffn
from outrider.train.chunk_sparsity import (
    AdaptiveWeight,
    SparsityTarget,
    chunk_share,
    chunk_sparsity,
    locality,
    spread,
    token_sparsity,
)


def scores(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gradients_are_those_of_finite_differences() -> None:
    z = scores(1, 6, 4).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: spread(x).double(), z, eps=1e-3, atol=1e-3)
    assert torch.autograd.gradcheck(lambda x: chunk_share(x.double(), 3).double(), z, eps=1e-3, atol=1e-3)
    # The later token is a constant target: its gradient is that of the earlier token's side alone.
    target = z.detach().clone()

    def earlier(x: Tensor) -> Tensor:
        both = torch.cat([x, target[:, -1:]], 1)
        wanted = torch.sigmoid(2.0 * target[:, 1:])
        return torch.nn.functional.binary_cross_entropy_with_logits(2.0 * both[:, :-1], wanted)

    (got,) = torch.autograd.grad(locality(z, steep=2.0), z)
    part = z.detach()[:, :-1].clone().requires_grad_(True)
    assert torch.autograd.gradcheck(earlier, part)
    (want,) = torch.autograd.grad(earlier(part), part)
    assert torch.allclose(got[:, :-1], want) and not got[:, -1].any()


@pytest.mark.parametrize("seed", range(4))
def test_the_share_of_a_chunk_lies_between_nothing_and_all_and_of_no_active_expert_is_nothing(seed: int) -> None:
    assert 0 <= float(chunk_share(10 * scores(2, 64, 8, seed=seed), 32)) <= 1
    assert float(chunk_share(-torch.rand(2, 64, 8), 32)) == 0.0
    assert float(chunk_share(scores(2, 5, 8), 32)) == 0.0, "there is no whole chunk"


def test_tokens_that_share_experts_use_a_smaller_share_than_tokens_that_do_not() -> None:
    shared, apart = -torch.ones(1, 2, 4), -torch.ones(1, 2, 4)
    shared[0, :, 0] = 1
    apart[0, 0, 0] = apart[0, 1, 1] = 1
    assert float(chunk_share(shared, 2)) == pytest.approx(0.25, abs=1e-3)
    assert float(chunk_share(apart, 2)) == pytest.approx(0.5, abs=1e-3)
    assert float(locality(shared)) < float(locality(apart))


def test_padding_does_not_count() -> None:
    z = scores(1, 8, 4)
    text = torch.tensor([[True] * 4 + [False] * 4])
    other = torch.cat([z[:, :4], scores(1, 4, 4, seed=1)], 1)
    for loss in (lambda x: locality(x, text), lambda x: chunk_share(x, 8, text), lambda x: spread(x, text)):
        assert float(loss(z)) == float(loss(other))


def test_the_losses_leave_the_scores_as_they_are() -> None:
    z = scores(1, 8, 4)
    before = z.clone()
    locality(z), chunk_share(z, 4), spread(z)
    assert torch.equal(z, before)


def test_a_loss_that_rises_raises_its_weight_but_never_above_four_times_the_start() -> None:
    weight = AdaptiveWeight(0.05, ramp=4, every=4)
    assert [weight.step(1.0) for _ in range(4)] == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
    seen = [weight.step(1.0 + step) for step in range(100)]
    assert max(seen) == 0.2 and seen[-1] == 0.2
    fallen = [weight.step(1.0 / (1 + step)) for step in range(100)]
    assert fallen[-1] < 0.2


def test_too_little_sparsity_raises_the_weight_that_holds_it() -> None:
    target = SparsityTarget(0.8)
    first = target.value
    assert target.step(0.5) > first and SparsityTarget(0.8).step(0.95) < first


def test_sparsity_by_token_and_by_chunk() -> None:
    active = torch.zeros(1, 4, 4, dtype=torch.bool)
    active[0, 0, 0] = active[0, 1, 0] = active[0, 2, 1] = active[0, 3, 2] = True
    assert token_sparsity(active) == chunk_sparsity(active, 1) == 0.75
    assert chunk_sparsity(active, 2) == pytest.approx((0.75 + 0.5 + 0.5) / 3)


def small_plan(**changes: object) -> BlockFFNPlan:
    plan = BlockFFNPlan(
        hidden=48,
        layers=2,
        heads=4,
        experts=32,
        expert_size=8,
        vocabulary=400,
        batch=16,
        length=64,
        chunk=32,
        warmup=10,
    )
    return dataclasses.replace(plan, **changes)


def source_tokens() -> Tensor:
    text = read_text([Path(__file__).parents[2] / "outrider" / "core"], 200_000)
    return encoded(new_tokenizer(text, 400), text)


def test_text_is_read_from_folders_and_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    assert read_text([tmp_path], 100) == "one two" and read_text([tmp_path], 3) == "one"
    with pytest.raises(InputError, match="no text"):
        read_text([tmp_path / "none"], 100)
    with pytest.raises(InputError, match="too few"):
        train_blockffn(torch.zeros(100, dtype=torch.long), small_plan(), torch.device("cpu"))


@pytest.mark.slow
def test_with_the_losses_neighbours_share_more_experts_at_equal_sparsity_by_token() -> None:
    tokens, device = source_tokens(), torch.device("cpu")
    told = {}
    for name, changes in (("with", {"sparsity": 0.75}), ("without", {"sparsity": 0.85, "local": 0.0, "chunks": 0.0})):
        told[name] = train_blockffn(tokens, small_plan(steps=250, **changes), device)[1]
    unused = {name: seen["unused by consecutive tokens"] for name, seen in told.items()}
    assert abs(unused["with"][1] - unused["without"][1]) < 0.04
    assert unused["with"][8] - unused["without"][8] > 0.04
    assert told["with"]["perplexity"] < 1.2 * told["without"]["perplexity"]
