"""BlockFFN: the union of experts is the whole layer, reads no more than it says, and drafts leave the text as it is."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.api import Outrider
from outrider.core.errors import UnsupportedModel
from outrider.core.params import SamplingParams
from outrider.core.records import GREEDY, Piece
from outrider.core.tree import fixed
from outrider.models import load_model
from outrider.models.networks.blockffn import (
    BlockFFNConfig,
    BlockFFNForCausalLM,
    bytes_read,
    routed_layers,
    stretches,
)
from outrider.runtime import choice
from outrider.runtime.targets import eager_target


@cache
def model() -> BlockFFNForCausalLM:
    torch.manual_seed(0)
    config = BlockFFNConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_experts=24, expert_size=8, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    made = BlockFFNForCausalLM(config).eval().requires_grad_(False)
    for layer in routed_layers(made):
        layer.router.weight -= 0.15 * torch.randn(32).abs()  # fewer are active than not
    return made


def test_numbers_are_joined_where_they_follow_each_other() -> None:
    assert (
        stretches([]) == []
        and stretches([0, 1, 2]) == [(0, 3)]
        and stretches([1, 3, 4, 9]) == [(1, 2), (3, 5), (9, 10)]
    )


@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_the_union_of_experts_gives_what_all_of_them_give(rows: int) -> None:
    layer = routed_layers(model())[0]
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    gates = layer.gates(x)
    assert torch.allclose(layer.union(x, gates), layer.dense(x, gates), atol=1e-5)
    assert float(layer.last_active) == float((gates != 0).any(0).sum())
    each = [float((gates[i] != 0).sum()) for i in range(rows)]
    assert max(each) <= float(layer.last_active) <= sum(each)


def test_a_row_for_which_no_expert_is_active_gives_nothing() -> None:
    layer = routed_layers(model())[0]
    nothing = torch.zeros(2, 32)
    assert not layer(nothing).any() and not layer.dense(nothing, layer.gates(nothing)).any()
    assert float(layer.last_active) == 0


def test_a_pass_reads_its_union_of_experts_and_says_so() -> None:
    made, target = model(), eager_target(model(), max_slots=1, self_test=False)
    slot = target.acquire()
    target.run([Piece(slot, [1, 5, 9])], GREEDY)
    for nodes in ([-1], [-1, 0, 1, 2], [-1, 0, 0, 1, 1, 2]):
        tree = fixed(np.arange(3, 3 + len(nodes)), np.array(nodes))
        target.run([Piece(slot, tree=tree)], GREEDY)
        layers = routed_layers(made)
        union = [(layer.scores > 0).flatten(0, -2).any(0).sum().item() for layer in layers]
        assert target.traits.active_experts is not None
        assert target.traits.active_experts() == np.mean(union)
        experts = sum(layer.expert_bytes * count for layer, count in zip(layers, union, strict=True))
        rest = sum(
            weight.nbytes for name, weight in made.named_parameters() if "mlp.up" not in name and "mlp.down" not in name
        )
        assert bytes_read(made) == rest - made.get_input_embeddings().weight.nbytes + experts


def test_it_loads_like_every_model_and_only_runtimes_that_choose_at_run_time_take_it(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    tokens = torch.tensor([[1, 4, 7, 9]])
    assert torch.equal(loaded.model(tokens).logits, model()(tokens).logits)
    assert choice.build(loaded.model, keep=False).traits.runtime == "eager"
    with pytest.raises(UnsupportedModel, match="experts"):
        choice.build(loaded.model, "native", keep=False)


@cache
def engine() -> Outrider:
    return Outrider(load_model(model()), "plain", strict=True, limits={"max_slots": 2})


@pytest.mark.parametrize(
    ("method", "options"),
    [("mix", {}), ("token-recycling", {}), ("draft-model", {"layers": 1}), ("early-exit", {}), ("jacobi", {})],
)
def test_every_kind_of_drafter_leaves_its_text_as_it_is(method: str, options: dict[str, Any]) -> None:
    made, params = engine(), SamplingParams(max_new_tokens=24, ignore_eos=True)
    for prompt in ([1, 2, 3, 1, 2, 3], [9, 8, 7]):
        plain = made.engine.submit(prompt, params, made.recipe("plain")).result()
        drafted = made.engine.submit(prompt, params, made.recipe(method, options)).result()
        assert drafted.token_ids == plain.token_ids
