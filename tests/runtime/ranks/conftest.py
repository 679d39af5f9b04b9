"""A target that two ranks can share, and a draft for it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target whose heads two ranks can share, and a smaller model of the same vocabulary."""
    made = {}
    for name, layers in (("target", 3), ("draft", 1)):
        torch.manual_seed(layers)
        config = LlamaConfig(
            vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
        )  # fmt: skip
        folder = tmp_path_factory.mktemp(name)
        LlamaForCausalLM(config).save_pretrained(folder)
        made[name] = str(folder)
    return made
