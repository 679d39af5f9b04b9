"""What the transformers drop-in cannot honour, each refused by name with one line.

transformers hands a callable `custom_generate` less than its own decoding loop gets: streamer, assistant model and
synchronisation are dropped on the way. They are looked up where `generate` still holds them, so that they are honoured
or refused like everything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationMixin
from transformers.generation import GenerationMode

from outrider.core.errors import InputError

# model inputs that are ours to decide or have no effect on what is said
_HARMLESS = frozenset(
    {
        "attention_mask", "position_ids", "past_key_values", "cache_params", "cache_position", "use_cache",
        "logits_to_keep", "output_attentions", "output_hidden_states", "return_dict",
    }
)  # fmt: skip
_CACHES = ("past_key_values", "cache_params")


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _several(value: Any) -> bool:
    return value is not None and value > 1


# setting of the generation config -> (when it asks for something, why it cannot be had)
_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "constraints": (_given, "constrained beam search is no sampling from the model"),
    "force_words_ids": (_given, "constrained beam search is no sampling from the model"),
    "num_beams": (_several, "beam search follows several texts at once"),
    "num_beam_groups": (_several, "beam search follows several texts at once"),
    "penalty_alpha": (lambda alpha: bool(alpha), "contrastive search needs hidden states of every candidate"),
    "dola_layers": (_given, "DoLa contrasts layers at every token"),
    "prompt_lookup_num_tokens": (_given, "use method='prompt-lookup'"),
    "assistant_early_exit": (_given, "use method='draft-model'"),
    "use_mtp": (_given, "it is another way to speculate"),
    "token_healing": (_given, "it rewrites the prompt with a tokenizer that is not handed on"),
    "cache_implementation": (
        lambda name: name is not None and ("offload" in name or name == "quantized"),
        "the cache is our own, in full precision on the model's device",
    ),
}


def dropped_arguments(model: Any) -> dict[str, Any]:
    """The caller's `streamer`, `assistant_model` and `synced_gpus`, from the running call of `model.generate`."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            held = frame.f_locals
            return {name: held.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
        frame = frame.f_back
    return {}


def refuse_unsupported(
    model: Any, config: Any, synced_gpus: bool, dropped: Mapping[str, Any], model_kwargs: Mapping[str, Any]
) -> None:
    """Raise for the first thing in this call that cannot be honoured; the model itself is judged by the runtime."""
    if synced_gpus or dropped.get("synced_gpus") or _is_sharded(model):
        raise _refusal("synced_gpus", "ranks would have to run the same number of steps")
    if dropped.get("assistant_model") is not None:
        raise _refusal("assistant_model", "use method='draft-model' with options={'draft': ...}")
    for name, (asks, why) in _SETTINGS.items():
        value = getattr(config, name, None)
        if asks(value):
            raise _refusal(f"{name}={value!r}", why)
    mode = config.get_generation_mode(None)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _refusal(
            f"the generation mode {mode.value!r}", "only greedy search and sampling follow the model's distribution"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, None):
            raise _refusal(name, "steps run several tokens at once, with a cache of their own")
    for name in _CACHES:
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise _refusal(name, "the cache is our own; give the whole text as input_ids")
    for name, value in model_kwargs.items():
        if name not in _HARMLESS and value is not None:
            raise _refusal(name, "prompts are token ids")


def _refusal(what: str, why: str) -> InputError:
    return InputError(
        f"custom_generate=outrider.generate cannot honour {what}: {why}; leave it out or call generate without "
        "custom_generate"
    )


def _is_sharded(model: Any) -> bool:
    """Whether transformers itself would keep ranks in step: parameters live on other ranks."""
    import torch.distributed as dist
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
