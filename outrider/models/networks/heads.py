"""The networks of Medusa (arXiv 2401.10774) and Hydra (arXiv 2402.05109): one residual block a head, the target's head.

Head k reads the target's last feature before the pending token and says the token k + 1 places behind it. Medusa's
heads know nothing else; Hydra's also read the embeddings of the pending token and of the k candidates after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.models.networks.shared_head import SharedHead


@dataclass(frozen=True, slots=True)
class HeadsShape:
    hidden: int  # d, the target's
    heads: int
    layer: int  # whose feature is read: the target's last
    vocab: int  # tokens the drafter can say

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> HeadsShape:
        return cls(**stored)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class MedusaHeads(SharedHead):
    shape: HeadsShape

    def __init__(self, shape: HeadsShape, ids: Tensor, head: nn.Module) -> None:
        super().__init__(shape, ids, head)
        self.blocks = nn.ModuleList(
            nn.Linear(self.reads(number) * shape.hidden, shape.hidden, bias=False) for number in range(shape.heads)
        )

    @property
    def deepest(self) -> int:
        """Levels of a tree that it can propose."""
        return self.shape.heads

    def reads(self, number: int) -> int:
        """How many vectors head `number` reads."""
        return 1

    def state(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        """What the target's head reads for the token after `path`: [..., d] and [..., number + 1, d] -> [..., d].

        `path` embeds the tokens behind the feature's, the pending one first; these heads do not look at it.
        """
        return feature + silu(self.blocks[number](feature))


class HydraHeads(MedusaHeads):
    def reads(self, number: int) -> int:
        return number + 2  # the feature, the pending token and the candidates before

    def state(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        read = torch.cat([feature, path.flatten(-2)], -1)
        return feature + silu(self.blocks[number](read))
