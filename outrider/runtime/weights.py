"""What tells one state of a model's weights from another, whoever changed them in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import InputError

_AS_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value


def check_same(model: Any, known: Any) -> None:
    """Refuse to run the weights of another model than the one that was checked."""
    if model is not known:
        raise InputError("only the model that was loaded can be refreshed: change its weights in place")


def bits(weight: Tensor) -> int:
    """The sum of a tensor's bit patterns: any value may have changed, and not every change is counted by torch."""
    if weight.is_meta or not weight.is_floating_point():
        return weight.numel()
    return int(weight.detach().contiguous().view(_AS_WHOLE[weight.itemsize]).sum())
