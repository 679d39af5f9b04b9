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
from outrider.bench.inflate import Shape, difference, inflate
from outrider.cli import app
from outrider.errors import InputError
from outrider.models import load_model

SMALL = Shape(hidden=24, layers=2, heads=6, key_heads=2, head_dim=8, mlp=20)


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
    shape = Shape(**{**{f: getattr(SMALL, f) for f in SMALL.__slots__}, **grown})
    big = inflate(model, shape)
    assert Shape.of(big.config) == shape
    worst, agree = difference(model, big)
    assert worst < 1e-5 and agree == 1.0  # transformers' norms compute in float32


WIDE = Shape(hidden=48, layers=4, heads=12, key_heads=3, head_dim=16, mlp=40)


def test_free_weights_are_noise_of_ordinary_scale() -> None:
    model = tiny()
    big = inflate(model, WIDE)
    for name in ("q_proj", "k_proj", "v_proj"):
        own = getattr(big.model.layers[3].self_attn, name).weight
        assert 0.5 < float(own.std() / getattr(model.model.layers[1].self_attn, name).weight.std()) < 2
        assert not (own == 0).any()
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
        inflate(tiny(), Shape(16, 2, 6, 2, 8, 20))
    with pytest.raises(InputError, match="multiple of 8"):
        inflate(tiny(), Shape(24, 2, 6, 2, 12, 20))
    with pytest.raises(InputError, match="rotary"):
        inflate(tiny(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), SMALL)


def test_the_embedded_model_at_the_shape_of_a_larger_one(smollm2: Any) -> None:
    shape = Shape(hidden=768, layers=31, heads=16, key_heads=4, head_dim=128, mlp=2048)
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
    assert Shape.of(loaded.config) == Shape(48, 3, 6, 2, 8, 20)
    assert difference(load_model(tmp_path / "small", device="cpu").model, loaded)[0] < 1e-4


def test_the_command_says_what_a_shape_is(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "inflate", "--out", str(tmp_path), "--shape", "huge"])
    assert done.exit_code == 2 and "use 1b, 8b" in done.output
