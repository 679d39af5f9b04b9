"""The networks of block drafters: some decoder layers that fill masks behind a text, all at once.

`DFlashNet` (arXiv 2602.06036) reads the target's hidden states: fused once, they are keys and values of every layer, as
they are, and only the rows of the block run through the layers. `DeerNet` (arXiv 2512.15176) reads the text itself,
each token seeing those before it, and masks behind the last. The rows of a block see each other and all the text before
it. The embeddings and the head are the target's. Attention is the caller's: he says who sees whom, and where keys and
values lie. Parameters of `DFlashNet` carry the names that serving engines read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.models.networks.eagle3 import MLP, Attention, LayerSizes, RMSNorm, heads, rotated, rotation
from outrider.models.networks.shared_head import SharedHead

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, queries, keys, values -> [B, Hq, R, D]
Rotary = tuple[Tensor, Tensor]  # cosines and sines


@dataclass(frozen=True, slots=True)
class BlockShape:
    hidden: int  # d, the target's
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: tuple[int, ...]  # of the target, whose inputs are fused; none: it reads the text
    deep: int  # layers of its own
    block: int  # rows of a block, at most
    mask: int  # the target's id whose embedding stands for a token to be found
    vocab: int  # tokens the drafter can say
    theta: float = 10_000.0
    eps: float = 1e-5
    scaling: tuple[float, ...] = ()  # as `Eagle3Shape`
    end: int = -1  # the target's id whose embedding stands behind a block, where the network reads it

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> BlockShape:
        return cls(**{**stored, "layers": tuple(stored["layers"]), "scaling": tuple(stored.get("scaling", ()))})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class BlockAttention(Attention):
    """Projections only; queries and keys are normed where the network says so."""

    def __init__(self, shape: LayerSizes, eps: float, normed: bool) -> None:
        super().__init__(shape, shape.hidden)
        self.q_norm: nn.Module = RMSNorm(shape.head_dim, eps) if normed else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(shape.head_dim, eps) if normed else nn.Identity()

    def queries(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """[B, R, d] -> [B, Hq, R, D]; left unrotated for a caller whose kernels do it."""
        q = self.q_norm(heads(self.q_proj(x), self.shape.head_dim))
        return q if rotary is None else rotated(q, rotary)

    def keys_values(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        k, v = (heads(proj(x), self.shape.head_dim) for proj in (self.k_proj, self.v_proj))
        k = self.k_norm(k)
        return (k if rotary is None else rotated(k, rotary)), v


class BlockLayer(nn.Module):
    self_attn: BlockAttention

    def __init__(self, shape: BlockShape, normed: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = BlockAttention(shape, shape.eps, normed), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def project(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        x = self.input_layernorm(x)
        return self.self_attn.queries(x, rotary), *self.self_attn.keys_values(x, rotary)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockNet(SharedHead):
    """`block` says what stands in a block, `forward` runs rows through the layers, `logits` reads what comes out."""

    shape: BlockShape
    first: int  # the row of a block that says the first token
    normed: bool  # queries and keys
    ended: bool  # the last row of a block says that it ends there

    def __init__(self, shape: BlockShape, ids: Tensor, head: nn.Module) -> None:
        super().__init__(shape, ids, head)
        self.layers = nn.ModuleList(BlockLayer(shape, self.normed) for _ in range(shape.deep))
        self.norm = RMSNorm(shape.hidden, shape.eps)

    @property
    def deepest(self) -> int:
        """Levels of a tree that it can propose."""
        return self.shape.block - self.first - self.ended

    def block(self, pending: int) -> NDArray[np.int64]:
        """The tokens of its rows."""
        tokens = np.full(self.shape.block, self.shape.mask, dtype=np.int64)
        if self.first:
            tokens[0] = pending
        if self.ended:
            tokens[-1] = self.shape.end
        return tokens

    def forward(self, x: Tensor, rotary: Rotary | None, attend: Attend) -> Tensor:
        """[B, R, d] -> [B, R, d]"""
        for number, layer in enumerate(self._layers):
            q, k, v = layer.project(x, rotary)
            x = layer.finish(x, attend(number, q, k, v))
        return x

    @property
    def _layers(self) -> list[BlockLayer]:
        return cast(list[BlockLayer], list(self.layers))

    def rotation(self, positions: Tensor) -> Rotary:
        """Of rows at these positions, [B, R]."""
        return rotation(positions, self.shape)

    def logits(self, state: Tensor) -> Tensor:
        return super().logits(self.norm(state))


class DFlashNet(BlockNet):
    first, normed, ended = 1, True, False  # row 0 is the pending token

    def __init__(self, shape: BlockShape, ids: Tensor, head: nn.Module) -> None:
        super().__init__(shape, ids, head)
        self.fc = nn.Linear(len(shape.layers) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., layers * d] -> [..., d]"""
        return self.hidden_norm(self.fc(features))

    def context(self, fused: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the text in all layers, one behind another: [B, layers * Hk, R, D] each."""
        each = [layer.self_attn.keys_values(fused, rotary) for layer in self._layers]
        keys, values = zip(*each, strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)


class DeerNet(BlockNet):
    first, normed, ended = 0, False, True  # the pending token is text
