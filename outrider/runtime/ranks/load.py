"""A model over several ranks: the plan by which `transformers` cuts its layers, and a target over all parts.

Attention heads and feed-forward columns are cut; embeddings and head stay whole on every rank, so that drafters can use
those of rank 0. Loads one part a process; nothing is read that the plan gives to another rank but what it is cut from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DistributedConfig

from outrider.core.errors import InputError, UnsupportedModel
from outrider.models.load import LoadedModel, check_source, default_device, load_model, local_path
from outrider.runtime.ranks.group import Part, join, meeting_place, start
from outrider.runtime.ranks.leader import LeadingTarget
from outrider.runtime.targets import eager_target


def load_spread(
    model: str | PathLike[str], ranks: int, limits: Mapping[str, Any], *, tokenizer: Any = None,
    dtype: str | None = None, revision: str | None = None, trust_remote_code: bool = False,
) -> tuple[LoadedModel, LeadingTarget]:  # fmt: skip
    """Rank 0's part, and the target over all of them. Refuses what cannot be spread before anything is loaded."""
    check_ranks(ranks)
    check_source(str(model))
    plan(str(model), ranks, trust_remote_code, revision)
    limits, store = dict(limits), meeting_place()
    common = (store.port, str(model), dtype, revision, trust_remote_code, limits)
    parts = [Part(rank, ranks, *common) for rank in range(ranks)]
    group = start(parts[1:])
    try:
        group.awaited(store)
        join(store, 0, ranks)
        loaded = load_part(parts[0], tokenizer)
        return loaded, LeadingTarget(eager_target(loaded.model, **limits), group)
    except BaseException as error:
        lost = group.failed(error) if isinstance(error, Exception) and group.killed else None
        group.close()
        if lost is not None:
            raise lost from error
        raise


def load_part(part: Part, tokenizer: Any = None) -> LoadedModel:
    """What this rank holds of the model. Every rank must be here: the parts are compared with each other."""
    config = DistributedConfig(
        tp_size=part.ranks, tp_plan=plan(part.model, part.ranks, part.trust_remote_code, part.revision)
    )
    return load_model(
        part.model, tokenizer=tokenizer, dtype=part.dtype, revision=part.revision,
        trust_remote_code=part.trust_remote_code, distributed=config,
    )  # fmt: skip


def plan(model: str, ranks: int, trust_remote_code: bool = False, revision: str | None = None) -> dict[str, str]:
    """What to change of the model's plan so that embeddings and head stay whole. Refuses what it does not divide."""
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    config = AutoConfig.from_pretrained(local_path(model), **common)
    text = config.get_text_config()
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    if not shape.tp_plan:
        raise UnsupportedModel(f"transformers has no tensor-parallel plan for {config.model_type}; use one device")
    sizes = {
        "attention heads": text.num_attention_heads,
        "key heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "feed-forward columns": getattr(text, "intermediate_size", None) or text.num_attention_heads,
    }
    if odd := [f"{size} {name}" for name, size in sizes.items() if size % ranks]:
        fitting = [n for n in range(2, 1 + math.gcd(*sizes.values())) if not math.gcd(*sizes.values()) % n]
        remedy = f"use {' or '.join(map(str, fitting))}" if fitting else "it runs on one device only"
        raise InputError(f"{ranks} ranks do not divide {' and '.join(odd)} of {model!r}; {remedy}")
    whole = [shape.get_input_embeddings(), shape.get_output_embeddings()]
    return {name: "replicate" for name, module in shape.named_modules() if any(module is one for one in whole)}


def check_ranks(ranks: int) -> None:
    """Refuse a number of ranks that this machine has no devices for; on a CPU they share it."""
    if ranks < 2:
        raise InputError(f"tensor_parallel {ranks}: give at least 2 ranks, or leave it at 1")
    if default_device().type == "cuda" and ranks > torch.cuda.device_count():
        raise InputError(f"tensor_parallel {ranks}: this machine has {torch.cuda.device_count()} GPUs; use that many")
