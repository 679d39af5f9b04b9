"""Architectures that `transformers` does not have: told to it when a model of one of them is to be loaded."""

from __future__ import annotations

import json
from pathlib import Path

BLOCKFFN = "blockffn"


def announce(folder: str) -> None:
    """Changes `transformers`, once: its automatic classes know what a model of ours in this folder is."""
    try:
        kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return  # a name on a hub, or no model: loading it says so
    if kind == BLOCKFFN:
        from transformers import AutoConfig, AutoModelForCausalLM

        from outrider.models.networks.blockffn import BlockFFNConfig, BlockFFNForCausalLM

        AutoConfig.register(BLOCKFFN, BlockFFNConfig, exist_ok=True)
        AutoModelForCausalLM.register(BlockFFNConfig, BlockFFNForCausalLM, exist_ok=True)
