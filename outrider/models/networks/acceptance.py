"""The network of an acceptance head: from a drafter's hidden state at a token it drafted to the chance that the token
is accepted.

SpecDec++ (arXiv 2405.19715): residual blocks x + SiLU(W x + b), then two logits. The state is scaled to size one first,
so that drafters whose states carry no norm can be judged as well. Runs in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu


@dataclass(frozen=True, slots=True)
class AcceptanceShape:
    hidden: int  # the drafter's: of a wider state, the first dimensions
    drafter: str  # kind of the drafter whose states are read
    digest: str = ""  # of its weights as they are stored
    blocks: int = 3
    shared: bool = False  # one block's weights in all of them, as in the published heads

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class AcceptanceHead(nn.Module):
    def __init__(self, shape: AcceptanceShape) -> None:
        super().__init__()
        self.shape = shape
        count = min(shape.blocks, 1) if shape.shared else shape.blocks
        self.blocks = nn.ModuleList(nn.Linear(shape.hidden, shape.hidden) for _ in range(count))
        self.out = nn.Linear(shape.hidden, 2)  # rejected, accepted

    @classmethod
    def from_tensors(cls, shape: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> AcceptanceHead:
        """The inverse of `tensors`; RuntimeError where these are not those of this shape."""
        made = cls(AcceptanceShape(**shape))
        made.load_state_dict(dict(tensors))
        return made.requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        """What a file keeps."""
        return dict(self.named_parameters())

    def odds(self, states: Tensor) -> Tensor:
        """[..., d] -> [...]: log of accepted over rejected."""
        x = states[..., : self.shape.hidden].float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        for number in range(self.shape.blocks):
            x = x + silu(self.blocks[0 if self.shape.shared else number](x))
        rejected, accepted = self.out(x).unbind(-1)
        return accepted - rejected

    def forward(self, states: Tensor) -> Tensor:
        """[..., d] -> [...]: the chance of acceptance."""
        return logsigmoid(self.odds(states)).exp()
