"""FSPAD: EAGLE-2 with features sampled by the token that was drawn, and logits that need not come from the guess alone.

arXiv 2408.15562. Lossless. A feature stands for a whole distribution; the embedding of the drawn token gates it in a
wider space before the layer reads it. An adapter between the guess and the head lets the guess stay close to the
target's feature while the distribution is as sure as it should be: the guess is fed on, the adapted one is only read.
The paper's wiring is not public; this is the simplest that does what it says. Cost: EAGLE-2's and three small products
a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.models.networks.eagle2 import Eagle2Layer
from outrider.models.networks.eagle3 import Eagle3Shape


@dataclass(frozen=True, slots=True)
class FspadShape(Eagle3Shape):
    lift: int = 0  # width of the space in which features are sampled
    adapter: int = 0  # width of the adapter; 0: none, the head reads the guess


class Sampling(nn.Module):
    """f + W_o (silu(W_g e) * W_f f)."""

    def __init__(self, hidden: int, lift: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, lift, bias=False)
        self.lift = nn.Linear(hidden, lift, bias=False)
        self.lower = nn.Linear(lift, hidden, bias=False)

    def forward(self, embedded: Tensor, feature: Tensor) -> Tensor:
        return feature + self.lower(silu(self.gate(embedded)) * self.lift(feature))


class Adapter(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)

    def forward(self, state: Tensor) -> Tensor:
        return state + self.up(silu(self.down(state)))


class FspadLayer(Eagle2Layer):
    shape: FspadShape

    def __init__(self, shape: FspadShape, ids: Tensor, head: nn.Module) -> None:
        super().__init__(shape, ids, head)
        self.sampling = Sampling(shape.hidden, shape.lift)
        self.adapter = Adapter(shape.hidden, shape.adapter) if shape.adapter else None

    def enter(self, embedded: Tensor, state: Tensor) -> Tensor:
        return super().enter(embedded, self.sampling(embedded, state))

    def logits(self, state: Tensor) -> Tensor:
        return super().logits(state if self.adapter is None else self.adapter(state))
