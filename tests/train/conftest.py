"""A target small enough to be distilled in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models import LoadedModel, load_model
from outrider.train.text.selfdata import DataPlan, SelfData, write_data


def make_target(seed: int) -> LoadedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return load_model(LlamaForCausalLM(config).requires_grad_(False))


def make_markov(rest: float = 0.3) -> LoadedModel:
    """The next token hangs on the last one mostly, which is learnt in seconds; `rest` scales what else it hangs on."""
    target = make_target(0)
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            weight.mul_(
                {"model.embed_tokens.weight": 5.0, "lm_head.weight": 4.0}.get(name, rest if weight.ndim == 2 else 1)
            )
    return load_model(target.model)


def make_text(target: LoadedModel, folder: Path) -> SelfData:
    return write_data(target, DataPlan(tokens=6 * 32 * 48, length=48, batch=32), folder)


@pytest.fixture(scope="session")
def four_layers() -> LoadedModel:
    return make_target(0)


@pytest.fixture(scope="session")
def another() -> LoadedModel:
    return make_target(1)


@pytest.fixture(scope="session")
def text(four_layers: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> SelfData:
    return make_text(four_layers, tmp_path_factory.mktemp("text"))
