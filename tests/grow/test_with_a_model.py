"""Growers over a real draft model: its cache follows whatever path was accepted, and greedy text is plain text."""

from __future__ import annotations

import pytest
import torch

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.draft.grown import Grown
from outrider.draft.model import draft_model as model
from outrider.grow.cost_aware import CostAware
from outrider.grow.dyspec import Heap, Threshold
from outrider.grow.kary import KAry
from outrider.grow.rsd import StochasticBeam
from outrider.grow.sequoia import Sequoia
from outrider.grow.top_plus_one import TopPlusOne
from outrider.grow.topk import TopK
from outrider.runtime.targets import eager_target
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from tests.watched import Watched, llama

PROMPTS = [[1, 2, 3, 4], [9, 8], [7, 7, 7, 30, 2, 1]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
GROWERS = {
    "k-ary": lambda: KAry((2, 2, 1), "without-replacement"),
    "top-k": lambda: TopK(beam=3, branch=3, depth=3),
    "rsd-s": lambda: StochasticBeam(2, 3),
    "dyspec heap": lambda: Heap(depth=3),
    "dyspec threshold": lambda: Threshold(depth=3),
    "sequoia": lambda: Sequoia(depth=3),
    "top plus one": lambda: TopPlusOne((2, 2)),
    "cost-aware": lambda: CostAware(lambda rows, batch, context: 1.0, lambda rows: 0.01),
}


def texts(grower, temperature: float) -> tuple[list[list[int]], list[list[int]]]:
    """With the grower and plain; the draft is the target itself with other noise, so that paths are accepted."""
    target, draft = llama(1), llama(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    source = Watched(eager_target(draft, max_slots=8))
    engine = Engine(eager_target(target, max_slots=4), PLAIN, strict=True)
    recipe = Recipe("tree", Grown(source, grower, sampled=True), Recursive(), Fixed(Budget(8, 8)))
    params = SamplingParams(max_new_tokens=16, temperature=temperature, seed=3)
    both = []
    for run in (recipe, PLAIN):
        handles = [engine.submit(prompt, params, run) for prompt in PROMPTS]
        both.append([list(handle.result().token_ids) for handle in handles])
    return both[0], both[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", GROWERS)
def test_the_drafts_cache_follows_the_accepted_path(name: str, temperature: float) -> None:
    Watched.steps = Watched.kept = 0
    mine, plain = texts(GROWERS[name](), temperature)
    assert Watched.steps > 5
    if temperature == 0:
        assert mine == plain and Watched.kept > 0


def test_a_draft_that_trusts_the_numbers_of_the_tree_is_seen(monkeypatch) -> None:
    """The source ran only the expanded nodes, so equal numbers mean other nodes."""
    monkeypatch.setattr(
        model, "_followed", lambda tree, tokens: list(range(1, min(len(tokens), len(tree) - 1) + 1)) if tree else []
    )
    with pytest.raises(AssertionError):
        texts(TopK(beam=3, branch=3, depth=3), 0.0)
