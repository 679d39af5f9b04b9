"""EAGLE-3 drafters as folders: what vLLM, SGLang and the `speculators` package expect in config.json and the weights.

Layer ids. Ours and transformers': `hidden_states[i]` is the input of 0-based layer i. vLLM and `speculators` mean the
same by `eagle_aux_hidden_state_layer_ids` at the top of the config. SGLang reads the list inside `eagle_config`, takes
each number for a layer whose *output* is wanted, and adds one: there stands i - 1. One folder so serves both engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models import LoadedModel

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_VERSION = "0.9.0"


@dataclass(frozen=True, slots=True)
class Content:
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    token_map: Tensor | None = None  # [draft vocabulary], the target's ids: what SGLang calls hot tokens


def engine(net: Any, target: LoadedModel, dtype: torch.dtype) -> Content:
    """One folder for vLLM and SGLang."""
    layers = [int(layer) for layer in net.shape.layers]
    _check_layers(layers, target)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(net, target, dtype),
        "draft_vocab_size": net.shape.vocab,
        "target_hidden_size": net.shape.hidden,
        LAYER_IDS: layers,
        "num_aux_hidden_states": len(layers),
        "eagle_config": {LAYER_IDS: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
        "norm_before_residual": net.shape.normed,
        "bias": False,
    }
    return Content(config, tensors(net, target, dtype, "midlayer."), net.ids.cpu())


def speculators(net: Any, target: LoadedModel, dtype: torch.dtype, verifier: str, depth: int) -> Content:
    """The wrapper of the `speculators` package, which vLLM serves by itself; SGLang does not read it."""
    layers = [int(layer) for layer in net.shape.layers]
    _check_layers(layers, target)
    greedy = {"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    architectures = list(target.model.config.architectures or [type(target.model).__name__])
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": layer_config(net, target, dtype),
        "draft_vocab_size": net.shape.vocab,
        "target_hidden_size": net.shape.hidden,
        LAYER_IDS: layers,
        "norm_before_residual": net.shape.normed,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return Content(config, tensors(net, target, dtype, "layers.0."))


def layer_config(net: Any, target: LoadedModel, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a Llama of one layer."""
    shape, theirs = net.shape, target.model.config.get_text_config()
    ends = sorted(target.eos_ids)
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "max_position_embeddings": int(getattr(theirs, "max_position_embeddings", 0) or 2048),
        "vocab_size": int(theirs.vocab_size),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(theirs, "bos_token_id", None),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "dtype": str(dtype).removeprefix("torch."),
    }


def tensors(net: Any, target: LoadedModel, dtype: torch.dtype, layer: str) -> dict[str, Tensor]:
    """The weights under the names of the format, and both vocabulary maps; no embeddings: they are the target's."""
    vocab = int(target.model.config.get_text_config().vocab_size)
    ids = net.ids.cpu()
    if int(ids.max()) >= vocab:
        raise InputError(f"the drafter names token {int(ids.max())}, the target has {vocab}; it belongs to another one")
    said = torch.zeros(vocab, dtype=torch.bool)
    said[ids] = True
    weights = {
        name.replace("midlayer.", layer): weight.detach().to("cpu", dtype).contiguous()
        for name, weight in net.named_parameters() if not name.startswith("lm_head.")
    }  # fmt: skip
    head = full_head(net.lm_head).to("cpu", dtype).contiguous()
    return {**weights, "lm_head.weight": head, "d2t": ids - torch.arange(len(ids)), "t2d": said}


def full_head(head: nn.Module) -> Tensor:
    """[draft vocabulary, hidden]: engines know no factored head, so a product is multiplied out."""
    matrices = [part.weight.detach().float() for part in head.modules() if isinstance(part, nn.Linear)]
    product = matrices[0]
    for matrix in matrices[1:]:
        product = matrix @ product
    return product


def _check_layers(layers: list[int], target: LoadedModel) -> None:
    total = int(target.model.config.get_text_config().num_hidden_layers)
    if not all(1 <= layer < total for layer in layers):
        raise InputError(
            f"the drafter reads the inputs of layers {', '.join(map(str, layers))}; engines hand out those of layers 1 "
            f"to {total - 1} only; train one on other layers with --layers"
        )
