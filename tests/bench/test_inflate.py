"""Inflated models say what the small one says, whatever grows; what would break that is caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from outrider.bench import inflate as module
from outrider.bench.inflate import ModelShape, difference, inflate
from outrider.cli import app
from outrider.core.errors import InputError
from outrider.models import load_model
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape

SMALL = ModelShape(hidden=24, layers=2, heads=6, key_heads=2, head_dim=8, mlp=20)


def tiny(**extra: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**{
        "vocab_size": 64, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
        "rms_norm_eps": 1e-2, "tie_word_embeddings": True, **extra,
    })  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.double()


@pytest.mark.parametrize(
    "grown",
    [
        {}, {"hidden": 66}, {"layers": 5}, {"heads": 8}, {"hidden": 72, "heads": 18, "key_heads": 6},
        {"hidden": 40, "heads": 20, "key_heads": 5}, {"head_dim": 16}, {"head_dim": 32}, {"mlp": 50},
        {"hidden": 48, "layers": 3, "heads": 16, "key_heads": 4, "head_dim": 16, "mlp": 33},
    ],
)  # fmt: skip
def test_the_same_logits_to_rounding(grown: dict[str, int]) -> None:
    model = tiny()
    shape = ModelShape(**{**{f: getattr(SMALL, f) for f in SMALL.__slots__}, **grown})
    big = inflate(model, shape)
    assert ModelShape.of(big.config) == shape
    worst, agree = difference(model, big)
    assert worst < 1e-5 and agree == 1.0  # transformers' norms compute in float32


WIDE = ModelShape(hidden=48, layers=4, heads=12, key_heads=3, head_dim=16, mlp=40)


def test_free_weights_are_noise_of_ordinary_scale() -> None:
    model = tiny()
    big = inflate(model, WIDE)
    for name in ("q_proj", "k_proj", "v_proj"):
        filled = getattr(big.model.layers[3].self_attn, name).weight
        assert 0.5 < float(filled.std() / getattr(model.model.layers[1].self_attn, name).weight.std()) < 2
        assert not (filled == 0).any()
    assert big.lm_head.weight is not big.get_input_embeddings().weight
    assert not (big.lm_head.weight == 0).any()


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("model.layers.0.self_attn.q_proj", lambda w: w.mul_(2**-0.5)),
        ("model.layers.1.self_attn.o_proj", lambda w: w[:, 70:].add_(0.1)),
        ("model.layers.0.mlp.down_proj", lambda w: w[:, 30:].add_(0.1)),
        ("model.layers.3.mlp.down_proj", lambda w: w.add_(0.05)),
        ("model.layers.1.input_layernorm", lambda w: w.mul_(2**0.5)),
        ("model.embed_tokens", lambda w: w[:, 30:].add_(0.1)),
    ],
)
def test_a_planted_error_is_caught(part: str, damage: Any) -> None:
    model = tiny()
    big = inflate(model, WIDE)
    with torch.no_grad():
        damage(big.get_submodule(part).weight)
    assert difference(model, big)[0] > 1e-4


def test_old_heads_in_another_group_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = module._rows
    monkeypatch.setattr(module, "_rows", lambda heads, *rest: rows(range(len(heads)), *rest))
    model = tiny()
    assert difference(model, inflate(model, WIDE))[0] > 1e-4


def test_what_cannot_be_inflated_is_refused() -> None:
    with pytest.raises(InputError, match="hidden 16 is below"):
        inflate(tiny(), ModelShape(16, 2, 6, 2, 8, 20))
    with pytest.raises(InputError, match="multiple of 8"):
        inflate(tiny(), ModelShape(24, 2, 6, 2, 12, 20))
    with pytest.raises(InputError, match="rotary"):
        inflate(tiny(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), SMALL)


def test_the_embedded_model_at_the_shape_of_a_larger_one(smollm2: Any) -> None:
    shape = ModelShape(hidden=768, layers=31, heads=16, key_heads=4, head_dim=128, mlp=2048)
    worst, agree = difference(smollm2.model, inflate(smollm2.model, shape), rows=24)
    assert worst < 1e-4 and agree == 1.0


def test_the_command_writes_a_model_folder(tmp_path: Path) -> None:
    tiny().float().save_pretrained(tmp_path / "small")
    words = ["bench", "inflate", "--model", str(tmp_path / "small"), "--device", "cpu", "--dtype", "float32"]
    wide = ["--shape", "hidden=48,layers=3", "--out", str(tmp_path / "big"), "--json"]
    done = CliRunner().invoke(app, [*words, *wide])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["difference"] < 1e-4 and made["same_token"] == 1.0
    loaded = load_model(tmp_path / "big", dtype="float32", device="cpu").model
    assert ModelShape.of(loaded.config) == ModelShape(48, 3, 6, 2, 8, 20)
    assert difference(load_model(tmp_path / "small", device="cpu").model, loaded)[0] < 1e-4


def test_the_command_says_what_a_shape_is(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "inflate", "--out", str(tmp_path), "--shape", "huge"])
    assert done.exit_code == 2 and "use 1b, 8b" in done.output


def drafter(rank: int = 0) -> Eagle3Layer:
    torch.manual_seed(3)
    shape = Eagle3Shape(24, 6, 2, 8, 30, (0, 1), 40, eps=1e-2, rank=rank)
    net = Eagle3Layer(shape, torch.arange(40)).double()
    for name, weight in net.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return net.requires_grad_(False)


def unrolled(net: Eagle3Layer, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Draft logits of every row of a text, each going on from the true features of the row before; twice."""
    rows = embedded.shape[1]
    state, out = net.fuse(features), []
    for _ in range(2):
        q, k, v = net.project(embedded, state, torch.arange(rows)[None])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        state = net.finish(net.enter(embedded, state), attended)
        out.append(net.logits(state))
    return torch.cat(out)


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("grown", [WIDE, ModelShape(30, 2, 10, 2, 8, 20), ModelShape(24, 2, 6, 2, 32, 90)])
def test_a_widened_drafter_says_the_same(grown: ModelShape, rank: int) -> None:
    net = drafter(rank)
    wide = module.inflate_drafter(net, grown)
    assert wide.shape.hidden == grown.hidden and wide.shape.intermediate == max(grown.mlp, 30)
    features, embedded = torch.randn(1, 7, 2, 24).double(), torch.randn(1, 7, 24).double()
    extra = grown.hidden - 24
    padded = torch.nn.functional.pad(features, (0, extra)).flatten(2)
    want = unrolled(net, features.flatten(2), embedded)
    got = unrolled(wide, padded, torch.nn.functional.pad(embedded, (0, extra)))
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("part", ["fc", "midlayer.self_attn.o_proj", "midlayer.mlp.down_proj", "midlayer.hidden_norm"])
def test_an_error_in_a_widened_drafter_is_caught(part: str) -> None:
    net = drafter()
    wide = module.inflate_drafter(net, WIDE)
    weight = wide.get_submodule(part).weight
    if weight.ndim == 1:
        weight.mul_(2**0.5)
    else:
        weight[24:].add_(0.05)  # what should write nothing
    features, embedded = torch.randn(1, 7, 2, 24).double(), torch.randn(1, 7, 24).double()
    padded = torch.nn.functional.pad(features, (0, 24)).flatten(2)
    got = unrolled(wide, padded, torch.nn.functional.pad(embedded, (0, 24)))
    assert (got - unrolled(net, features.flatten(2), embedded)).abs().max() > 1e-4


