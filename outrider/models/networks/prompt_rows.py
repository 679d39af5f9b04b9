"""The vectors of parallel prompt decoding (arXiv 2405.18628): what a frozen target reads to say what comes later.

Vector i behind a text says the token i + 1 places on. Each has some members, that are run apart and whose logits are
averaged. With them goes how often each rank of a guess was right, from which trees are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class PromptShape:
    hidden: int  # d, the target's
    prompts: int  # rows one behind another, each of which looks one token further ahead
    members: int  # vectors of each
    ranks: int  # of a guess whose acceptance was measured

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> PromptShape:
        return cls(**stored)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class PromptRows(nn.Module):
    rates: Tensor  # [prompts, ranks]: how often a rank was right where the guesses before were

    def __init__(self, shape: PromptShape) -> None:
        super().__init__()
        self.shape = shape
        self.vectors = nn.Parameter(torch.zeros(shape.members, shape.prompts, shape.hidden))
        self.register_buffer("rates", torch.zeros(shape.prompts, shape.ranks))

    @property
    def deepest(self) -> int:
        """Levels of a tree that it can propose."""
        return self.shape.prompts

    def tensors(self) -> dict[str, Tensor]:
        """What a file keeps."""
        return dict(self.state_dict())

    @classmethod
    def from_tensors(cls, shape: PromptShape, tensors: Mapping[str, Tensor]) -> Self:
        """The inverse of `tensors`; KeyError or RuntimeError where these are not those of this shape."""
        net = cls(shape)
        net.load_state_dict(dict(tensors))
        return net.requires_grad_(False)
