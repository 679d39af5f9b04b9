"""Attention of the unrolled training steps: the true text below the diagonal, and one key of each later step.

In the first step column u sees the text up to u. After n later steps it sees the text up to u - n and, besides, the
key that each of those steps computed in this column.

Two ways to the same numbers. `plain` writes the scores out, in any precision. `fused` runs a flash kernel over the true
text and joins the few later keys to it by their log-sum-exp, so that nothing of the size text x text is stored; its
backward gives that kernel the joined output and sum, which is what makes its part of the joint softmax exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Pair = tuple[Tensor, Tensor]  # keys and values, [B, Hk, T, D] each


def attend(q: Tensor, first: Pair, later: Sequence[Pair]) -> Tensor:
    """[B, Hq, T, D]: column u sees the first step's columns up to u less the later steps, and its key of each."""
    return (
        fused(q, first, later) if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) else plain(q, first, later)
    )


def plain(q: Tensor, first: Pair, later: Sequence[Pair]) -> Tensor:
    keys, values = first
    _, heads, columns, dim = q.shape
    with torch.autocast(q.device.type, enabled=False):
        q = q.unflatten(1, (-1, heads // keys.shape[1])) * dim**-0.5  # [B, Hk, G, T, D]
        scores = q @ keys[:, :, None].transpose(-1, -2)  # [B, Hk, G, T, T]
        hidden = torch.ones(columns, columns, dtype=torch.bool, device=q.device).triu(1 - len(later))
        scores = scores.masked_fill(hidden, -math.inf)
        beside = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in later]  # [B, Hk, G, T, 1]
        highest = torch.stack([scores.amax(-1, keepdim=True), *beside]).amax(0).detach()
        weights = (scores - highest).exp()
        total, out = weights.sum(-1, keepdim=True), weights @ values[:, :, None]
        for score, (_, v) in zip(beside, later, strict=True):  # one softmax over both kinds, without joining them
            weight = (score - highest).exp()
            total, out = total + weight, out + weight * v[:, :, None]
        out = out / total
        return out.flatten(1, 2)


def fused(q: Tensor, first: Pair, later: Sequence[Pair]) -> Tensor:
    group = q.shape[1] // first[0].shape[1]
    wide = [part.repeat_interleave(group, 1) if group > 1 else part for pair in (first, *later) for part in pair]
    return _Joint.apply(q, *wide)


class _Joint(torch.autograd.Function):
    """One softmax over a causal block, moved by the number of later keys, and those keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *later: Tensor) -> Tensor:
        late, seen = len(later) // 2, q.shape[2] - len(later) // 2
        out, block, ctx.extra = _flash(q[:, :, late:], k[:, :, :seen], v[:, :, :seen])
        total = block
        if late:
            block = pad(block, (late, 0), value=-math.inf)  # the first columns see later keys only
            scores = [_dot(q, key) for key in later[::2]]
            total = torch.logsumexp(torch.stack([block, *scores]), 0)
            joint = pad(out, (0, 0, late, 0)) * _weight(block, total)
            for score, value in zip(scores, later[1::2], strict=True):
                joint += _weight(score, total) * value
            out = joint.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total, *later)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, total, *later = ctx.saved_tensors
        grad, late, seen = grads[0].contiguous(), len(later) // 2, q.shape[2] - len(later) // 2
        dq, dk, dv = _flash_backward(
            grad[:, :, late:], q[:, :, late:], k[:, :, :seen], v[:, :, :seen], out[:, :, late:],
            total[:, :, late:].contiguous(), ctx.extra,
        )  # fmt: skip
        if not late:
            return dq, dk, dv
        dq, dk, dv = _wide(pad(dq, (0, 0, late, 0))), pad(dk, (0, 0, 0, late)), pad(dv, (0, 0, 0, late))
        broad = _wide(grad)
        mean, scale, rest = (broad * out).sum(-1), q.shape[-1] ** -0.5, list[Tensor]()
        for key, value in zip(later[::2], later[1::2], strict=True):
            weight = _weight(_dot(q, key), total)
            slope = weight * ((broad * value).sum(-1) - mean)[..., None] * scale
            dq += slope * key
            rest += [(slope * q).to(q.dtype), (weight * grad).to(q.dtype)]
        return dq.to(q.dtype), dk, dv, *rest


def _dot(q: Tensor, k: Tensor) -> Tensor:
    """The score of each column's later key, [B, H, T], in float32 or wider."""
    return (_wide(q) * k).sum(-1) * q.shape[-1] ** -0.5


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _weight(score: Tensor, total: Tensor) -> Tensor:
    return (score - total).exp()[..., None]


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Causal attention, the log-sum-exp of its scores, and what its backward wants besides."""
    if q.is_cuda:
        out, total, *extra = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        return out, total, tuple(extra)
    return *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True), ()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, extra: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    if not q.is_cuda:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, total, 0.0, True)
    cum_q, cum_k, max_q, max_k, seed, offset, _ = extra
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return backward(grad, q, k, v, out, total, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset)
