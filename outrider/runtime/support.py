"""Which models this runtime runs exactly, and how far: refusals with a sentence, and the context a config allows.

A configuration is refused for what it says about itself; what it does not say is found by the runtime's self-test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from outrider.core.errors import InputError, UnsupportedModel
from outrider.models.quiet import first_line

# Verified against independent forwards by this project's own tests; others are checked when they are loaded.
TESTED_GRAPHS = frozenset(
    {
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "gpt_neox", "olmo2",
        "granite", "falcon", "cohere", "mixtral", "qwen3_moe", "gpt_oss",
    }
)  # fmt: skip
TESTED = TESTED_GRAPHS | {
    "apertus", "arcee", "bart", "biogpt", "bloom", "codegen", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "gemma3n_text", "glm4", "gpt_neo", "gptj", "helium", "hunyuan_v1_dense", "llama4_text",
    "mpt", "nemotron", "olmo3", "persimmon", "phi", "qwen2_moe", "roformer", "seed_oss", "smollm3", "stablelm",
    "starcoder2", "xglm",
}  # fmt: skip
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_INDEXED = "its rows choose what they see by index keys of their own, which this runtime's cache does not hold"
_COMPRESSED = "its rows see stretches of the text as one, cut in storage order, which a tree does not have"
SPARSE_LAYERS = {
    "indexed_attention": _INDEXED,
    "minimax_m3_sparse": _INDEXED,
    "compressed_sparse_attention": _COMPRESSED,
    "heavily_compressed_attention": _COMPRESSED,
}
LIMITS = (
    "max_position_embeddings", "n_positions", "max_target_positions", "max_decoder_position_embeddings",
    "max_sequence_length", "max_seq_length", "max_seq_len", "n_ctx", "context_length", "model_max_length",
)  # fmt: skip
DEFAULT_CONTEXT = 4096  # for models without positional limit


def refuse_unsupported(model: Any, *, states: bool = False) -> None:
    """Raise with one sentence if the configuration already says that the model cannot be right, or its mode does.

    `states`: the runtime knows the model's recurrent layers and carries their states.
    """
    name = type(model).__name__
    text = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; this runtime runs decoder-only language models")
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS - _MLP_LAYERS)
    for kind in foreign:
        if kind in SPARSE_LAYERS:
            raise UnsupportedModel(f"{name} has sparse attention ({kind}): {SPARSE_LAYERS[kind]}")
    if not states and (getattr(model, "_is_stateful", False) or foreign):
        what = f" ({', '.join(foreign)})" if foreign else ""
        raise UnsupportedModel(
            f"{name} has recurrent or state-space layers{what}; their state cannot branch into a tree in this runtime"
        )
    if getattr(text, "add_cross_attention", False):
        raise UnsupportedModel(f"{name} has cross-attention; this runtime runs self-attention only")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModel(f"{name} is configured for bidirectional attention; it does not generate left to right")
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise UnsupportedModel(
            f"{name} counts positions from its padding id where it finds them itself, and from 0 in transformers' "
            "generate: there is no one output to keep"
        )
    if not states and not cache_argument(model):
        raise UnsupportedModel(f"{name} takes no key/value cache (`past_key_values`); this runtime needs one")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language-model head; load it as AutoModelForCausalLM")
    refuse_dependent(model)
    if model.training:
        raise InputError("the model is in training mode, where dropout is random; call model.eval() first")


def cache_argument(model: Any) -> str:
    """The name by which a model takes its cache; empty where it takes none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in taken), "")


_MLP_LAYERS = frozenset({"dense", "sparse", "moe", "mlp"})


def context_limit(config: Any) -> tuple[int, str]:
    """Positions the model may use, and why."""
    text = config.get_text_config(decoder=True)
    limit = next((int(v) for n in LIMITS if (v := getattr(text, n, None))), None)
    bound, reason = limit or DEFAULT_CONTEXT, "the model's positions end there" if limit else "no positional limit"
    for rope in ropes(getattr(text, "rope_parameters", None)):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":  # beyond it the keys of all earlier positions would change
            name = "original_max_position_embeddings"
            switch = int(rope.get(name) or getattr(text, name, None) or bound)
            if switch < bound:
                bound, reason = switch, "long-rope switches its frequencies there"
        elif "dynamic" in kind:
            reason = "dynamic rope changes its frequencies there"
    return bound, reason


def ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """Rope parameters are one dictionary, or one for each layer type."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters or not any(isinstance(v, dict) for v in parameters.values()):
        yield parameters
        return
    yield from (v for v in parameters.values() if isinstance(v, dict))


def plain_logits(model: Any, tokens: Tensor) -> Tensor:
    """Of the unmodified model without a cache, [B, R, V]; `UnsupportedModel` where it does not run by itself."""
    try:
        logits: Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} does not run by itself either: a plain forward of {tokens.shape[1]} tokens ends "
            f"in {first_line(error, typed=True)}"
        ) from error
    return logits


# Quantised by transformers: a row's result may not depend on the rows beside it in a pass, or a tree's rows are not
# what the model says of each text alone. Weights in fewer bits keep to that, and so do activations that are scaled row
# by row; what scales them over the whole pass does not. A method that is not listed is refused: nobody looked at it.
REMEDY = "or load the model's unquantised weights, or weights by awq, gptq, or bitsandbytes in 4 bits"
Settings = Mapping[str, Any]


def refuse_dependent(model: Any) -> None:
    """Raise with one sentence where a row of this model depends on the rows beside it, or may."""
    settings = _settings(model.config)
    if not settings:
        return
    method = _method(settings)
    judge = METHODS.get(method)
    why, remedy = judge(settings) if judge else (f"how {method} treats the rows of a pass is not known", "")
    if why:
        said = f"{remedy}, {REMEDY}" if remedy else REMEDY.removeprefix("or ")
        raise UnsupportedModel(f"{type(model).__name__} is quantised by {method}: {why}; {said}")


def is_quantised(model: Any) -> bool:
    return bool(_settings(model.config))


def refuse_quantised(model: Any, runtime: str) -> None:
    """For a runtime that reads the weights itself."""
    if is_quantised(model):
        name, method = type(model).__name__, _method(_settings(model.config))
        raise UnsupportedModel(
            f"{name} is quantised by {method}, whose weights the runtime {runtime} does not read; use eager"
        )


def _settings(config: Any) -> Settings:
    """What a configuration says of its quantisation; nothing where the weights were made plain numbers again."""
    found = getattr(config, "quantization_config", None)
    settings: Settings = found if isinstance(found, Mapping) else found.to_dict() if found is not None else {}
    return {} if settings.get("dequantize") else settings


def _method(settings: Settings) -> str:
    name = settings.get("quant_method", "an unnamed method")
    return str(getattr(name, "value", name))


# Each gives why it is refused and what would help; two empty texts where it is run.


def _always(_: Settings) -> tuple[str, str]:
    return "", ""


def _bitsandbytes(settings: Settings) -> tuple[str, str]:
    if not settings.get("load_in_8bit") or not settings.get("llm_int8_threshold", 6.0):
        return "", ""
    return "in 8 bits it picks outliers over all rows of a pass", "load it with llm_int8_threshold=0"


def _fp8(settings: Settings) -> tuple[str, str]:
    by_block = settings.get("weight_block_size") is not None
    if by_block or settings.get("activation_scheme") == "static":
        return "", ""
    return "without blocks it may scale a pass as a whole", "load it with dequantize=True"


def _compressed(settings: Settings) -> tuple[str, str]:
    groups = settings.get("config_groups") or {}
    inputs = [group.get("input_activations") for group in groups.values() if isinstance(group, Mapping)]
    whole = [one for one in inputs if one and one.get("dynamic") and one.get("strategy") not in ("token", "group")]
    return ("its activations are scaled over a whole pass", "take one with activations by token") if whole else ("", "")


def _quanto(settings: Settings) -> tuple[str, str]:
    if settings.get("activations") is None:
        return "", ""
    return "its activations may be scaled over a whole pass", "load it with activations=None"


def _torchao(settings: Settings) -> tuple[str, str]:
    said = repr(settings.get("quant_type", "")).lower().replace("_", "")
    if "weightonly" in said or ("perrow" in said and "pertensor" not in said):
        return "", ""
    return "its activations may be scaled over a whole pass", "use a weight-only kind, or PerRow granularity"


METHODS: Mapping[str, Callable[[Settings], tuple[str, str]]] = {
    **dict.fromkeys(("awq", "gptq", "aqlm", "hqq", "eetq", "mxfp4", "gguf"), _always),  # weights only
    **dict.fromkeys(("fbgemm_fp8", "bitnet"), _always),  # activations row by row
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "quanto": _quanto,
    "torchao": _torchao,
}
