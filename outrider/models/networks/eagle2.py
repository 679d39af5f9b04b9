"""EAGLE-2: one trained layer that guesses the target's next top feature, read by the target's own head.

arXiv 2401.15077 (the layer), 2406.16858 (the tree, which comes from the grower). Lossless. Position t mixes the feature
of t (what the target's head reads, or this layer's own guess where the target has not been) with the embedding of the
token after it; the output is the guessed feature of t + 1. Drafting, rollback and cost are those of EAGLE-3
(`draft/feature/eagle3.py`), with one feature and without a head of its own.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from outrider.models.networks.eagle3 import MLP, Attention, Eagle3Shape, RMSNorm
from outrider.models.networks.shared_head import SharedHead


class Layer(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, shape.hidden), MLP(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)  # no norm before: the mixture is fed as it is


class Eagle2Layer(SharedHead):
    """As `Eagle3Layer`, with one feature and without a head of its own."""

    shape: Eagle3Shape

    def __init__(self, shape: Eagle3Shape, ids: Tensor, head: nn.Module) -> None:
        super().__init__(shape, ids, head)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])  # a list of one: so serving engines name it

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def enter(self, embedded: Tensor, state: Tensor) -> Tensor:
        """[..., d]: the feature mixed with the token that followed; all that the layer reads."""
        return self.fc(torch.cat([embedded, state], -1))

    @property
    def layer(self) -> Layer:
        return cast(Layer, self.layers[0])

    def project(self, embedded: Tensor, state: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer.self_attn(state, positions)

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """The guessed feature, which is the next state."""
        layer = self.layer
        state = state + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return state + layer.mlp(layer.post_attention_layernorm(state))
