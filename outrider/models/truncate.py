"""A model's first layers as a model of its own, with the same embeddings, final norm and head: an early-exit drafter.

No weight is copied: every parameter and buffer *is* the original's tensor. The modules are new, so caches, hooks and
settings of one do not leak into the other. The shared head sees features it was not trained on: a draft, not an answer.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import InputError, UnsupportedModel

Scalar = int | float | bool | str


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Logits equal the original's hidden state after `layers` layers, put through its final norm and head."""
    path, total = layer_list(model)
    if not 1 <= layers <= total:
        raise InputError(f"layers must be between 1 and {total}, not {layers}")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UnsupportedModel("the model is spread over devices; first_layers needs it on one")
    config = copy.deepcopy(model.config)
    _cut(config.get_text_config(), layers, total)
    with torch.device("meta"):
        short = type(model)(config)
    for name, module in short.named_modules():
        _share(name, module, model.get_submodule(name), inside_layer=name.startswith(f"{path}."))
    short.generation_config = copy.deepcopy(model.generation_config)
    return short.train(model.training)


def layer_list(model: PreTrainedModel) -> tuple[str, int]:
    """The dotted name and the length of the list of decoder layers: the one ModuleList as long as the config says."""
    total = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == total]
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if total is None or len(outer) != 1:
        raise UnsupportedModel(f"cannot find the decoder layers of {type(model).__name__}; use another draft model")
    return outer[0], total


def _cut(config: Any, layers: int, total: int) -> None:
    """Shorten the layer count and every list that has one entry a layer (layer_types and its kin)."""
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list | tuple) and len(value) == total:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers


def _share(name: str, new: nn.Module, old: nn.Module, inside_layer: bool) -> None:
    """Give `new` the tensors of `old`. Inside a layer every plain setting must agree too: a layer that behaves
    differently in a shorter model (caches shared between late layers, say) would not be the original's layer."""
    if type(new) is not type(old):
        raise UnsupportedModel(f"module {name} was replaced by {type(old).__name__} (quantised?); load it unquantised")
    new._parameters = dict(old._parameters)
    new._buffers = dict(old._buffers)
    for key, value in list(vars(new).items()):
        theirs = vars(old).get(key)
        if isinstance(theirs, Tensor):  # a tensor kept outside the buffers, such as the unscaled rotary frequencies
            vars(new)[key] = theirs
        elif inside_layer and key != "training" and isinstance(value, Scalar) and value != theirs:
            raise UnsupportedModel(f"{name}.{key} depends on the number of layers; use another draft model")
