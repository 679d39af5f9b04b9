"""What tells one state of a model's weights from another, whoever changed them in place."""

from __future__ import annotations

import torch
from torch import Tensor

_AS_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value


def bits(weight: Tensor) -> int:
    """The sum of a tensor's bit patterns: any value may have changed, and not every change is counted by torch."""
    if weight.is_meta or not weight.is_floating_point():
        return weight.numel()
    return int(weight.detach().contiguous().view(_AS_WHOLE[weight.itemsize]).sum())
