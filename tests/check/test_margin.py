"""Margins: nothing smaller changes the choice, and where nothing is truncated they are as large as that allows."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.check.margin import boundary, race_margin
from outrider.core.params import SamplingParams
from outrider.core.warping import keep_min_p, keep_top_k, keep_top_p

SIZE = 24


def winner(scores: torch.Tensor, waits: torch.Tensor, params: SamplingParams) -> int:
    kept = keep_min_p(keep_top_p(keep_top_k(scores, params.top_k), params.top_p), params.min_p)
    return int((kept - waits.log()).argmax())


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(SIZE, generator=generator, dtype=torch.float64)
    waits = -torch.log(torch.rand(SIZE, generator=generator, dtype=torch.float64))
    return scores, waits, generator


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.sampled_from([0, 1, 3, 10]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
)
@example(413, 3, 0.5, 0.0)  # the likeliest token is passed, and the one that passes it is enough alone
@example(112, 10, 0.5, 0.0)
@example(155, 0, 0.5, 0.0)
def test_smaller_changes_never_move_the_choice(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    scores, waits, generator = drawn(seed)
    chosen = winner(scores, waits, params)
    margin = race_margin(scores, waits, chosen, params)
    assert margin >= 0
    size = min(0.49 * margin, 1.0)  # each score moves by less than half, so a difference of two by less than the whole
    for _ in range(20):
        push = torch.randint(0, 2, (SIZE,), generator=generator).double() * 2 - 1
        assert winner(scores + size * push, waits, params) == chosen


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_without_truncation_the_margin_is_tight(seed: int) -> None:
    params = SamplingParams(temperature=1.0)
    scores, waits, _ = drawn(seed)
    chosen = winner(scores, waits, params)
    margin = race_margin(scores, waits, chosen, params)
    scores[chosen] -= 1.001 * margin
    assert winner(scores, waits, params) != chosen


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), top_k=st.sampled_from([0, 4]), top_p=st.sampled_from([1.0, 0.6]))
def test_boundary_keeps_what_sampling_keeps(seed: int, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=0.01)
    scores, _, _ = drawn(seed)
    kept = keep_min_p(keep_top_p(keep_top_k(scores, top_k), top_p), 0.01) > -torch.inf
    assert torch.equal(boundary(scores, params)[0], kept)