def test_free_weights_of_a_widened_drafter_are_noise() -> None:
    wide = module.inflate_drafter(drafter(), WIDE)
    for part in ("midlayer.self_attn.k_proj", "midlayer.mlp.gate_proj", "lm_head"):
        assert not (wide.get_submodule(part).weight == 0).any()


def test_a_drafter_of_its_own_size_reads_the_first_dimensions_of_a_wider_target() -> None:
    """On the inflated model it drafts what it drafts on the small one."""
    from outrider.control.fixed import Fixed
    from outrider.core.engine import Engine
    from outrider.core.protocols import Recipe
    from outrider.core.records import Budget
    from outrider.core.sampling import SamplingParams
    from outrider.draft.feature.eagle3 import Eagle3Source
    from outrider.draft.grown import Grown
    from outrider.grow.topk import TopK
    from outrider.runtime.layers.plain import PlainDriver
    from outrider.runtime.targets import eager_target
    from outrider.verify.invariant import Invariant

    model, net = tiny().float(), drafter().float()
    big = inflate(model, WIDE)
    results = []
    for target, layer in ((model, net), (big, net), (big, module.inflate_drafter(net, WIDE))):
        source = Eagle3Source(PlainDriver(layer, target.get_input_embeddings()))
        recipe = Recipe("eagle3", Grown(source, TopK(depth=4)), Invariant(), Fixed(Budget(12, 4)))
        engine = Engine(eager_target(target, max_slots=1), recipe, strict=True)
        made = engine.submit([1, 2, 3, 4, 5], SamplingParams(max_new_tokens=24)).result()
        results.append((made.token_ids, made.stats.drafted, made.stats.accepted))
    assert results[0] == results[1] == results[2] and results[0][1] > 50
