"""Some of a model's layers as a model of its own, with the same embeddings, final norm and head: an early-exit drafter.

No weight is copied: every parameter and buffer *is* the original's tensor. The modules are new, so caches, hooks and
settings of one do not leak into the other. The shared head sees features it was not trained on: a draft, not an answer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError, UnsupportedModel
from outrider.models.load import is_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Scalar = int | float | bool | str


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Logits equal the original's hidden state after `layers` layers, put through its final norm and head."""
    total = layer_list(model)[1]
    if not 1 <= layers <= total:
        raise InputError(f"layers must be between 1 and {total}, not {layers}")
    return chosen_layers(model, range(layers))


def chosen_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """The layers of these numbers, in this order: layer i of the result shares the tensors of layer `layers[i]`."""
    path, total = layer_list(model)
    if not layers or not all(0 <= layer < total for layer in layers):
        raise InputError(f"layers {list(layers)}: name one or more of 0..{total - 1}")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UnsupportedModel("the model is spread over devices; a shorter model needs it on one")
    if any(map(is_part, model.parameters())):
        raise UnsupportedModel(
            "the model is spread over ranks (tensor_parallel); a shorter model needs it in one process"
        )
    config = copy.deepcopy(model.config)
    _cut(config.get_text_config(), layers, total)
    with torch.device("meta"):
        short = type(model)(config)
    for name, module in short.named_modules():
        within = name.removeprefix(f"{path}.")
        if within == name:
            _share(name, module, model.get_submodule(name), layer=None)
        else:  # `1.mlp` -> `15.mlp`, where the second chosen layer is number 15
            place, dot, rest = within.partition(".")
            layer = layers[int(place)]
            _share(name, module, model.get_submodule(f"{path}.{layer}{dot}{rest}"), layer)
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


def final_norm(model: PreTrainedModel) -> nn.Module:
    """What stands between the last layer and the head."""
    trunk = model.get_submodule(layer_list(model)[0].rpartition(".")[0])
    norms = [module for name, module in trunk.named_children() if "norm" in name.lower() or name == "ln_f"]
    if len(norms) != 1:
        raise UnsupportedModel(f"cannot tell the final norm of {type(model).__name__}; use another method")
    return norms[0]


def _cut(config: Any, layers: Sequence[int], total: int) -> None:
    """Shorten the layer count and every list that has one entry a layer (layer_types and its kin)."""
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list | tuple) and len(value) == total:
            setattr(config, key, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)


def _share(name: str, new: nn.Module, old: nn.Module, layer: int | None) -> None:
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
        elif layer is None or key == "training" or not isinstance(value, Scalar):
            continue
        elif theirs != (layer if key == "layer_idx" else value):  # layer_idx: its place in the cache
            raise UnsupportedModel(f"{name}.{key} depends on the number of layers; use another draft model")
