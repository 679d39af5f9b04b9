"""A model of the target's design with fewer and narrower layers and its very vocabulary: a draft model from scratch.

FastDraft (arXiv 2411.11055) finds wide and shallow best. Embeddings and head are one matrix, which begins as the
target's embeddings seen along their widest directions: tokens that were alike stay alike.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class SmallShape:
    hidden: int
    depth: int
    intermediate: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def small_shape(target: PreTrainedModel, hidden: int, depth: int, intermediate: int = 0) -> SmallShape:
    """`intermediate` 0: as wide against `hidden` as the target's is."""
    theirs = target.config.get_text_config()
    head = _head_dim(theirs)
    if hidden < head or hidden % head:
        raise InputError(f"hidden size {hidden}: use a multiple of {head}, the size of one of the target's heads")
    wide = getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size
    return SmallShape(hidden, depth, intermediate or max(1, round(wide * hidden / theirs.hidden_size)))


def small_model(target: PreTrainedModel, shape: SmallShape) -> PreTrainedModel:
    """Random, in float32, on the target's device; its embeddings are the target's, narrowed."""
    config = copy.deepcopy(target.config)
    settings = config.get_text_config()
    total, heads = int(settings.num_hidden_layers), shape.hidden // _head_dim(settings)
    share = settings.num_attention_heads // (
        getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    )
    groups = next(n for n in range(max(1, heads // share), 0, -1) if heads % n == 0)
    for key, value in list(vars(settings).items()):
        if "layer" in key and isinstance(value, list | tuple) and len(value) == total:
            setattr(settings, key, list(value[: shape.depth]))
    changes = {
        "head_dim": _head_dim(settings), "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.depth, "num_attention_heads": heads, "num_key_value_heads": groups,
        "tie_word_embeddings": True,
    }  # fmt: skip
    for key, value in changes.items():
        setattr(settings, key, value)
    config.tie_word_embeddings = True
    model = type(target)(config).float().to(target.device).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(narrowed(target.get_input_embeddings().weight, shape.hidden))
    model.tie_weights()
    return model.requires_grad_(False)


def narrowed(embeddings: Tensor, width: int) -> Tensor:
    """[vocabulary, width]: along the widest directions, as large as before."""
    wide = embeddings.detach().float()
    directions = torch.linalg.eigh((wide.T @ wide).double().cpu()).eigenvectors.flip(1)[:, :width]
    narrow = wide @ directions.float().to(wide.device)
    if narrow.shape[1] < width:  # wider than the target: the rest begins as nothing
        narrow = torch.nn.functional.pad(narrow, (0, width - narrow.shape[1]))
    return narrow * (wide.std() / narrow.std().clamp(min=1e-9))


def load_small(target: PreTrainedModel, shape: dict[str, Any], stored: dict[str, Tensor]) -> PreTrainedModel:
    """In the target's precision; KeyError, TypeError or RuntimeError where the tensors are not those of the shape."""
    model = small_model(target, SmallShape(**shape))
    wanted = dict(model.named_parameters())
    if wanted.keys() != stored.keys():
        raise KeyError(", ".join(sorted(wanted.keys() ^ stored.keys())))
    for name, weight in wanted.items():
        weight.data.copy_(stored[name])
    return model.to(target.dtype)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
