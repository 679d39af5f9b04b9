"""The network of an EAGLE-3 drafter: one decoder layer over the target's fused features and the token that followed.

arXiv 2503.01840. Position t reads the state of t (fused features of three target layers, or this layer's own output
where the target has not been) and the token after it, and says how likely each token is to come next. Embeddings are
the target's, handed in. Attention is the caller's: the network projects rows and finishes them. Parameters carry the
names that serving engines read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.models.networks.shared_head import Saved, stored_ids


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    hidden: int  # d, the target's
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: tuple[int, ...]  # target layers whose inputs are fused
    vocab: int  # tokens the drafter can say
    theta: float = 10_000.0
    eps: float = 1e-5
    rank: int = 0  # of the head: a product of two matrices; 0: one matrix
    normed: bool = False  # the normed state flows past attention, not the state (`norm_before_residual`)
    scaling: tuple[float, ...] = ()  # Llama 3.1's rotary: factor, low and high frequency factors, original context

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Eagle3Shape:
        return cls(**{**stored, "layers": tuple(stored["layers"]), "scaling": tuple(stored.get("scaling", ()))})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class RotaryShape(Protocol):
    @property
    def head_dim(self) -> int: ...
    @property
    def theta(self) -> float: ...
    @property
    def scaling(self) -> tuple[float, ...]: ...


class LayerSizes(RotaryShape, Protocol):
    """What the parts of a layer are made from."""

    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def intermediate(self) -> int: ...


class FeatureLayer(Protocol):
    """One decoder layer over the target's features: `Eagle3Layer` says what each of these does."""

    shape: Eagle3Shape
    ids: Tensor
    fc: nn.Linear

    def fuse(self, features: Tensor) -> Tensor: ...
    def enter(self, embedded: Tensor, state: Tensor) -> Tensor: ...
    def project(self, embedded: Tensor, state: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]: ...
    def finish(self, state: Tensor, attended: Tensor) -> Tensor: ...
    def logits(self, state: Tensor) -> Tensor: ...


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = _wide(x)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Projections only: who sees whom is the caller's business."""

    def __init__(self, shape: LayerSizes, width: int) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, q, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, R, width] and [B, R] -> queries [B, Hq, R, D], keys and values [B, Hk, R, D]; rotated by position.

        Without positions they are left unrotated, for a caller whose kernels do it.
        """
        q, k, v = (heads(proj(x), self.shape.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if positions is None:
            return q, k, v
        rotary = rotation(positions, self.shape)
        return rotated(q, rotary), rotated(k, rotary), v


def heads(x: Tensor, dim: int) -> Tensor:
    """[B, R, H * D] -> [B, H, R, D]"""
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


def rotation(positions: Tensor, shape: RotaryShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines for heads of rows at these positions, [B, 1, R, D / 2] each."""
    angles = rotary_angles(positions, shape)[:, None]
    return angles.cos(), angles.sin()


def rotary_angles(positions: Tensor, shape: RotaryShape) -> Tensor:
    """[..., D / 2]: by how much each pair of a head is rotated at each position."""
    half = shape.head_dim // 2
    steps = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    speeds = shape.theta**-steps
    if shape.scaling:  # slow pairs rotate `factor` times slower, those between slow and fast by a share of it
        factor, low, high, context = shape.scaling
        fast = ((context * speeds / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        speeds = speeds * ((1 - fast) / factor + fast)
    return positions[..., None] * speeds


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[B, H, R, D], the first half of each head's numbers rotated against the second."""
    cos, sin = rotary
    a, b = _wide(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, shape: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, 2 * shape.hidden), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)  # of the embedding
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)


def head(shape: Eagle3Shape) -> Any:
    """From a normed state to the draft vocabulary; through `rank` numbers where the shape says so (SlimSpec)."""
    if not shape.rank:
        return nn.Linear(shape.hidden, shape.vocab, bias=False)
    down, up = nn.Linear(shape.hidden, shape.rank, bias=False), nn.Linear(shape.rank, shape.vocab, bias=False)
    return nn.Sequential(down, up)


class Eagle3Layer(Saved):
    """`fuse`, `enter`, `project`, attention by the caller, `finish`; `logits` reads a finished state."""

    shape: Eagle3Shape

    def __init__(self, shape: Eagle3Shape, ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.layers) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Layer(shape)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = head(shape)
        self.register_buffer("ids", ids.long(), persistent=False)

    @classmethod
    def from_tensors(cls, shape: Eagle3Shape, tensors: Mapping[str, Tensor]) -> Eagle3Layer:
        """The inverse of `tensors`; KeyError or RuntimeError where these are not those of this shape."""
        ids = stored_ids(tensors, shape.vocab)
        with torch.device("meta"):  # no time for weights that are replaced at once
            made = cls(shape, ids)
        return made.filled(tensors)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., 3d] -> [..., d]: the state where the target has been."""
        return self.fc(features)

    def enter(self, embedded: Tensor, state: Tensor) -> Tensor:
        """What flows past attention: the state itself, or normed."""
        return self.midlayer.hidden_norm(state) if self.shape.normed else state

    def project(self, embedded: Tensor, state: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows that entered: the next token's embedding beside the state, both normed."""
        layer = self.midlayer
        state = state if self.shape.normed else layer.hidden_norm(state)
        return layer.self_attn(torch.cat([layer.input_layernorm(embedded), state], -1), positions)

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, which is the next state: attended is [B, Hq, R, D]."""
        layer = self.midlayer
        state = state + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return state + layer.mlp(layer.post_attention_layernorm(state))

    def logits(self, state: Tensor) -> Tensor:
        """Over the draft vocabulary."""
        return self.lm_head(self.norm(state))
