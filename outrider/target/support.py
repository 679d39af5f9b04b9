"""Which models this runtime runs exactly, and how far: refusals with a sentence, and the context a config allows.

A configuration is refused for what it says about itself; what it does not say is found by the runtime's self-test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.errors import UnsupportedModel

# Verified against independent forwards by this project's own tests; others are checked when they are loaded.
TESTED = frozenset(
    {
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "gpt_neox", "olmo2",
        "granite", "falcon", "cohere", "mixtral", "qwen3_moe", "gpt_oss",
    }
)  # fmt: skip
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
DEFAULT_CONTEXT = 4096  # for models without positional limit


def refuse_unsupported(model: Any) -> None:
    """Raise `UnsupportedModel` with one sentence if the configuration already says that the model cannot be right."""
    name = type(model).__name__
    text = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; this runtime runs decoder-only language models")
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS - _MLP_LAYERS)
    if getattr(model, "_is_stateful", False) or foreign:
        what = f" ({', '.join(foreign)})" if foreign else ""
        raise UnsupportedModel(
            f"{name} has recurrent or state-space layers{what}; their state cannot branch into a tree in this runtime"
        )
    if getattr(text, "add_cross_attention", False):
        raise UnsupportedModel(f"{name} has cross-attention; this runtime runs self-attention only")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModel(f"{name} is configured for bidirectional attention; it does not generate left to right")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language-model head; load it as AutoModelForCausalLM")


_MLP_LAYERS = frozenset({"dense", "sparse", "moe", "mlp"})


def context_limit(config: Any) -> tuple[int, str]:
    """Positions the model may use, and why."""
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
    limit = next((int(v) for n in names if (v := getattr(text, n, None))), None)
    bound, reason = limit or DEFAULT_CONTEXT, "the model's positions end there" if limit else "no positional limit"
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":  # beyond it the keys of all earlier positions would change
            name = "original_max_position_embeddings"
            switch = int(rope.get(name) or getattr(text, name, None) or bound)
            if switch < bound:
                bound, reason = switch, "long-rope switches its frequencies there"
        elif "dynamic" in kind:
            reason = "dynamic rope changes its frequencies there"
    return bound, reason


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """Rope parameters are one dictionary, or one for each layer type."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters or not any(isinstance(v, dict) for v in parameters.values()):
        yield parameters
        return
    yield from (v for v in parameters.values() if isinstance(v, dict))
