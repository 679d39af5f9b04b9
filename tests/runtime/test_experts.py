"""Active experts: what a pass is said to have touched is what its routers chose; the timed curve has them, too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.control.cost import measure
from outrider.core.records import GREEDY, Piece
from outrider.core.tree import fixed
from outrider.runtime.targets import eager_target
from tests.runtime.test_architectures import build


def chosen_by_the_model(model, tokens: list[int]) -> float:
    """Experts that some token of a text was sent to, of a layer, on average; from the model's own router logits."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    k = model.config.num_experts_per_tok
    return float(np.mean([len(layer.topk(k).indices.unique()) for layer in logits]))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_pass_touches_the_experts_that_its_rows_were_sent_to(name: str) -> None:
    model = build(name)
    target = eager_target(model, max_slots=1, max_context=64, self_test=False)
    assert target.traits.active_experts is not None and target.traits.experts > 1
    slot = target.acquire()
    text = [3, 7, 11, 2, 9]
    target.run([Piece(slot, text)], GREEDY)
    assert target.traits.active_experts() == chosen_by_the_model(model, text)
    target.run([Piece(slot, tree=fixed(np.array([5, 6, 8, 8]), np.array([-1, 0, 0, 1])))], GREEDY)
    count = target.traits.active_experts()
    assert model.config.num_experts_per_tok <= count <= target.traits.experts
    again = build(name)
    assert all("forward" not in module.__dict__ for module in again.modules())


def test_the_measured_curve_of_a_mixture_says_how_many_experts_its_trees_touch() -> None:
    target = eager_target(build("mixtral"), max_slots=1, max_context=128, self_test=False)
    experts = measure(target, (1, 8, 16), contexts=(32,), repeats=1).experts
    assert experts is not None and experts.touched[0] < experts.touched[-1] <= experts.total
    assert measure(eager_target(build("llama"), max_slots=1, self_test=False), (1, 2), repeats=1).experts is None
