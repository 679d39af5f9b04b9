"""Small random models of every family with recurrent layers, and walks over them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import transformers

from outrider.runtime.targets import eager_target
from tests.runtime.test_architectures import COMMON, CONTEXT, FEW_EXPERTS, LATENT, walk

unchecked = partial(eager_target, self_test=False)  # the walks are the check
HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SCAN = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 16, "mamba_d_conv": 4,
}  # fmt: skip
SELECTIVE = {"state_size": 8, "intermediate_size": 64, "time_step_rank": 4}
DELTA = {
    **HYBRID, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
SHORT = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}

# name -> (class, what its configuration adds to the common one)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}),
    "lfm2": ("Lfm2", SHORT),
    "qwen3-next": ("Qwen3Next", {**DELTA, **FEW_EXPERTS, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "mamba": ("Mamba", SELECTIVE),
    "falcon-mamba": ("FalconMamba", SELECTIVE),
    "bamba": ("Bamba", {**SCAN, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 4,
            "attn_layer_offset": 1, "expert_layer_period": 2, **EXPERTS,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {**SCAN, **EXPERTS, **HYBRID, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 24},
    ),
    "falcon-h1": ("FalconH1", {**SCAN, "head_dim": 8, "mamba_d_ssm": 64}),
    "nemotron-h": (
        "NemotronH",
        {
            "num_hidden_layers": 4, "hybrid_override_pattern": "M*-M", "head_dim": 8, "mamba_num_heads": 8,
            "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
        },
    ),
    "minimax": ("MiniMax", {**HYBRID, **EXPERTS, "head_dim": 8, "block_size": 16}),
    "recurrent-gemma": (
        "RecurrentGemma", {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 7, "head_dim": 8},
    ),
    "rwkv": ("Rwkv", {"context_length": CONTEXT, "attention_hidden_size": 32, "rescale_every": 1}),
    "kimi-linear": (
        "KimiLinear",
        {
            **LATENT, **EXPERTS, **HYBRID, "n_group": 1, "linear_num_heads": 4, "linear_head_dim": 8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "qwen3.5": ("Qwen3_5Text", DELTA),
    "olmo-hybrid": ("OlmoHybrid", {**DELTA, "linear_num_key_heads": 4}),
    "lfm2-moe": ("Lfm2Moe", {**SHORT, **EXPERTS, "moe_intermediate_size": 24, "num_dense_layers": 1}),
    "zamba": (
        "Zamba",
        {
            "num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 2, "mamba_dt_rank": 4, "attn_layer_period": 2,
            "attn_layer_offset": 0,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            "num_hidden_layers": 4, "mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 2,
            "chunk_size": 16, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
            "num_mem_blocks": 1, "use_mem_rope": True, "adapter_rank": 4,
        },
    ),
}  # fmt: skip


@cache
def build(name: str, context: int = CONTEXT) -> Any:
    """Weights small enough that the model itself gives the same in one piece and token by token, to 1e-5."""
    kind, extra = FAMILIES[name]
    config_class = getattr(transformers, f"{kind}Config")
    model_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(
        config_class(**{**COMMON, "max_position_embeddings": context, "initializer_range": 0.1, **extra})
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start at 1 and 0, where a mix-up would not show
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def walked(name: str, *, seed: int, steps: int = 20, chunk: int = 13, **more: Any) -> float:
    """The worst difference of a random walk with trees and commits."""
    return walk(build(name), seed=seed, steps=steps, chunk=chunk, runtime=unchecked, **more)
